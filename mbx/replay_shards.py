"""A replay in equal shards of its environments: every draw takes the same number of rows from each.

A batch is laid out shard by shard along its last index axis, so that an index drawn from a replay
says by its place which shard it reads. A shard is a slice of the environment axis. Where that axis
is divided over as many devices (`mbx.exchange`), every one of them works on its own shard, without
communication; on other numbers of devices, or one, operations are batched over the shards, and the
same numbers come out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from mbx import exchange
from mbx.replay_storage import Index, ReplayState, dims

PyTree = Any
T = TypeVar("T")


def split_axis(tree: PyTree, shards: int, axis: int) -> PyTree:
    """Leaves `[..., B, ...] -> [..., shards, B / shards, ...]` at `axis`."""

    def split(x: Array) -> Array:
        return x.reshape(*x.shape[:axis], shards, x.shape[axis] // shards, *x.shape[axis + 1 :])

    return jax.tree.map(split, tree)


def merge_axis(tree: PyTree, axis: int) -> PyTree:
    """Leaves `[..., shards, B / shards, ...] -> [..., B, ...]` at `axis`."""

    def merge(x: Array) -> Array:
        return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])

    return jax.tree.map(merge, tree)


def draw(
    local: Callable[..., T],
    state: ReplayState,
    key: Array | None,
    batch_size: int,
    *,
    axis: int,
    own: Array | None = None,
) -> T:
    """`local(state, key, batch_size)` of every shard for its share of the batch, along `axis`.

    Each shard gets a key of its own; None for a `local` that draws nothing at random.

    Args:
      own: `[shards, ...]`, of which `local` takes its shard's part as a fourth argument.

    Raises:
      ValueError: the batch is no multiple of the shards.
    """
    shards = state.shards
    if shards == 1:
        return local(state, key, batch_size, *([] if own is None else [own[0]]))
    check_batch(batch_size, shards)

    def one(shard: Array, key: Array | None, own: Array | None, part: ReplayState) -> T:
        extra = () if own is None else (own,)
        return _shifted(local(part, key, batch_size // shards, *extra), shard * dims(part)[0])

    keys = None if key is None else jax.random.split(key, shards)
    return _each(one, state, (jnp.arange(shards), keys, own), out=axis)


def look(local: Callable[..., T], state: ReplayState, index: Index) -> T:
    """`local(state, index)` of every shard for its part of the batch, `[..., B, ...]`.

    index `[..., B]`: laid out as drawn. Raises ValueError where B is no multiple of the shards.
    """
    if state.shards == 1:
        return local(state, index)
    return _at_index(local, state, index, (), out=index.env.ndim - 1)


def change(
    local: Callable[..., ReplayState], state: ReplayState, index: Index, *trees: PyTree
) -> ReplayState:
    """The replay after `local(state, index, *trees)` of every shard.

    index `[..., B]`: laid out as drawn. trees: leaves `[..., B, ...]`. Raises as `look`.
    """
    if state.shards == 1:
        return local(state, index, *trees)
    return _at_index(local, state, index, trees, out=0).replace(shards=state.shards)


def _at_index(
    local: Callable[..., Any], state: ReplayState, index: Index, trees: tuple, out: int
) -> Any:
    axis = index.env.ndim - 1
    check_batch(index.env.shape[axis], state.shards)

    def one(shard: Array, part: ReplayState, index: Index, *trees: PyTree) -> Any:
        return local(part, Index(index.env - shard * dims(part)[0], index.slot), *trees)

    return _each(one, state, (jnp.arange(state.shards),), (index, *trees), axis=axis, out=out)


def rowwise(local: Callable[..., ReplayState], state: ReplayState, *trees: PyTree) -> ReplayState:
    """`local(state, *trees)` of every shard with its environments' part of trees `[E, ...]`."""
    if state.shards == 1:
        return local(state, *trees)
    return _each(local, state, (), trees, out=0).replace(shards=state.shards)


def _each(
    local: Callable[..., Any],
    state: ReplayState,
    own: tuple = (),
    trees: tuple = (),
    *,
    axis: int = 0,
    out: int,
) -> Any:
    """`local(*own, part, *trees)` of every shard, with results behind one another along `out`.

    Args:
      local: a shard's own, of a replay that is one shard.
      own: leaves `[shards, ...]`, of which each shard gets its entry.
      trees: leaves with the rows of all shards along `axis`.
    """
    shards, whole = state.shards, state.replace(shards=1)
    if exchange.devices() == shards:

        def here(own: tuple, part: ReplayState, trees: tuple) -> Any:
            return local(*jax.tree.map(lambda x: x[0], own), part, *trees)

        return exchange.apart(here, (0, 0, axis), own, whole, trees, out=out)
    inputs = (*own, split_axis(whole, shards, 0), *split_axis(trees, shards, axis))
    axes = (*[0] * (len(own) + 1), *[axis] * len(trees))
    return merge_axis(jax.vmap(local, in_axes=axes, out_axes=out)(*inputs), out)


def check_batch(batch_size: int, shards: int) -> None:
    """Raises ValueError where a batch cannot be shared out evenly."""
    if batch_size % shards:
        raise ValueError(
            f"a batch of {batch_size} cannot be drawn evenly from {shards} replay shards: choose "
            f"loss.batch_size and reanalyze.batch_size as multiples of {shards}, or fewer shards"
        )


def _shifted(result: T, first: Array) -> T:
    """Every index in `result` with its environments counted from the first shard's."""

    def shift(x: Any) -> Any:
        return Index(x.env + first, x.slot) if isinstance(x, Index) else x

    return jax.tree.map(shift, result, is_leaf=lambda x: isinstance(x, Index))
