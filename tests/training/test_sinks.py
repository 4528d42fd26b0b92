"""TensorBoard, Weights & Biases (with a stand-in for the package) and the terminal."""

from __future__ import annotations

import io
import json
import math
import pathlib
import shutil
import sys
import types

import pytest

from mbx.agents.dreamer import settings as dreamer
from mbx.agents.settings import Log
from mbx.settings import to_dict
from mbx.training import logging, run, rundir
from mbx.training.logging import NoLogger, Progress, RunLogger, duration, read_rows
from tests.helpers import tiny_config

LOG = Log(wandb="walks")
CONFIG = {"seed": 1, "log": to_dict(LOG)}


class StandInRun:
    def __init__(self, options):
        self.options, self.rows, self.metrics, self.finished = options, [], [], False

    def define_metric(self, name, step_metric=None):
        self.metrics.append((name, step_metric))

    def log(self, row):
        assert not self.finished
        self.rows.append(row)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A module that has what the sink uses of wandb; its `runs` are those opened."""
    module = types.ModuleType("wandb")
    module.Error, module.runs = type("Error", (Exception,), {}), []

    def init(**options):
        module.runs.append(StandInRun(options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_rows_are_mirrored_over_environment_steps(wandb, tmp_path):
    logger = RunLogger(str(tmp_path / "a"), config=CONFIG, log=LOG)
    logger.log("train", 10, {"loss/value": 0.5})
    with pytest.warns(UserWarning, match="not finite"):
        logger.log("eval", 20, {"return_mean": float("nan")})
    logger.close()
    (opened,) = wandb.runs
    assert opened.rows[0] == {"environment_steps": 10, "train/loss/value": 0.5}
    assert opened.rows[1]["environment_steps"] == 20
    assert math.isnan(opened.rows[1]["eval/return_mean"])
    assert ("*", "environment_steps") in opened.metrics and opened.finished
    assert opened.options["project"] == "walks" and opened.options["entity"] is None
    assert opened.options["name"] == "a" and opened.options["config"] == CONFIG
    assert opened.options["dir"] == str(tmp_path / "a")
    assert len(read_rows(str(tmp_path / "a" / "metrics.jsonl"))) == 2


def test_a_resumed_run_keeps_its_id_and_a_new_one_gets_another(wandb, tmp_path):
    for workdir, resume_step in (("a", None), ("a", 10), ("b", None), ("c", 10)):
        RunLogger(str(tmp_path / workdir), config=CONFIG, log=LOG, resume_step=resume_step).close()
    ids = [opened.options["id"] for opened in wandb.runs]
    assert ids[0] == ids[1] and len(set(ids)) == 3
    assert all(opened.options["resume"] == "allow" for opened in wandb.runs)
    assert json.loads((tmp_path / "a" / "wandb.json").read_text())["id"] == ids[0]


def test_seeds_are_runs_of_their_own_named_after_theirs(wandb, tmp_path):
    loggers = [RunLogger(str(tmp_path / "a" / f"seed-{i}"), config=CONFIG, log=LOG) for i in (0, 1)]
    loggers[1].log("train", 10, {"x": 1.0})
    assert [len(opened.rows) for opened in wandb.runs] == [0, 1]
    assert [opened.options["name"] for opened in wandb.runs] == ["a/seed-0", "a/seed-1"]
    assert {opened.options["reinit"] for opened in wandb.runs} == {"create_new"}
    for logger in loggers:
        logger.close()


def test_without_the_setting_nothing_is_opened(wandb, tmp_path):
    RunLogger(str(tmp_path), config={}).close()
    assert wandb.runs == [] and not (tmp_path / "wandb.json").exists()


def test_a_missing_package_is_told_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(log=dict(wandb="walks"))
    with pytest.raises(ImportError, match=r"log\.wandb='walks' .* pip install -e '\.\[wandb\]'"):
        run.train(config, str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


def test_a_run_that_wandb_does_not_open_leaves_the_directory_free(wandb, monkeypatch, tmp_path):
    def init(**options):
        raise wandb.Error("no key")

    monkeypatch.setattr(wandb, "init", init)
    with pytest.raises(ValueError, match=r"log\.wandb='walks': no key: run `wandb login`"):
        RunLogger(str(tmp_path), config=CONFIG, log=LOG)
    rundir.check(to_dict(dreamer.Settings()), str(tmp_path), str(tmp_path))


class Broken:
    """A service that fails in one of its methods, and in closing after that."""

    def __init__(self, method: str, error: Exception):
        self.method, self.error = method, error

    def __getattr__(self, name):
        def call(*_):
            if name in (self.method, "close"):
                raise self.error

        return call


@pytest.mark.parametrize("method", ["log", "settings", "picture", "pretraining", "close"])
@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), RuntimeError("gone")])
@pytest.mark.parametrize("name", ["TensorBoard", "wandb", "progress"])
def test_a_service_that_fails_is_dropped_and_the_run_continues(tmp_path, method, error, name):
    logger = RunLogger(str(tmp_path), config={}, quiet=True)
    logger._sinks.call("close")
    seen: list[str] = []
    other = types.SimpleNamespace(log=lambda kind, *_: seen.append(kind))
    logger._sinks = logging.Sinks(**{name: Broken(method, error), "other": other})
    with pytest.warns(UserWarning, match=f"{name} failed .{type(error).__name__}") as told:
        logger._sinks.call("settings", {}, ())
        logger.show_pretraining({}, 1, 2)
        logger.log_picture("a.png", 0, b"")
        for step in range(3):
            logger.log("train", step, {"loss": 1.0})
        logger.close()
    assert len(told) == 1 and seen == ["train"] * 3
    assert len(read_rows(str(tmp_path / "metrics.jsonl"))) == 3


def test_an_event_file_that_cannot_be_opened_does_not_end_the_run(tmp_path):
    (tmp_path / "tb").write_text("a file")
    with pytest.warns(UserWarning, match="TensorBoard gets nothing of this run"):
        logger = RunLogger(str(tmp_path), config={}, quiet=True)
    logger.log("train", 1, {"x": 1.0})
    logger.close()
    assert len(read_rows(str(tmp_path / "metrics.jsonl"))) == 1


def test_progress_is_shown_in_the_letters_that_the_output_has(monkeypatch):
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", output)
    Progress(None, 0).log("eval", 40, {"return_mean": 34.0, "return_std": 2.0})
    assert output.buffer.getvalue() == b"eval  step 40  return 34  ? 2\n"


def test_a_process_without_a_log_writes_nothing(tmp_path):
    logger = NoLogger(str(tmp_path))
    logger.log("train", 1, {"x": 1.0})
    logger.log_episodes("eval", [1], [0], [1.0], [1])
    logger.close()
    assert not list(tmp_path.iterdir())
    with pytest.raises(AttributeError):
        logger.lag("train")


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
    assert [m.name.tag for m in data[0].experiment.metric_infos] == list(logging._COMPARED)
    given = data[1].session_start_info.hparams
    assert given["agent"].string_value == "tdmpc" and given["loss.rho"].number_value == 0.5
    assert given["loss.heads"].string_value == "[1, 2]" and given["resume"].bool_value
    shown = [(step, v.tag, v.image.width, v.image.height) for step, v in values[3:]]
    assert shown == [(40, "model.png", 258, 7), (60, "film.gif", 261, 9)]
    assert values[3][1].image.encoded_image_string == png


def test_lines_instead_of_a_bar_off_a_terminal(tmp_path, capsys, monkeypatch):
    clock = iter([100.0, 130.0])
    monkeypatch.setattr("mbx.training.logging.open_tensorboard", lambda *_: None)
    monkeypatch.setattr("mbx.training.logging.time.monotonic", lambda: next(clock))
    logger = RunLogger(str(tmp_path), config={}, progress_total=4000, label="seed 1")
    logger.log("setup", 0, {"parameters": 1234567.0, "replay/bytes_rows": 23.5})
    logger.log("train", 40, {"episode/return": 12.0, "loss/value": 0.25, "steps_per_second": 99.0})
    logger.log("eval", 40, {"return_mean": 34.0, "return_std": 2.0, "length_mean": 200.0})
    logger.show_pretraining({"loss/value": 1.5}, 50, 2500)
    logger.log("train", 140, {"loss/value": 0.5})  # no episode has ended: nothing of the old one
    logger.close()
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [0, 40, 40, 140]
    assert capsys.readouterr().out.splitlines() == [
        "setup  parameters 1,234,567  replay/bytes_rows 23.5",
        "train step 40 of 4,000  seed 1  return 12  value 0.25  steps/s 99",
        "eval  step 40 of 4,000  seed 1  return 34  ± 2  length 200",
        "      pretraining 50 of 2,500  seed 1  value 1.5",  # of which no row is kept
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
    monkeypatch.setattr("mbx.training.logging.time.monotonic", lambda: next(clock))
    progress = Progress(1000, 0)
    for step, updates in ((100, 0.0), (200, 0.0), (300, 50.0), (400, 10.0)):
        progress.log("train", step, {"updates": updates, "steps_per_second": 1.0})
    progress.log("eval", 400, {"return_mean": 1.0})
    progress.log("train", 600, {"steps_per_second": 1.0})  # an agent that counts no updates
    lines = capsys.readouterr().out.splitlines()
    left = [line.split("steps/s 1")[1] for line in lines if line.startswith("train")]
    assert left == ["", "", "", "  60 s left", "  40 s left"]


def test_the_bar_shows_the_newest_row_and_the_last_evaluation_with_its_step(monkeypatch):
    shown = io.StringIO()
    shown.isatty = lambda: True
    monkeypatch.setattr("sys.stderr", shown)
    progress = Progress(100, 0)
    progress.log("eval", 20, {"return_mean": 5.0})
    progress.log("train", 20, {"episode/return": 12.0})
    progress.log("train", 40, {"loss/value": 0.25})
    last = shown.getvalue().rsplit("\r", 1)[1]
    progress.pretraining({"loss/value": 1.5}, 50, 2500)
    assert "40/100" in shown.getvalue().rsplit("\r", 1)[1]
    assert "pretraining 50 of 2,500  value 1.5" in shown.getvalue().rsplit("\r", 1)[1]
    progress.close()
    assert "40/100" in last and "value 0.25  eval at 20: return 5" in last
    assert "return 12" in shown.getvalue() and "return 12" not in last  # whose speed may have a 12
