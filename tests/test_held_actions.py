"""`experiments.held_actions`: what is measured are the seed phase's own actions, held."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from experiments import held_actions
from mbx import envs
from mbx.envs.base import wide_actions
from mbx.training.evaluation import make_random

TASK = "gymnax:Pendulum-v1"


def test_an_action_is_kept_for_its_steps():
    spec = envs.make(TASK, 2).spec
    act, init_actor = held_actions.held(wide_actions, 3, spec)
    actor, taken = init_actor(2), []
    for t in range(6):
        action, actor = act(None, actor, None, None, jax.random.key(t), False)
        taken.append(np.asarray(action))
    for t, first in enumerate((0, 0, 0, 3, 3, 3)):
        np.testing.assert_array_equal(taken[t], wide_actions(spec, jax.random.key(first), 2))
    assert not np.array_equal(taken[0], taken[3])


def test_wide_actions_are_a_clipped_gaussian_of_deviation_2():
    spec = envs.make(TASK, 1).spec
    drawn = np.asarray(wide_actions(spec, jax.random.key(0), 20_000))
    assert drawn.shape == (20_000, 1) and np.abs(drawn).max() == 1.0
    # P(|N(0, 2)| >= 1) and P(|N(0, 2)| <= 0.5)
    assert abs(np.mean(np.abs(drawn) == 1.0) - 0.617) < 0.015
    assert abs(np.mean(np.abs(drawn) <= 0.5) - 0.197) < 0.015
    discrete = spec._replace(discrete=True, action_dim=3)
    hot = np.asarray(wide_actions(discrete, jax.random.key(1), 50))
    assert hot.shape == (50, 3) and set(hot.sum(-1)) == {1.0} and set(hot.ravel()) == {0.0, 1.0}


def test_uniform_actions_of_one_step_are_the_yardstick_of_evaluations():
    row = held_actions.measure(TASK, "uniform", 1, episodes=3, seed=5)
    returns = make_random(envs.make(TASK, 3, seed=5))(jax.random.key(5)).returns
    assert row["mean"] == np.float32(jnp.mean(returns)) and row["rewarded"] == 1.0
    held = held_actions.measure(TASK, "uniform", 4, episodes=3, seed=5)
    assert held["mean"] != row["mean"] and held["hold"] == 4
