"""Suites, their gates on made-up curves, tables, jobs as processes, tracked results."""

from __future__ import annotations

import csv
import json
import math
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from benchmarks import empo, reproduce, suites
from benchmarks.suites import Gate, Run, Task, judge, value_at
from mbx.analysis.curves import Curve
from mbx.commands import jobs
from mbx.training import build
from mbx.training.build import environment_spec
from mbx.types import EnvSpec
from tests.helpers import overridden

ROOT = pathlib.Path(__file__).parents[1]
CONTINUOUS = EnvSpec("x:continuous", (24,), np.float32, 6, 500, 2)
PUBLISHED = {("a", "sac"): {100: (40.0, 30.0, 50.0)}, ("b", "sac"): {100: (10.0, 5.0, 20.0)}}


def run(values, seed=0, hours=0.5) -> Run:
    """Evaluations at 10, 20, 30, ..."""
    return Run(seed, Curve(10.0 * np.arange(1, len(values) + 1), np.array(values, float)), hours)


def test_the_value_at_a_step_is_never_an_early_one():
    curve = Curve(np.array([80.0, 91.0, 101.0, 150.0]), np.array([1.0, 2.0, 3.0, 4.0]))
    assert value_at(curve, 100) == 3.0
    assert value_at(curve, 95) == 2.0
    assert math.isnan(value_at(curve, 120))
    assert math.isnan(value_at(Curve(np.zeros(0), np.zeros(0)), 100))


RUNS = {
    "a": [run([10, 20, 60, 50]), run([0, 40, 20, 70], seed=1), run([5, 30, 40, 90], seed=2)],
    "b": [run([1, 2, 3, 12], hours=1.5)],
}


@pytest.mark.parametrize(
    ("gate", "measured"),
    [
        (Gate("mean", 0, step=40), (70 + 12) / 2),
        (Gate("mean", 0, step=40, tasks=("a",)), 70),
        (Gate("median", 0, step=30, tasks=("a",)), 40),
        (Gate("median", 0, step=40), 12),
        (Gate("median held", 0, step=20, tasks=("a",)), 30),
        (Gate("held", 0, step=20, tasks=("a",), share=1.0), 20),
        (Gate("held", 0, step=20, tasks=("a",), share=0.3), 30),
        (Gate("collapse", 0, step=20, tasks=("a",)), 0.5),
        (Gate("collapse", 0, step=20), 0.5),
        (Gate("collapse", 0, step=40, tasks=("a",)), 50 / 60),
        (Gate("minutes", 0), -90),
    ],
)
def test_measures(gate, measured):
    assert judge(gate, RUNS, PUBLISHED).measured == pytest.approx(measured)


def test_a_collapse_is_measured_from_the_best_of_all_before_it():
    runs = {"a": [run([60, 40, 24, 50])]}
    assert judge(Gate("collapse", 0.5, step=20), runs, {}).measured == pytest.approx(0.4)


def test_what_is_published_is_compared_task_by_task():
    runs = {"a": [run([0] * 9 + [50]), run([0] * 9 + [70])], "b": [run([0] * 9 + [8])]}
    gate = Gate("published", 1.0, step=100, agent="sac")
    verdict = judge(gate, runs, PUBLISHED)
    assert verdict.measured == pytest.approx(0.8) and not verdict.passed
    assert judge(gate._replace(bar=0.8), runs, PUBLISHED).passed


@pytest.mark.parametrize("measure", list(suites.MEASURES))
def test_what_was_not_measured_is_not_passed(measure):
    gate = Gate(measure, -1e9, step=100, agent="sac")
    unfinished = run([1, 2, 3], hours=0.0)
    for runs in ({}, {"a": []}, {"a": [unfinished], "b": []}, {"a": [unfinished]}):
        verdict = judge(gate, runs, PUBLISHED)
        assert math.isnan(verdict.measured) and not verdict.passed


def test_the_published_values_are_those_of_the_papers_authors():
    published = suites.load_published()
    tasks = [task.name for task in suites.SUITES["dmc15"].tasks]
    means = {
        agent: np.mean([published[task, agent][100_000][0] for task in tasks])
        for agent in ("tdmpc2", "dreamerv3", "sac")
    }
    # Rounded means over the fifteen tasks.
    assert {k: round(v) for k, v in means.items()} == {"tdmpc2": 680, "dreamerv3": 510, "sac": 433}
    assert published["dmc:cheetah-run", "tdmpc2"][100_000][0] == pytest.approx(519, abs=1)


@pytest.mark.parametrize("name", list(suites.SUITES))
def test_every_run_of_a_suite_is_accepted(name):
    """Its settings exist, are in range, and have an effect together; its gates are measures."""
    suite, known = suites.SUITES[name], set()
    for job in reproduce.make_jobs(suite, "out", extra=()):
        (config,) = (x.removeprefix("--config=") for x in job.command if x.startswith("--config="))
        overrides = tuple(
            x.removeprefix("--config.") for x in job.command if x.startswith("--config.")
        )
        values = overridden(config, overrides)
        assert values["env"]["name"] == job.label and values["train"]["steps"] == job.steps
        checked = (config, *(x for x in overrides if not x.startswith(("env.name", "seed"))))
        if checked not in known:
            known.add(checked)
            spec = CONTINUOUS if values["agent"] != "empo" else environment_spec(build.read(values))
            build.build_agent(build.read(values), spec)
    for gate in suite.gates:
        assert gate.measure in suites.MEASURES
        assert set(gate.tasks) <= {task.name for task in suite.tasks}


@pytest.mark.parametrize("sweep", suites.DATA["sweeps"])
def test_every_variant_is_accepted(sweep):
    """Settings that exist, are in range and have an effect together."""
    variants = suites.DATA["sweeps"][sweep]
    assert len({json.dumps(v) for v in variants.values()}) == len(variants)
    of_dreamer = sweep in ("replay_loss", "dreamer_options", "continues")
    for config in ("dreamer", "dreamer_small") if of_dreamer else ("tdmpc",):
        for overrides in variants.values():
            build.build_agent(build.read(overridden(f"configs/{config}.py", overrides)), CONTINUOUS)


def test_first_seeds_come_first_and_unknown_tasks_are_refused():
    suite = suites.Suite("", "c.py", (Task("x:a", 5, seeds=2), Task("x:b", 5)), seeds=1, at=())
    found = reproduce.make_jobs(suite, "out", extra=("loss.rho=0.7",))
    assert [(j.label, j.seed) for j in found] == [("x:a", 0), ("x:b", 0), ("x:a", 1)]
    assert found[0].workdir.endswith("/out/x-a-s0") and os.path.isabs(found[0].workdir)
    assert found[0].command[-2:] == ("--config.env.name=x:a", "--config.loss.rho=0.7")
    with pytest.raises(ValueError, match=r"\['x:c'\] are not of this suite: choose from x:a, x:b"):
        reproduce.make_jobs(suite, "out", tasks=["x:c"], extra=())


def evaluated(path: pathlib.Path, values) -> None:
    """A run directory's log with evaluations at 10, 20, ..."""
    path.mkdir(parents=True, exist_ok=True)
    rows = [{"kind": "eval", "step": 10 * i + 10, "return_mean": v} for i, v in enumerate(values)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


WRITE = """
import json, sys
record = {"started": "2026-11-22T20:00:00Z", "commit": "1a2b3c4", "processor_seconds": 1.5}
with open(sys.argv[1] + "/run.json", "w") as f:
    json.dump({"attempts": [record | {"processor_seconds": None}, record]}, f)
if sys.argv[2:]:
    sys.exit(3)
with open(sys.argv[1] + "/metrics.jsonl", "a") as f:
    f.write(json.dumps({"kind": "eval", "step": 40, "return_mean": 1.5}) + "\\n")
"""


def test_runs_are_processes_that_go_on_and_say_what_they_took(tmp_path):
    def job(name: str, *fails: str) -> jobs.Job:
        work = tmp_path / name
        work.mkdir()
        return jobs.Job(name, 0, str(work), 40, (sys.executable, "-c", WRITE, str(work), *fails))

    good, bad = job("good"), job("bad", "fails")
    problems = jobs.run_all([good, bad], workers=2)
    assert problems == [f"bad seed 0: failed, see {bad.workdir}.log"]
    assert good.complete() and not bad.complete()
    assert jobs.run_all([good], workers=1) == []  # nothing left to do
    assert jobs.processor_hours(good) == 1.5 / 3600
    unstarted = jobs.Job("none", 0, str(tmp_path / "none"), 40, ())
    jobs.write_manifest(str(tmp_path / "m.json"), [good, bad, unstarted])
    manifest = json.loads((tmp_path / "m.json").read_text())
    assert [r["complete"] for r in manifest["runs"]] == [True, False]
    shared = manifest["all"]
    assert (shared["commit"], shared["date"], shared["attempts"]) == ("1a2b3c4", "2026-11-22", 2)
    for text in ('{"attem', '{"attempts": [{"processor_seconds": "x"}]}'):
        (tmp_path / "bad" / "run.json").write_text(text)
        jobs.write_manifest(str(tmp_path / "m.json"), [good, bad])
        whole, damaged = json.loads((tmp_path / "m.json").read_text())["runs"]
        assert (whole["attempts"], damaged["attempts"]) == (2, "damaged")


def test_a_command_names_no_place_on_this_machine(tmp_path):
    job = jobs.make_job("t", 1, str(tmp_path / "w"), config="configs/tdmpc.py", steps=9)
    assert jobs._shown(job) == (
        "mbx train --config=configs/tdmpc.py --config.resume=True "
        "--config.seed=1 --config.train.steps=9"
    )


def rows_of(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_curves_are_written_as_rows(tmp_path):
    path, found = str(tmp_path / "new" / "c.csv"), []
    for seed in (0, 1, 2):
        found.append(jobs.Job("x", seed, str(tmp_path / str(seed)), 20, ()))
        evaluated(tmp_path / str(seed), [seed, 1 / 8] if seed < 2 else [])
    jobs.write_curves(path, [("x:a", "b, c", job) for job in found])
    assert [tuple(row.values()) for row in rows_of(path)] == [
        ("x:a", "b, c", seed, step, value)
        for seed in "01"
        for step, value in (("10", seed), ("20", "0.125"))
    ]
    jobs.write_curves(path, [("x:a", "b, c", found[2])])
    assert (tmp_path / "new" / "c.csv").read_text() == "task,setting,seed,step,value\n"


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A suite of two tasks: one with two seeds, one not measured."""
    suite = suites.Suite(
        "",
        "configs/tdmpc.py",
        (Task("x:a", 40, seeds=2, low=-20, high=180), Task("x:b", 40)),
        seeds=1,
        at=(20, 40),
        gates=(Gate("median", 50, step=40, tasks=("x:a",)), Gate("mean", 1, step=40)),
    )
    monkeypatch.setitem(suites.SUITES, "made-up", suite)
    published = {("x:a", "them"): {20: (30.0, 20.0, 40.0), 80: (99.0, 98.0, 100.0)}}
    monkeypatch.setattr(suites, "load_published", lambda: published)
    found = reproduce.make_jobs(suite, str(tmp_path), extra=())
    evaluated(tmp_path / "x-a-s0", [0, 10, 20, 40])
    evaluated(tmp_path / "x-a-s1", [0, 30, 60, 80])
    return found, tmp_path


def test_the_report_says_what_was_measured_and_what_was_not(made_up, capsys):
    found, folder = made_up
    verdicts = reproduce.report("made-up", found, str(folder))
    assert [v.passed for v in verdicts] == [True, False]
    text = (folder / "table.md").read_text()
    assert "| x:a | 2 | 20 (10, 30) | 60 (40, 80) | 30 |" in text
    assert "| x:b | 0 |  |  |  |" in text
    assert "40 steps, normalised, 2 runs: mean over tasks 0.400 [0.300, 0.500]" in text
    assert "1 tasks not measured" in text
    content = json.loads((folder / "verdict.json").read_text())
    assert not content["passed"]
    assert [g["measured"] for g in content["gates"]] == [60.0, None]
    assert "MISSED" in capsys.readouterr().out
    reproduce.keep("made-up", found, str(folder / "kept"))
    kept = rows_of(str(folder / "kept/made-up.csv"))
    assert [row["seed"] for row in kept] == 4 * ["0"] + 4 * ["1"]


def command(*arguments: str, **settings) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.reproduce", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, JAX_PLATFORMS="cpu"),
        **settings,
    )


@pytest.mark.slow
def test_the_command_fails_where_nothing_was_measured(tmp_path):
    done = command("--suite=smoke", "--norun", f"--out={tmp_path}")
    assert done.returncode == 1, done.stderr
    assert "MISSED" in done.stdout and "not measured" in done.stdout
    assert (tmp_path / "smoke/verdict.json").exists()


@pytest.mark.slow
def test_the_smoke_suite_passes_its_gates(tmp_path):
    done = command("--suite=smoke", f"--out={tmp_path}", f"--keep={tmp_path}/kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "smoke/verdict.json").read_text())["passed"]
    again = command("--suite=smoke", f"--out={tmp_path}", timeout=60)  # nothing is repeated
    assert again.returncode == 0
    kept = json.loads((tmp_path / "kept/smoke.json").read_text())  # what all share stands once
    assert len(kept["runs"]) == 2 and all((kept["all"] | r)["complete"] for r in kept["runs"])


@pytest.mark.slow
def test_a_named_sweep_leaves_figure_table_and_data(tmp_path):
    tiny = ("env.num_envs=2", "loss.batch_size=8", "planner.num_samples=16", "planner.num_elites=4")
    done = command(
        "--sweep=targets",
        "--seeds=1",
        "--steps=60",
        "--eval_interval=30",
        "--episodes=1",
        f"--out={tmp_path}/runs",
        *(f"--set={x}" for x in (*tiny, "train.seed_steps=20", "train.pretrain_updates=1")),
        *("--set=env.episode_length=10", "--set=replay.capacity=200"),
        "--set=train.log_interval=20",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs/targets"
    assert (folder / "curves.png").exists()
    assert (folder / "scores.md").read_text().count("\n| ") == 2
    rows = (folder / "curves.csv").read_text().splitlines()
    assert rows[0] == "task,setting,seed,step,value" and len(rows) == 5
    assert rows[1].startswith("gymnax:Pendulum-v1,stored,0,")
    manifest = json.loads((folder / "runs.json").read_text())
    assert [run["run"] for run in manifest["runs"]] == ["stored seed 0", "legacy seed 0"]


@pytest.mark.parametrize("variant", list(empo.VARIANTS))
def test_every_variant_of_empos_networks_has_settings(variant):
    changes = {name: own for name, own in empo.VARIANTS[variant].items() if name != "run"}
    settings = empo.settings_of(10, **changes)
    for section, values in changes.items():
        for name, value in values.items():
            assert getattr(getattr(settings, section), name) == value
