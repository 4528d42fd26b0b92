"""A policy that is carried away: compiled once, in the environment's units, without environment."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mbx
from mbx import envs
from mbx.agents.base import Agent
from mbx.training import build, policy, run, specs
from mbx.training.checkpoint import Checkpointer
from mbx.types import EnvSpec
from tests.helpers import leave_untrained, tiny_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOW, HIGH = (0.0, -4.0), (2.0, 4.0)
SPEC = EnvSpec("gone:x", (2,), np.float32, 2, 7, 1, action_low=LOW, action_high=HIGH)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """The directory of a run whose environment there is not, with an untrained TD-MPC."""
    path = str(tmp_path_factory.mktemp("policy"))
    leave_untrained(path, tiny_config(env=dict(name="gone:x")), SPEC)
    return path


@pytest.fixture(scope="module")
def planning(workdir):
    return mbx.load_policy(workdir)


@pytest.fixture(scope="module")
def alone(workdir):
    return mbx.load_policy(workdir, planner=False, batch=3)


def test_one_program_for_a_thousand_calls(planning, alone):
    planning.reset()
    obs = np.random.default_rng(0).normal(size=(1000, 2))
    actions = np.stack([planning(x) for x in obs])
    assert planning._compiled._cache_size() == 1
    assert actions.shape == (1000, 2) and actions.dtype == np.float32
    assert (actions >= LOW).all() and (actions <= HIGH).all() and actions[:, 0].max() > 1.0
    for _ in range(3):
        alone(obs[:3].tolist())
    assert alone._compiled._cache_size() == 1


def test_it_acts_as_the_agent_with_the_same_keys(workdir, planning):
    settings = run.load_settings(workdir)
    agent = build.build_agent(settings, SPEC)
    checkpointer = Checkpointer(workdir)
    train, _ = checkpointer.restore_best(jax.eval_shape(agent.init, jax.random.key(0)))
    checkpointer.close()
    act = jax.jit(
        lambda actor, obs, first, key: agent.act(
            train, actor, obs, first, mbx.fast.rng.unrolled(key), True
        )
    )
    planning.reset()
    planning._carry = planning._begun
    actor, key, first = agent.init_actor(1), jax.random.key(0), jnp.ones(1, bool)
    for i in range(4):
        if i == 2:
            planning.reset()
            first = jnp.ones(1, bool)
        obs = np.float32([0.1 * i, -0.2])
        now, key = jax.random.split(key)
        action, actor = act(actor, obs[None], first, now)
        first = jnp.zeros(1, bool)
        expected = np.array(LOW) + (np.asarray(action[0]) + 1) / 2 * np.subtract(HIGH, LOW)
        np.testing.assert_allclose(planning(obs), expected, rtol=0, atol=1e-6)


def test_without_the_planner_it_is_the_policy_s_mean(workdir, alone):
    obs = np.float32([[0.1, 0.2], [-3.0, 0.4], [0.0, 0.0]])
    train = jax.tree.unflatten(alone._structure, _all_leaves(workdir))
    model = build.importlib.import_module("mbx.agents.tdmpc.agent")
    settings = run.load_settings(workdir)
    world = model.make_world_model(model.world_config(settings, SPEC))
    mean, _ = world.policy(train.params, world.encode(train.params, obs))
    if world.config.policy != "gaussian":
        mean = jnp.tanh(mean)
    expected = np.array([LOW]) + (np.clip(mean, -1, 1) + 1) / 2 * np.subtract([HIGH], [LOW])
    np.testing.assert_allclose(alone(obs), expected, atol=1e-6)
    np.testing.assert_array_equal(alone(obs), alone(obs))  # nothing is drawn


def _all_leaves(workdir):
    agent = build.build_agent(run.load_settings(workdir), SPEC)
    checkpointer = Checkpointer(workdir)
    train, _ = checkpointer.restore_best(jax.eval_shape(agent.init, jax.random.key(0)))
    checkpointer.close()
    return jax.tree.leaves(train)


def test_a_reset_of_some_of_a_batch(alone):
    alone.reset()
    alone(np.zeros((3, 2)))
    alone.reset([False, True, False])
    assert alone._first.tolist() == [False, True, False]


def test_what_it_does_not_take(workdir, planning):
    with pytest.raises(ValueError, match=r"an observation of shape \(3,\): .* takes \(2,\)"):
        planning(np.zeros(3))
    with pytest.raises(ValueError, match="batch=0: give at least 1"):
        mbx.load_policy(workdir, batch=0)
    agent = Agent(None, None, None, None, None)
    with pytest.raises(ValueError, match="agent 'tdmpc' has no policy beside the planner"):
        policy.Policy(agent, None, SPEC, run.load_settings(workdir), planner=False)


def test_units_of_actions():
    choice = SPEC._replace(discrete=True, action_low=(1.0,), action_high=())
    assert policy.in_units(choice, jnp.eye(2)[::-1]).tolist() == [2, 1]
    choice = choice._replace(action_low=())  # numbered from 0
    assert policy.in_units(choice, jnp.eye(2)[::-1]).tolist() == [1, 0]
    third = np.array([LOW]) + np.subtract([HIGH], [LOW]) / 3
    found = policy.in_units(SPEC, jnp.array([[-1 / 3, -1 / 3], [2.0, -3.0]]))
    np.testing.assert_allclose(found, [*third, (HIGH[0], LOW[1])], rtol=1e-6)
    plain = SPEC._replace(action_low=(), action_high=())
    assert policy.in_units(plain, jnp.full((1, 2), 3.0)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("name", ["gymnax:Reacher-misc", "gym:Pendulum-v1", "gym:CartPole-v1"])
def test_the_specs_of_environments_say_their_units(name, tmp_path):
    spec = envs.make(name, 1).spec
    bounds = {"gym:Pendulum-v1": ((-2.0,), (2.0,)), "gym:CartPole-v1": ((0.0,), ())}
    assert (spec.action_low, spec.action_high) == bounds.get(name, ((-1.0, -1.0), (1.0, 1.0)))
    specs.save(spec, str(tmp_path))
    again = specs.load(str(tmp_path))
    assert again == spec._replace(obs_dtype=np.dtype(spec.obs_dtype))
    ranged = again._replace(reward_range=(-1.0, 2.5))
    specs.save(ranged, str(tmp_path))
    assert specs.load(str(tmp_path)) == ranged
    written = (tmp_path / "spec.json").read_text()
    (tmp_path / "spec.json").write_text(written.replace("2.5", "-2.5"))
    with pytest.raises(ValueError, match="spec.json: field 'reward_range': .* must be .lowest"):
        specs.load(str(tmp_path))
    (tmp_path / "spec.json").write_text('{"name": "x", "obs_shape": 3}')
    with pytest.raises(ValueError, match="spec.json: field 'obs_shape' is missing or no list"):
        specs.load(str(tmp_path))


def test_the_exported_file_acts_alike_without_mbx(workdir, planning, tmp_path):
    pytest.importorskip("flatbuffers")
    path = str(tmp_path / "policy.mbx")
    assert planning.save(path) == os.path.getsize(path)
    program = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "import numpy as np, run_exported\n"
        "policy = run_exported.Policy(sys.argv[1])\n"
        "assert policy._act._cache_size() == 1  # before the first action\n"
        "obs = np.random.default_rng(1).normal(size=(9, 2))\n"
        "actions = [policy(x) for x in obs[:6]]\n"
        "policy.reset()\n"
        "actions += [policy(x) for x in obs[6:]]\n"
        "assert policy._act._cache_size() == 1\n"
        "assert not any(m.partition('.')[0] in ('mbx', 'flax', 'gymnasium') for m in sys.modules)\n"
        "np.save(sys.argv[3], actions)"
    )
    out = str(tmp_path / "actions.npy")
    command = [sys.executable, "-c", program, path, str(ROOT / "examples"), out]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, check=True, cwd=tmp_path, env=environment)
    planning.reset()
    planning._carry = planning._begun
    obs = np.random.default_rng(1).normal(size=(9, 2))
    expected = [planning(x) for x in obs[:6]]
    planning.reset()
    expected += [planning(x) for x in obs[6:]]
    np.testing.assert_allclose(np.load(out), expected, rtol=0, atol=1e-6)


def test_a_run_s_directory_is_enough(tmp_path, monkeypatch):
    """The environment's file is not even there any more."""
    from tests.envs.test_own import SOURCE
    from tests.faults.small import small_config

    (tmp_path / "carried.py").write_text(
        SOURCE.replace("gauge.READING", "1.0").replace("import gauge", "")
    )
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    config = small_config(env=dict(name=f"gym:{tmp_path}/carried.py:Scale"))
    run.train(config, str(tmp_path / "run"))
    (tmp_path / "carried.py").unlink()
    action = mbx.load_policy(str(tmp_path / "run"))(np.array([9.0, 9.0]))
    assert action.shape == (2,) and 0 <= action[0] <= 2 and -4 <= action[1] <= 4
    with pytest.raises(ValueError, match="planner=False: agent 'small'"):
        mbx.load_policy(str(tmp_path / "run"), planner=False)
