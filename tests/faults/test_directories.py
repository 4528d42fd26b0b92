"""What lies in a run directory is continued, put aside and said, or left alone."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

import jax
import pytest

from mbx.training import files, run, rundir
from mbx.training.checkpoint import Checkpointer
from mbx.training.logging import RunLogger, read_rows
from tests.faults.processes import rows_of
from tests.faults.small import small_config


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> pathlib.Path:
    """A finished run; not to be written to."""
    workdir = tmp_path_factory.mktemp("whole")
    run.train(small_config(), str(workdir))
    return workdir


@pytest.fixture
def copied(whole, tmp_path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(whole, tmp_path / "run"))


def contents(workdir: pathlib.Path) -> dict[str, bytes]:
    files = [p for p in workdir.rglob("*") if p.is_file() and p.name != ".lock"]
    return {str(p.relative_to(workdir)): p.read_bytes() for p in files}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(), "already holds a run .metrics.jsonl, best, checkpoints."),
        (dict(resume=True, agent="tdmpc"), "another run: agent='tdmpc' .there 'small'."),
        (dict(resume=True, seed=3), "another run: seed=3 .there 0."),
        (dict(resume=True, env=dict(name="toy:ends")), "another run: env.name='toy:ends'"),
    ],
)
def test_a_directory_of_another_run_is_refused(changes, message, whole):
    with pytest.raises(ValueError, match=message):
        rundir.check(small_config(**changes), str(whole), str(whole))


@pytest.mark.parametrize("kept", ["metrics.jsonl", "best", "checkpoints"])
def test_whatever_is_left_of_a_run_is_not_written_over(kept, copied):
    for path in copied.iterdir():
        if path.name != kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = contents(copied)
    with pytest.raises(ValueError, match=f"already holds a run .{kept}.*resume=True"):
        run.train(small_config(), str(copied))
    assert contents(copied) == before


def test_rows_whose_checkpoints_are_gone_are_not_written_over(copied):
    shutil.rmtree(copied / "checkpoints")
    before = contents(copied)
    with pytest.raises(ValueError, match="rows up to step 80 and no checkpoint: put"):
        run.train(small_config(resume=True), str(copied))
    assert contents(copied) == before


@pytest.mark.parametrize(("last", "refused"), [(20, False), (40, False), (60, True), (400, True)])
def test_rows_are_lost_once_the_second_checkpoint_has_begun(last, refused, tmp_path):
    """The first was due at 20 and is whole when the second begins, after the row of 40."""
    row = dict(kind="train", step=last, time=0.0)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    for steps, wanted in ((last, True), (1000, refused)):  # of a run that has finished, always
        expected = pytest.warns(UserWarning, match="begins again")
        if wanted:
            expected = pytest.raises(ValueError, match=f"up to step {last:,}")
        with expected:
            rundir.set_aside([str(tmp_path)], 20, steps)


def test_nothing_to_resume_is_an_error(tmp_path):
    for workdir in (tmp_path, tmp_path / "mistyped"):
        with pytest.raises(ValueError, match="holds no run to resume: fix the path"):
            run.train(small_config(resume=True), str(workdir))
    assert not list(tmp_path.iterdir())


def test_a_run_killed_before_its_first_checkpoint_begins_again(whole, copied):
    """With the rows, and the best, of before put aside and equal rows at the end."""
    shutil.rmtree(copied / "checkpoints")
    lines = (copied / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (copied / "metrics.jsonl").write_bytes(b"".join(lines[:2]) + b'{"kind": "tr')
    with pytest.warns(UserWarning, match="no checkpoint yet: the run begins again.*before-1"):
        run.train(small_config(resume=True), str(copied))
    assert rows_of(copied) == rows_of(whole)
    assert rows_of(copied / "before-1") == rows_of(whole)[:2]
    assert (copied / "before-1" / "best").is_dir()


def test_a_fallback_makes_the_same_rows_and_the_same_best(whole, copied):
    for step in ("80", "60", "40"):
        if step != "40":
            shutil.rmtree(copied / "checkpoints" / step)
    (copied / "config.json").write_text("{broken")
    with pytest.warns(UserWarning, match="config.json is no JSON.*written again"):
        run.train(small_config(resume=True), str(copied))
    assert rows_of(copied) == rows_of(whole)
    bests = [Checkpointer(str(workdir)) for workdir in (whole, copied)]
    assert bests[0].best_step() == bests[1].best_step()
    for best in bests:
        best.close()
    assert json.loads((copied / "config.json").read_text())["agent"] == "small"


def test_a_directory_that_goes_away_is_said_at_the_next_row(tmp_path):
    workdir = tmp_path / "run"
    logger = RunLogger(str(workdir), config=small_config())
    logger.log("train", 20, {"loss": 1.0})
    workdir.rename(tmp_path / "moved")
    workdir.mkdir()  # as a checkpoint, written in between, may make it again
    with pytest.raises(OSError, match=f"{workdir}.*is gone.*put it back and resume"):
        logger.log("train", 40, {"loss": 1.0})
    logger.close()
    assert not (workdir / "metrics.jsonl").exists()


def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(tmp_path):
    target = tmp_path / "letter"
    target.write_text("dear")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)
    with pytest.raises(ValueError, match=".lock is a link"):
        run.train(small_config(), str(tmp_path / "run"))
    assert target.read_text() == "dear"


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "config.json.tmp-{pid}"])
def test_files_that_are_links_are_replaced_and_their_targets_left_alone(name, tmp_path):
    target = tmp_path / "letter"
    target.write_text("{}")
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / name.format(pid=os.getpid())).symlink_to(target)
    logger = RunLogger(str(workdir), config={})
    logger.log("train", 1, {"x": 1.0})
    logger.close()
    assert target.read_text() == "{}" and len(read_rows(str(workdir / "metrics.jsonl"))) == 1


def test_a_directory_that_cannot_be_written_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    for workdir in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match=f"workdir={workdir}.*choose another directory"):
            run.train(small_config(), str(workdir))


def test_atomic_write_names_the_file_and_the_remedy(tmp_path):
    with pytest.raises(OSError, match="below/x cannot be written .*correct its directory"):
        files.atomic_write(str(tmp_path / "below" / "x"), b"")


def test_the_record_of_a_run_names_code_machine_and_every_start(copied):
    (first,) = rundir.attempts(str(copied))
    assert (first["from_step"], first["to_step"], first["outcome"]) == (0, 80, "complete")
    assert first["started"] <= first["ended"] and first["ended"].endswith("Z")
    assert first["processor_seconds"] > 0.0
    assert first["versions"]["jax"] == jax.__version__ and first["devices"].endswith("cpu")
    run.train(small_config(resume=True, train=dict(steps=120)), str(copied))
    before, second = rundir.attempts(str(copied))
    assert before == first
    assert (second["from_step"], second["to_step"]) == (80, 120)


def test_an_attempt_that_fails_or_is_killed_is_recorded(tmp_path):
    with pytest.raises(KeyError):
        with rundir.attempt(str(tmp_path), 10) as going:
            (running,) = rundir.attempts(str(tmp_path))
            assert running["ended"] is running["outcome"] is running["to_step"] is None
            going["to_step"] = 20
            raise KeyError("x")
    (failed,) = rundir.attempts(str(tmp_path))
    assert (failed["outcome"], failed["to_step"]) == ("KeyError", 20)


@pytest.mark.parametrize("text", ["{", "[]", '{"attempts": 3}', '{"attempts": [3]}'])
def test_a_record_that_cannot_be_read_stops_nothing(tmp_path, text, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "experiments.train", "--config=a b"])
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match="run.json"):
        rundir.attempts(str(tmp_path))
    with pytest.warns(UserWarning, match="run.json.*written again"):
        with rundir.attempt(str(tmp_path), 0):
            pass
    (attempt,) = rundir.attempts(str(tmp_path))
    assert attempt["command"] == "python -m experiments.train '--config=a b'"


def test_the_commit_is_that_of_the_checkout_and_not_of_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    here = rundir.provenance()["commit"]
    package = tmp_path / "site" / "mbx"
    package.mkdir(parents=True)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr("mbx.__file__", str(package / "__init__.py"))
    assert rundir.provenance()["commit"] == "unknown" != here or here == "unknown"
