"""How the replay keeps rows and planner targets in memory: the types, reads and writes by index,
the encoding of targets, the checks of shapes, ring arithmetic, and shards.

`mbx.replay` is the interface; what is here knows slots, not episodes. Axes: E environments, C
capacity, N candidate actions, A action dims.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array

from mbx.fast import collectives
from mbx.types import Record

PyTree = Any
T = TypeVar("T")

_INT8_SCALE = 127.0
# Uniform draws per wanted window: the first one that is a transition is used.
_TRIES = 4
_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "int8": jnp.int8}


@flax.struct.dataclass
class Targets(Record):
    """Planner targets of rows.

    Attributes:
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
class ReplayState(Record):
    """The replay.

    Attributes:
      data: dict of rows [E, C, ...].
      targets: encoded targets [E, C, ...], or None.
      position: [E] int32, slot the next row goes to (an episode's end adds a row, so environments
        differ).
      size: [E] int32, rows held. When full the oldest row is at `position`.
      transitions: [E] int32, transitions held.
      shards: equal blocks of environments that every batch is drawn from evenly (static).
    """

    data: PyTree
    targets: Targets | None
    position: Array
    size: Array
    transitions: Array
    shards: int = flax.struct.field(pytree_node=False, default=1)


class TargetSpec(NamedTuple):
    """How planner targets are stored.

    Attributes:
      num_actions: N the planner returns.
      keep: store only the `keep` best by value (None: all N).
      values_dtype: "float32" | "bfloat16".
      actions_dtype: "float32" | "bfloat16" | "int8" (round(127 a): an error of at most 1/254,
        actions in [-1, 1]).
      expert: also store the planner's Gaussian, 2 A float32.
    """

    num_actions: int
    action_dim: int
    keep: int | None = None
    values_dtype: str = "float32"
    actions_dtype: str = "float32"
    expert: bool = False


class Index(NamedTuple):
    """Places of rows: env and slot, int32 of one shape; slot == C means "no row", never written."""

    env: Array
    slot: Array


def example_row(
    obs_shape: tuple[int, ...], action_dim: int, obs_dtype: Any = jnp.float32
) -> dict[str, Any]:
    """The fields that every agent's rows have, as shapes: what `init` is given.

    Returns:
      `jax.ShapeDtypeStruct`s: obs, action [A], reward [], and the flags is_first, is_last and
      terminated []. Custom fields are added to it.
    """
    shape = jax.ShapeDtypeStruct
    flags = {name: shape((), jnp.bool_) for name in ("is_first", "is_last", "terminated")}
    return dict(
        obs=shape(obs_shape, obs_dtype),
        action=shape((action_dim,), jnp.float32),
        reward=shape((), jnp.float32),
        **flags,
    )


# Reading and writing


def dims(state: ReplayState) -> tuple[int, int]:
    """E environments and C rows of capacity each."""
    return state.data["is_last"].shape


def read(tree: T, index: Index) -> T:
    """Entries [..., ...] of leaves [E, C, ...] at index [...]; outside it, the nearest slot's."""
    return jax.tree.map(lambda leaf: leaf.at[index.env, index.slot].get(mode="clip"), tree)


def write(tree: T, index: Index, values: PyTree) -> T:
    """Leaves [E, C, ...] with `values` [..., ...] at index [...]; slot C is left out.

    Where an index occurs twice, either value may stay.
    """

    # Masked rows carry slot C. Never -1: that wraps to the last slot, even with mode="drop".
    def one(leaf: Array, x: Array) -> Array:
        return leaf.at[index.env, index.slot].set(x, mode="drop")

    return jax.tree.map(one, tree, values)


def write_targets(state: ReplayState, index: Index, targets: Targets) -> Targets:
    """The stored targets [E, C, ...] with `targets` [..., ...] encoded at index [...].

    With more actions than are kept, the best by value. Raises ValueError as `check_targets`.
    """
    stored = check_targets(state, targets, index.env.shape)
    return write(stored, index, _encode(stored, targets))


def decode(stored: Targets) -> Targets:
    """Stored targets as float32."""
    actions = stored.actions.astype(jnp.float32)
    if stored.actions.dtype == jnp.int8:
        actions = actions / _INT8_SCALE
    return stored.replace(actions=actions, values=stored.values.astype(jnp.float32))


def _encode(stored: Targets, targets: Targets) -> Targets:
    """Best-k, then the storage dtypes."""
    actions = jnp.asarray(targets.actions, jnp.float32)
    values = jnp.asarray(targets.values, jnp.float32)
    keep = stored.values.shape[2]
    if values.shape[-1] > keep:
        # top_k ranks NaN highest, so NaN must look worst.
        _, best = collectives.top_k(jnp.where(jnp.isnan(values), -jnp.inf, values), keep)
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


def row_storage(row: Mapping[str, Any], num_envs: int, capacity: int) -> PyTree:
    """Room for all rows: leaves [E, C, ...], zero.

    Raises ValueError where `is_first` or `is_last` is missing or no boolean scalar.
    """
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

    def room(leaf: Any) -> Array:
        if not hasattr(leaf, "dtype"):
            leaf = jnp.asarray(leaf)
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jnp.zeros((num_envs, capacity, *leaf.shape), dtype)

    return jax.tree.map(room, row)


def target_storage(spec: TargetSpec, num_envs: int, capacity: int) -> Targets:
    """Room for the targets of all rows: leaves [E, C, ...], zero, none of them valid.

    Raises ValueError for counts below one, more kept actions than there are, or unknown dtypes.
    """
    check_positive("target_spec.num_actions", spec.num_actions)
    check_positive("target_spec.action_dim", spec.action_dim)
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
        expert=jnp.zeros((*lead, 2, spec.action_dim), jnp.float32) if spec.expert else None,
    )


# Checks (of shapes only, so they cost nothing in compiled code)


def check_positive(name: str, value: int) -> None:
    """Raises ValueError for a count below one."""
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")


def check_sizes(num_envs: int, capacity: int, shards: int) -> None:
    """Raises ValueError for sizes that are too small, do not divide, or overflow int32."""
    check_positive("num_envs", num_envs)
    check_positive("shards", shards)
    if num_envs % shards:
        raise ValueError(
            f"num_envs is {num_envs}, which {shards} shards cannot share evenly: choose a multiple "
            f"of {shards}, or fewer shards"
        )
    if capacity < 2:
        raise ValueError(f"capacity is {capacity}: a transition needs two rows, so use at least 2")
    if num_envs * capacity >= 2**31:
        raise ValueError(
            f"num_envs * capacity is {num_envs * capacity}: rows are counted in int32, "
            f"so lower capacity (rows per environment) to at most {(2**31 - 1) // num_envs}"
        )


def check_rows(state: ReplayState, rows: dict[str, Any]) -> dict[str, Any]:
    """The rows [E, ...] as arrays; raises ValueError where structure, shape or dtype do not fit."""
    rows = jax.tree.map(jnp.asarray, rows)
    stored, given = (
        {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (state.data, rows)
    )
    if missing := sorted(stored.keys() - given):
        raise ValueError(f"rows lack {', '.join(missing)}: give all fields of the row of init")
    if unknown := sorted(given.keys() - stored):
        raise ValueError(
            f"rows have {', '.join(unknown)}, but the replay stores {', '.join(sorted(stored))}: "
            "leave out, or add to the row of init"
        )
    for name, row in given.items():
        shape, dtype = (stored[name].shape[0], *stored[name].shape[2:]), stored[name].dtype
        if row.shape != shape or row.dtype != dtype:
            raise ValueError(
                f"rows{name} is {row.dtype}{list(row.shape)}: the replay stores "
                f"{dtype}{list(shape)}, cast or reshape it"
            )
    return rows


def check_mask(mask: Array, shape: tuple[int, ...]) -> Array:
    """The mask as an array; raises ValueError where it is no bool of that shape."""
    mask = jnp.asarray(mask)
    if mask.shape != shape or mask.dtype != jnp.bool_:
        raise ValueError(f"mask is {mask.dtype}{list(mask.shape)}: it must be bool{list(shape)}")
    return mask


def require_targets(state: ReplayState) -> Targets:
    """The stored targets; raises ValueError where the replay stores none."""
    if state.targets is None:
        raise ValueError(
            "targets is None: this replay stores no planner targets, give init a target_spec"
        )
    return state.targets


def check_targets(state: ReplayState, targets: Targets, lead: tuple[int, ...]) -> Targets:
    """The storage; raises ValueError where `targets` [*lead, ...] do not fit, or there is none."""
    stored = require_targets(state)
    keep, action_dim = stored.actions.shape[2:]
    num = jnp.shape(targets.values)[-1] if jnp.ndim(targets.values) else 0
    if num < keep:
        raise ValueError(
            f"targets.values holds {num} actions a row: give at least the {keep} the replay keeps"
        )
    if (stored.expert is None) != (targets.expert is None):
        raise ValueError(
            f"targets.expert is {'missing' if targets.expert is None else 'given'}: give it just "
            "where target_spec.expert is True"
        )
    ends: dict[str, tuple[int, ...]] = dict(actions=(num, action_dim), values=(num,))
    ends |= dict(step=(), valid=()) | (
        {} if targets.expert is None else dict(expert=(2, action_dim))
    )
    for name, end in ends.items():
        got, want = jnp.shape(getattr(targets, name)), (*lead, *end)
        if got != want:
            raise ValueError(f"targets.{name} has shape {got}: it must be {want}")
    return stored


# Sizes


def bytes_per_transition(state: ReplayState) -> dict[str, float]:
    """Device memory one row takes, in bytes: {"rows": ..., "targets": ...}. Needs shapes only
    (works on abstract states)."""

    def total(tree: PyTree) -> float:
        return float(
            sum(jnp.dtype(x.dtype).itemsize * math.prod(x.shape[2:]) for x in jax.tree.leaves(tree))
        )

    return {"rows": total(state.data), "targets": total(state.targets)}


# Ring arithmetic: which rows a replay holds, oldest first, and which of them are transitions. An
# offset counts rows from the oldest one of an environment; a slot is its place in memory.


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


def draw_transitions(
    state: ReplayState, key: Array, num: int, weight: Callable[[Array], Array] | None = None
) -> tuple[Index, Array]:
    """Transitions, uniform or by `weight` of their ages: the index of the first row, and whether
    one was found, each [num]."""
    counts = jnp.maximum(state.size - 1, 0)
    total = jnp.sum(counts)
    if weight is None:
        # maxval 0 would give 0 without complaint: keep the range legal, answer "not found" instead.
        flat = jax.random.randint(key, (_TRIES, num), 0, jnp.maximum(total, 1), dtype=jnp.int32)
        env, offset = locate(counts, flat)
    else:
        env, offset = _locate_by_age(counts, weight(jnp.arange(dims(state)[1])), key, num)
    good = is_transition(state, env, offset) & (total > 0)
    # Given that a try is good it is uniform over transitions, so the first good one is, too.
    first = jnp.argmax(good, axis=0)[None, :]
    env, offset, good = (jnp.take_along_axis(x, first, axis=0)[0] for x in (env, offset, good))
    return Index(env, slot_of(state, env, offset)), good


def _locate_by_age(counts: Array, weights: Array, key: Array, num: int) -> tuple[Array, Array]:
    """Environments and offsets [tries, num], drawn by the weights [C] of ages 0, 1, ..."""
    below = jnp.cumsum(jnp.concatenate([jnp.zeros(1), weights]))  # of all younger ages
    ends = jnp.cumsum(below[counts])
    one, other = jax.random.uniform(key, (2, _TRIES, num))
    env = jnp.searchsorted(ends, one * ends[-1], side="right")
    env = jnp.minimum(env, len(counts) - 1)  # all weights 0
    age = jnp.searchsorted(below, other * below[counts[env]], side="right") - 1
    return env, jnp.clip(counts[env] - 1 - age, 0)


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


# Shards: every draw takes the same number of rows from equal blocks of environments. A batch is
# laid out shard by shard along its last index axis, so that an index drawn from a replay says by
# its place which shard it reads. Where the environment axis is divided over as many devices
# (`fast.collectives`), each works on its own shard, without communication; on other numbers,
# or one, operations are batched over the shards, and the same numbers come out.


def split_axis(tree: PyTree, shards: int, axis: int) -> PyTree:
    """Leaves `[..., B, ...] -> [..., shards, B / shards, ...]` at `axis`."""

    def split(x: Array) -> Array:  # without -1, which an empty field leaves open
        return x.reshape(*x.shape[:axis], shards, x.shape[axis] // shards, *x.shape[axis + 1 :])

    return jax.tree.map(split, tree)


def merge_axis(tree: PyTree, axis: int) -> PyTree:
    """Leaves `[..., shards, B / shards, ...] -> [..., B, ...]` at `axis`."""

    def merge(x: Array) -> Array:
        return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])

    return jax.tree.map(merge, tree)


def per_shard(
    local: Callable[..., T], state: ReplayState, *args: PyTree, axes: tuple[int, ...], out: int = 0
) -> T:
    """`local(part, *args)` of every shard, with results concatenated along `out`.

    Args:
      local: a function of a replay that is one shard, and of its part of `args`.
      args: leaves with the rows of all shards along their axis of `axes`.
    """
    shards, whole = state.shards, state.replace(shards=1)
    if shards == 1:
        return local(state, *args)
    axes = (0, *axes)
    if collectives.num_devices() == shards:
        found = collectives.shard_map(local, axes, whole, *args, out=out)
    else:
        parts = [split_axis(x, shards, axis) for x, axis in zip((whole, *args), axes, strict=True)]
        found = merge_axis(jax.vmap(local, in_axes=axes, out_axes=out)(*parts), out)
    return found.replace(shards=shards) if isinstance(found, ReplayState) else found


def draw(
    local: Callable[..., T],
    state: ReplayState,
    key: Array | None,
    batch_size: int,
    *,
    axis: int,
) -> T:
    """`local(state, key, batch_size)` of every shard for its share of the batch, along `axis`.

    Each shard gets a key of its own; None for a `local` that draws nothing at random. Raises
    ValueError where the batch is no multiple of the shards.
    """
    shards = state.shards
    check_batch(batch_size, shards)

    def one(part: ReplayState, shard: Array, keys: Array | None) -> T:
        mine = jax.tree.map(lambda x: x[0], keys)
        return jax.tree.map(
            lambda x: x._replace(env=x.env + shard[0] * dims(part)[0]) if type(x) is Index else x,
            local(part, mine, batch_size // shards),
            is_leaf=lambda x: type(x) is Index,
        )

    if shards == 1:
        return local(state, key, batch_size)
    keys = None if key is None else jax.random.split(key, shards)
    numbers = jnp.arange(shards, dtype=jnp.int32)
    return per_shard(one, state, numbers, keys, axes=(0, 0), out=axis)


def at_index(
    local: Callable[..., T],
    state: ReplayState,
    index: Index,
    *trees: PyTree,
    out: int | None = None,
) -> T:
    """`local(state, index, *trees)` of every shard for its part of the batch.

    Args:
      index: `[..., B]`, laid out as drawn.
      trees: leaves `[..., B, ...]`.
      out: axis of the results' batch; None for that of `index`.

    Raises:
      ValueError: B is no multiple of the shards.
    """
    if state.shards == 1:
        return local(state, index, *trees)
    axis = index.env.ndim - 1
    check_batch(index.env.shape[axis], state.shards)

    def one(part: ReplayState, shard: Array, index: Index, *trees: PyTree) -> T:
        return local(part, Index(index.env - shard[0] * dims(part)[0], index.slot), *trees)

    numbers = jnp.arange(state.shards, dtype=jnp.int32)
    axes = (0, axis, *[axis] * len(trees))
    out = axis if out is None else out
    return per_shard(one, state, numbers, index, *trees, axes=axes, out=out)


def check_batch(batch_size: int, shards: int) -> None:
    """Raises ValueError where a batch cannot be shared out evenly."""
    if batch_size % shards:
        raise ValueError(
            f"a batch of {batch_size} cannot be drawn evenly from {shards} replay shards: choose "
            f"loss.batch_size and reanalyze.batch_size as multiples of {shards}, or fewer shards"
        )
