"""Training from Python in three lines, for a name, a class or an instance."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import numpy as np
import pytest

import mbx
from examples.own_gymnasium import Tank
from mbx import api, config
from mbx.commands import train as commands
from mbx.training import transfer
from tests.faults.small import small_config


def test_three_lines_for_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = small_config()
    agent, state, metrics = mbx.train("toy:point", config=config, steps=40, seed=3, num_envs=4)
    assert config["seed"] == 0 and config["env"]["num_envs"] == 2  # left as it was
    assert agent.act and int(state.step) > 0
    assert [row["step"] for row in metrics if row["kind"] == "eval"] == [40]
    (workdir,) = (tmp_path / "runs").iterdir()
    assert workdir.name.startswith("toy-point-s3-")
    assert mbx.load_policy(str(workdir)).spec.name == "toy:point"


def test_a_class_of_ones_own_with_its_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    workdir = str(tmp_path / "run")
    given = functools.partial(Tank, leak=0.1)
    _, _, rows = mbx.train(
        given, small_config(), workdir=workdir, env=dict(episode_length=9), metrics=("error",)
    )
    evaluations = [row for row in rows if row["kind"] == "eval"]
    assert len(evaluations) == 2 and all(row["episode/error"] > 0 for row in evaluations)
    policy = mbx.load_policy(workdir)
    assert policy.spec.name.endswith("own_gymnasium.py:Tank")
    action = policy(np.zeros(3))
    assert 0.0 <= action[0] <= 2.0 and 0.0 <= action[1] <= 5.0


class Elsewhere(Tank):
    """Goes to another directory when it is made, as simulators do that look for their files."""

    def __init__(self):
        os.chdir("/")
        super().__init__()


@pytest.mark.parametrize("workdir", [None, "runs/mine"])
def test_a_run_lies_where_it_was_started(workdir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []

    def trained(settings, workdir, at_end):
        asked.append((os.getcwd(), workdir))
        raise KeyboardInterrupt

    monkeypatch.setattr(api.run, "train", trained)
    with pytest.raises(KeyboardInterrupt):
        mbx.train(Elsewhere, small_config(), workdir=workdir)
    ((here, path),) = asked
    assert here == "/" and path.startswith(str(tmp_path / (workdir or "runs/gym-Elsewhere-s0-")))
    monkeypatch.chdir(tmp_path)
    flags = [f"--workdir={workdir}"] if workdir else []
    assert commands.chosen(["--config=tdmpc", *flags])[1].startswith(str(tmp_path / "runs"))


def test_paths_in_settings_are_absolute_before_an_environment_is_made(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = transfer.located(config.load("tdmpc", ["init_from=runs/a", "dataset=rows.npz"]))
    assert found.train.init_from == str(tmp_path / "runs" / "a")
    assert found.train.dataset == str(tmp_path / "rows.npz")
    for path in ("", "hf://me/run"):
        kept = transfer.located(config.load("tdmpc", [f"init_from={path}"]))
        assert kept.train.init_from == path


def test_the_package_shows_what_is_public_and_loads_no_simulator():
    code = (
        "import sys, mbx; print(*(n for n in ('jax', 'gymnasium') if n in sys.modules)); "
        "print(*dir(mbx)); print(mbx.mppi.plan.__module__, mbx.train.__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded, names, modules = done.stdout.splitlines()
    assert loaded == "" and modules == "mbx.mppi mbx.api"
    public = "train train_fn load_policy distributions returns networks world_model mppi heads"
    public += " successors categorical replay observations planners power envs agents types"
    public += " settings config"
    assert set(names.split()) == {*public.split(), "__version__"} == set(mbx.__all__)
    with pytest.raises(AttributeError, match="module 'mbx' has no attribute 'plan'"):
        _ = mbx.plan
