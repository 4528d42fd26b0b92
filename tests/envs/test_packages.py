"""Environments of packages written after gymnax, by their dotted path: jax:module:name."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete

from mbx import envs
from mbx.envs import custom, gymnax
from mbx.training.loop import random_actions
from tests.envs.toys import rollout

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
CRAFTAX = "jax:craftax.craftax_env:make_craftax_env_from_name"


# As Craftax: spaces of its own, another name of the limit, a flag that has the limit in it.
class AnyDiscrete(NamedTuple):
    n: int


class AnyBox(NamedTuple):
    low: float
    high: float
    shape: tuple
    dtype: Any = np.float32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Params:
    max_timesteps: int = 4


class Count:
    """Each step adds the action to a count; 5 of it are the end."""

    default_params = Params()

    def __init__(self, continuous=False, high=1.0, side=0):
        self.continuous, self.high, self.side = continuous, high, side

    def action_space(self, params):
        return AnyBox(0.0, self.high, (1,)) if self.continuous else AnyDiscrete(3)

    def observation_space(self, params):
        return AnyBox(0, 255, (2, 2, 1), np.uint8) if self.side else AnyBox(0.0, 9.0, (2,))

    def see(self, state):
        obs = jnp.array([state[0], state[1]], jnp.float32)
        return jnp.full((2, 2, 1), 50 * state[0], jnp.uint8) if self.side else obs

    def reset_env(self, key, params):
        return self.see((0.0, 0)), (0.0, 0)

    def step_env(self, key, state, action, params):
        state = state[0] + jnp.reshape(action, ()), state[1] + 1
        return self.see(state), state, 10.0 * state[0], self.is_terminal(state, params), {}

    def is_terminal(self, state, params):
        return (state[0] >= 5) | (state[1] >= params.max_timesteps)


@dataclasses.dataclass(frozen=True)
class One:
    max_steps_in_episode: int = 1  # gymnax's default, which its owner does not read


class Owner(Count):
    default_params, max_steps_in_episode = One(), 4

    def step_env(self, key, state, action, params):
        state = state[0] + jnp.reshape(action, ()), state[1] + 1
        late = state[1] >= self.max_steps_in_episode
        done = (state[0] >= 5) | late
        return self.see(state), state, 10.0 * state[0], done, {"truncated": late}


class Asked(Owner):
    def is_terminated(self, state, params):
        return state[0] == 3


def make(kind, num_envs=1, **kwargs):
    return envs.make(custom.name_of(kind)[0], num_envs, kwargs=kwargs)


def episode(environment, action, steps):
    """Per step: final observation, reward, terminated, truncated of the only environment."""
    rows = rollout(environment, steps, action=action)[1]
    return [
        [x[0].tolist() for x in (t.final_obs, t.reward, t.terminated, t.truncated)] for t in rows
    ]


@pytest.mark.parametrize("kind", [Count, Owner])
def test_a_flag_that_holds_the_time_limit_is_taken_apart(kind):
    environment = make(kind)  # a limit of the environment itself wins over that of parameters
    spec = environment.spec
    assert (spec.episode_length, spec.action_dim, spec.discrete) == (4, 3, True)
    # One a step: four steps, and cut off there, which is no termination.
    rows = episode(environment, [0, 1, 0], 5)
    assert rows[3] == [[4, 4], 40, False, True] and rows[4] == [[1, 1], 10, False, False]
    # Two a step: 2, 4, 6 is the end by itself.
    assert episode(environment, [0, 0, 1], 3)[2] == [[6, 3], 60, True, False]


def test_one_that_says_what_a_termination_is_has_the_last_word():
    rows = episode(make(Asked), [0, 1, 0], 4)
    assert [row[2:] for row in rows[1:]] == [[False, False], [True, False], [False, False]]


def test_bounds_and_images_of_foreign_spaces():
    environment = make(Count, continuous=True, high=3.0, side=2)
    assert environment.spec.action_high == (3.0,) and environment.spec.obs_dtype == jnp.uint8
    # An action of 0 is the middle, 1.5: 50 * 1.5 is 75 of 255.
    assert episode(environment, [0.0], 1) == [[[[[75], [75]], [[75], [75]]], 15.0, False, False]]
    with pytest.raises(envs.EnvironmentFailure, match="unbounded actions"):
        make(Count, continuous=True, high=float("inf"))


def test_a_part_of_another_shape_is_refused():
    class Env:
        max_steps_in_episode = 4
        given = (2, 3)

        def action_space(self, params):
            return Discrete(2)

        def observation_space(self, params):
            return Dict(grid=Box(-1, 1, (2, 3)), level=Box(-1, 1, ()))

        def reset_env(self, key, params):
            return {"grid": jnp.arange(6.0).reshape(self.given), "level": 7.0}, key

    env = Env()
    environment = envs.episodic(gymnax.adapt("jax:there:Env", env, None), 1)
    seen = [[*range(6), 7]]
    assert environment.reset(jax.random.key(0))[1].tolist() == seen
    env.given = (3, 2)
    with pytest.raises(ValueError, match=r"'grid' is of shape \(3, 2\), wanted grid \[2, 3\]"):
        environment.reset(jax.random.key(0))


def test_parameters_without_a_limit_are_refused():
    @dataclasses.dataclass
    class Bare:
        speed: float = 1.0

    class Env:
        def action_space(self, params):
            return type("Discrete", (), {"n": 2})

    with pytest.raises(ValueError, match="Bare, have no time limit.*max_timesteps"):
        gymnax.adapt("jax:there:Env", Env(), Bare())


@pytest.mark.slow
@pytest.mark.parametrize("kind, shape", [("Symbolic", (1345,)), ("Pixels", (63, 63, 3))])
def test_craftax_classic(kind, shape):
    pytest.importorskip("craftax", reason="pip install -e '.[craftax]'")
    from craftax.craftax_env import make_craftax_env_from_name

    name = f"Craftax-Classic-{kind}-v1"
    environment = envs.make(CRAFTAX, 2, kwargs=dict(name=name, auto_reset=False))
    spec = environment.spec
    assert (spec.obs_shape, spec.action_dim, spec.episode_length) == (shape, 17, 10_000)
    state, obs = jax.jit(environment.reset)(jax.random.key(0))
    assert obs.shape == (2, *shape) and float(obs.min()) >= 0 and float(obs.max()) <= 1
    for seen, wanted in own_steps(environment, state, make_craftax_env_from_name(name, False)):
        np.testing.assert_allclose(seen, wanted, atol=1e-6)


def own_steps(environment, state, env):
    """Of four random steps the second environment's final observation, and what `env` gives."""
    step, own = jax.jit(environment.step), jax.jit(env.step_env)
    actions = environment.spec.action_dim
    for i in range(4):
        chosen = jax.random.randint(jax.random.key(i), (2,), 0, actions)
        key = jax.random.key(100 + i)
        # The wrapper's keys: one half for the steps, divided among the environments.
        keys = jax.random.split(jax.random.split(key)[0], 2)
        one = jax.tree.map(lambda x: x[1], state.raw)
        state, timestep = step(state, jax.nn.one_hot(chosen, actions), key)
        wanted, _, reward, done, _ = own(keys[1], one, chosen[1], env.default_params)
        assert float(reward) == pytest.approx(float(timestep.reward[1]))
        assert bool(done) == bool(timestep.terminated[1])
        yield np.asarray(timestep.final_obs[1]), np.asarray(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("task, limit", [("CartPoleEasy", 200), ("BreakoutEasy", 2000)])
def test_popgym_arcade(task, limit):
    arcade = pytest.importorskip(
        "popgym_arcade.environments",
        reason="pip install popgym-arcade, in an environment of its own",
    )
    with jax.numpy_rank_promotion("allow"):
        environment = envs.make(f"jax:popgym_arcade.environments:{task}", 2)
        spec = environment.spec
        assert (spec.obs_shape, spec.obs_dtype) == ((128, 128, 3), jnp.uint8)
        assert (spec.action_dim, spec.episode_length, spec.discrete) == (5, limit, True)
        state, _ = jax.jit(environment.reset)(jax.random.key(0))
        for seen, wanted in own_steps(environment, state, getattr(arcade, task)()):
            # Drawn as floats of 0 to 255; a compiler's rounding may cross a whole number.
            assert np.abs(seen.astype(int) - wanted.astype(int)).max() <= 1 and wanted.max() > 100


@pytest.mark.slow
def test_jumanji():
    pytest.importorskip("jumanji", reason="pip install jumanji")
    with jax.numpy_rank_promotion("allow"):
        environment = envs.make(f"jax:{EXAMPLES}/own_jumanji.py:make", 2, kwargs={"time_limit": 30})
        spec = environment.spec
        assert [part.name for part in spec.parts] == ["grid", "step_count", "action_mask"]
        assert spec.obs_shape == (12 * 12 * 5 + 1 + 4,) and spec.action_dim == 4
        state, _ = jax.jit(environment.reset)(jax.random.key(0))
        step, walls = jax.jit(environment.step), 0
        for i in range(60):
            action = random_actions(spec, jax.random.key(i), 2)
            state, t = step(state, action, jax.random.key(i))
            assert np.isfinite(t.obs).all() and np.isfinite(t.reward).all()
            np.testing.assert_array_equal(t.final_obs[:, 12 * 12 * 5], t.episode_length)
            assert not (t.truncated & (t.episode_length < 30)).any()
            walls += int(t.terminated.sum())
    assert walls
