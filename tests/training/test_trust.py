"""Whose code a run directory may make a user execute: what was remembered, and nothing else."""

from __future__ import annotations

import pytest

from mbx.training import rundir

OWN, OTHER = "gym:/home/a/own.py:Scale", "jax:/home/b/theirs.py:Point"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data/mbx/environments"


def test_what_a_user_trained_with_is_remembered_once(home):
    rundir.remember("gymnax:Pendulum-v1")
    assert not home.exists()
    rundir.remember(OWN)
    rundir.remember(OWN)
    assert home.read_text() == OWN + "\n"
    rundir.remember(f"multi:gymnax:Pendulum-v1+{OTHER}+{OWN}")
    assert home.read_text() == f"{OWN}\n{OTHER}\n"


def test_only_what_is_remembered_or_said_to_be_trusted_is_followed(home):
    with pytest.raises(ValueError, match=r"run in runs/a executes /home/a/own.py:Scale, which"):
        rundir.check_trusted(OWN, "runs/a", trusted=False)
    rundir.check_trusted(OWN, "runs/a", trusted=True)
    assert not home.exists()  # saying so is for once
    rundir.check_trusted("gymnax:Pendulum-v1", "runs/a", trusted=False)
    rundir.remember(OWN)
    rundir.check_trusted(OWN, "runs/a", trusted=False)
    with pytest.raises(ValueError, match="/home/b/theirs.py:Point"):
        rundir.check_trusted(f"multi:{OWN}+{OTHER}", "runs/a", trusted=False)


def test_without_a_data_directory_it_lies_in_the_home(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    rundir.remember(OWN)
    assert (tmp_path / ".local/share/mbx/environments").read_text() == OWN + "\n"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    rundir.remember(OWN)
    with pytest.raises(ValueError, match="own.py:Scale"):
        rundir.check_trusted(OWN, "runs/a", trusted=False)
