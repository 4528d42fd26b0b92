"""What the TD-MPC agent's tests use: small settings, models, batches, rows of a replay."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mbx import replay
from mbx.agents.tdmpc.agent import resolve, world_config
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch
from mbx.types import EnvSpec
from mbx.world_model import WorldModelConfig, make_world_model
from tests.helpers import compiled

T, B, N, A = 2, 4, 5, 2
SPEC = EnvSpec("toy:small", (3,), jnp.float32, A, 50, 1)

# Without noise, dropout or options, so that a test's expected values are short formulas.
PLAIN = dict(
    model=dict(
        num_values=2, num_bins=11, dropout=0.0, log_std_min=-10.0, log_std_max=2.0, episodic="False"
    ),
    planner=dict(
        iterations=2,
        num_samples=8,
        num_elites=3,
        num_proposals=2,
        rescore_proposals=True,
        action_noise=0.0,
        extra_iterations=0,
        evaluation_selection="sample",
    ),
    training_planner=dict(iterations=2, num_samples=N, num_elites=3, max_std=2.0),
    replay=dict(keep_targets=0, capacity=1000),
    reanalyze=dict(batch_size=6, stale_exponent=0.0),
    loss=dict(
        batch_size=B,
        horizon=T,
        discount=0.9,
        value_weighting="weighted",
        termination="hard",
    ),
)


def make_settings(**sections) -> Settings:
    """Small settings for `SPEC` with some replaced: make_settings(loss=dict(value_target="td")).

    They are not checked, so that a test need not put back what has no effect in it.
    """
    return replaced(resolve(replaced(Settings(), **PLAIN), SPEC), **sections)


def replaced(settings: Settings, **sections) -> Settings:
    """`settings` with some of their sections' settings replaced."""
    new = {
        name: dataclasses.replace(getattr(settings, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(settings, **new)


def make_world(settings: Settings, **overrides) -> WorldModelConfig:
    """The world model of settings, eight wide."""
    widths = dict(enc_dim=8, mlp_dim=8, latent_dim=8)
    return dataclasses.replace(world_config(settings, SPEC), **{**widths, **overrides})


def make_model(settings: Settings, **overrides):
    """That model, its networks one program each."""
    return compiled(make_world_model(make_world(settings, **overrides)))


def make_batch(key=0, **overrides) -> Batch:
    keys = jax.random.split(jax.random.key(key), 5)
    batch = Batch(
        obs=jax.random.normal(keys[0], (T + 1, B, 3)),
        action=jax.random.uniform(keys[1], (T, B, A), minval=-1.0),
        reward=jax.random.normal(keys[2], (T, B)),
        terminated=jnp.zeros((T, B)),
        mask=jnp.ones((T, B)),
        plan_actions=jax.random.uniform(keys[3], (T + 1, B, N, A), minval=-1.0),
        plan_values=jax.random.normal(keys[4], (T + 1, B, N)),
        plan_valid=jnp.ones((T + 1, B), bool),
    )
    return batch._replace(**overrides)


@jax.jit
def loud(tree, key=7):
    """Parameters with nothing zero in them, so that every path shows."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(key), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


def changed(before, after) -> bool:
    return any(moved(before, after))


def moved(before, after) -> list[bool]:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [not np.array_equal(a, b) for a, b in pairs]


def row(obs, action=None, *, first=False, last=False):
    """A replay row of every environment, with reward 1."""
    num, no = obs.shape[0], jnp.zeros(obs.shape[0], bool)
    return dict(
        obs=obs,
        action=jnp.zeros((num, A)) if action is None else action,
        reward=jnp.ones(num),
        is_first=no | first,
        is_last=no | last,
        terminated=no,
    )


def empty_replay(agent, num_envs: int, capacity: int) -> replay.ReplayState:
    spec = agent.store.spec if agent.store else None
    return replay.init(agent.example_row(), num_envs=num_envs, capacity=capacity, target_spec=spec)
