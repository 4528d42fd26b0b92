"""The files of a run directory: rows, resuming, values that JSON has no word for."""

from __future__ import annotations

import csv
import json
import os
import stat
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from mbx.training import files, run
from mbx.training.files import atomic_write
from mbx.training.logging import RunLogger, read_rows


def jsonl(workdir) -> str:
    return os.path.join(workdir, "metrics.jsonl")


def long_rows(workdir) -> list[list[str]]:
    with open(os.path.join(workdir, "metrics.csv"), newline="") as file:
        return list(csv.reader(file))


@pytest.fixture
def filled(tmp_path):
    """A run directory with train rows at 10, 20, 30 and an evaluation at 20."""
    logger = RunLogger(str(tmp_path), config={"seed": 1})
    for step in (10, 20, 30):
        logger.log("train", step, {"loss/value": step / 8})
        if step == 20:
            logger.log("eval", step, {"return_mean": -1.5})
    logger.close()
    return tmp_path


def test_rows_hold_kind_step_time_and_values(filled):
    rows = read_rows(jsonl(filled))
    assert [(r["kind"], r["step"]) for r in rows] == [
        ("train", 10),
        ("train", 20),
        ("eval", 20),
        ("train", 30),
    ]
    assert rows[0]["loss/value"] == 1.25 and rows[2]["return_mean"] == -1.5
    assert all(r["time"] > 1.6e9 for r in rows)


def test_csv_holds_the_same_in_long_form_and_takes_new_columns(filled):
    logger = RunLogger(str(filled), config={}, resume_step=30)
    logger.log("train", 40, {"loss/value": 5.0, "quite, new": 1e-30})
    logger.close()
    rows = long_rows(filled)
    assert rows[0] == ["kind", "step", "name", "value"]
    assert ["eval", "20", "return_mean", "-1.5"] in rows
    assert rows[-1][:3] == ["train", "40", "quite, new"] and float(rows[-1][3]) == 1e-30
    assert all(len(row) == 4 for row in rows)


def test_resuming_drops_later_rows_from_both_files(filled):
    logger = RunLogger(str(filled), config={"seed": 2}, resume_step=20)
    logger.log("train", 30, {"loss/value": 9.0})
    logger.close()
    rows = read_rows(jsonl(filled))
    assert [r["step"] for r in rows if r["kind"] == "train"] == [10, 20, 30]
    assert rows[-1]["loss/value"] == 9.0
    assert [r for r in long_rows(filled) if r[1] == "30"] == [["train", "30", "loss/value", "9.0"]]


def test_resuming_keeps_the_config_until_there(filled):
    for _ in range(2):
        RunLogger(str(filled), config={"seed": 2}, resume_step=20).close()
    configs = [json.loads(path.read_text()) for path in sorted(filled.glob("config*.json"))]
    assert configs == [{"seed": 1, "resume": False}, {"seed": 2, "resume": False}]
    assert (filled / "config-until-20.json").exists()


def test_a_row_cut_short_by_a_crash_is_dropped(filled):
    whole = (filled / "metrics.jsonl").read_bytes()
    (filled / "metrics.jsonl").write_bytes(whole[:-9])
    assert [r["step"] for r in read_rows(jsonl(filled))] == [10, 20, 20]
    logger = RunLogger(str(filled), config={}, resume_step=30)
    logger.log("train", 30, {"loss/value": 3.75})
    logger.close()
    lines = (filled / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 20, 30]


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), jnp.float32(0.5), np.array(0.5)]
)
def test_array_scalars_are_numbers(tmp_path, value):
    logger = RunLogger(str(tmp_path), config={})
    logger.log("train", 1, {"x": value, "count": 3})
    logger.close()
    row = read_rows(jsonl(tmp_path))[0]
    assert row["x"] == 0.5 and row["count"] == 3


def test_values_that_are_not_finite_are_null_and_told_once(tmp_path):
    logger = RunLogger(str(tmp_path), config={})
    with pytest.warns(UserWarning, match="train/loss/value is not finite at step 0") as told:
        for step, value in enumerate((float("nan"), float("inf"), np.float32("-inf"))):
            logger.log("train", step, {"loss/value": value, "fine": 1.0})
    logger.close()
    assert len(told) == 1

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["loss/value"] for r in rows] == [None] * 3 and [r["fine"] for r in rows] == [1.0] * 3
    assert [r[3] for r in long_rows(tmp_path) if r[2] == "loss/value"] == [""] * 3


@pytest.mark.parametrize("name", ["kind", "step", "time"])
def test_a_value_cannot_take_the_name_of_a_field(tmp_path, name):
    logger = RunLogger(str(tmp_path), config={})
    with pytest.raises(ValueError, match=f"'{name}' .* rename"):
        logger.log("train", 1, {name: 2.0})
    logger.close()
    assert read_rows(jsonl(tmp_path)) == []


def test_without_tensorboard_everything_else_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    logger = RunLogger(str(tmp_path), config={})
    logger.log("train", 1, {"x": 1.0})
    logger.close()
    assert len(read_rows(jsonl(tmp_path))) == 1 and not (tmp_path / "tb").exists()


def test_every_episode_of_an_evaluation_is_kept_and_a_resumed_run_makes_later_ones_again(tmp_path):
    path = tmp_path / "episodes.csv"
    logger = RunLogger(str(tmp_path), config={})
    logger.log_episodes("eval", [10, 10], range(2), np.array([1.5, np.nan]), np.array([7, 3]))
    returns, lengths = [1.0, 2.0, 3.0, 4.0], [5, 5, 6, 6]
    logger.log_episodes("eval", [20] * 4, range(4), returns, lengths, ("a:x", "b:y"), 4)
    logger.close()
    head = ["step,episode,task,return,length", "10,0,,1.5,7", "10,1,,nan,3"]
    later = ["20,0,a:x,1.0,5", "20,1,a:x,2.0,5", "20,2,b:y,3.0,6", "20,3,b:y,4.0,6"]
    assert path.read_text().splitlines() == head + later
    path.write_text(path.read_text() + "20,4,b:y,4.")  # cut short by a crash
    RunLogger(str(tmp_path), config={}, resume_step=20).close()
    assert path.read_text().splitlines() == head + later
    RunLogger(str(tmp_path), config={}, resume_step=10).close()
    assert path.read_text().splitlines() == head


def test_training_episodes_after_a_checkpoint_are_made_again(tmp_path):
    path = tmp_path / "training_episodes.csv"
    logger = RunLogger(str(tmp_path), config={})
    totals, lengths = np.float32([1.5, -2.0]), np.array([7, 3])
    logger.log_episodes("train", [8, 8], np.array([0, 3]), totals, lengths, ("b:y", "a:x"), 4)
    logger.log_episodes("train", [], [], [], [], (), 4)
    logger.log_episodes("train", [12], [1], [0.25], [5], (), 4)
    logger.close()
    head = ["step,environment,task,return,length", "8,0,b:y,1.5,7", "8,3,a:x,-2.0,3"]
    assert path.read_text().splitlines() == [*head, "12,1,,0.25,5"]
    RunLogger(str(tmp_path), config={}, resume_step=10).close()
    assert path.read_text().splitlines() == head


def test_training_episodes_have_the_step_that_ended_them():
    """Of three steps of four environments, two a task, with two environment steps each."""
    length, total = np.zeros((3, 4), int), np.zeros((3, 4))
    length[0, 1], total[0, 1] = 7, -2.5
    length[2, 3], total[2, 3] = 9, 4.0
    logged = []
    tasks = (types.SimpleNamespace(name="a"), types.SimpleNamespace(name="b"))
    spec = types.SimpleNamespace(action_repeat=2, tasks=tasks)
    job = types.SimpleNamespace(environment=types.SimpleNamespace(spec=spec))
    logger = types.SimpleNamespace(log_episodes=lambda *each: logged.append(each))
    run.log_ended(logger, job, {"ended": (length, total)}, 100)
    run.log_ended(logger, job, {}, 100)  # learning from recorded rows
    ((kind, *columns, names, number),) = logged
    assert [[*map(float, x)] for x in columns] == [[84, 100], [1, 3], [-2.5, 4.0], [7, 9]]
    assert (kind, tuple(names), number) == ("train", ("a", "b"), 4)


def test_atomic_write_keeps_the_old_content_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    atomic_write(str(path), b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic_write(str(path), b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["config.json"]


def test_where_a_file_goes_is_checked_before_it_is_made(tmp_path, monkeypatch):
    files.prepare_output(str(tmp_path / "new" / "deep" / "a.png"))
    assert (tmp_path / "new" / "deep").is_dir()
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path / "file" / "a", "exists"), (tmp_path / "new", "directory")):
        with pytest.raises(OSError, match=f"{path} cannot be written .*{reason}.*: correct its"):
            files.prepare_output(str(path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(OSError, match="no permission"):
        files.prepare_output(str(tmp_path / "a"))


def test_written_files_follow_the_umask(tmp_path):
    """On a shared disk others may read a run, where the user's settings say so."""
    (tmp_path / "plain").touch()
    atomic_write(str(tmp_path / "atomic"), b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")]
    assert modes[0] == modes[1]
