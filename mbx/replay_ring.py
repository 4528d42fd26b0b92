"""Which rows a replay holds, oldest first, and which of them are transitions: ring arithmetic.

An offset counts rows from the oldest one of an environment; a slot is its place in memory. Axes: E
environments, M any batch of row indices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mbx.replay_storage import Index, ReplayState, dims, read

PyTree = Any

# Uniform draws per wanted window: the first one that is a transition is used.
_TRIES = 4


def slot_of(state: ReplayState, env: Array, offset: Array) -> Array:
    """Slot of the row that is `offset` rows younger than the oldest one."""
    capacity = dims(state)[1]
    return (state.position[env] - state.size[env] + offset) % capacity


def holds(state: ReplayState, index: Index) -> Array:
    """Whether a row is written at index [...]."""
    num_envs, capacity = dims(state)
    inside = (index.env >= 0) & (index.env < num_envs) & (index.slot >= 0) & (index.slot < capacity)
    env = jnp.clip(index.env, 0, num_envs - 1)
    oldest = state.position[env] - state.size[env]
    return inside & ((index.slot - oldest) % capacity < state.size[env])


def locate(counts: Array, flat: Array) -> tuple[Array, Array]:
    """Maps 0 .. sum(counts)-1 one to one onto (env, offset < counts[env]). O(log E) an element."""
    ends = jnp.cumsum(counts)
    env = jnp.searchsorted(ends, flat, side="right").astype(jnp.int32)
    env = jnp.minimum(env, counts.shape[0] - 1)
    offset = flat - (ends[env] - counts[env])
    return env, jnp.clip(offset, 0, jnp.maximum(counts[env] - 1, 0))


def draw_transitions(state: ReplayState, key: Array, num: int) -> tuple[Array, Array, Array]:
    """Uniform transitions: env, offset of the first row, and whether one was found, each [num]."""
    counts = jnp.maximum(state.size - 1, 0)
    total = jnp.sum(counts)
    # maxval 0 would give 0 without complaint: keep the range legal and answer "not found" instead.
    flat = jax.random.randint(key, (_TRIES, num), 0, jnp.maximum(total, 1), dtype=jnp.int32)
    env, offset = locate(counts, flat)
    good = is_transition(state, env, offset) & (total > 0)
    # Given that a try is good it is uniform over transitions, so the first good one is, too.
    first = jnp.argmax(good, axis=0)[None, :]
    env, offset, good = (jnp.take_along_axis(x, first, axis=0)[0] for x in (env, offset, good))
    return env, offset, good


def is_transition(state: ReplayState, env: Array, offset: Array) -> Array:
    """[...] bool: whether the row at (env, offset) [...] and the next are one transition."""
    last = read(state.data["is_last"], Index(env, slot_of(state, env, offset)))
    first = read(state.data["is_first"], Index(env, slot_of(state, env, offset + 1)))
    return ~last & ~first & (offset + 1 < state.size[env])


def transition_change(state: ReplayState, rows: PyTree) -> Array:
    """Transitions gained (with the newest row held) minus lost (with the oldest row), [E] int32."""
    num_envs, capacity = dims(state)
    env = jnp.arange(num_envs, dtype=jnp.int32)
    newest = Index(env, (state.position - 1) % capacity)
    gained = (state.size > 0) & ~read(state.data["is_last"], newest) & ~rows["is_first"]
    lost = (state.size == capacity) & is_transition(state, env, jnp.zeros_like(env))
    return gained.astype(jnp.int32) - lost.astype(jnp.int32)


def is_last_occurrence(state: ReplayState, index: Index, mask: Array) -> Array:
    """[M] bool: unmasked, and no later unmasked element of `index` [M] names the same row. O(M log
    M)."""
    num_envs, capacity = dims(state)
    name = jnp.where(mask, index.env * capacity + index.slot, num_envs * capacity)
    order = jnp.argsort(name, stable=True)
    ordered = name[order]
    ends_run = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones((1,), bool)])
    return jnp.zeros(name.shape, bool).at[order].set(ends_run, unique_indices=True) & mask
