"""The examples run, at a tiny size, and do what they are there for."""

from __future__ import annotations

import os

import jax
import numpy as np
import pytest

from examples import ilqr, own_agent, own_environment, own_model
from mbx import envs
from mbx.settings import to_dict
from mbx.training import build
from mbx.training.environments import make_environment
from mbx.training.metrics import read_rows
from mbx.training.state import make_schedule


@pytest.fixture(autouse=True)
def as_users_run_them():
    """Tests of the package refuse that arrays of other ranks are joined; users need not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_own_model():
    path = np.asarray(own_model.main())
    assert path.shape == (40, 3, 4)
    left = np.linalg.norm(path[-1, :, :2] - own_model.GOAL, axis=-1)
    from_obstacle = np.linalg.norm(path[..., :2] - own_model.OBSTACLE, axis=-1)
    assert left.max() < 0.2 and from_obstacle.min() > own_model.RADIUS - 0.05


def test_ilqr_finds_the_actions_that_lead_to_the_goal():
    found, unknown, costs = ilqr.main()
    np.testing.assert_allclose(found, unknown, atol=0.02)
    assert costs[-1] < 1e-3 < 1.0 < costs[0]


def test_own_agent_in_own_environment(tmp_path):
    """One run for both: TD-MPC, which the environment's example trains, takes longer to compile."""
    config = to_dict(own_agent.Settings())
    config["env"] |= dict(name="mine:rail", episode_length=20)
    config["train"] |= dict(steps=400, seed_steps=40, pretrain_updates=10, log_interval=80)
    config["eval"] |= dict(interval=200, episodes=2)
    result = own_environment.main(str(tmp_path / "run"), config)
    rows = read_rows(os.path.join(result.workdir, "metrics.jsonl"))
    losses = [row["loss/model"] for row in rows if row.get("loss/model") is not None]
    assert losses[-1] < 0.5 * losses[0]
    assert [steps for steps, _ in result.evaluations] == [160, 320, 400]
    assert os.path.exists(tmp_path / "run" / "curve.png")


def test_the_configuration_of_own_environment_fits_it():
    envs.register("mine", envs.Suite(raw=own_environment.rail))
    config = own_environment.configuration()
    environment = make_environment(config, config["env"]["num_envs"], seed=0)
    agent = build.build_agent(config, environment.spec)
    make_schedule(build.read(config), environment.spec)
    assert agent.example_row()["obs"].shape == (2,) and environment.spec.episode_length == 100


def test_an_agent_that_nobody_registered_is_told():
    spec = envs.make("gymnax:Pendulum-v1", 1).spec
    with pytest.raises(ValueError, match="config.agent='nobody': choose .* or register your own"):
        build.build_agent({"agent": "nobody"}, spec)
