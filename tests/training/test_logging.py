"""The log of a run: its files, TensorBoard, Weights & Biases (a stand-in), the terminal."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import pathlib
import shutil
import stat
import sys
import types
import warnings
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.agents.dreamer import settings as dreamer
from mbx.agents.settings import Log
from mbx.agents.tdmpc.settings import Env, Settings
from mbx.settings import to_dict
from mbx.training import files, logging, run, rundir
from mbx.training.files import atomic_write
from mbx.training.logging import NoLogger, Progress, RunLogger, duration, read_rows
from mbx.types import ActionPart, EnvSpec
from tests.helpers import tiny_config


def jsonl(workdir) -> str:
    return os.path.join(workdir, "metrics.jsonl")


def long_rows(workdir) -> list[list[str]]:
    with open(os.path.join(workdir, "metrics.csv"), newline="") as file:
        return list(csv.reader(file))


@pytest.fixture
def filled(tmp_path):
    """A run directory with train rows at 10, 20, 30 and an evaluation at 20."""
    with closing(RunLogger(str(tmp_path), config={"seed": 1})) as logger:
        for step in (10, 20, 30):
            logger.log("train", step, {"loss/value": step / 8})
            if step == 20:
                logger.log("eval", step, {"return_mean": -1.5})
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
    with closing(RunLogger(str(filled), config={}, resume_step=30)) as logger:
        logger.log("train", 40, {"loss/value": 5.0, "quite, new": 1e-30})
    rows = long_rows(filled)
    assert rows[0] == ["kind", "step", "name", "value"]
    assert ["eval", "20", "return_mean", "-1.5"] in rows
    assert rows[-1][:3] == ["train", "40", "quite, new"] and float(rows[-1][3]) == 1e-30
    assert all(len(row) == 4 for row in rows)


def test_resuming_drops_later_rows_from_both_files(filled):
    with closing(RunLogger(str(filled), config={"seed": 2}, resume_step=20)) as logger:
        logger.log("train", 30, {"loss/value": 9.0})
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
    with closing(RunLogger(str(filled), config={}, resume_step=30)) as logger:
        logger.log("train", 30, {"loss/value": 3.75})
    lines = (filled / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10, 20, 20, 30]


@pytest.mark.parametrize(
    "value", [np.float32(0.5), np.float64(0.5), jnp.float32(0.5), np.array(0.5)]
)
def test_array_scalars_are_numbers(tmp_path, value):
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        logger.log("train", 1, {"x": value, "count": 3})
    row = read_rows(jsonl(tmp_path))[0]
    assert row["x"] == 0.5 and row["count"] == 3


def test_values_that_are_not_finite_are_null_and_told_once(tmp_path):
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        with pytest.warns(UserWarning, match="train/loss/value is not finite at step 0") as told:
            for step, value in enumerate((float("nan"), float("inf"), np.float32("-inf"))):
                logger.log("train", step, {"loss/value": value, "fine": 1.0})
    assert len(told) == 1

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line, parse_constant=refuse) for line in lines]
    assert [r["loss/value"] for r in rows] == [None] * 3 and [r["fine"] for r in rows] == [1.0] * 3
    assert [r[3] for r in long_rows(tmp_path) if r[2] == "loss/value"] == [""] * 3


@pytest.mark.parametrize("name", ["kind", "step", "time"])
def test_a_value_cannot_take_the_name_of_a_field(tmp_path, name):
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        with pytest.raises(ValueError, match=f"'{name}' .* rename"):
            logger.log("train", 1, {name: 2.0})
    assert read_rows(jsonl(tmp_path)) == []


def test_without_tensorboard_everything_else_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        logger.log("train", 1, {"x": 1.0})
    assert len(read_rows(jsonl(tmp_path))) == 1 and not (tmp_path / "tb").exists()


def test_every_episode_of_an_evaluation_is_kept_and_a_resumed_run_makes_later_ones_again(tmp_path):
    path = tmp_path / "episodes.csv"
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        logger.log_episodes("eval", [10, 10], range(2), np.array([1.5, np.nan]), np.array([7, 3]))
        returns, lengths = [1.0, 2.0, 3.0, 4.0], [5, 5, 6, 6]
        logger.log_episodes("eval", [20] * 4, range(4), returns, lengths, ("a:x", "b:y"), 4)
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
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        totals, lengths = np.float32([1.5, -2.0]), np.array([7, 3])
        logger.log_episodes("train", [8, 8], np.array([0, 3]), totals, lengths, ("b:y", "a:x"), 4)
        logger.log_episodes("train", [], [], [], [], (), 4)
        logger.log_episodes("train", [12], [1], [0.25], [5], (), 4)
    head = ["step,environment,task,return,length", "8,0,b:y,1.5,7", "8,3,a:x,-2.0,3"]
    assert path.read_text().splitlines() == [*head, "12,1,,0.25,5"]
    path.write_text(
        "\n".join([head[0], '8,"damaged', "\0" * 200_000, *head[1:], "12,1,,0.25,5", ""])
    )
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
    with closing(RunLogger(str(tmp_path / "a"), config=CONFIG, log=LOG)) as logger:
        logger.log("train", 10, {"loss/value": 0.5})
        with pytest.warns(UserWarning, match="not finite"):
            logger.log("eval", 20, {"return_mean": float("nan")})
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


def test_trackio_mirrors_rows_of_seeds_and_a_resumed_run(tmp_path):
    """Needs the extra trackio, which CI has not."""
    trackio = pytest.importorskip("trackio")
    stored, project = trackio.sqlite_storage.SQLiteStorage, f"mbx-test-{os.getpid()}"
    try:
        paths = [str(tmp_path / "a" / f"seed-{i}") for i in (0, 1)]
        log = Log(trackio=project)
        loggers = [RunLogger(path, config=CONFIG, log=log) for path in paths]
        for step, logger in enumerate(loggers):
            with pytest.warns(UserWarning, match="not finite"):
                logger.log("eval", step, {"return_mean": float("nan")})
            logger.log("train", step, {"loss/value": 0.5})
            logger.close()
        with closing(RunLogger(paths[0], config=CONFIG, log=log, resume_step=5)) as logger:
            logger.log("train", 9, {"loss/value": 0.25})
        names = [run.name for run in trackio.Api().runs(project)]
        rows = {name[:8]: stored.get_logs(project, name) for name in names}
        assert [row["step"] for row in rows["a/seed-0"]] == [0, 0, 9]
        assert [row.get("train/loss/value") for row in rows["a/seed-0"]] == [None, 0.5, 0.25]
        assert [row["environment_steps"] for row in rows["a/seed-1"]] == [1, 1]
    finally:
        trackio.delete_project(project, force=True)


def test_without_the_setting_nothing_is_opened(wandb, tmp_path):
    RunLogger(str(tmp_path), config={}).close()
    assert wandb.runs == [] and not (tmp_path / "wandb.json").exists()


def test_a_missing_package_is_told_before_anything_is_made(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny_config(log=dict(wandb="walks"))
    with pytest.raises(ImportError, match=r"log\.wandb='walks' .* pip install 'mbx-rl\[wandb\]'"):
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
    with closing(RunLogger(str(tmp_path), config={})) as logger:
        logger.log("train", 20, {"x": 1.5, "y": -2.0})
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
    with closing(RunLogger(str(tmp_path), config=config)) as logger:
        png = (
            b"\x89PNG\r\n\x1a\n" + bytes([0, 0, 0, 13]) + b"IHDR" + bytes([0, 0, 1, 2, 0, 0, 0, 7])
        )
        logger.log_picture("model.png", 40, png)
        logger.log_picture("film.gif", 60, b"GIF89a" + bytes([5, 1, 9, 0]))
        logger.log_picture("notes.txt", 60, b"words")
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
    with closing(
        RunLogger(str(tmp_path), config={}, progress_total=4000, label="seed 1")
    ) as logger:
        logger.log("setup", 0, {"parameters": 1234567.0, "replay/bytes_rows": 23.5})
        logger.log(
            "train", 40, {"episode/return": 12.0, "loss/value": 0.25, "steps_per_second": 99.0}
        )
        logger.log("eval", 40, {"return_mean": 34.0, "return_std": 2.0, "length_mean": 200.0})
        logger.show_pretraining({"loss/value": 1.5}, 50, 2500)
        logger.log(
            "train", 140, {"loss/value": 0.5}
        )  # no episode has ended: nothing of the old one
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


def test_the_device_and_what_takes_so_long(capsys):
    logging.print_devices()
    out, err = capsys.readouterr()
    assert out == ""  # rows alone go there
    count = jax.device_count()
    devices = f"{count} CPU device{'s' * (count > 1)}"
    assert err == f"mbx: running on {devices}, jax {jax.__version__}\n"


def test_what_the_task_decides_is_said(capsys):
    settings = Settings(env=Env(name="toy:point"))
    spec = EnvSpec("toy:point", (3,), "float32", 2, episode_length=20, action_repeat=4)
    chosen = settings.for_task(spec)
    logging.print_task_settings(settings, chosen, spec)
    logging.print_task_settings(chosen, chosen, spec)  # nothing was left to it
    assert capsys.readouterr().err == (
        "mbx: for toy:point: env.action_repeat=4, env.episode_length=20, train.seed_hold=4, "
        "train.utd_ratio=2.0, loss.discount=0.95, optimizer.learning_rate=0.001, "
        "optimizer.final_learning_rate=0.0003, optimizer.policy_lr_scale=0.3\n"
    )
    parts = ActionPart("gear", (), "int64", ((0, 3),)), ActionPart("", (2,), "int8", ((0, 2),) * 2)
    joined = spec._replace(discrete=True, action_dim=12, action_parts=parts)
    logging.print_task_settings(chosen, chosen, joined)
    wanted = "mbx: for toy:point: actions are one choice of 12, gear [3], [2, 2]\n"
    assert capsys.readouterr().err == wanted


def test_the_kind_of_a_gpu_is_said(capsys, monkeypatch):
    gpu = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    monkeypatch.setattr(logging.jax, "devices", lambda: [gpu])
    monkeypatch.setattr(logging.jax, "device_count", lambda: 1)
    monkeypatch.setattr(logging.jax, "default_backend", lambda: "gpu")
    logging.print_devices()
    said = f"mbx: running on 1 GPU device (NVIDIA H100), jax {jax.__version__}\n"
    assert capsys.readouterr().err == said


def test_what_is_compiled_is_said_before_and_how_long_it_took_after(capsys, monkeypatch):
    clock = iter([100.0, 200.0, 300.0, 304.0])
    monkeypatch.setattr(logging, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    with logging.printed_compilation("the toy"):
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/backend_compile_duration", 3.0, fun_name="jit(toy)"
        )
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/jaxpr_trace_duration", 2.2, fun_name="jit(toy)"
        )
        jax.monitoring.record_event_duration_secs("/other", 50.0, fun_name="toy")
        assert "compiling the toy (20 s or more" in capsys.readouterr().err
    jax.monitoring.record_event_duration_secs(
        "/jax/core/compile/backend_compile_duration", 9.0, fun_name="jit(toy)"
    )
    assert capsys.readouterr().err == "mbx: compiled the toy in 5 s\n"
    with logging.printed_compilation("the toy"):  # programs inside programs are reported twice
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/jaxpr_trace_duration", 9.0, fun_name="jit(toy)"
        )
    assert capsys.readouterr().err.endswith("mbx: compiled the toy in 4 s\n")
    monkeypatch.setattr(logging.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(logging, "time", types.SimpleNamespace(monotonic=lambda: 0.0))
    with logging.printed_compilation("the toy"):
        pass
    assert "the toy (half a minute to some minutes the first time" in capsys.readouterr().err
    with logging.printed_compilation("the toy", kept=False):
        pass
    assert "(half a minute to some minutes at every start)" in capsys.readouterr().err
    with logging.printed_compilation("the toy", talk=False):
        pass
    assert capsys.readouterr().err == ""


def test_deprecations_of_other_packages_are_not_shown_and_all_else_is(monkeypatch):
    def warn(category: type[Warning], module: str) -> None:
        warnings.warn_explicit("old", category, "file.py", 1, module=module)

    monkeypatch.setattr(sys, "warnoptions", [])
    with pytest.warns() as seen, logging.without_foreign_deprecations():
        warn(DeprecationWarning, "dm_control.suite.base")
        warn(FutureWarning, "jax")
        warn(UserWarning, "dm_control.suite.base")
        warn(DeprecationWarning, "jaxtra")
        warn(DeprecationWarning, "mine")
    assert [w.category for w in seen] == [UserWarning, DeprecationWarning, DeprecationWarning]
    monkeypatch.setattr(sys, "warnoptions", ["default"])
    with pytest.warns(FutureWarning), logging.without_foreign_deprecations():
        warn(FutureWarning, "jax")


def test_a_gpu_that_this_jaxlib_cannot_use(monkeypatch, tmp_path):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(logging, "_NVIDIA", str(tmp_path / "nvidia[0-9]*"))
    assert logging.missed_gpu("cpu") == ""  # asked for the processor
    assert "jax[cuda12]" in logging.missed_gpu(None)
    monkeypatch.setattr(logging, "_NVIDIA", str(tmp_path / "none"))
    assert logging.missed_gpu(None) == ""


def test_only_writes_of_a_checkpoint_that_was_given_up_are_left_out(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: seen.append(str(found.exc_value)))

    def report(error: Exception) -> None:
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))

    for _ in range(2):
        logging.quiet_storage()
    report(RuntimeError("Event loop is closed"))
    report(RuntimeError("another"))
    report(ValueError("Event loop is closed"))
    assert seen == ["another", "Event loop is closed"]
