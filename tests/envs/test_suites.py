"""Adapters of the suites, each against the library it adapts."""

from __future__ import annotations

import os
import subprocess
import sys

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.envs import gymnasium as gymnasium_suite
from mbx.envs import multi
from mbx.envs.host import SteppedEnvironment
from mbx.training.loop import random_actions
from mbx.types import EnvSpec


def test_gymnax_pendulum_matches_gymnax():
    import gymnax

    environment = envs.make("gymnax:Pendulum-v1", 3)
    assert environment.spec.obs_shape == (3,) and environment.spec.episode_length == 200
    state, obs = environment.reset(jax.random.key(0))
    raw, params = gymnax.make("Pendulum-v1")
    action = jnp.array([[0.5], [-1.0], [0.1]])
    step = jax.jit(environment.step)
    new, timestep = step(state, action, jax.random.key(1))
    for i in range(3):
        one = jax.tree.map(lambda x, i=i: x[i], state.raw)
        expected = raw.step_env(jax.random.key(9), one, 2.0 * action[i, 0], params)
        np.testing.assert_allclose(timestep.final_obs[i], expected[0].reshape(3), rtol=1e-6)
        np.testing.assert_allclose(timestep.reward[i], expected[2], rtol=1e-6)
    truncated = []
    for i in range(201):
        state, timestep = step(state, action, jax.random.key(i))
        assert not timestep.terminated.any()
        truncated.append(bool(timestep.truncated.all()))
        if i == 199:
            assert not np.allclose(timestep.obs, timestep.final_obs)
            assert len(np.unique(np.asarray(timestep.obs)[:, 0])) == 3
    assert truncated == [False] * 199 + [True, False]


def test_brax_fast_steps_and_truncates():
    environment = envs.make("brax:fast", 2, episode_length=3)
    state, obs = environment.reset(jax.random.key(0))
    step = jax.jit(environment.step, donate_argnums=0)
    flags = []
    for i in range(4):
        state, timestep = step(state, jnp.zeros((2, 1)), jax.random.key(i))
        flags.append(bool(timestep.truncated.all()))
    assert obs.shape == (2, *environment.spec.obs_shape)
    assert flags == [False, False, True, False]


@pytest.mark.slow
def test_playground_cartpole():
    pytest.importorskip("mujoco_playground")
    with jax.numpy_rank_promotion("allow"):  # MJX broadcasts between ranks
        environment = envs.make("playground:CartpoleSwingup", 2, episode_length=3)
        state, obs = jax.jit(environment.reset)(jax.random.key(0))
        step = jax.jit(environment.step, donate_argnums=0)
        for i in range(3):
            state, timestep = step(state, jnp.zeros((2, 1)), jax.random.key(i))
    assert environment.spec.action_repeat == 2
    assert timestep.truncated.all() and np.isfinite(timestep.reward).all()
    assert not np.allclose(timestep.obs, timestep.final_obs)


@pytest.mark.parametrize("name", ["gym:Pendulum-v1", "dmc:cartpole-balance", "dmc:reacher-easy"])
def test_host_environments(name):
    if name.startswith("dmc"):
        pytest.importorskip("dm_control")
    environment = envs.make(name, 2, episode_length=3, seed=3)
    first = environment.reset(5)
    again = environment.reset(5)
    np.testing.assert_array_equal(first, again)
    size = (8, 2, environment.spec.action_dim)
    actions = np.random.default_rng(0).uniform(-1, 1, size).astype(np.float32)
    flags, snapshot, tail = [], None, []
    for i, action in enumerate(actions):
        if i == 4:
            snapshot = environment.get_state()
        timestep = environment.step(action)
        flags.append(bool(timestep.truncated.all()))
        if i >= 4:
            tail.append(timestep)
        differs = not np.allclose(timestep.obs, timestep.final_obs)
        assert differs == flags[-1]
    assert flags == [False, False, True] * 2 + [False, False]
    assert snapshot is not None
    other = envs.make(name, 2, episode_length=3, seed=4)
    other.set_state(snapshot)
    for action, expected in zip(actions[4:], tail, strict=True):
        timestep = other.step(action)
        jax.tree.map(np.testing.assert_array_equal, tuple(timestep), tuple(expected))
    environment.close()


def test_gym_termination_is_not_truncation():
    class Ends(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (1,))
        action_space = gymnasium.spaces.Box(-2, 2, (1,))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.count = 0
            return np.zeros(1, np.float32), {}

        def step(self, action):
            self.count += 1
            return action / 2, 1.0, self.count == 2, False, {}

    gymnasium.register("MbxEnds-v0", entry_point=Ends, max_episode_steps=10)
    environment = envs.make("gym:MbxEnds-v0", 1, action_repeat=3)
    timestep = environment.step(np.ones((1, 1)))
    assert timestep.terminated.all() and not timestep.truncated.any()
    assert timestep.reward[0] == 2.0  # the third repeat did not happen
    np.testing.assert_array_equal(timestep.final_obs, [[1.0]])  # the action was rescaled to 2
    np.testing.assert_array_equal(timestep.obs, [[0.0]])


class Clock(gymnasium.Env):
    """Counts its steps into the observation and cuts its own episodes after five."""

    observation_space = gymnasium.spaces.Box(0, 1, (2, 2, 3), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros((2, 2, 3), np.float32), {}

    def step(self, action):
        self.count += 1
        return np.full((2, 2, 3), self.count / 8, np.float32), 1.0, False, self.count == 5, {}


def test_gym_tasks_that_cut_their_own_episodes_and_float_images():
    gymnasium.register("MbxClock-v0", entry_point=Clock, max_episode_steps=100)
    environment = envs.make("gym:MbxClock-v0", 1, action_repeat=2)
    assert environment.spec.obs_dtype == np.float32
    rows = [environment.step(np.zeros((1, 1))) for _ in range(4)]
    assert [bool(r.truncated[0]) for r in rows] == [False, False, True, False]
    assert not any(r.terminated.any() for r in rows)
    assert [float(r.reward[0]) for r in rows] == [2, 2, 1, 2]
    np.testing.assert_array_equal(rows[2].final_obs, np.full((1, 2, 2, 3), 5 / 8))
    np.testing.assert_array_equal(rows[2].obs, np.zeros((1, 2, 2, 3)))


def test_dmc_stays_inside_an_episode_that_the_repeat_does_not_divide(monkeypatch):
    pytest.importorskip("dm_control")
    environment = envs.make("dmc:cartpole-balance", 1, action_repeat=300)
    assert environment.spec.episode_length == 4  # 300 + 300 + 300 + 100 of 1000
    inner, kinds = environment._tasks[0]._env, []
    step = inner.step

    def watched(action):
        timestep = step(action)
        kinds.append(timestep.step_type)
        return timestep

    monkeypatch.setattr(inner, "step", watched)
    timesteps = [environment.step(np.ones((1, 1))) for _ in range(4)]
    assert [bool(t.truncated[0]) for t in timesteps] == [False, False, False, True]
    assert [int(k) for k in kinds] == [1] * 999 + [2]  # one whole episode, nothing of the next
    environment.close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pendulum-v1", "SUITE:TASK"),
        ("atari:Pong", "SUITE:TASK"),
        ("gymnax:Pendulum-v2", "Pendulum-v1"),
        ("gym:Pendulun-v1", "Pendulum-v1"),
        ("brax:inverted_pendulun", "inverted_pendulum"),
        ("brax:inverted_pendulum@bullet", "bullet.*spring"),
        ("brax:fast@mjx", "none to choose"),
    ],
)
def test_wrong_names_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name, 1)


@pytest.mark.parametrize(
    ("name", "can"),
    [
        ("gymnax:Pendulum-v1", False),
        ("gymnax:CartPole-v1", True),
        ("gym:Pendulum-v1", False),
        ("gym:CartPole-v1", True),
        ("multi:gymnax:Pendulum-v1+gymnax:Reacher-misc", False),
        ("multi:gymnax:Pendulum-v1+gymnax:MountainCarContinuous-v0", True),
    ],
)
def test_specs_say_whether_episodes_can_end_early(name, can):
    assert envs.make(name, 2).spec.can_terminate is can


class Gapped:
    """Rewards of 1, but for the third, seventh, … step of an episode, which earn 0."""

    num_actions, action_low, action_high = 0, np.float32([-1]), np.float32([1])
    obs_shape, obs_dtype, time_limit, ends_at, can_terminate = (1,), np.float32, 100, None, False
    reward_range = (0.0, 1.0)

    def reset(self, seed):
        self.count = 0
        return np.zeros(1, np.float32)

    def step(self, action):
        self.count += 1
        return np.full(1, self.count, np.float32), float(self.count % 4 != 3), False, False

    def get_state(self):
        return b"%d" % self.count

    def set_state(self, snapshot):
        self.count = int(snapshot)


@pytest.mark.parametrize(("first", "whole"), [(0, (0, 4)), (3, (1,)), (8, (0, 4))])
def test_three_environments_in_four_begin_again_where_a_host_task_is_solved(first, whole):
    options = dict(episode_length=8, reset_solved=3, first=first)
    made = SteppedEnvironment("toy:gapped", [Gapped() for _ in range(5)], **options)
    steps = []
    for i in range(18):
        steps.append(made.step(np.zeros((5, 1))))
        if i == 4:  # a snapshot knows that two of three steps in a row are done
            saved = made.get_state()
            made = SteppedEnvironment("toy:gapped", [Gapped() for _ in range(5)], **options)
            made.set_state(saved)
    for number in range(5):
        ends = [i + 1 for i, step in enumerate(steps) if step.truncated[number]]
        assert ends == ([8, 16] if number in whole else [6, 12, 18])
        assert steps[ends[0] - 1].episode_length[number] == ends[0]
        assert steps[ends[0]].episode_length[number] == 1
    for _ in range(2):
        made.step(np.zeros((5, 1)))
    made.reset(0)  # begins the count again, too
    ended = [made.step(np.zeros((5, 1))).truncated.any() for _ in range(6)]
    assert ended == [False] * 5 + [True]


def test_a_host_run_may_begin_to_count_when_it_is_resumed():
    before, after = (
        SteppedEnvironment("toy:gapped", [Gapped(), Gapped()], episode_length=8, reset_solved=n)
        for n in (0, 3)
    )
    for _ in range(2):
        before.step(np.zeros((2, 1)))
    after.set_state(before.get_state())
    # Two steps are behind, the third earns nothing, then come three in a row.
    ended = [bool(after.step(np.zeros((2, 1))).truncated[1]) for _ in range(4)]
    assert ended == [False] * 3 + [True]


def test_several_tasks_share_out_their_numbers(monkeypatch):
    names = "multi:gym:Pendulum-v1+gym:MountainCarContinuous-v0"
    # Every reward is nearly the highest of such a range.
    monkeypatch.setattr(gymnasium_suite._Task, "reward_range", (-1e6, 100.0), raising=False)
    for first, whole in ((0, [True, False]), (4, [False, False]), (8, [True, False])):
        made = envs.make(names, 4, episode_length=7, reset_solved=3, first=first)
        ended = [made.step(np.zeros((4, 1))).truncated for _ in range(3)][-1]
        assert (~ended).tolist() == whole * 2
        made.close()
    made = envs.make(names, 4, episode_length=200, reset_solved=None)
    # Left to the tasks: the car ends its episodes itself.
    assert [task.reset_solved for task in made.spec.tasks] == [50, 0]
    ends = np.stack([made.step(np.zeros((4, 1))).truncated for _ in range(50)])
    assert ends[:49].sum() == 0 and ends[49].tolist() == [False, True, False, False]
    made.close()


def test_who_declares_the_range_of_rewards():
    pytest.importorskip("dm_control")
    ranges = {"dmc:reacher-easy": (0.0, 1.0), "gymnax:Pendulum-v1": (), "gym:Pendulum-v1": ()}
    for name, declared in ranges.items():
        assert envs.make(name, 1).spec.reward_range == declared
    both = envs.make("multi:dmc:reacher-easy+dmc:cartpole-balance", 2).spec
    assert both.reward_range == (0.0, 1.0)
    low, high = (EnvSpec(n, (3,), "float32", 1, 9, 1) for n in ("a", "b"))
    joined = multi._joint_spec("multi:a+b", [low, high], (0, 0))
    assert joined.reward_range == ()
    low, high = low._replace(reward_range=(-2.0, 0.0)), high._replace(reward_range=(0.0, 5.0))
    assert multi._joint_spec("multi:a+b", [low, high], (0, 0)).reward_range == (-2.0, 5.0)
    half = high._replace(reward_range=())
    assert multi._joint_spec("multi:a+b", [low, half], (0, 0)).reward_range == ()


def test_dmc_refuses_episodes_longer_than_its_own():
    pytest.importorskip("dm_control")
    with pytest.raises(
        ValueError, match="episode_length=501 with action_repeat=2 exceeds the 1000"
    ):
        envs.make("dmc:cartpole-balance", 1, episode_length=501)


@pytest.mark.parametrize("name", ["gymnax:CartPole-v1", "gym:CartPole-v1"])
def test_discrete_actions_are_one_hot(name):
    environment = envs.make(name, 3, episode_length=50)
    spec = environment.spec
    assert (spec.discrete, spec.action_dim, spec.obs_shape) == (True, 2, (4,))
    actions = random_actions(spec, jax.random.key(0), 500)
    assert set(map(tuple, np.asarray(actions).tolist())) == {(0.0, 1.0), (1.0, 0.0)}
    push = np.eye(2, dtype=np.float32)[[0, 1, 1]]
    if name.startswith("gym:"):
        obs = environment.reset(0)
        after = environment.step(push)
    else:
        state, obs = environment.reset(jax.random.key(0))
        _, after = environment.step(state, jnp.asarray(push), jax.random.key(1))
    faster = np.asarray(after.obs[:, 1]) > np.asarray(obs[:, 1])
    np.testing.assert_array_equal(faster, [False, True, True])


def test_dmc_tasks_without_action_bounds_are_told():
    pytest.importorskip("dm_control")
    with pytest.raises(ValueError, match="lqr_2_1.*unbounded"):
        envs.make("dmc:lqr-lqr_2_1", 1, episode_length=5)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(ImportError, match=r"pip install -e '\.\[playground\]'"):
        envs.make("playground:CartpoleSwingup", 1)


WITHOUT_PICTURES = """
import sys
from mbx import envs
envs.make("gymnax:Pendulum-v1", 1)
print(sorted({"seaborn", "pandas", "matplotlib.pyplot"} & sys.modules.keys()))
import gymnax.environments.misc.pong as pong
print(pong.sns.color_palette("husl", 2).as_hex())  # what it draws with comes when it draws
print(pong.plt.get_backend(), pong.sns is sys.modules["seaborn"])
import seaborn, matplotlib.pyplot
print(seaborn.__version__ == pong.sns.__version__, hasattr(matplotlib.pyplot, "figure"))
"""


def test_gymnax_comes_without_what_it_draws_with_until_it_draws():
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_PICTURES],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.stdout.splitlines() == [
        "[]",
        "['#f77189', '#36ada4']",
        "agg False",
        "True True",
    ], found.stderr
