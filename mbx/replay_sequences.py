"""Sequences of consecutive replay rows, across episode ends, for recurrent world models.

A sequence may start anywhere and run into the next episode: rows carry `is_first`, at which the
model resets. Reward and flags arrive with their row. `sample` draws uniformly, `select` as the
official DreamerV3 does: new sequences first, each once, then uniformly, by recency and by priority.
`write` puts values of some fields back (stored latents, priorities) with `.at[].set`.
Axes: L rows, B batch, E environments, C capacity.
Source: official DreamerV3, embodied/core/replay.py and selectors.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import replay, replay_storage
from mbx.fast import collectives
from mbx.replay import Index, ReplayState
from mbx.types import Array

_NONE = 1e30  # inverse of a priority of 0, finite: data sets hold no infinity


class Sequences(NamedTuple):
    """Rows `[L, B, ...]` and their places in the replay, `[L, B]`."""

    rows: dict[str, Any]
    index: Index  # type: ignore[assignment]  # the name of a tuple's method


class Selection(NamedTuple):
    """Rules by which `select` draws; what the shares leave is drawn uniformly.

    `row` holds the fields that the replay's rows need for them. Both are 0 in a new row, which
    means: not taken from the queue yet, and of infinite priority.
    """

    online: bool = False  # new sequences first, see `_queue`
    priority_share: float = 0.0
    recency_share: float = 0.0
    priority_exponent: float = 0.8
    priority_maxfrac: float = 0.5  # share of the largest priority of a sequence, else the mean
    priority_zero: bool = True  # a sequence's rows lose their priority when it is drawn by it
    recency_exponent: float = 1.0  # of 1 / (age + 1)

    @property
    def row(self) -> dict[str, Any]:
        """Fields of a row, as shapes."""
        fields = {"seen": (self.online, jnp.bool_)}
        fields["priority_inverse"] = (self.priority_share > 0, jnp.float32)
        return {n: jax.ShapeDtypeStruct((), dtype) for n, (used, dtype) in fields.items() if used}


def sample(state: ReplayState, key: Array, *, batch_size: int, length: int) -> Sequences:
    """Draws runs of `length` consecutive rows, uniformly over where they can start.
    Rows past the newest one, which occur only while no environment holds `length` rows, repeat it.
    Raises ValueError for a length out of range.
    """
    return select(state, key, Selection(), batch_size=batch_size, length=length)[0]


def select(
    state: ReplayState, key: Array, rules: Selection, *, batch_size: int, length: int
) -> tuple[Sequences, ReplayState]:
    """Draws sequences by `rules`; the replay remembers which were taken from the queue, and that
    rows drawn by priority have none now. Every shard draws from its own environments.
    """
    capacity = replay_storage.dims(state)[1]
    if not 1 <= length <= capacity:
        raise ValueError(
            f"length is {length} with a capacity of {capacity} rows an environment: choose "
            "1 <= length <= capacity"
        )
    if state.shards > 1:
        key = jax.random.split(key)[0]
    local = functools.partial(_select, rules=rules, length=length)
    found, queued, drawn = replay_storage.draw(local, state, key, batch_size, axis=1)

    def mark(state: ReplayState, where: Array, name: str, value: Any) -> ReplayState:
        index = Index(found.index.env, jnp.where(where, found.index.slot, capacity))
        return write(state, index, {name: jnp.full(where.shape, value)})

    state = mark(state, queued, "seen", True) if rules.online else state
    if rules.priority_share and rules.priority_zero:
        state = mark(state, drawn, "priority_inverse", _NONE)
    return found, state


def _select(
    state: ReplayState, key: Array, num: int, *, rules: Selection, length: int
) -> tuple[Sequences, Array, Array]:
    """Sequences of one shard, and which of their rows were queued and which drawn by priority."""
    key, more_key = jax.random.split(key)
    more = jax.random.split(more_key, 3)
    counts = jnp.maximum(state.size - length + 1, 0)
    total = jnp.maximum(jnp.sum(counts), 1)
    found = replay_storage.locate(counts, jax.random.randint(key, (num,), 0, total, jnp.int32))
    kind = jax.random.uniform(more[0], (num,)) - rules.priority_share  # < 0: by priority
    queued = jnp.zeros(num, bool)

    def put(where: Array, other: tuple[Array, Array]) -> tuple[Array, Array]:
        return jax.tree.map(lambda x, y: jnp.where(where, x, y), other, found)

    if rules.recency_share:
        found = put(kind < rules.recency_share, _by_recency(state, rules, more[1], num, length))
    if rules.online:
        *first, queued = _queue(state, num, length)
        found = put(queued, tuple(first))
    drawn = (kind < 0) & ~queued
    if rules.priority_share:
        found = put(drawn, _by_priority(state, rules, more[2], drawn, length))
    env, offset = found
    offsets = offset[None] + jnp.arange(length, dtype=jnp.int32)[:, None]
    offsets = jnp.minimum(offsets, jnp.maximum(state.size[env] - 1, 0)[None])
    env, queued, drawn = (jnp.broadcast_to(x[None], offsets.shape) for x in (env, queued, drawn))
    index = Index(env, replay_storage.slot_of(state, env, offsets))
    return Sequences(replay.row_at(state, index), index), queued, drawn


def _queue(state: ReplayState, num: int, length: int) -> tuple[Array, Array, Array]:
    """Environments and offsets of the longest waiting sequences `[num]`, and whether there are any.
    An environment queues its rows in sequences of `length`, one behind the other, from its second
    row on; each waits until it is drawn or overwritten.
    """
    start = 1 + jnp.max(jnp.where(state.data["seen"], _offsets(state), 0), axis=1)
    offset = start[:, None] + length * jnp.arange(num)[None]
    rows_ago = jnp.maximum(state.size[:, None] - offset - length, -1).reshape(-1)
    waited, best = collectives.top_k(rows_ago, num)
    return best // num, offset.reshape(-1)[best], waited >= 0


def _by_recency(
    state: ReplayState, rules: Selection, key: Array, num: int, length: int
) -> tuple[Array, Array]:
    """Environments and offsets `[num]`, with probabilities of (age + 1) ** -exponent.
    Ages count the sequences of all environments, newest first. They are drawn as if the replay were
    full, and scaled down to the sequences there are.
    """
    num_envs, capacity = replay_storage.dims(state)
    counts, most = jnp.maximum(state.size - length + 1, 0), num_envs * (capacity - length + 1)
    side = int(most**0.5) + 1
    ages = jnp.arange(side * side).reshape(side, side)
    weights = jnp.where(ages < most, (ages + 1.0) ** -rules.recency_exponent, 0.0)
    row, column = jax.vmap(_pick, (None, 0))(weights, jax.random.uniform(key, (num, 2)))
    held = jnp.sum(counts)
    scaled = (jnp.float32(side) * row + column) / most * held
    age = jnp.where(held == most, side * row + column, scaled.astype(jnp.int32))
    # How many environments hold a sequence that is so many rows from the newest, and the sum.
    wide = num_envs - jnp.searchsorted(jnp.sort(counts), jnp.arange(capacity), side="right")
    ends = jnp.cumsum(wide)
    depth = jnp.minimum(jnp.searchsorted(ends, age, side="right"), capacity - 1)
    holds = jnp.cumsum(counts[None, ::-1] > depth[:, None], axis=1)
    place = jnp.argmax(holds > (age - ends[depth] + wide[depth])[:, None], axis=1)
    env = num_envs - 1 - place
    return env, jnp.maximum(counts[env] - 1 - depth, 0)


def _by_priority(
    state: ReplayState, rules: Selection, key: Array, wanted: Array, length: int
) -> tuple[Array, Array]:
    """Environments and offsets `[B]` drawn by priority, one after the other, where `wanted`.
    Sequences of infinite priority come first, evenly; so do all where none has any.
    """
    capacity = replay_storage.dims(state)[1]
    offsets, inverse = _offsets(state), state.data["priority_inverse"]
    valid = offsets < (state.size - length + 1)[:, None]
    share = rules.priority_maxfrac

    def weigh(rows: Array, valid: Array) -> Array:
        items = 0.0
        if share > 0:
            items = share * _sliding(jnp.maximum, rows, length)
        if share < 1:
            items = items + (1.0 - share) * _sliding(jnp.add, rows, length) / length
        return jnp.where(valid, items, 0.0)

    def draw(carry: tuple[Array, Array], given: tuple[Array, Array]) -> Any:
        (rows, items), (wants, numbers) = carry, given
        endless = jnp.isinf(items)
        weights = jnp.where(jnp.any(endless), endless, items)
        env, slot = _pick(jnp.where(jnp.any(weights > 0), weights, valid), numbers)
        if rules.priority_zero:
            inside = (jnp.arange(capacity) - slot) % capacity < length
            own = jnp.where(inside & wants, 0.0, rows[env])
            rows, items = rows.at[env].set(own), items.at[env].set(weigh(own, valid[env]))
        return (rows, items), (env, offsets[env, slot])

    rows = jnp.where(inverse < _NONE, 1.0 / inverse, 0.0) ** rules.priority_exponent
    numbers = jax.random.uniform(key, (*wanted.shape, 2))
    return jax.lax.scan(draw, (rows, weigh(rows, valid)), (wanted, numbers))[1]


def priority_field(priority: Array) -> dict[str, Array]:
    """Priorities as `write` takes them."""
    return {"priority_inverse": jnp.minimum(1.0 / priority, _NONE)}


def _offsets(state: ReplayState) -> Array:
    """Rows between every slot's and the oldest of its environment, `[E, C]`."""
    capacity = replay_storage.dims(state)[1]
    return (jnp.arange(capacity)[None] - (state.position - state.size)[:, None]) % capacity


def _pick(weights: Array, numbers: Array) -> tuple[Array, Array]:
    """An entry of `weights` `[R, K]`, in proportion to it: its row, then its column."""

    def one(weights: Array, number: Array) -> Array:
        below = jnp.cumsum(weights)
        found = jnp.searchsorted(below, number * below[-1], side="right")
        return jnp.minimum(found, len(below) - 1).astype(jnp.int32)

    row = one(jnp.sum(weights, axis=1), numbers[0])
    return row, one(weights[row], numbers[1])


def _sliding(combine: Callable[[Array, Array], Array], x: Array, length: int) -> Array:
    """`combine` of the entries t, ..., t + length - 1 of a ring, for every t of the last axis."""
    found, done = None, 0
    for bit in range(length.bit_length()):
        if length >> bit & 1:
            part = jnp.roll(x, -done, axis=-1)
            found, done = part if found is None else combine(found, part), done + (1 << bit)
        x = combine(x, jnp.roll(x, -(1 << bit), axis=-1))
    return found


def write(state: ReplayState, index: Index, fields: dict[str, Array]) -> ReplayState:
    """Overwrites some fields of rows, `fields[name]` `[..., ...]` at `index` `[...]`.
    Of a row that occurs more than once one occurrence is written, the same one for all fields; a
    slot of C is left out.
    """
    return replay_storage.at_index(_write, state, index, fields, out=0)


def _write(state: ReplayState, index: Index, fields: dict[str, Array]) -> ReplayState:
    capacity = replay_storage.dims(state)[1]
    flat = Index(index.env.reshape(-1), index.slot.reshape(-1))
    once = replay_storage.is_last_occurrence(state, flat, flat.slot < capacity)
    target = Index(flat.env, jnp.where(once, flat.slot, capacity))
    data = dict(state.data)
    for name, value in fields.items():
        value = value.reshape(-1, *value.shape[index.env.ndim :]).astype(data[name].dtype)
        data[name] = replay_storage.write(data[name], target, value)
    return state.replace(data=data)
