"""Sequences of consecutive replay rows, across episode ends, for recurrent world models.

A sequence may start anywhere and run into the next episode: rows carry `is_first`, at which the
model resets. Reward and flags arrive with their row. `write` puts fresh values of some fields back
(stored latents) with `.at[].set`.
Axes: L rows, B batch, E environments, C capacity.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import replay, replay_storage
from mbx.replay import Index, ReplayState
from mbx.types import Array


class Sequences(NamedTuple):
    """Rows `[L, B, ...]` and their places in the replay, `[L, B]`."""

    rows: dict[str, Any]
    index: Index


def sample(
    state: ReplayState, key: Array, *, batch_size: int, length: int, fresh: int = 0
) -> Sequences:
    """Draws runs of `length` consecutive rows, uniformly over where they can start.
    `fresh` columns, the first of their shards, are each an environment's newest rows instead,
    environments in turn from a random one on, so that new experience is trained on immediately
    (DreamerV3's online queue, with repetition). Rows past the newest one, which occur only while no
    environment holds `length` rows, repeat it. Raises ValueError for length or fresh out of range.
    """
    capacity = replay_storage.dims(state)[1]
    if not 1 <= length <= capacity:
        raise ValueError(
            f"length is {length} with a capacity of {capacity} rows an environment: choose "
            "1 <= length <= capacity"
        )
    if not 0 <= fresh <= batch_size:
        raise ValueError(f"fresh is {fresh} with batch_size {batch_size}: choose 0..batch_size")
    turn = jnp.int32(0)
    if state.shards > 1:
        key, turn_key = jax.random.split(key)
        turn = jax.random.randint(turn_key, (), 0, state.shards)
    # Of several shards, each puts its own share first; what is left over goes round by chance.
    each, over = divmod(fresh, state.shards)
    shares = each + ((jnp.arange(state.shards) - turn) % state.shards < over)
    local = functools.partial(_sample, length=length)
    return replay_storage.draw(local, state, key, batch_size, axis=1, own=shares)


def _sample(
    state: ReplayState, key: Array, batch_size: int, fresh: Array, *, length: int
) -> Sequences:
    num_envs = replay_storage.dims(state)[0]
    draw_key, env_key = jax.random.split(key)
    counts = jnp.maximum(state.size - length + 1, 0)
    total = jnp.maximum(jnp.sum(counts), 1)
    flat = jax.random.randint(draw_key, (batch_size,), 0, total, dtype=jnp.int32)
    env, offset = replay_storage.locate(counts, flat)
    column = jnp.arange(batch_size, dtype=jnp.int32)
    newest = (column + jax.random.randint(env_key, (), 0, num_envs)) % num_envs
    env = jnp.where(column < fresh, newest, env)
    offset = jnp.where(column < fresh, jnp.maximum(state.size[env] - length, 0), offset)
    offsets = offset[None] + jnp.arange(length, dtype=jnp.int32)[:, None]
    offsets = jnp.minimum(offsets, jnp.maximum(state.size[env] - 1, 0)[None])
    env = jnp.broadcast_to(env[None], offsets.shape)
    index = Index(env, replay_storage.slot_of(state, env, offsets))
    return Sequences(replay.row_at(state, index), index)


def write(state: ReplayState, index: Index, fields: dict[str, Array]) -> ReplayState:
    """Overwrites some fields of rows, `fields[name]` `[..., ...]` at `index` `[...]`.
    Of a row that occurs more than once one occurrence is written, the same one for all fields.
    """
    return replay_storage.at_index(_write, state, index, fields, out=0)


def _write(state: ReplayState, index: Index, fields: dict[str, Array]) -> ReplayState:
    capacity = replay_storage.dims(state)[1]
    flat = Index(index.env.reshape(-1), index.slot.reshape(-1))
    once = replay_storage.is_last_occurrence(state, flat, jnp.ones(flat.env.shape, bool))
    target = Index(flat.env, jnp.where(once, flat.slot, capacity))
    data = dict(state.data)
    for name, value in fields.items():
        value = value.reshape(-1, *value.shape[index.env.ndim :]).astype(data[name].dtype)
        data[name] = replay_storage.write(data[name], target, value)
    return state.replace(data=data)
