"""Replay on the device: one ring buffer per environment, episode-safe windows and stored planner
targets.

Every function is pure and takes and returns a `ReplayState`, so that insertion, sampling and the
write-back of planner targets can live inside one jitted, scanned step. Writes are scatters; with
the state donated (or carried by a scan) they happen in place.

Axes: E environments, C capacity (rows an environment holds), T window length, B batch, M any batch
of row indices, N candidate actions, A action dims.

Row convention: reward and flags arrive with the row, and an episode that ends is followed by one
extra row that holds its true final observation (`is_last`). Transition t is the pair (row t, row
t+1); it exists iff both are written, row t is not `is_last` and row t+1 is not `is_first`.
`insert_step` writes rows by this convention.

Sharding: every array leads with E. With `shards` above 1 every operation is batched over equal
blocks of environments (`mbx.replay_storage`), which devices can hold without communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mbx import replay_storage as storage
from mbx.fast import collectives
from mbx.replay_storage import Index, ReplayState, Targets, TargetSpec, dims, read, slot_of, write
from mbx.replay_storage import bytes_per_transition as bytes_per_transition
from mbx.replay_storage import example_row as example_row

PyTree = Any

# Age of a row that has no valid planner target.
NEVER = 2**31 - 1
# Uniform transitions `sample_stale` looks at for every row it returns.
_STALE_CANDIDATES = 8


class Sample(NamedTuple):
    """Windows of T transitions: rows, targets, index [T+1, B, ...] and mask [T, B] bool."""

    rows: PyTree
    targets: Targets | None
    mask: Array
    index: Index  # type: ignore[assignment]  # the name of a tuple's method


# Construction and writing


def init(
    row: Mapping[str, Any],
    *,
    num_envs: int,
    capacity: int,
    target_spec: TargetSpec | None = None,
    shards: int = 1,
) -> ReplayState:
    """Returns an empty replay.

    Args:
      row: one un-batched row, a dict of arrays or `jax.ShapeDtypeStruct`s (values may be pytrees)
        that has the boolean scalars `is_first` and `is_last`.
      capacity: C, rows an environment can hold; at least 2.
      target_spec: how to store planner targets; None for an agent without any.
      shards: equal blocks of environments that every batch is drawn from evenly; divides E.

    Raises:
      ValueError: a missing or non-boolean flag, an impossible size, an unknown dtype.
    """
    storage.check_sizes(num_envs, capacity, shards)
    return ReplayState(
        data=storage.row_storage(row, num_envs, capacity),
        targets=None
        if target_spec is None
        else storage.target_storage(target_spec, num_envs, capacity),
        position=jnp.zeros((num_envs,), jnp.int32),
        size=jnp.zeros((num_envs,), jnp.int32),
        transitions=jnp.zeros((num_envs,), jnp.int32),
        shards=shards,
    )


def insert(
    state: ReplayState,
    rows: Mapping[str, Any],
    targets: Targets | None = None,
    mask: Array | None = None,
) -> ReplayState:
    """Appends one row to every environment where `mask`; a full ring drops its oldest. O(E).

    Args:
      rows: rows [E, ...], in structure and dtypes as given to `init`.
      targets: their planner targets [E, ...], or None: the rows are stored without (valid False).
        With more actions than are kept, the best by value are stored.
      mask: [E] bool, None for all.

    Raises:
      ValueError: rows or targets do not fit the storage.
    """
    num_envs = dims(state)[0]
    rows = storage.check_rows(state, dict(rows))
    mask = jnp.ones((num_envs,), bool) if mask is None else storage.check_mask(mask, (num_envs,))
    return storage.per_shard(_insert, state, rows, targets, mask, axes=(0, 0, 0))


def _insert(
    state: ReplayState, rows: dict[str, Any], targets: Targets | None, mask: Array
) -> ReplayState:
    num_envs, capacity = dims(state)
    env = jnp.arange(num_envs, dtype=jnp.int32)
    slot = jnp.where(mask, state.position, capacity)
    change = storage.transition_change(state, rows)
    # Always false, which XLA cannot know: lets every write wait for the flags just read. Unordered,
    # the flag arrays would be copied at every insertion.
    slot = jnp.where(change > 1, capacity, slot)
    index = Index(env, slot)
    stored = state.targets
    if targets is not None:
        stored = storage.write_targets(state, index, targets)
    elif stored is not None:
        stored = stored.replace(valid=write(stored.valid, index, jnp.zeros((num_envs,), bool)))
    return state.replace(
        data=write(state.data, index, rows),
        targets=stored,
        position=jnp.where(mask, (state.position + 1) % capacity, state.position),
        size=jnp.where(mask, jnp.minimum(state.size + 1, capacity), state.size),
        transitions=state.transitions + jnp.where(mask, change, 0),
    )


def insert_step(
    state: ReplayState,
    row: Mapping[str, Any],
    final: Mapping[str, Any],
    done: Array,
    targets: Targets | None = None,
) -> ReplayState:
    """Appends what one step of every environment gives, by the convention of rows above.

    That is the row acted on and, where the episode ended with it, a last row: the observation that
    a reset has replaced, with the reward and the flag that came with it.

    Args:
      row: [E, ...]: the observation, the reward that came with it, `is_first`, the action taken and
        all other stored fields but `is_last` and `terminated`: this row has neither.
      final: [E, ...] fields of the last row: `obs`, `reward` and `terminated` of this step, as far
        as they are stored; what else a row has is zero unless it is given here.
      done: [E] bool, where the episode ended (terminated or truncated) and its last row is stored.
      targets: planner targets of `row`, as `insert` takes them; the last row has none.

    Raises:
      ValueError: a field missing or not wanted; rows or targets that do not fit the storage.

    Examples:
      >>> row = dict(obs=0.0, reward=0.0, is_first=False, is_last=False, terminated=False)
      >>> state = replay.init(row, num_envs=1, capacity=4)
      >>> now = dict(obs=jnp.array([1.0]), reward=jnp.zeros(1), is_first=jnp.array([True]))
      >>> final = dict(obs=jnp.array([2.0]), reward=jnp.ones(1), terminated=jnp.array([True]))
      >>> state = replay.insert_step(state, now, final, done=jnp.array([True]))
      >>> int(replay.num_transitions(state))
      1
    """
    of_end = [name for name in ("obs", "reward", "terminated") if name in state.data]
    if missing := [name for name in of_end if name not in final]:
        raise ValueError(f"final lacks {', '.join(missing)}: give {', '.join(of_end)} of this step")
    flags = [name for name in ("is_last", "terminated") if name in state.data]
    if given := [name for name in flags if name in row]:
        raise ValueError(f"row has {', '.join(given)}: leave out, only a last row ends an episode")
    no = jnp.zeros((dims(state)[0],), bool)
    row = storage.check_rows(state, {**row, **dict.fromkeys(flags, no)})
    blank = jax.tree.map(jnp.zeros_like, row)
    last = storage.check_rows(state, {**blank, **final, "is_first": no, "is_last": ~no})
    return insert(insert(state, row, targets), last, mask=done)


def update_targets(
    state: ReplayState, index: Index, targets: Targets, mask: Array | None = None
) -> ReplayState:
    """Writes planner targets back to the rows they were computed for.

    In place when donated, as long as all reads of the old targets in the same program come first by
    data flow (targets made with updated parameters do); an unordered read costs a copy.

    Rows the replay does not hold are left alone. Where a row occurs more than once in `index` its
    last unmasked occurrence wins, for all fields of the targets together.

    Args:
      state: the replay; no row may have been inserted since `index` was drawn.
      index: rows, of any shape [...].
      targets: [...] targets; with more actions than are kept, the best by value are stored.
      mask: [...] bool, False to leave a row as it is; None for all.

    Raises:
      ValueError: the replay stores no targets, or shapes do not fit.
    """
    shape = index.env.shape
    storage.check_targets(state, targets, shape)
    mask = jnp.ones(shape, bool) if mask is None else storage.check_mask(mask, shape)
    return storage.at_index(_update_targets, state, index, targets, mask, out=0)


def _update_targets(state: ReplayState, index: Index, targets: Targets, mask: Array) -> ReplayState:
    shape = index.env.shape
    targets, index, mask = jax.tree.map(
        lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[len(shape) :])),
        (targets, index, storage.holds(state, index) & mask),
    )
    # Two scatters of the same row could resolve differently for actions and values: decide the
    # winner once, here.
    wins = storage.is_last_occurrence(state, index, mask)
    index = index._replace(slot=jnp.where(wins, index.slot, dims(state)[1]))
    return state.replace(targets=storage.write_targets(state, index, targets))


# Sampling


def sample(
    state: ReplayState,
    key: Array,
    *,
    batch_size: int,
    length: int,
    weight: Callable[[Array], Array] | None = None,
) -> Sample:
    """Draws windows that start at random transitions. The key is consumed.

    Every stored transition is the first of a window with the same probability, or with one
    proportional to its `weight`. Without weights the cost does not depend on C. Draws fall on rows
    that have a successor, and of 4 draws the first whose row is not an episode's end is taken.
    Should all 4 fail, or the replay be empty, that column is wholly masked.

    mask[t, b] is True iff transition t is of the episode the window started in and both its rows
    are written. Rows past the newest one repeat the newest (masked).

    Args:
      batch_size: B.
      length: T, transitions of a window; smaller than C.
      weight: ages [C] -> numbers [C], not below 0. The age of a transition is the number of rows
        written to its environment after both of its own.

    Raises:
      ValueError: batch_size or length out of range.
    """
    _, capacity = dims(state)
    storage.check_positive("batch_size", batch_size)
    if not 1 <= length < capacity:
        raise ValueError(
            f"length is {length} with a capacity of {capacity} rows: choose 1 <= length < capacity"
        )

    def local(state: ReplayState, key: Array, num: int) -> Sample:
        start, good = storage.draw_transitions(state, key, num, weight)
        found = windows(state, start, length=length)
        return found._replace(mask=found.mask & good[None, :])

    return storage.draw(local, state, key, batch_size, axis=1)


def by_age(half_life: float | Array) -> Callable[..., Sample]:
    """`sample` with transitions that are drawn half as often with every `half_life` rows of age."""
    return functools.partial(sample, weight=lambda age: 0.5 ** (age / half_life))


def windows(state: ReplayState, start: Index, *, length: int) -> Sample:
    """Windows of T = `length` transitions from the rows at `start` [B], for samplers of your own.

    Masked as those of `sample`; a start that the replay does not hold is masked whole. Of a replay
    in shards, `start` is laid out as drawn from it.
    """
    env, capacity = start.env, dims(state)[1]
    offset = (start.slot - (state.position[env] - state.size[env])) % capacity
    newest = jnp.maximum(state.size[env] - 1, 0)
    wanted = offset[None, :] + jnp.arange(length + 1, dtype=jnp.int32)[:, None]
    offsets = jnp.minimum(wanted, newest[None, :])
    env = jnp.broadcast_to(env[None, :], offsets.shape)
    index = Index(env, slot_of(state, env, offsets))
    rows = row_at(state, index)
    step_ok = ~rows["is_last"][:-1] & ~rows["is_first"][1:] & (wanted[1:] <= newest[None, :])
    mask = jnp.cumprod(step_ok.astype(jnp.int32), axis=0).astype(bool)
    mask = mask & storage.holds(state, start)[None, :]
    return Sample(rows, targets_at(state, index), mask, index)


def sample_rows(state: ReplayState, key: Array, *, batch_size: int) -> tuple[PyTree, Index]:
    """Draws B rows uniformly over transitions. The key is consumed.

    Returns:
      rows [B, ...] and their index [B]; a slot of C where no row was found (an empty replay), which
      `update_targets` leaves alone.

    Raises:
      ValueError: batch_size is not positive.
    """
    storage.check_positive("batch_size", batch_size)

    def local(state: ReplayState, key: Array, num: int) -> tuple[PyTree, Index]:
        index, good = storage.draw_transitions(state, key, num)
        index = index._replace(slot=jnp.where(good, index.slot, dims(state)[1]))
        return row_at(state, index), index

    return storage.draw(local, state, key, batch_size, axis=0)


def sample_stale(
    state: ReplayState, key: Array, step: Array | int, *, batch_size: int, exponent: float | Array
) -> tuple[PyTree, Index]:
    """Draws B different rows, older planner targets more often, rows without valid targets first.

    An approximation whose cost does not depend on C: 8 B transitions are drawn uniformly, and B of
    the different ones among them are chosen without replacement with probabilities proportional to
    (age + 1) ** exponent (Gumbel top-k). A row is repeated only where fewer than B different ones
    were drawn. The key is consumed.

    Args:
      step: learner step now.
      batch_size: B.
      exponent: 0 for uniform, larger for staler.

    Returns:
      rows [B, ...] and their index [B], as `sample_rows`.

    Raises:
      ValueError: the replay stores no targets, or batch_size is not positive.
    """
    storage.check_positive("batch_size", batch_size)

    def local(state: ReplayState, key: Array, num: int) -> tuple[PyTree, Index]:
        draw_key, gumbel_key = jax.random.split(key)
        index, good = storage.draw_transitions(state, draw_key, _STALE_CANDIDATES * num)
        age = target_age(state, index, step)
        score = jnp.asarray(exponent, jnp.float32) * jnp.log1p(age.astype(jnp.float32))
        # Distant classes, so that noise orders rows only within a class: no row < repeated < aged <
        # without targets.
        score = jnp.where(age == NEVER, 1e6, jnp.minimum(score, 1e5))
        score = jnp.where(
            storage.is_last_occurrence(state, index, good), score, jnp.where(good, -1e6, -1e9)
        )
        score = score + jax.random.gumbel(gumbel_key, score.shape, score.dtype)
        _, best = collectives.top_k(score, num)
        slot = jnp.where(good, index.slot, dims(state)[1])
        index = Index(index.env[best], slot[best])
        return row_at(state, index), index

    return storage.draw(local, state, key, batch_size, axis=0)


def refresh_index(
    state: ReplayState, chunk_start: Array | int, batch_size: int
) -> tuple[Index, Array]:
    """Rows `chunk_start` .. `chunk_start + batch_size - 1` of all rows held, environment by
    environment, oldest first; of several shards, their shares of them.

    For a sweep over the whole replay: chunk_start = 0, B, 2 B, ... for `sweep_length` chunks.

    Returns:
      index [B] and mask [B] bool, False past the last row (slot C there).

    Raises:
      ValueError: batch_size is not positive.
    """
    storage.check_positive("batch_size", batch_size)
    start = jnp.asarray(chunk_start, jnp.int32) // state.shards

    def local(state: ReplayState, _: None, num: int) -> tuple[Index, Array]:
        flat = start + jnp.arange(num, dtype=jnp.int32)
        env, offset = storage.locate(state.size, flat)
        mask = (flat >= 0) & (flat < jnp.sum(state.size))
        return Index(env, jnp.where(mask, slot_of(state, env, offset), dims(state)[1])), mask

    return storage.draw(local, state, None, batch_size, axis=0)


def sweep_length(state: ReplayState, batch_size: int) -> Array:
    """Chunks of `batch_size` rows that `refresh_index` needs for all rows held, int32 []."""
    storage.check_positive("batch_size", batch_size)
    held = jnp.sum(state.size.reshape(state.shards, -1), axis=1)
    return jnp.max(-(-held // max(batch_size // state.shards, 1)))


def leading_columns(state: ReplayState, tree: PyTree, num: int) -> PyTree:
    """The first `num` of a batch's columns, leaves [T, B, ...], as many of every shard.

    Raises:
      ValueError: num is no multiple of the shards.
    """
    if state.shards == 1:
        return jax.tree.map(lambda x: x[:, :num], tree)
    storage.check_batch(num, state.shards)
    parts = storage.split_axis(tree, state.shards, 1)
    own = jax.tree.map(lambda x: x[:, :, : num // state.shards], parts)
    return storage.merge_axis(own, 1)


# Reading


def row_at(state: ReplayState, index: Index) -> PyTree:
    """Rows [..., ...] at index [...]; an index outside the buffers reads the nearest slot.

    Of a replay in shards, index is laid out as drawn from it; so for the functions below.
    """
    return storage.at_index(lambda part, index: read(part.data, index), state, index)


def targets_at(state: ReplayState, index: Index) -> Targets | None:
    """Targets at index [...], decoded to float32; None if the replay stores none."""
    if state.targets is None:
        return None

    return storage.at_index(
        lambda part, index: storage.decode(read(part.targets, index)), state, index
    )


def target_age(state: ReplayState, index: Index, step: Array | int) -> Array:
    """Learner steps since the targets at index [...] were computed, int32 [...]; `NEVER` where
    there are none valid.

    Raises:
      ValueError: the replay stores no targets.
    """
    storage.require_targets(state)

    def local(state: ReplayState, index: Index) -> Array:
        age = jnp.asarray(step, jnp.int32) - read(state.targets.step, index)
        return jnp.where(read(state.targets.valid, index), jnp.maximum(age, 0), NEVER)

    return storage.at_index(local, state, index)


def num_transitions(state: ReplayState) -> Array:
    """Transitions held, int32 []."""
    return jnp.sum(state.transitions)
