"""The files of a run directory: rows, resuming, values that JSON has no word for."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import pathlib
import shutil
import stat
import sys
import types

import jax.numpy as jnp
import numpy as np
import pytest

from mbx.training import metrics, run
from mbx.training.metrics import RunLogger, atomic_write, read_rows
from mbx.training.progress import Progress, duration


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
    monkeypatch.setitem(sys.modules, "mbx.training.tensorboard", None)
    logger = RunLogger(str(tmp_path), config={})
    logger.log("train", 1, {"x": 1.0})
    logger.close()
    assert len(read_rows(jsonl(tmp_path))) == 1 and not (tmp_path / "tb").exists()


def events_of(path: pathlib.Path) -> list:
    """The records of an event file: 8 bytes length, 4 of its checksum, the event, 4 of its."""
    from tensorboardX.proto.event_pb2 import Event

    data, events = path.read_bytes(), []
    while data:
        size = int.from_bytes(data[:8], "little")
        events.append(Event.FromString(data[12 : 12 + size]))
        data = data[16 + size :]
    return events


def test_tensorboard_gets_every_value_and_hides_what_a_resumed_run_makes_again(tmp_path):
    logger = RunLogger(str(tmp_path), config={})
    logger.log("train", 20, {"x": 1.5, "y": -2.0})
    logger.close()
    first = events_of(next((tmp_path / "tb").iterdir()))
    assert [e.session_log.status for e in first] == [0, 0, 0]
    values = [(v.tag, e.step, v.simple_value) for e in first for v in e.summary.value]
    assert values == [("train/x", 20, 1.5), ("train/y", 20, -2.0)]
    shutil.rmtree(tmp_path / "tb")  # its name ends in the second
    RunLogger(str(tmp_path), config={}, resume_step=20).close()
    purge = events_of(next((tmp_path / "tb").iterdir()))[1]
    assert (purge.step, purge.session_log.status) == (21, 1)


def test_tensorboard_gets_settings_pictures_and_films(tmp_path):
    from tensorboardX.proto.plugin_hparams_pb2 import HParamsPluginData

    config = {"agent": "tdmpc", "loss": {"rho": 0.5, "heads": [1, 2]}, "resume": True}
    logger = RunLogger(str(tmp_path), config=config)
    png = b"\x89PNG\r\n\x1a\n" + bytes([0, 0, 0, 13]) + b"IHDR" + bytes([0, 0, 1, 2, 0, 0, 0, 7])
    logger.log_picture("model.png", 40, png)
    logger.log_picture("film.gif", 60, b"GIF89a" + bytes([5, 1, 9, 0]))
    logger.log_picture("notes.txt", 60, b"words")
    logger.close()
    events = events_of(next((tmp_path / "tb").iterdir()))
    values = [(event.step, value) for event in events for value in event.summary.value]
    data = [HParamsPluginData.FromString(v.metadata.plugin_data.content) for _, v in values[:3]]
    assert [m.name.tag for m in data[0].experiment.metric_infos] == list(metrics._COMPARED)
    given = data[1].session_start_info.hparams
    assert given["agent"].string_value == "tdmpc" and given["loss.rho"].number_value == 0.5
    assert given["loss.heads"].string_value == "[1, 2]" and given["resume"].bool_value
    shown = [(step, v.tag, v.image.width, v.image.height) for step, v in values[3:]]
    assert shown == [(40, "model.png", 258, 7), (60, "film.gif", 261, 9)]
    assert values[3][1].image.encoded_image_string == png


def test_an_event_file_that_cannot_be_written_ends_the_run_by_name(tmp_path, monkeypatch):
    from mbx.training import tensorboard

    monkeypatch.setattr(tensorboard, "_FLUSH_SECONDS", -1)
    logger = RunLogger(str(tmp_path), config={})

    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(logger._tensorboard._writer, "flush", full)
        with pytest.raises(OSError, match=f"{tmp_path}/tb cannot be written .*free space there"):
            logger.log("train", 20, {"x": 1.0})
    logger.close()


def test_lines_instead_of_a_bar_off_a_terminal(filled, capsys, monkeypatch):
    clock = iter([100.0, 130.0])
    fake = types.SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr("mbx.training.progress.time", fake)
    logger = RunLogger(str(filled), config={}, resume_step=30, progress_total=4000, label="seed 1")
    logger.log("setup", 0, {"parameters": 1234567.0, "replay/bytes_rows": 23.5})
    logger.log("train", 40, {"episode/return": 12.0, "loss/value": 0.25, "steps_per_second": 99.0})
    logger.log("eval", 40, {"return_mean": 34.0, "return_std": 2.0, "length_mean": 200.0})
    logger.show_pretraining({"loss/value": 1.5}, 50, 2500)
    logger.log("train", 140, {"loss/value": 0.5})  # no episode has ended: nothing of the old one
    logger.close()
    assert [row["step"] for row in read_rows(filled / "metrics.jsonl")][-3:] == [40, 40, 140]
    assert capsys.readouterr().out.splitlines() == [
        "setup  parameters 1,234,567  replay/bytes_rows 23.5",
        "train step 40 of 4,000  seed 1  return 12  value 0.25  steps/s 99",
        "eval  step 40 of 4,000  seed 1  return 34  ± 2  length 200",
        "      50 of 2,500 first updates  seed 1  value 1.5",  # of which no row is kept
        "train step 140 of 4,000  seed 1  value 0.5  19 min left",  # 30 s for 100 of 3,860
    ]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.4, "3 s"), (89, "89 s"), (90, "2 min"), (5000, "83 min"), (7500, "2 h 5 min")],
)
def test_times_in_words(seconds, words):
    assert duration(seconds) == words


def test_the_time_left_goes_by_the_speed_of_rows_with_updates(monkeypatch, capsys):
    """Random actions up to 200, first updates at once until 300, from there 100 steps take 10 s."""
    clock = iter([30.0, 40.0, 60.0])  # read in rows with updates alone
    monkeypatch.setattr("mbx.training.progress.time.monotonic", lambda: next(clock))
    progress = Progress(1000, 0)
    for step, updates in ((100, 0.0), (200, 0.0), (300, 50.0), (400, 10.0)):
        progress.show("train", step, {"updates": updates, "steps_per_second": 1.0})
    progress.show("eval", 400, {"return_mean": 1.0})
    progress.show("train", 600, {"steps_per_second": 1.0})  # an agent that counts no updates
    lines = capsys.readouterr().out.splitlines()
    left = [line.split("steps/s 1")[1] for line in lines if line.startswith("train")]
    assert left == ["", "", "", "  60 s left", "  40 s left"]


def test_the_bar_shows_the_newest_row_and_the_last_evaluation_with_its_step(monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    progress = Progress(100, 0)
    progress.show("eval", 20, {"return_mean": 5.0})
    progress.show("train", 20, {"episode/return": 12.0})
    progress.show("train", 40, {"loss/value": 0.25})
    last = shown.getvalue().rsplit("\r", 1)[1]
    progress.pretraining({"loss/value": 1.5}, 50, 2500)
    assert "40/100" in shown.getvalue().rsplit("\r", 1)[1]
    assert "50 of 2,500 first updates  value 1.5" in shown.getvalue().rsplit("\r", 1)[1]
    progress.close()
    assert "40/100" in last and "value 0.25  eval at 20: return 5" in last
    assert "return 12" in shown.getvalue() and "return 12" not in last  # whose speed may have a 12


def test_every_episode_of_an_evaluation_is_kept_and_a_resumed_run_makes_later_ones_again(tmp_path):
    path = tmp_path / "episodes.csv"
    logger = RunLogger(str(tmp_path), config={})
    logger.log_episodes(10, np.array([1.5, np.nan]), np.array([7, 3]), ())
    logger.log_episodes(20, [1.0, 2.0, 3.0, 4.0], [5, 5, 6, 6], ("a:x", "b:y"))
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
    logger.log_training([8, 8], [0, 3], ["", "a:x"], np.float32([1.5, -2.0]), np.array([7, 3]))
    logger.log_training([], [], [], [], [])
    logger.log_training([12], [1], [""], [0.25], [5])
    logger.close()
    head = ["step,environment,task,return,length", "8,0,,1.5,7", "8,3,a:x,-2.0,3"]
    assert path.read_text().splitlines() == [*head, "12,1,,0.25,5"]
    RunLogger(str(tmp_path), config={}, resume_step=10).close()
    assert path.read_text().splitlines() == head


def test_training_episodes_have_the_step_that_ended_them_and_their_task():
    """Of three steps of four environments, two a task, with two environment steps each."""
    length, total = np.zeros((3, 4), int), np.zeros((3, 4))
    length[0, 1], total[0, 1] = 7, -2.5
    length[2, 3], total[2, 3] = 9, 4.0
    tasks = (types.SimpleNamespace(name="a"), types.SimpleNamespace(name="b"))
    logged = []
    for names in (tasks, ()):
        spec = types.SimpleNamespace(action_repeat=2, tasks=names)
        job = types.SimpleNamespace(environment=types.SimpleNamespace(spec=spec))
        logger = types.SimpleNamespace(log_training=lambda *each: logged.append([*map(list, each)]))
        run.log_ended(logger, job, {"ended": (length, total)}, 100)
    assert logged[0] == [[84, 100], [1, 3], ["a", "b"], [-2.5, 4.0], [7, 9]]
    assert logged[1][2] == ["", ""]
    run.log_ended(logger, job, {}, 100)  # learning from recorded rows
    assert len(logged) == 2


def test_atomic_write_keeps_the_old_content_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    atomic_write(str(path), b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        atomic_write(str(path), b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["config.json"]


def test_written_files_follow_the_umask(tmp_path):
    """On a shared disk others may read a run, where the user's settings say so."""
    (tmp_path / "plain").touch()
    atomic_write(str(tmp_path / "atomic"), b"")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "atomic")]
    assert modes[0] == modes[1]
