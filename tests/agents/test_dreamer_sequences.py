"""Sequences of replay rows: consecutive, uniform, across episodes; write-back of stored fields."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.agents.dreamer import sequences


def filled(steps=30, capacity=20, num_envs=2):
    """Rows numbered as they came; an episode ends every seventh row."""
    row = dict(
        obs=jnp.zeros(()),
        is_first=jnp.zeros((), bool),
        is_last=jnp.zeros((), bool),
        deter=jnp.zeros((3,)),
    )
    state = replay.init(row, num_envs=num_envs, capacity=capacity)
    insert = jax.jit(replay.insert)
    for t in range(steps):
        obs = jnp.float32(t) + 100.0 * jnp.arange(num_envs)
        state = insert(
            state,
            dict(
                obs=obs,
                is_first=jnp.full(num_envs, t % 7 == 0),
                is_last=jnp.full(num_envs, t % 7 == 6),
                deter=jnp.zeros((num_envs, 3)),
            ),
        )
    return state


def test_rows_are_consecutive_and_cross_episodes():
    state = filled()
    got = sequences.sample(state, jax.random.key(0), batch_size=400, length=8)
    obs = np.asarray(got.rows["obs"])
    assert obs.shape == (8, 400) and np.all(np.diff(obs, axis=0) == 1.0)
    assert np.all(np.any(np.asarray(got.rows["is_last"]), axis=0))
    starts, counts = np.unique(obs[0], return_counts=True)
    # Rows 10..29 are held: 13 starts in each of two environments, all about equally often.
    np.testing.assert_array_equal(starts, np.r_[10:23, 110:123])
    assert counts.min() > 3 and counts.max() < 40


def test_write_back_goes_to_the_rows_it_came_from():
    state = filled()
    got = sequences.sample(state, jax.random.key(2), batch_size=64, length=6)
    fields = {"deter": jnp.repeat(got.rows["obs"][..., None], 3, axis=-1)}
    after = jax.jit(sequences.write)(state, got.index, fields)
    seen = sequences.sample(after, jax.random.key(3), batch_size=64, length=6).rows
    deter, obs = np.asarray(seen["deter"][..., 0]), np.asarray(seen["obs"])
    assert np.all((deter == obs) | (deter == 0.0)) and np.mean(deter == obs) > 0.9
    np.testing.assert_array_equal(after.data["obs"], state.data["obs"])


def test_a_row_sampled_twice_is_written_once():
    state = filled()
    index = replay.Index(jnp.zeros(2, jnp.int32), jnp.full(2, 4, jnp.int32))
    after = sequences.write(state, index, {"deter": jnp.asarray([[1.0] * 3, [2.0] * 3])})
    np.testing.assert_array_equal(after.data["deter"][0, 4], [2.0] * 3)


@pytest.mark.parametrize("fields, match", [(dict(length=21), "length"), (dict(fresh=9), "fresh")])
def test_mistakes_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        sequences.sample(filled(2), jax.random.key(0), **(dict(batch_size=4, length=3) | fields))
