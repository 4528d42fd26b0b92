"""A resumed run: configured by its directory, with what has changed said and kept."""

from __future__ import annotations

import dataclasses
import json
import os
import signal

import numpy as np
import pytest

from mbx import cli
from mbx.commands import train
from mbx.settings import to_dict
from mbx.training import build, run, rundir
from mbx.training.checkpoint import Checkpointer
from mbx.training.logging import RunLogger, read_rows
from mbx.training.run import Interrupt
from mbx.types import EnvSpec
from tests.faults.small import small_config


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run of 40 steps whose checkpoints are only at the end, after its first updates (20)."""
    workdir = str(tmp_path_factory.mktemp("begun") / "run")
    config = small_config(train=dict(steps=40), checkpoint=dict(interval=0, keep=9))
    return run.train(config, workdir), workdir


def test_a_checkpoint_follows_the_first_updates(begun):
    assert Checkpointer.saved_steps(begun[1]) == [20, 40]


@pytest.mark.parametrize(("minutes", "saved"), [(1e-9, [20, 40, 60, 80]), (0.0, [80])])
def test_checkpoints_by_the_clock_or_not(minutes, saved, tmp_path):
    config = small_config(checkpoint=dict(interval=0, keep=9, minutes=minutes))
    run.train(config, str(tmp_path))
    assert Checkpointer.saved_steps(str(tmp_path)) == saved


def test_the_directory_is_enough_and_changes_are_said(begun, capsys):
    first, workdir = begun
    given = [f"--workdir={workdir}", "--config.resume=True"]
    asked, there = train.chosen([*given, "--config.train.steps=80"])
    assert (asked.train.steps, asked.resume, there) == (80, True, workdir)
    assert train.chosen(given)[0].train.steps == 40
    with pytest.raises(ValueError, match="config.train.step is not a setting.* train.steps"):
        train.chosen([*given, "--config.train.step=80"])
    config = rundir.saved_config(workdir)
    assert config == {**config, "resume": False} and config["env"]["name"] == "toy:point"
    config["resume"], config["train"]["steps"], config["eval"]["episodes"] = True, 80, 3
    config["train"]["log_interval"] = 16  # of which 40 is no multiple
    result = run.train(config, workdir)
    told = capsys.readouterr().err
    assert f"resuming {workdir} from step 40 of 80" in told
    assert "mbx: for toy:point: env.action_repeat=1, env.episode_length=" in told
    said = "train.steps=80 (was 40); train.log_interval=16 (was 20); eval.episodes=3 (was 2)"
    assert f"changed: {said}\n" in told
    assert [steps for steps, _ in result.evaluations] == [40, 64, 80]
    assert result.steps == 80
    assert result.evaluations[0] == first.evaluations[0]
    rows = read_rows(os.path.join(workdir, "metrics.jsonl"))
    assert [row["step"] for row in rows if row["kind"] == "train"] == [20, 40, 48, 64, 80]
    assert Checkpointer.saved_steps(workdir) == [20, 40, 80]
    with open(os.path.join(workdir, "config.json")) as file:
        assert json.load(file)["train"]["steps"] == 80
    with open(os.path.join(workdir, "config-until-40.json")) as file:
        assert json.load(file)["train"]["steps"] == 40
    run.train(config, workdir)
    assert "no setting changed" in capsys.readouterr().err


def test_a_run_shorter_than_one_interval_of_its_resume_is_gone_on_with(
    tmp_path, capsys, monkeypatch
):
    workdir, best = str(tmp_path / "run"), []
    monkeypatch.setattr(Checkpointer, "resume_at", lambda self, *given: best.append(given))
    first = run.train(small_config(train=dict(steps=40)), workdir)
    changed = small_config(train=dict(steps=100, log_interval=60), resume=True)
    result = run.train(changed, workdir)
    told = capsys.readouterr().err
    assert f"resuming {workdir} from step 40 of 120" in told
    assert "changed: train.steps=100 (was 40); train.log_interval=60 (was 20)\n" in told
    assert [steps for steps, _ in result.evaluations] == [40, 60, 120]
    assert result.evaluations[0] == first.evaluations[0]
    assert best == first.evaluations
    rows = read_rows(os.path.join(workdir, "metrics.jsonl"))
    assert [row["step"] for row in rows if row["kind"] != "eval"] == [0, 20, 40, 60, 120]
    assert os.path.exists(os.path.join(workdir, "config-until-40.json"))


class StopsAt(Interrupt):
    """Asked to end when the run shows its n-th share of the pretraining."""

    def __init__(self, monkeypatch, n):
        super().__init__()
        self.left = n
        show = RunLogger.show_pretraining

        def seen(logger, values, made, of):
            show(logger, values, made, of)
            self.left -= 1
            if self.left == 0:
                assert self.unsaved
                self.number = signal.SIGINT

        monkeypatch.setattr(RunLogger, "show_pretraining", seen)


def test_a_pretraining_is_stopped_and_goes_on_bit_for_bit(tmp_path, monkeypatch, capsys):
    """Its first updates are five shares after the first interval; ended after two and one more."""
    whole, workdir = str(tmp_path / "whole"), str(tmp_path / "run")
    config = small_config(train=dict(steps=60, seed_steps=20, pretrain_updates=45))
    run.train(config, whole)
    shown = capsys.readouterr().out
    assert all(f"pretraining {made} of 45" in shown for made in (10, 20, 30, 40))
    for stops, at in (
        (2, "stopped at 20 of 60"),
        (1, "stopped at 20 of 60"),
        (9, "60 environment"),
    ):
        with monkeypatch.context() as patched:
            resumed = {**config, "resume": os.path.exists(workdir)}
            result = run.train(resumed, workdir, interrupt=StopsAt(patched, stops))
        assert str(result).startswith(at)
    one, other = (
        [
            {k: v for k, v in row.items() if k not in ("time", "seconds", "steps_per_second")}
            for row in read_rows(os.path.join(path, "metrics.jsonl"))
        ]
        for path in (whole, workdir)
    )
    assert [row["step"] for row in one] == [row["step"] for row in other] == [0, 20, 40, 40, 60, 60]
    assert one[3:] == other[3:]  # evaluations and later rows; the first two hold other updates
    assert (one[1]["updates"], one[2]["updates"]) == (45, 10)
    assert (other[1]["updates"], other[2]["updates"]) == (20, 15 + 10)  # ten between have no row


def test_a_run_that_ends_with_its_pretraining_makes_all_of_it(tmp_path, monkeypatch):
    """None would go on with the rest: no interval is left."""
    config = small_config(train=dict(steps=20, seed_steps=20, pretrain_updates=45))
    result = run.train(config, str(tmp_path), interrupt=StopsAt(monkeypatch, 1))
    assert result.signal is None
    rows = read_rows(os.path.join(str(tmp_path), "metrics.jsonl"))
    assert [row["updates"] for row in rows if row["kind"] == "train"] == [45]


def test_a_change_is_told_of_what_was_in_force(tmp_path):
    """A learning rate of 0 stands for the one that the model's size chooses."""
    spec = EnvSpec("toy:small", (3,), np.float32, 2, 50, 1)
    before = build.settings_class("tdmpc")()
    (tmp_path / "config.json").write_text(json.dumps(to_dict(before)))
    rate = dataclasses.replace(before.optimizer, learning_rate=5e-4)
    settings = dataclasses.replace(before, optimizer=rate, resume=True)
    told = rundir.changes(settings, str(tmp_path), spec)
    assert before.optimizer.learning_rate == 0.0
    # And what follows from it: the policy's rate and that after the decay.
    assert told == [
        "optimizer.learning_rate=0.0005 (was 0.001)",
        "optimizer.final_learning_rate=0.0005 (was 0.0003)",
        "optimizer.policy_lr_scale=0.6 (was 0.3)",
    ]


def test_several_seeds_are_one_run_again(tmp_path):
    for seed in (3, 4):
        os.makedirs(tmp_path / f"seed-{seed}")
        with open(tmp_path / f"seed-{seed}" / "config.json", "w") as file:
            json.dump({**small_config(), "seed": seed}, file)
    config = rundir.saved_config(str(tmp_path))
    assert (config["seed"], config["num_seeds"]) == (3, 2)
    rows = {3: [(20, 1.0), (40, None)], 4: [(20, 2.0), (40, 5.0), (60, 6.0)]}
    for seed, pairs in rows.items():
        lines = [dict(kind="eval", step=s, time=0.0, return_mean=x) for s, x in pairs]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"seed-{seed}" / "metrics.jsonl").write_text(text)
    dirs = [str(tmp_path / f"seed-{seed}") for seed in rows]
    (first, second) = rundir.evaluations_before(dirs, 50)
    assert first == (20, 1.5) and second[0] == 40 and second[1] != second[1]


def test_what_cannot_be_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setattr(rundir, "_trusted_names", set)
    with pytest.raises(FileNotFoundError, match="holds no run"):
        rundir.saved_config(str(tmp_path / "nowhere"))
    for name, message in (
        ("gym:/a/b.py:C", "which no run of yours was made with"),
        ("empo:multigrid//a/map.yaml", "was made from the file env.name=/a/map.yaml: name it"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(small_config(env=dict(name=name))))
        with pytest.raises(ValueError, match=message):
            rundir.saved_config(str(tmp_path))


def test_every_command_opens_a_run_by_its_directory(begun, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in (
        ["evaluate", begun[1], "--episodes=2", "--random"],
        ["evaluate", f"--workdir={begun[1]}", "--episodes=2", "--json", "--checkpoint=latest"],
        ["plot", begun[1], "--out=curve.png", "--table=scores.md"],
        ["report", begun[1], "--out=report.html"],
        ["export", begun[1], "--out=policy.mbx"],
    ):
        cli.run(command)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("toy:point best: ") and told[2].startswith("toy:point random: ")
    assert len(json.loads(told[4])["latest"]["returns"]) == 2
    made = {"curve.png", "scores.md", "report.html", "policy.mbx"}
    assert {path.name for path in tmp_path.iterdir()} == made


def test_a_run_of_another_version_is_refused_in_a_line(tmp_path):
    config = small_config() | {"a_setting_of_once": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="config.json is of another version .*use the code that"):
        train.chosen([f"--workdir={tmp_path}", "--config.resume=True"])
