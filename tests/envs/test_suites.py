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
from mbx.envs import brax, multi
from mbx.envs import gymnasium as gymnasium_suite
from mbx.training.loop import random_actions
from mbx.types import EnvSpec
from tests.envs.toys import rollout


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
    _, rows = rollout(environment, 201)
    assert not any(row.terminated.any() for row in rows)
    assert [bool(row.truncated.all()) for row in rows] == [False] * 199 + [True, False]
    assert not np.allclose(rows[199].obs, rows[199].final_obs)
    assert len(np.unique(rows[199].obs[:, 0])) == 3


def test_numbers_of_a_brax_environment_need_not_be_jax_arrays():
    for value in (1, 1.0, np.float32(1), np.float64(1), np.ones(2), jnp.ones(2, int)):
        found = brax._typed(value, jnp.zeros(()))
        assert found.dtype == np.float32 and np.all(found == 1)


def test_brax_fast_steps_and_truncates():
    environment = envs.make("brax:fast", 2, episode_length=3)
    obs, rows = rollout(environment, 4)
    assert obs.shape == (2, *environment.spec.obs_shape)
    assert [bool(row.truncated.all()) for row in rows] == [False, False, True, False]


@pytest.mark.slow
def test_playground_cartpole():
    pytest.importorskip("mujoco_playground")
    with jax.numpy_rank_promotion("allow"):  # MJX broadcasts between ranks
        environment = envs.make("playground:CartpoleSwingup", 2, episode_length=3)
        _, rows = rollout(environment, 3)
    assert environment.spec.action_repeat == 2
    assert rows[2].truncated.all() and np.isfinite(rows[2].reward).all()
    assert not np.allclose(rows[2].obs, rows[2].final_obs)


class Clock(gymnasium.Env):
    """Counts its steps into the observation and ends its own episodes after five."""

    observation_space = gymnasium.spaces.Box(0, 1, (2, 2, 3), np.float32)
    action_space = gymnasium.spaces.Box(-2, 2, (1,))

    def __init__(self, terminates=False):
        self.ends = [terminates, not terminates]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros((2, 2, 3), np.float32), {}

    def step(self, action):
        assert action == 2.0  # rescaled
        self.count += 1
        obs = np.full((2, 2, 3), self.count / 8, np.float32)
        return obs, 1.0, *(self.count == 5 and end for end in self.ends), {}


@pytest.mark.parametrize("terminates", [False, True])
def test_gym_tasks_that_end_their_own_episodes_and_float_images(terminates):
    gymnasium.register("MbxClock-v0", entry_point=Clock, max_episode_steps=100)
    kwargs = {"terminates": terminates}
    environment = envs.make("gym:MbxClock-v0", 1, action_repeat=2, kwargs=kwargs)
    assert environment.spec.obs_dtype == np.float32
    _, rows = rollout(environment, 4, action=1.0)
    ends = [(bool(r.terminated[0]), bool(r.truncated[0])) for r in rows]
    assert ends == [(False, False)] * 2 + [(terminates, not terminates), (False, False)]
    assert [float(r.reward[0]) for r in rows] == [2, 2, 1, 2]  # no second repeat
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
    _, rows = rollout(environment, 4, action=1.0)
    assert [bool(row.truncated[0]) for row in rows] == [False, False, False, True]
    assert [int(k) for k in kinds] == [1] * 999 + [2]  # one whole episode, nothing of the next
    with pytest.raises(
        ValueError, match="episode_length=501 with action_repeat=2 exceeds the 1000"
    ):
        envs.make("dmc:cartpole-balance", 1, episode_length=501)
    with pytest.raises(ValueError, match="lqr_2_1.*unbounded"):
        envs.make("dmc:lqr-lqr_2_1", 1, episode_length=5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pendulum-v1", "SUITE:TASK"),
        ("arcade:Pong", "SUITE:TASK"),
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


def test_several_tasks_share_out_their_numbers(monkeypatch):
    names = "multi:gym:Pendulum-v1+gym:MountainCarContinuous-v0"
    # Every reward is nearly the highest of such a range.
    monkeypatch.setattr(gymnasium_suite.Task, "reward_range", (-1e6, 100.0), raising=False)
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
    spec = EnvSpec("a", (3,), "float32", 1, 9, 1)
    low, high = (spec._replace(reward_range=one) for one in ((-2.0, 0.0), (0.0, 5.0)))
    for specs, joint in (([low, high], (-2.0, 5.0)), ([low, spec], ()), ([spec, spec], ())):
        assert multi._joint_spec("multi:a+b", specs, (0, 0)).reward_range == joint


@pytest.mark.parametrize("name", ["gymnax:CartPole-v1", "gym:CartPole-v1"])
def test_discrete_actions_are_one_hot(name):
    environment = envs.make(name, 3, episode_length=50)
    spec = environment.spec
    assert (spec.discrete, spec.action_dim, spec.obs_shape) == (True, 2, (4,))
    actions = random_actions(spec, jax.random.key(0), 500)
    assert set(map(tuple, np.asarray(actions).tolist())) == {(0.0, 1.0), (1.0, 0.0)}
    obs, (after,) = rollout(environment, 1, action=np.eye(2)[[0, 1, 1]])
    np.testing.assert_array_equal(after.obs[:, 1] > obs[:, 1], [False, True, True])


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mujoco_playground", None)
    with pytest.raises(ImportError, match=r"pip install 'mbx-rl\[playground\]'"):
        envs.make("playground:CartpoleSwingup", 1)


WITHOUT_PICTURES = """
import sys
from mbx import envs
envs.make("gymnax:Pendulum-v1", 1)
print(sorted({"seaborn", "pandas", "matplotlib.pyplot"} & sys.modules.keys()))
import gymnax.environments.misc.pong as pong
print(pong.sns.color_palette("husl", 2).as_hex())  # what it draws with comes when it draws
import seaborn, matplotlib.pyplot
print(pong.plt.get_backend(), hasattr(matplotlib.pyplot, "figure"))
"""


def test_gymnax_comes_without_what_it_draws_with_until_it_draws():
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "MPLBACKEND": "agg"}
    command = [sys.executable, "-c", WITHOUT_PICTURES]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert found.stdout.splitlines() == ["[]", "['#f77189', '#36ada4']", "agg True"], found.stderr
