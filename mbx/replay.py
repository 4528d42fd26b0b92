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

Sharding: every array leads with E, so a replay can be split over devices along that axis; used
inside a `shard_map` each shard samples its own environments and no collective is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

PyTree = Any

# Age of a row that has no valid planner target.
NEVER = 2**31 - 1
# Uniform draws per wanted window: the first one that is a transition is used.
_TRIES = 4
# Uniform transitions `sample_stale` looks at for every row it returns.
_STALE_CANDIDATES = 8
_INT8_SCALE = 127.0
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}


@flax.struct.dataclass
class Targets:
    """Planner targets of rows.

    actions: [..., N, A] candidate actions, in [-1, 1].
    values: [..., N] the planner's value of each.
    step: [...] int32, learner step at which they were computed.
    valid: [...] bool; False where a row has none (losses ignore it, `sample_stale` visits it
      first).
    expert: [..., 2, A] mean and standard deviation of the planner's Gaussian, or None where it is
      not stored.
    """

    actions: Array
    values: Array
    step: Array
    valid: Array
    expert: Array | None = None


@flax.struct.dataclass
class ReplayState:
    """The replay. `data` is a dict of rows [E, C, ...]; `targets` the encoded targets [E, C, ...]
    or None.

    position: [E] int32, slot the next row goes to (an episode's end adds a row, so environments
      drift apart).
    size: [E] int32, rows held. When full the oldest row is at `position`.
    transitions: [E] int32, transitions held.
    """

    data: PyTree
    targets: Targets | None
    position: Array
    size: Array
    transitions: Array


class TargetSpec(NamedTuple):
    """How planner targets are stored.

    num_actions: N the planner returns. keep: store only the `keep` best by value (None: all N).
    actions_dtype: "float32" | "bfloat16" | "int8" (round(127 a): an error of at most 1/254, actions
      in [-1, 1]).
    values_dtype: "float32" | "bfloat16".
    expert: also store the planner's Gaussian, 2 A float32.
    """

    num_actions: int
    action_dim: int
    keep: int | None = None
    values_dtype: str = "float32"
    actions_dtype: str = "float32"
    expert: bool = False


class Index(NamedTuple):
    """Where rows lie: env and slot, int32 of one shape; slot == C means "no row", never written."""

    env: Array
    slot: Array


class Sample(NamedTuple):
    """Windows of T transitions: rows, targets, index [T+1, B, ...] and mask [T, B] bool."""

    rows: PyTree
    targets: Targets | None
    mask: Array
    index: Index


# -------------------------------------------------------------------------------------------------
# Construction and writing


def init(
    row: Mapping[str, Any], *, num_envs: int, capacity: int, target_spec: TargetSpec | None = None
) -> ReplayState:
    """Returns an empty replay.

    Args:
      row: one un-batched row, a dict of arrays or `jax.ShapeDtypeStruct`s (values may be pytrees)
        that has the boolean scalars `is_first` and `is_last`.
      num_envs: E.
      capacity: C, rows an environment can hold; at least 2.
      target_spec: how to store planner targets; None for an agent without any.

    Raises:
      ValueError: a missing or non-boolean flag, an impossible size, an unknown dtype.
    """
    _check_sizes(num_envs, capacity)
    row = dict(row)
    for name in ("is_first", "is_last"):
        if name not in row:
            raise ValueError(
                f"row has no '{name}' (fields: {sorted(row)}): add it as a boolean scalar"
            )
        leaf = jnp.asarray(row[name]) if not hasattr(row[name], "dtype") else row[name]
        if leaf.dtype != jnp.bool_ or leaf.shape != ():
            raise ValueError(
                f"row['{name}'] is {leaf.dtype}{list(leaf.shape)}: make it a bool scalar"
            )

    def storage(leaf: Any) -> Array:
        if not hasattr(leaf, "dtype"):
            leaf = jnp.asarray(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jnp.zeros((num_envs, capacity, *leaf.shape), dtype)

    return ReplayState(
        data=jax.tree.map(storage, row),
        targets=None if target_spec is None else _target_storage(target_spec, num_envs, capacity),
        position=jnp.zeros((num_envs,), jnp.int32),
        size=jnp.zeros((num_envs,), jnp.int32),
        transitions=jnp.zeros((num_envs,), jnp.int32),
    )


def insert(
    state: ReplayState,
    rows: Mapping[str, Any],
    targets: Targets | None = None,
    mask: Array | None = None,
) -> ReplayState:
    """Appends one row to every environment where `mask`; a full ring drops its oldest. O(E).

    Args:
      state: the replay.
      rows: rows [E, ...], in structure and dtypes as given to `init`.
      targets: their planner targets [E, ...], or None: the rows are stored without (valid False).
        With more actions than are kept, the best by value are stored.
      mask: [E] bool, None for all.

    Raises:
      ValueError: rows or targets do not fit the storage.
    """
    num_envs, capacity = _dims(state)
    rows = _check_rows(state, dict(rows))
    mask = jnp.ones((num_envs,), bool) if mask is None else _check_mask(mask, (num_envs,))
    env = jnp.arange(num_envs, dtype=jnp.int32)
    slot = jnp.where(mask, state.position, capacity)
    change = _transition_change(state, rows)
    # Always false, which XLA cannot know: lets every write wait for the flags just read. Unordered,
    # the flag arrays would be copied at every insertion.
    slot = jnp.where(change > 1, capacity, slot)
    index = Index(env, slot)
    stored = state.targets
    if targets is not None or stored is not None:
        if targets is None:
            stored = stored.replace(valid=_write(stored.valid, index, jnp.zeros((num_envs,), bool)))
        else:
            stored = _write_targets(state, index, targets)
    return state.replace(
        data=jax.tree.map(lambda leaf, row: _write(leaf, index, row), state.data, rows),
        targets=stored,
        position=jnp.where(mask, (state.position + 1) % capacity, state.position),
        size=jnp.where(mask, jnp.minimum(state.size + 1, capacity), state.size),
        transitions=state.transitions + jnp.where(mask, change, 0),
    )


def update_targets(
    state: ReplayState, index: Index, targets: Targets, mask: Array | None = None
) -> ReplayState:
    """Writes planner targets back to the rows they were computed for.

    In place when donated, as long as whatever reads the old targets in the same program comes first
    by data flow (targets made with updated parameters do); an unordered read costs a copy.

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
    _check_targets(state, targets, shape)
    write = _holds(state, index)
    if mask is not None:
        write = write & _check_mask(mask, shape)
    flat = Index(index.env.reshape(-1), index.slot.reshape(-1))
    # Two scatters of the same row could resolve differently for actions and values: decide the
    # winner once, here.
    slot = jnp.where(
        _is_last_occurrence(state, flat, write.reshape(-1)), flat.slot, _dims(state)[1]
    )
    targets = jax.tree.map(lambda x: jnp.reshape(x, (-1, *jnp.shape(x)[len(shape) :])), targets)
    return state.replace(targets=_write_targets(state, Index(flat.env, slot), targets))


# -------------------------------------------------------------------------------------------------
# Sampling


def sample(state: ReplayState, key: Array, *, batch_size: int, length: int) -> Sample:
    """Draws windows that start at uniformly random transitions. The key is consumed.

    Every stored transition is the first of a window with the same probability. The cost does not
    depend on C: draws fall on rows that have a successor, and of 4 draws the first whose row is not
    an episode's end is taken. Should all 4 fail, or the replay be empty, that column is wholly
    masked.

    mask[t, b] is True iff transition t lies in the episode the window started in and both its rows
    are written. Rows past the newest one repeat the newest (masked).

    Args:
      state: the replay.
      key: typed PRNG key.
      batch_size: B.
      length: T, transitions of a window; smaller than C.

    Raises:
      ValueError: batch_size or length out of range.
    """
    _, capacity = _dims(state)
    _check_positive("batch_size", batch_size)
    if not 1 <= length < capacity:
        raise ValueError(
            f"length is {length} with a capacity of {capacity} rows: choose 1 <= length < capacity"
        )
    env, offset, good = _draw_transitions(state, key, batch_size)
    time = jnp.arange(length + 1, dtype=jnp.int32)[:, None]
    newest = jnp.maximum(state.size[env] - 1, 0)
    wanted = offset[None, :] + time
    offsets = jnp.minimum(wanted, newest[None, :])
    env = jnp.broadcast_to(env[None, :], offsets.shape)
    index = Index(env, _slot(state, env, offsets))
    rows = row_at(state, index)
    step_ok = ~rows["is_last"][:-1] & ~rows["is_first"][1:] & (wanted[1:] <= newest[None, :])
    mask = jnp.cumprod(step_ok.astype(jnp.int32), axis=0).astype(bool) & good[None, :]
    return Sample(rows, targets_at(state, index), mask, index)


def sample_rows(state: ReplayState, key: Array, *, batch_size: int) -> tuple[PyTree, Index]:
    """Draws B rows uniformly over transitions. The key is consumed.

    Returns:
      rows [B, ...] and their index [B]; a slot of C where no row was found (an empty replay), which
      `update_targets` leaves alone.

    Raises:
      ValueError: batch_size is not positive.
    """
    _check_positive("batch_size", batch_size)
    env, offset, good = _draw_transitions(state, key, batch_size)
    index = Index(env, jnp.where(good, _slot(state, env, offset), _dims(state)[1]))
    return row_at(state, index), index


def sample_stale(
    state: ReplayState, key: Array, step: Array | int, *, batch_size: int, exponent: float | Array
) -> tuple[PyTree, Index]:
    """Draws B different rows, older planner targets more often, rows without valid targets first.

    An approximation whose cost does not depend on C: 8 B transitions are drawn uniformly, and B of
    the different ones among them are chosen without replacement with probabilities proportional to
    (age + 1) ** exponent (Gumbel top-k). A row is repeated only where fewer than B different ones
    were drawn. The key is consumed.

    Args:
      state: the replay.
      key: typed PRNG key.
      step: learner step now.
      batch_size: B.
      exponent: 0 for uniform, larger for staler.

    Returns:
      rows [B, ...] and their index [B], as `sample_rows`.

    Raises:
      ValueError: the replay stores no targets, or batch_size is not positive.
    """
    _check_positive("batch_size", batch_size)
    draw_key, gumbel_key = jax.random.split(key)
    env, offset, good = _draw_transitions(state, draw_key, _STALE_CANDIDATES * batch_size)
    index = Index(env, _slot(state, env, offset))
    age = target_age(state, index, step)
    score = jnp.asarray(exponent, jnp.float32) * jnp.log1p(age.astype(jnp.float32))
    # Classes far apart, so that noise orders rows only within a class: no row < repeated < aged <
    # without targets.
    score = jnp.where(age == NEVER, 1e6, jnp.minimum(score, 1e5))
    score = jnp.where(_is_last_occurrence(state, index, good), score, jnp.where(good, -1e6, -1e9))
    _, best = jax.lax.top_k(score + jax.random.gumbel(gumbel_key, score.shape), batch_size)
    slot = jnp.where(good, index.slot, _dims(state)[1])
    index = Index(env[best], slot[best])
    return row_at(state, index), index


def refresh_index(
    state: ReplayState, chunk_start: Array | int, batch_size: int
) -> tuple[Index, Array]:
    """Rows `chunk_start` .. `chunk_start + batch_size - 1` of all rows held, environment by
    environment, oldest first.

    For a sweep over the whole replay: chunk_start = 0, B, 2 B, ... while below
    `jnp.sum(state.size)`.

    Returns:
      index [B] and mask [B] bool, False past the last row (slot C there).

    Raises:
      ValueError: batch_size is not positive.
    """
    _check_positive("batch_size", batch_size)
    flat = jnp.asarray(chunk_start, jnp.int32) + jnp.arange(batch_size, dtype=jnp.int32)
    env, offset = _locate(state.size, flat)
    mask = (flat >= 0) & (flat < jnp.sum(state.size))
    return Index(env, jnp.where(mask, _slot(state, env, offset), _dims(state)[1])), mask


# -------------------------------------------------------------------------------------------------
# Reading


def row_at(state: ReplayState, index: Index) -> PyTree:
    """Rows [..., ...] at index [...]; an index outside the buffers reads the nearest slot."""
    return jax.tree.map(lambda leaf: _read(leaf, index), state.data)


def targets_at(state: ReplayState, index: Index) -> Targets | None:
    """Targets at index [...], decoded to float32; None if the replay stores none."""
    if state.targets is None:
        return None
    stored = jax.tree.map(lambda leaf: _read(leaf, index), state.targets)
    actions = stored.actions.astype(jnp.float32)
    if stored.actions.dtype == jnp.int8:
        actions = actions / _INT8_SCALE
    return stored.replace(actions=actions, values=stored.values.astype(jnp.float32))


def target_age(state: ReplayState, index: Index, step: Array | int) -> Array:
    """Learner steps since the targets at index [...] were computed, int32 [...]; `NEVER` where
    there are none valid.

    Raises:
      ValueError: the replay stores no targets.
    """
    stored = _require_targets(state)
    age = jnp.asarray(step, jnp.int32) - _read(stored.step, index)
    return jnp.where(_read(stored.valid, index), jnp.maximum(age, 0), NEVER)


def num_transitions(state: ReplayState) -> Array:
    """Transitions held, int32 []."""
    return jnp.sum(state.transitions)


def bytes_per_transition(state: ReplayState) -> dict[str, float]:
    """Device memory one row takes, in bytes: {"rows": ..., "targets": ...}. Needs shapes only
    (works on abstract states)."""

    def total(tree: PyTree) -> float:
        return float(
            sum(jnp.dtype(x.dtype).itemsize * _product(x.shape[2:]) for x in jax.tree.leaves(tree))
        )

    return {"rows": total(state.data), "targets": total(state.targets)}


# -------------------------------------------------------------------------------------------------
# Ring arithmetic


def _dims(state: ReplayState) -> tuple[int, int]:
    return state.data["is_last"].shape


def _slot(state: ReplayState, env: Array, offset: Array) -> Array:
    """Slot of the row that is `offset` rows younger than the oldest one."""
    capacity = _dims(state)[1]
    return (state.position[env] - state.size[env] + offset) % capacity


def _holds(state: ReplayState, index: Index) -> Array:
    """Whether a row is written at index [...]."""
    num_envs, capacity = _dims(state)
    inside = (index.env >= 0) & (index.env < num_envs) & (index.slot >= 0) & (index.slot < capacity)
    env = jnp.clip(index.env, 0, num_envs - 1)
    oldest = state.position[env] - state.size[env]
    return inside & ((index.slot - oldest) % capacity < state.size[env])


def _locate(counts: Array, flat: Array) -> tuple[Array, Array]:
    """Maps 0 .. sum(counts)-1 one to one onto (env, offset < counts[env]). O(log E) an element."""
    ends = jnp.cumsum(counts)
    env = jnp.searchsorted(ends, flat, side="right").astype(jnp.int32)
    env = jnp.minimum(env, counts.shape[0] - 1)
    offset = flat - (ends[env] - counts[env])
    return env, jnp.clip(offset, 0, jnp.maximum(counts[env] - 1, 0))


def _draw_transitions(state: ReplayState, key: Array, num: int) -> tuple[Array, Array, Array]:
    """Uniform transitions: env, offset of the first row, and whether one was found, each [num]."""
    counts = jnp.maximum(state.size - 1, 0)
    total = jnp.sum(counts)
    # maxval 0 would give 0 without complaint: keep the range legal and answer "not found" instead.
    flat = jax.random.randint(key, (_TRIES, num), 0, jnp.maximum(total, 1), dtype=jnp.int32)
    env, offset = _locate(counts, flat)
    good = _is_transition(state, env, offset) & (total > 0)
    # Given that a try is good it is uniform over transitions, so the first good one is, too.
    first = jnp.argmax(good, axis=0)[None, :]
    env, offset, good = (jnp.take_along_axis(x, first, axis=0)[0] for x in (env, offset, good))
    return env, offset, good


def _is_transition(state: ReplayState, env: Array, offset: Array) -> Array:
    last = _read(state.data["is_last"], Index(env, _slot(state, env, offset)))
    first = _read(state.data["is_first"], Index(env, _slot(state, env, offset + 1)))
    return ~last & ~first & (offset + 1 < state.size[env])


def _transition_change(state: ReplayState, rows: PyTree) -> Array:
    """Transitions gained (with the newest row held) minus lost (with the oldest row), [E] int32."""
    num_envs, capacity = _dims(state)
    env = jnp.arange(num_envs, dtype=jnp.int32)
    newest = Index(env, (state.position - 1) % capacity)
    gained = (state.size > 0) & ~_read(state.data["is_last"], newest) & ~rows["is_first"]
    lost = (state.size == capacity) & _is_transition(state, env, jnp.zeros_like(env))
    return gained.astype(jnp.int32) - lost.astype(jnp.int32)


def _is_last_occurrence(state: ReplayState, index: Index, mask: Array) -> Array:
    """[M] bool: unmasked, and no later unmasked element of `index` [M] names the same row. O(M log
    M)."""
    num_envs, capacity = _dims(state)
    name = jnp.where(mask, index.env * capacity + index.slot, num_envs * capacity)
    order = jnp.argsort(name, stable=True)
    ordered = name[order]
    ends_run = jnp.concatenate([ordered[1:] != ordered[:-1], jnp.ones((1,), bool)])
    return jnp.zeros(name.shape, bool).at[order].set(ends_run, unique_indices=True) & mask


# -------------------------------------------------------------------------------------------------
# Storage


def _read(leaf: Array, index: Index) -> Array:
    return leaf.at[index.env, index.slot].get(mode="clip")


def _write(leaf: Array, index: Index, value: Array) -> Array:
    # Masked rows carry slot C. Never -1: that wraps to the last slot, even with mode="drop".
    return leaf.at[index.env, index.slot].set(value, mode="drop")


def _write_targets(state: ReplayState, index: Index, targets: Targets) -> Targets:
    stored = _check_targets(state, targets, index.env.shape)
    return jax.tree.map(lambda leaf, x: _write(leaf, index, x), stored, _encode(stored, targets))


def _encode(stored: Targets, targets: Targets) -> Targets:
    """Best-k, then the storage dtypes."""
    actions = jnp.asarray(targets.actions, jnp.float32)
    values = jnp.asarray(targets.values, jnp.float32)
    keep = stored.values.shape[2]
    if values.shape[-1] > keep:
        # top_k ranks NaN highest, so NaN must look worst.
        _, best = jax.lax.top_k(jnp.where(jnp.isnan(values), -jnp.inf, values), keep)
        values = jnp.take_along_axis(values, best, axis=-1)
        actions = jnp.take_along_axis(actions, best[..., None], axis=-2)
    if stored.actions.dtype == jnp.int8:
        actions = jnp.round(jnp.clip(actions, -1.0, 1.0) * _INT8_SCALE)
    return Targets(
        actions=actions.astype(stored.actions.dtype),
        values=values.astype(stored.values.dtype),
        step=jnp.asarray(targets.step, jnp.int32),
        valid=jnp.asarray(targets.valid, bool),
        expert=None if stored.expert is None else jnp.asarray(targets.expert, jnp.float32),
    )


def _target_storage(spec: TargetSpec, num_envs: int, capacity: int) -> Targets:
    _check_positive("target_spec.num_actions", spec.num_actions)
    _check_positive("target_spec.action_dim", spec.action_dim)
    if spec.keep is not None and not 1 <= spec.keep <= spec.num_actions:
        raise ValueError(
            f"target_spec.keep is {spec.keep} with num_actions = {spec.num_actions}: "
            "choose 1 <= keep <= num_actions, or None to keep all"
        )
    for field, allowed in (
        ("values_dtype", ("float32", "bfloat16")),
        ("actions_dtype", ("float32", "bfloat16", "int8")),
    ):
        if getattr(spec, field) not in allowed:
            raise ValueError(
                f"target_spec.{field} is {getattr(spec, field)!r}: choose one of {allowed}"
            )
    kept = spec.num_actions if spec.keep is None else spec.keep
    lead = (num_envs, capacity)
    return Targets(
        actions=jnp.zeros((*lead, kept, spec.action_dim), _DTYPES[spec.actions_dtype]),
        values=jnp.zeros((*lead, kept), _DTYPES[spec.values_dtype]),
        step=jnp.zeros(lead, jnp.int32),
        valid=jnp.zeros(lead, bool),
        expert=jnp.zeros((*lead, 2, spec.action_dim)) if spec.expert else None,
    )


# -------------------------------------------------------------------------------------------------
# Checks (of shapes only, so they cost nothing in compiled code)


def _product(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")


def _check_sizes(num_envs: int, capacity: int) -> None:
    _check_positive("num_envs", num_envs)
    if capacity < 2:
        raise ValueError(f"capacity is {capacity}: a transition needs two rows, so use at least 2")
    if num_envs * capacity >= 2**31:
        raise ValueError(
            f"num_envs * capacity is {num_envs * capacity}: rows are counted in int32, "
            f"so lower capacity (rows per environment) to at most {(2**31 - 1) // num_envs}"
        )


def _check_rows(state: ReplayState, rows: dict[str, Any]) -> dict[str, Any]:
    expected, actual = jax.tree.structure(state.data), jax.tree.structure(rows)
    if expected != actual:
        raise ValueError(
            f"rows have the structure {actual}, the replay stores {expected}: give the row of init"
        )
    rows = jax.tree.map(jnp.asarray, rows)
    named = jax.tree_util.tree_leaves_with_path(rows)
    for (path, row), leaf in zip(named, jax.tree.leaves(state.data), strict=True):
        shape = (leaf.shape[0], *leaf.shape[2:])
        if row.shape != shape or row.dtype != leaf.dtype:
            raise ValueError(
                f"rows{jax.tree_util.keystr(path)} is {row.dtype}{list(row.shape)}: "
                f"the replay stores {leaf.dtype}{list(shape)}, cast or reshape it"
            )
    return rows


def _check_mask(mask: Array, shape: tuple[int, ...]) -> Array:
    mask = jnp.asarray(mask)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}: it must be bool{list(shape)}")
    return mask


def _require_targets(state: ReplayState) -> Targets:
    if state.targets is None:
        raise ValueError(
            "targets is None: this replay stores no planner targets, give init a target_spec"
        )
    return state.targets


def _check_targets(state: ReplayState, targets: Targets, lead: tuple[int, ...]) -> Targets:
    """Returns the storage, after checking that `targets` [*lead, ...] fit it."""
    stored = _require_targets(state)
    keep, action_dim = stored.actions.shape[2:]
    num = jnp.shape(targets.values)[-1] if jnp.ndim(targets.values) else 0
    if num < keep:
        raise ValueError(
            f"targets.values holds {num} actions a row: give at least the {keep} the replay keeps"
        )
    wanted = {
        "actions": (*lead, num, action_dim),
        "values": (*lead, num),
        "step": lead,
        "valid": lead,
    }
    if (stored.expert is None) != (targets.expert is None):
        raise ValueError(
            f"targets.expert is {'missing' if targets.expert is None else 'given'}: give it just "
            "where target_spec.expert is True"
        )
    if targets.expert is not None:
        wanted["expert"] = (*lead, 2, action_dim)
    for name, shape in wanted.items():
        if jnp.shape(getattr(targets, name)) != shape:
            raise ValueError(
                f"targets.{name} has shape {jnp.shape(getattr(targets, name))}: it must be {shape}"
            )
    return stored
