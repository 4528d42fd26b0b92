"""Adapters of the suites, each against the library it adapts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs


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
    environment = envs.make("playground:CartpoleSwingup", 2, episode_length=3)
    assert environment.spec.action_repeat == 2
    state, obs = environment.reset(jax.random.key(0))
    step = jax.jit(environment.step, donate_argnums=0)
    for i in range(3):
        state, timestep = step(state, jnp.zeros((2, 1)), jax.random.key(i))
    assert timestep.truncated.all() and np.isfinite(timestep.reward).all()
    assert not np.allclose(timestep.obs, timestep.final_obs)


@pytest.mark.parametrize("name", ["gym:Pendulum-v1", "dmc:cartpole-balance"])
def test_host_environments(name):
    if name.startswith("dmc"):
        pytest.importorskip("dm_control")
    environment = envs.make(name, 2, episode_length=3, seed=3)
    first = environment.reset(5)
    again = environment.reset(5)
    np.testing.assert_array_equal(first, again)
    actions = np.random.default_rng(0).uniform(-1, 1, (8, 2, 1)).astype(np.float32)
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
    import gymnasium

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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Pendulum-v1", "SUITE:TASK"),
        ("atari:Pong", "SUITE:TASK"),
        ("gymnax:Pendulum-v2", "Pendulum-v1"),
        ("gymnax:CartPole-v1", "discrete"),
        ("gym:Pendulun-v1", "Pendulum-v1"),
        ("gym:CartPole-v1", "bounded Box"),
        ("brax:inverted_pendulun", "inverted_pendulum"),
    ],
)
def test_wrong_names_are_told(name, message):
    with pytest.raises(ValueError, match=message):
        envs.make(name, 1)
