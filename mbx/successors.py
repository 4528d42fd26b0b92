"""Expectations over ragged successors: flat layout, segment sums, de-duplication.

A state b and a robot action a have 0..K successors, each with a probability. They are held either
densely, `[B, A, K]` padded with probability 0, or flat, `[C]` with a segment id `b * A + a`; both
forms give the same expectations. Capacities are static: what does not fit is counted, and the
missing probability shows as mass below one, never renormalised away.

Padding may hold anything, NaN included: it reaches neither values nor gradients.
Axes: B states, A robot actions, K successors of a pair, C capacity, N flat slots, W key words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Successors(NamedTuple):
    """A flat list of successors with static capacity C."""

    state: Any  # pytree of `[C, ...]`
    prob: Array  # `[C]`, 0 in unused slots
    segment: Array  # `[C]` int32, num_segments in unused slots
    valid: Array  # `[C]` bool
    overflow: Array  # scalar int32, successors that did not fit
    lost_mass: Array  # `[num_segments]`, their probability

    @property
    def count(self) -> Array:
        """Successors held."""
        return jnp.sum(self.valid)

    @property
    def fill(self) -> Array:
        """Share of the capacity in use."""
        return self.count / self.valid.size


class Unique(NamedTuple):
    """Distinct keys."""

    first: Array  # `[U]` int32, a slot that holds each
    inverse: Array  # `[N]` int32 into them
    count: Array  # true number of distinct valid keys, also where it exceeds U
    overflowed: Array  # whether it does


def segment_expectation(
    values: Array, probs: Array, segment_ids: Array, num_segments: int
) -> Array:
    """Probability-weighted sums `[num_segments, ...]` of the values of each segment.

    Slots with an id outside 0..num_segments-1 are padding, whatever they hold; so is a slot of
    probability 0 whose value is not finite. Ids may come in any order. A segment without successors
    gets 0. Sums are not divided by the mass: see `segment_mass`.

    Args:
      values: [N, ...] successor values.
      probs: [N] probabilities.
      segment_ids: [N] int.
      num_segments: static number of segments.

    Raises:
      ValueError: values, probs and ids differ in their leading axis.

    Source: docs/sources.md#empo, aggregation.

    Examples:
      >>> values, probs = jnp.array([1.0, 3.0, 5.0]), jnp.array([0.5, 0.5, 1.0])
      >>> ids = jnp.array([0, 0, 1])
      >>> successors.segment_expectation(values, probs, ids, 2).tolist()
      [2.0, 5.0]
    """
    values, probs = jnp.asarray(values), jnp.asarray(probs)
    if not values.shape[:1] == probs.shape == segment_ids.shape:
        raise ValueError(
            f"segment_expectation: values {values.shape}, probs {probs.shape} and segment_ids "
            f"{segment_ids.shape} must share their one leading axis: flatten successors first"
        )
    inside = (segment_ids >= 0) & (segment_ids < num_segments)
    probs = jnp.where(inside, probs, 0.0)
    wide = (-1,) + (1,) * (values.ndim - 1)
    unused = ~inside | (probs == 0.0)
    unused = unused.reshape(wide) & (~jnp.isfinite(values) | ~inside.reshape(wide))
    # The value is replaced before it is multiplied: 0 * NaN would poison sum and gradient.
    weighted = jnp.where(unused, 0.0, values) * probs.reshape(wide)
    ids = jnp.where(inside, segment_ids, num_segments)
    return jax.ops.segment_sum(weighted, ids, num_segments)


def segment_mass(probs: Array, segment_ids: Array, num_segments: int) -> Array:
    """Probability mass `[num_segments]` of each segment: 1 where nothing is missing."""
    return segment_expectation(jnp.ones_like(probs), probs, segment_ids, num_segments)


def dense_expectation(values: Array, probs: Array) -> Array:
    """The same over `[..., K]` values and probabilities padded with 0: `[...]`."""
    if values.shape != probs.shape:
        raise ValueError(f"dense_expectation: values {values.shape} but probs {probs.shape}")
    padding = (probs == 0.0) & ~jnp.isfinite(values)
    return jnp.sum(jnp.where(padding, 0.0, values) * probs, axis=-1)


def mass_error(mass: Array, used: Array | None = None) -> Array:
    """Largest |1 - mass| over the segments `used` (default: those with any mass)."""
    used = mass > 0.0 if used is None else used
    return jnp.max(jnp.where(used, jnp.abs(1.0 - mass), 0.0), initial=0.0)


def flatten(states: Any, probs: Array, capacity: int | None = None) -> Successors:
    """Dense successors as a flat list of B*A segments `b * A + a`, used slots first and in order.
    A full list counts what it dropped in `overflow` and `lost_mass`.

    Args:
      states: pytree of [B, A, K, ...].
      probs: [B, A, K], 0 in unused slots.
      capacity: C; None for B*A*K, which never overflows.
    """
    if probs.ndim != 3:
        raise ValueError(f"probs has shape {probs.shape}: give [B, A, K]")
    total, num_segments = probs.size, probs.shape[0] * probs.shape[1]
    capacity = total if capacity is None else capacity
    if capacity < 1:
        raise ValueError(f"capacity={capacity}: must be at least 1")
    flat, numbers = probs.reshape(-1), jnp.arange(total, dtype=jnp.int32)
    segment, used = numbers // probs.shape[2], flat > 0.0
    slot = jnp.where(used, jnp.cumsum(used) - 1, capacity)
    kept = used & (slot < capacity)
    # Which dense slot each flat slot holds; unused ones point at slot 0 and are masked.
    source = jnp.zeros(capacity, jnp.int32).at[slot].set(numbers, mode="drop")
    valid = jnp.arange(capacity) < jnp.sum(kept)
    return Successors(
        state=jax.tree.map(lambda x: x.reshape(total, *x.shape[3:])[source], states),
        prob=jnp.where(valid, flat[source], 0.0),
        segment=jnp.where(valid, segment[source], num_segments),
        valid=valid,
        overflow=jnp.sum(used) - jnp.sum(kept),
        lost_mass=jax.ops.segment_sum(jnp.where(used & ~kept, flat, 0.0), segment, num_segments),
    )


def segment_reward(
    x_h: Array,
    state_ids: Array,
    num_states: int,
    xi: Array | float,
    eta: Array | float,
    reduce: str = "mean",
) -> tuple[Array, Array]:
    """y and U_r (eq. 8) of states with different numbers of humans, all in one flat list.

    Args:
      x_h: [N] abilities, > 0 where the id is in range.
      state_ids: [N] int, the state each human belongs to; out of range: padding.
      xi, eta: exponents.
      reduce: "mean" or "sum" over a state's humans.

    Returns:
      (y, u_r), both [num_states]; NaN for a state without humans, for which neither is defined.
    """
    inside = (state_ids >= 0) & (state_ids < num_states)
    safe = jnp.where(inside, x_h, 1.0)
    power = safe ** (-xi)
    y = segment_expectation(power, jnp.ones_like(power), state_ids, num_states)
    count = segment_mass(jnp.ones_like(power), state_ids, num_states)
    if reduce == "mean":
        y = y / jnp.maximum(count, 1.0)
    elif reduce != "sum":
        raise ValueError(f"reduce={reduce!r}: choose mean or sum")
    filled = jnp.where(count > 0, y, 1.0)
    return jnp.where(count > 0, y, jnp.nan), jnp.where(count > 0, -(filled**eta), jnp.nan)


def deduplicate(keys: Array, valid: Array, size: int) -> Unique:
    """The distinct keys among the valid slots, compared in full (no hashes).
    `inverse` points past U for keys that found no room, and at 0 for invalid slots.

    Args:
      keys: [N] or [N, W] integers that identify a state.
      valid: [N] bool.
      size: U, static room for distinct keys.
    """
    if size < 1:
        raise ValueError(f"size={size}: must be at least 1")
    words = keys.reshape(keys.shape[0], -1)
    order = jnp.lexsort((*words.T, ~valid))  # the last key counts first: valid slots lead
    sorted_words, sorted_valid = words[order], valid[order]
    changed = jnp.any(sorted_words[1:] != sorted_words[:-1], axis=-1)
    new = jnp.concatenate([jnp.ones(1, bool), changed]) & sorted_valid
    rank, count = jnp.cumsum(new) - 1, jnp.sum(new)
    first, inverse = jnp.zeros(size, jnp.int32), jnp.zeros(keys.shape[0], jnp.int32)
    first = first.at[jnp.where(new, rank, size)].set(order.astype(jnp.int32), mode="drop")
    inverse = inverse.at[order].set(jnp.where(sorted_valid, rank, 0).astype(jnp.int32))
    return Unique(first, inverse, count, count > size)


def map_unique(
    function: Callable[[Any], Any], states: Any, keys: Array, valid: Array, size: int
) -> tuple[Any, Array]:
    """`function(states)` evaluated once a distinct key; on every slot where U is too small.

    Args:
      function: pytree of [n, ...] -> pytree of [n, ...], row by row.
      states: pytree of [N, ...]; keys, valid, size: as for `deduplicate`.

    Returns:
      (results [N, ...], number of distinct keys). The results never depend on U.
    """
    unique = deduplicate(keys, valid, size)

    def few(_: None) -> Any:
        results = function(jax.tree.map(lambda x: x[unique.first], states))
        return jax.tree.map(lambda x: x[unique.inverse], results)

    return jax.lax.cond(unique.overflowed, lambda _: function(states), few, None), unique.count
