"""Sweeps over any settings: their combinations, the runs, a job array, and a tiny one."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import threading
import time

import optuna
import pytest

from mbx.commands import jobs, search, sweep

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = "configs/tdmpc.py"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("tiny", ["tiny"]),
        ("(1, 2), (3, [4, 5])", ["(1, 2)", "(3, [4, 5])"]),
        ("'a,b',\"c\"", ["a,b", "c"]),
        ("it's", ["it's"]),
    ],
)
def test_values_are_split_at_commas_outside_brackets_and_quotes(text, values):
    assert sweep.split(text) == values


def test_every_combination_is_made_once():
    assert sweep.combinations(["a.x=1,2", "b=u", "config.c=3,4,3"]) == [
        ("a.x=1", "b=u", "c=3"),
        ("a.x=1", "b=u", "c=4"),
        ("a.x=2", "b=u", "c=3"),
        ("a.x=2", "b=u", "c=4"),
    ]
    assert sweep.combinations([]) == [()]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["loss.rho"], "--set=loss.rho: write SETTING=VALUE"),
        (["loss.rho=0.5,"], "write SETTING=VALUE or SETTING=VALUE,VALUE"),
        (["a=1", "a=2"], "a is given twice, give all its values at once"),
        (["seed=0,1"], "--set=seed=0,1: not here, use --seeds"),
        (["loss.roh=0.5"], "loss.roh is not a setting of .* did you mean loss.rho"),
        (["loss.rho=0.5,x"], "config.loss.rho='x': give a number"),
        (["loss.rho=0.5,-1"], "config.loss.rho=-1"),
        (["loss.awr_temperature=0.1", "loss.policy_loss=svg"], "has no effect here"),
    ],
)
def test_mistakes_are_told_before_anything_runs(given, message):
    with pytest.raises(ValueError, match=message):
        sweep.make_jobs(CONFIG, given, seeds=1, folder="out", metric="eval/return_mean")


def test_runs_are_named_by_what_differs_and_take_what_is_shared(tmp_path):
    given = ["loss.rho=0.5,0.7", "train.steps=2e3", "env.kwargs.leak=0.1", "model.size=1"]
    found = sweep.make_jobs(CONFIG, given, seeds=2, folder=str(tmp_path), metric="eval/x")
    assert [(j.label, j.seed) for j in found] == [
        ("loss.rho=0.5", 0),
        ("loss.rho=0.7", 0),
        ("loss.rho=0.5", 1),
        ("loss.rho=0.7", 1),
    ]
    job = found[3]
    assert job.workdir == f"{tmp_path}/loss.rho=0.7-s1"
    assert job.steps == 2000 and job.metric == "eval/x"
    assert job.command[7:] == (
        "--config.seed=1",
        "--config.train.steps=2000",
        "--config.loss.rho=0.7",
        "--config.env.kwargs.leak=0.1",
        "--config.model.size=1",
    )


def test_the_job_array_makes_one_run_a_job(tmp_path):
    text = sweep.slurm(["--set=loss.rho=0.5,0.7", "--out=a b"], 6, workers=2)
    assert "#SBATCH --array=0-5%2\n" in text
    command = "mbx sweep --set=loss.rho=0.5,0.7 '--out=a b'"
    assert f'\n{command} --only="$SLURM_ARRAY_TASK_ID" &\n' in text
    (tmp_path / "script.sh").write_text(text)
    assert subprocess.run(["bash", "-n", tmp_path / "script.sh"]).returncode == 0


TRIAL = """
import json, os, sys
workdir, x = sys.argv[1], float(sys.argv[2])
os.makedirs(workdir, exist_ok=True)
row = dict(kind="eval", step=40, time=0.0, return_mean=-((x - 3.0) ** 2))
with open(f"{workdir}/metrics.jsonl", "w") as file:
    file.write(json.dumps(row) + "\\n")
"""


def test_a_search_keeps_within_its_ends_and_stops_where_nothing_is_measured(tmp_path):
    made = []

    def make(values):
        made.append(float(values["a.x"]))
        path = str(tmp_path / values["a.x"])
        command = (sys.executable, "-S", "-c", TRIAL, path, "1.0")
        return [jobs.Job("a", 0, path, 40, command, "eval/misspelt")]

    options = dict(workers=1, devices=0, storage=f"sqlite:///{tmp_path}/optuna.db")
    found, problems = search.search({"a.x": ["0.123456..0.123461"]}, make, trials=5, **options)
    assert not found and 0.123456 <= min(made) <= max(made) <= 0.123461 and len(set(made)) == 3
    assert len(problems) == 1 and "eval/misspelt was never logged, choose one of" in problems[0]


def test_a_search_continues_learns_from_scores_and_survives_failures(tmp_path):
    axes = {"a.x": ["0.5..8.0 log"], "b.n": ["1..2"], "c.kind": ["tiny", "large"]}
    made = []

    def make(values):
        made.append(values)
        found = []
        for seed in (0, 1):
            path = str(tmp_path / f"{values['a.x']}-{values['b.n']}-{values['c.kind']}-s{seed}")
            script = TRIAL if values["c.kind"] == "large" else "raise SystemExit(1)"
            command = (sys.executable, "-S", "-c", script, path, values["a.x"])
            found.append(jobs.Job(str(values), seed, path, 40, command))
        return found

    options = dict(workers=2, devices=0, storage=f"sqlite:///{tmp_path}/optuna.db")
    runs, problems = search.search(axes, make, trials=6, **options)
    assert [tuple(values.values()) for values in made[:6]] == [  # every end is checked first
        *(("0.5", "1", "tiny"), ("8.0", "1", "tiny"), ("0.5", "1", "tiny")),
        *(("0.5", "2", "tiny"), ("0.5", "1", "tiny"), ("0.5", "1", "large")),
    ]
    study = optuna.load_study(study_name="sweep", storage=options["storage"])
    states = [trial.state.name for trial in study.trials]
    kinds = [trial.params["c.kind"] for trial in study.trials]
    assert states == [{"tiny": "FAIL", "large": "COMPLETE"}[kind] for kind in kinds]
    assert len(problems) == 2 * kinds.count("tiny") and {"FAIL", "COMPLETE"} == set(states)
    begun = study.ask({name: kind for name, kind in study.trials[0].distributions.items()})
    runs, _ = search.search(axes, make, trials=12, **options)
    trials = optuna.load_study(study_name="sweep", storage=options["storage"]).trials
    assert len(trials) == 12 and trials[begun.number].state.is_finished()
    values = [job.curve().values[-1] for job in runs]
    assert values == sorted(values, reverse=True) and len(values) == 2 * sum(
        trial.value is not None for trial in trials
    )
    before = len(os.listdir(tmp_path))
    assert search.search(axes, make, trials=12, **options)[0][0].workdir == runs[0].workdir
    assert len(os.listdir(tmp_path)) == before
    with pytest.raises(ValueError, match="its trials are of a.x, b.n, c.kind: give another --out"):
        search.search(axes | {"d": ["1..2"]}, make, trials=12, **options)
    with pytest.raises(ValueError, match="optuna.db cannot be used: .* give another --out"):
        search.search(axes | {"c.kind": ["other"]}, make, trials=12, **options)
    with pytest.raises(ValueError, match="its trials are of {'seeds': 2, .*'seeds': 1, .*--out"):
        search.search(axes, lambda values: make(values)[:1], trials=12, **options)
    (tmp_path / "damaged.db").write_text("no database")
    with pytest.raises(ValueError, match="damaged.db cannot be used"):
        search.search(
            axes, make, trials=1, **options | {"storage": f"sqlite:///{tmp_path}/damaged.db"}
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set=loss.rho=0.2..0.7"], "--set=loss.rho: a range is for --search=optuna"),
        (["--set=loss.rho=0.7..0.2", "--search=optuna"], "the range 0.7..0.2 is empty"),
        (["--set=loss.rho=0..1 log", "--search=optuna"], "has no logarithm"),
        (["--set=loss.rho=-1..1", "--search=optuna"], "config.loss.rho=-1"),
        (["--set=loss.rho=0..1,2", "--search=optuna"], "loss.rho: a range stands alone"),
        (["--set=loss.rho=0.2..0.7", "--search=optuna", "--slurm"], "leave out --slurm"),
    ],
)
def test_mistakes_of_a_search(arguments, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        sweep.main([*arguments, f"--out={tmp_path}"])


STOPS = """
import signal, sys, time, pathlib
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
pathlib.Path(sys.argv[1], "started").touch()
time.sleep(60)
"""


def test_a_signal_reaches_the_run_and_starts_no_other(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        command = (sys.executable, "-c", STOPS, str(tmp_path / name))
        found.append(jobs.Job(name, 0, str(tmp_path / name), 40, command))

    def stop() -> None:
        while not (tmp_path / "a" / "started").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), 15)

    thread = threading.Thread(target=stop)
    thread.start()
    problems = jobs.run_all(found, workers=1)
    thread.join()
    assert problems == [
        "a seed 0: stopped and saved, the same command continues it",
        "b seed 0: not run, the same command continues",
    ]


TINY = (
    *("env.num_envs=2", "loss.batch_size=8", "planner.num_samples=16", "planner.num_elites=4"),
    *("train.seed_steps=20", "train.pretrain_updates=1", "env.episode_length=10"),
    *("replay.capacity=200", "reanalyze.batch_size=8", "train.log_interval=20", "train.steps=6e1"),
    *("eval.interval=30", "eval.episodes=1"),
)


@pytest.mark.slow
def test_a_sweep_leaves_curves_tables_and_data_and_repeats_nothing(tmp_path):
    command = [
        *(sys.executable, "-m", "experiments.sweep", "--seeds=2", "--workers=2"),
        *("--set", "optimizer.learning_rate=1e-4,3e-4", f"--out={tmp_path}/out"),
        *(f"--set={x}" for x in TINY),
    ]
    environment = dict(os.environ, JAX_PLATFORMS="cpu")
    for _ in range(2):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    lines = (out / "scores.csv").read_text().splitlines()
    assert lines[0].startswith("settings,seeds,mean at 60,IQM,")
    names = [line.partition(",")[0] for line in lines[1:]]
    assert names == ["optimizer.learning_rate=1e-4", "optimizer.learning_rate=3e-4"]
    assert (out / "scores.tex").read_text().startswith(r"\begin{tabular}")
    made = json.loads((out / "runs.json").read_text())
    assert len(made["runs"]) == 4 and made["all"]["complete"] and made["all"]["attempts"] == 1
    assert len((out / "curves.csv").read_text().splitlines()) == 1 + 4 * 2
