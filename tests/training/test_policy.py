"""A policy that is carried away: compiled once, in the environment's units, without environment."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys

import gymnasium
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import strategies as st

import mbx
from examples import run_exported
from mbx import envs
from mbx.agents.base import Agent
from mbx.envs.gymnasium import Task
from mbx.envs.host import SteppedEnvironment
from mbx.training import build, policy, run, rundir
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
    assert planning.compiled._cache_size() == 1
    assert actions.shape == (1000, 2) and actions.dtype == np.float32
    assert (actions >= LOW).all() and (actions <= HIGH).all() and actions[:, 0].max() > 1.0
    for _ in range(3):
        alone(obs[:3].tolist())
    assert alone.compiled._cache_size() == 1


def test_actions_have_the_precision_of_the_run(workdir):
    settings = dataclasses.replace(run.load_settings(workdir), matmul_precision="highest")
    agent, train = build.build_agent(settings, SPEC), _train_state(workdir)
    found = policy.Policy(agent, train, SPEC, settings, planner=False)
    found([0.1, 0.2])
    assert found.compiled._cache_size() == 1
    inputs = np.zeros((1, 2), np.float32), np.ones(1, bool)
    program = found.compiled.lower(found.leaves, found.begun, *inputs).as_text()
    assert program.count("dot_general") == program.count("[HIGHEST, HIGHEST]") > 0


def test_it_acts_as_the_agent_with_the_same_keys(workdir, planning):
    agent, train = build.build_agent(run.load_settings(workdir), SPEC), _train_state(workdir)
    act = jax.jit(
        lambda actor, obs, first, key: agent.act(
            train, actor, obs, first, mbx.fast.rng.unrolled(key), True
        )
    )
    planning.reset()
    planning._carry = planning.begun
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
    train = _train_state(workdir)
    model = importlib.import_module("mbx.agents.tdmpc.agent")
    settings = run.load_settings(workdir)
    world = model.make_world_model(model.world_config(settings, SPEC))
    mean, _ = world.policy(train.params, world.encode(train.params, obs))
    if world.config.policy != "gaussian":
        mean = jnp.tanh(mean)
    expected = np.array([LOW]) + (np.clip(mean, -1, 1) + 1) / 2 * np.subtract([HIGH], [LOW])
    np.testing.assert_allclose(alone(obs), expected, atol=1e-6)
    np.testing.assert_array_equal(alone(obs), alone(obs))  # nothing is drawn


def _train_state(workdir):
    agent = build.build_agent(run.load_settings(workdir), SPEC)
    with Checkpointer(workdir) as checkpointer:
        return checkpointer.restore_best(jax.eval_shape(agent.init, jax.random.key(0)))[0]


def test_a_planner_s_settings_are_changed_for_acting(workdir):
    followed = mbx.load_policy(workdir, planner_settings=["horizon=3", "reuse=1e9"])
    seen = np.random.default_rng(0).standard_normal((2, 4, 2))
    seen[1, 0] = seen[0, 0]
    episodes = []
    for observations in seen:
        followed.reset()
        followed._carry = followed.begun  # the same draws
        episodes.append([followed(one) for one in observations])
    equal = [np.array_equal(*pair) for pair in zip(*episodes, strict=True)]
    assert equal == [True, True, True, False]  # the fourth is planned, from another state
    with pytest.raises(ValueError, match="planner.reus.* did you mean planner.reuse"):
        mbx.load_policy(workdir, planner_settings=["reus=1"])


def test_a_reset_of_some_of_a_batch(alone):
    alone.reset()
    alone(np.zeros((3, 2)))
    alone.reset([False, True, False])
    assert alone._first.tolist() == [False, True, False]


def test_what_it_does_not_take(workdir, planning):
    with pytest.raises(
        ValueError, match=r"an observation that has the shape \[3\]: .* takes \[2\]"
    ):
        planning(np.zeros(3))
    with pytest.raises(ValueError, match="batch=0: give at least 1"):
        mbx.load_policy(workdir, batch=0)
    agent = Agent(None, None, None, None, None)
    with pytest.raises(
        ValueError, match="agent 'tdmpc' cannot act without its planner, or has none: leave"
    ):
        policy.Policy(agent, None, SPEC, run.load_settings(workdir), planner=False)


@pytest.mark.parametrize("name", ["gymnax:Reacher-misc", "gym:Pendulum-v1", "gym:CartPole-v1"])
def test_the_specs_of_environments_say_their_units(name, tmp_path):
    spec = envs.make(name, 1).spec
    bounds = {"gym:Pendulum-v1": ((-2.0,), (2.0,)), "gym:CartPole-v1": ((0.0,), ())}
    assert (spec.action_low, spec.action_high) == bounds.get(name, ((-1.0, -1.0), (1.0, 1.0)))
    rundir.save_spec(spec, str(tmp_path))
    again = rundir.load_spec(str(tmp_path))
    assert again == spec._replace(obs_dtype=np.dtype(spec.obs_dtype))
    ranged = again._replace(reward_range=(-1.0, 2.5))
    rundir.save_spec(ranged, str(tmp_path))
    assert rundir.load_spec(str(tmp_path)) == ranged
    written = (tmp_path / "spec.json").read_text()
    (tmp_path / "spec.json").write_text(written.replace("2.5", "-2.5"))
    with pytest.raises(ValueError, match="spec.json: field 'reward_range': .* must be .lowest"):
        rundir.load_spec(str(tmp_path))
    (tmp_path / "spec.json").write_text('{"name": "x", "obs_shape": 3}')
    with pytest.raises(ValueError, match="spec.json: field 'obs_shape' is missing or no list"):
        rundir.load_spec(str(tmp_path))


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
    planning._carry = planning.begun
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


class Sampled(gymnasium.Env):
    """An environment of any spaces that gives samples and keeps the actions it gets."""

    max_episode_steps = 5

    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed=None, options=None):
        self.given = self.observation_space.sample()
        return self.given, {}

    def step(self, action):
        self.taken, self.given = action, self.observation_space.sample()
        return self.given, 0.0, False, False, {}


def box(low, high, shape, dtype):
    return st.builds(spaces.Box, st.just(low), st.just(high), st.just(shape), st.just(dtype))


CHOICES = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 4), start=st.integers(-3, 3)),
    st.builds(spaces.MultiDiscrete, st.lists(st.integers(1, 3), min_size=1, max_size=3)),
    st.just(spaces.MultiDiscrete([[2, 3], [1, 2]], start=[[0, -1], [5, 0]])),
    st.builds(spaces.MultiBinary, st.sampled_from([2, (2, 2)])),
)
BOXES = st.one_of(
    box(-2, 3, (), np.float32),
    box(-2, 3, (3,), np.float64),
    box(-2, 3, (2, 2), np.float32),
    box(0, 9, (2,), np.int64),
    box(0, 1, (3,), np.bool_),
)
IMAGE = st.sampled_from([spaces.Box(0, 255, (n, n, 3), np.uint8) for n in (9, 16)])
NUMBERS = st.one_of(CHOICES, BOXES)
NESTED = st.one_of(
    st.builds(lambda a, b: spaces.Tuple((a, b)), NUMBERS, NUMBERS),
    st.builds(lambda a, b: spaces.Dict(image=a, inner=spaces.Dict(x=b)), IMAGE, NUMBERS),
    st.builds(lambda a, b: spaces.Dict(a=spaces.Tuple((a,)), b=b), NUMBERS, NUMBERS),
)
ACTIONS = st.one_of(
    st.builds(spaces.Discrete, st.integers(1, 4), start=st.integers(-3, 3)),
    box(-1, 0.2, (2, 3), np.float32),
    box(-0.3, 7, (), np.float32),
    box(0, 10, (3,), np.int64),
    box(-5, 5, (2, 1), np.int8),
    box(-1e-3, 0.7, (1,), np.float64),
    CHOICES,
    st.builds(lambda a, b: spaces.Dict(x=spaces.Dict(y=a), z=b), CHOICES, CHOICES),
    st.builds(
        lambda a, b: spaces.Dict(a=a, b=b), box(0, 9, (2,), np.int64), box(-2, 3, (3,), np.float64)
    ),
)


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(st.one_of(NUMBERS, IMAGE, NESTED), ACTIONS, st.integers(0, 99))
def test_policies_and_files_take_and_give_what_the_environment_does(seen, acted, seed):
    """For spaces of every kind: what training sees of an observation and does with an action."""
    env = Sampled(seen, acted)
    for space in (seen, acted):
        space.seed(seed)
    environment = SteppedEnvironment("gym:x", [Task(env, "x", lambda: 5)], seed=None)
    spec = environment.spec
    wanted = environment.reset(seed)[0]
    one = object.__new__(policy.Policy)
    one.spec, one._batch, one.shape = spec, None, (1, *spec.obs_shape)
    about = json.loads(json.dumps(one.about()))
    np.testing.assert_array_equal(policy.as_seen(spec, env.given), wanted)
    np.testing.assert_array_equal(run_exported.as_seen(about, env.given)[0], wanted)
    np.testing.assert_array_equal(policy.as_seen(spec, wanted), wanted)  # one-hot, joined
    action = np.random.default_rng(seed).uniform(-1.3, 1.3, (1, spec.action_dim)).astype(np.float32)
    environment.step(action)
    traced = np.asarray(policy.in_units(spec, jnp.asarray(action)))
    exported, given = run_exported.in_space(about, traced), policy.in_space(spec, traced)
    exported = mbx.observations.nested(exported) if isinstance(exported, dict) else exported
    for one in (jax.tree.map(lambda x: x[0], found) for found in (given, exported)):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), one, env.taken)
        assert acted.contains(one)
        jax.tree.map(lambda x, y: np.testing.assert_equal(np.shape(x), np.shape(y)), one, env.taken)


PARTS = (mbx.types.Part("level", (2,)), mbx.types.Part("alarm", (3,)))
ALARM = SPEC._replace(obs_shape=(5,), parts=PARTS, choices=(("alarm", ((0, 3),)),))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"level": [1.0], "alarm": 1}, "'level'.* shape"),
        ({"level": [1.0, 2.0], "alarm": [1, 2]}, "'alarm'.* shape"),
        ({"level": [1.0, 2.0], "alarm": 3}, "'alarm'.* is 3"),
        ({"level": [1.0, 2.0]}, "without 'alarm'"),
        ({"level": [np.nan, 2.0], "alarm": 1}, "not finite"),
        (np.float32([0, np.inf, 1, 0, 0]), "not finite"),
        (np.zeros(4), "shape"),
    ],
)
def test_observations_that_do_not_fit_are_named(given, words):
    one = object.__new__(policy.Policy)
    one.spec, one._batch, one.shape = ALARM, None, (1, 5)
    about = json.loads(json.dumps(one.about()))
    for call in (lambda: policy.as_seen(ALARM, given), lambda: run_exported.as_seen(about, given)):
        with pytest.raises(ValueError, match=words):
            call()


def test_a_batch_of_numbers_of_choices():
    spec = SPEC._replace(obs_shape=(3,), choices=(("", ((4, 3),)),))
    wanted = np.eye(3)[[2, 0]]
    for given in ([6, 4], [[6], [4]], wanted):
        np.testing.assert_array_equal(policy.as_seen(spec, given, (2,)), wanted)


def test_a_spec_keeps_the_spaces_of_an_environment(tmp_path):
    for changes in (dict(action_shape=()), dict(action_shape=(1, 2), action_dtype="int64")):
        spec = ALARM._replace(obs_dtype=np.dtype(np.float32), **changes)
        rundir.save_spec(spec, str(tmp_path))
        assert rundir.load_spec(str(tmp_path)) == spec
    path = tmp_path / "spec.json"
    path.write_text(path.read_text().replace("int64", "O"))
    with pytest.raises(ValueError, match="field 'action_dtype': 'O' is no type of numbers"):
        rundir.load_spec(str(tmp_path))
