"""A run directory: whose code it may execute, and its copies of the user's own files."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mbx.training import rundir

OWN, OTHER = "gym:/home/a/own.py:Scale", "jax:/home/b/theirs.py:Point"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data/mbx/environments"


def test_what_a_user_trained_with_is_remembered_once(home):
    rundir.remember_trusted("gymnax:Pendulum-v1")
    assert not home.exists()
    rundir.remember_trusted(OWN)
    rundir.remember_trusted(OWN)
    assert home.read_text() == OWN + "\n"
    rundir.remember_trusted(f"multi:gymnax:Pendulum-v1+{OTHER}+{OWN}")
    assert home.read_text() == f"{OWN}\n{OTHER}\n"


def test_only_what_is_remembered_or_said_to_be_trusted_is_followed(home):
    with pytest.raises(ValueError, match=r"run in runs/a executes /home/a/own.py:Scale, which"):
        rundir.check_trusted(OWN, "runs/a", trusted=False)
    rundir.check_trusted(OWN, "runs/a", trusted=True)
    assert not home.exists()  # saying so is for once
    rundir.check_trusted("gymnax:Pendulum-v1", "runs/a", trusted=False)
    rundir.remember_trusted(OWN)
    rundir.check_trusted(OWN, "runs/a", trusted=False)
    with pytest.raises(ValueError, match="/home/b/theirs.py:Point"):
        rundir.check_trusted(f"multi:{OWN}+{OTHER}", "runs/a", trusted=False)


def test_without_a_data_directory_it_lies_in_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    rundir.remember_trusted(OWN)
    assert (tmp_path / ".local/share/mbx/environments").read_text() == OWN + "\n"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    rundir.remember_trusted(OWN)
    with pytest.raises(ValueError, match="own.py:Scale"):
        rundir.check_trusted(OWN, "runs/a", trusted=False)


# -------------------------------------------------------------------------------------------------
# Copies of input files


@dataclasses.dataclass(frozen=True)
class Settings:
    """Of a run with files of two kinds."""

    paths: tuple[tuple[str, str], ...]

    def files(self):
        return dict(self.paths)

    def with_files(self, paths):
        return dataclasses.replace(self, paths=tuple(sorted(paths.items())))


@pytest.fixture
def place(tmp_path):
    """(settings, run directory) of a run that has kept its two files."""
    for name, text in (("a.txt", "one"), ("b.bin", "two")):
        (tmp_path / name).write_text(text)
    (tmp_path / "run").mkdir()
    settings = Settings(paths=(("x", str(tmp_path / "a.txt")), ("y", str(tmp_path / "b.bin"))))
    rundir.check_inputs(settings.files(), str(tmp_path / "run"))  # before anything was kept
    rundir.keep_inputs(settings.files(), str(tmp_path / "run"))
    return settings, tmp_path / "run"


def test_copies_are_named_by_setting_and_made_once(place):
    settings, run = place
    held = {path.name: path.read_text() for path in (run / "inputs").iterdir()}
    assert held == {"x.txt": "one", "y.bin": "two"}
    (run.parent / "a.txt").write_text("other")
    rundir.keep_inputs(settings.files(), str(run))
    assert (run / "inputs/x.txt").read_text() == "one"
    with pytest.raises(ValueError, match="x=.*a.txt is not what the run .* began with"):
        rundir.check_inputs(settings.files(), str(run))


def test_a_run_is_read_with_its_copies_and_with_nothing_outside_of_it(place):
    settings, run = place
    (run.parent / "a.txt").unlink()
    wanted = (("x", str(run / "inputs/x.txt")), ("y", str(run / "inputs/y.bin")))
    assert rundir.with_kept_inputs(settings, str(run)).paths == wanted
    copy = run / "inputs/y.bin"
    copy.unlink()
    with pytest.raises(ValueError, match=f"y=.*b.bin lies outside of the run .* copy it to {copy}"):
        rundir.with_kept_inputs(settings, str(run))
    copy.symlink_to(run.parent / "b.bin")  # a file that is there, by a way out
    with pytest.raises(ValueError, match="y=.*b.bin lies outside of the run and is not opened"):
        rundir.with_kept_inputs(settings, str(run))


def test_a_null_in_a_field_that_a_run_is_opened_by_is_told(tmp_path):
    values = dict(agent="tdmpc", train={}, eval={}, checkpoint={}, replay={})
    for env, field in ((None, "env"), (dict(name=None, num_envs=2), "env.name")):
        (tmp_path / "config.json").write_text(json.dumps(values | dict(env=env)))
        with pytest.raises(ValueError, match=rf"config.json: field '{field}' is missing or no"):
            rundir.load_config(str(tmp_path))
