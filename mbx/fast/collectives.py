"""Data parallelism: a function of a batch, run on every device for its own rows.

A loss is a function of a batch and knows no devices. Where a run has several
(`mbx.training.devices`), `shard_map` calls an agent's update once on each of them, and inside of
it

    counts = collectives.psum(jnp.sum(mask, axis=1))         # of the whole batch
    weights = mask / counts                                  # the devices' losses add up
    grads, metrics = collectives.psum((grads, metrics))      # all of it travels as one array

On one device, and outside of `shard_map`, `psum(x)` is `x`. Where large parameters are sharded as
well (`sharded_parameters`), `shard_map` divides nothing: layers ask for replicated kernels, and
`psum` leaves every device its part of a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

T = TypeVar("T")

# Parts of the key of JAX's caches: a program is traced again where they differ.
_allowed = jax.make_user_context(False)
_axes = jax.make_user_context(())
_sharding = jax.make_user_context(1)
_replicated = jax.make_user_context(False)

_LARGE = 2**18  # numbers


def data_parallel(allowed: bool = True) -> AbstractContextManager[None]:
    """A context in which `shard_map` divides batches among the devices of the current mesh.
    Not where parameters are sharded, too.
    """
    return _allowed(allowed)


def sharded_parameters(devices: int) -> AbstractContextManager[None]:
    """A context in which large parameters are sharded over `devices` devices (1: none are)."""
    return _sharding(devices)


def replicated_states(replicated: bool) -> AbstractContextManager[None]:
    """A context in which every device holds all states, so that the compiler divides none."""
    return _replicated(replicated)


def states_are_replicated() -> bool:
    """Whether every device holds all states."""
    return bool(_replicated.value)


def sharded_axis(shape: tuple[int, ...], devices: int) -> int | None:
    """The longest axis along which parameters of a shape can be sharded.
    None for small parameters, which are not worth the gathering, and for those with no such axis.

    Examples:
        >>> collectives.sharded_axis((5, 512, 1024), 8), collectives.sharded_axis((512,), 8)
        (2, None)
    """
    fits = [i for i, n in enumerate(shape) if n % devices == 0]
    if math.prod(shape) < _LARGE or not fits:
        return None
    return max(fits, key=lambda i: shape[i])


def replicate(tree: T) -> T:
    """Gather parameters that may be sharded, for the use in a layer."""
    if _sharding.value == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, jax.P())


def _own_part(tree: T) -> T:
    """The part of gradients that a device keeps where parameters are sharded."""
    name = jax.sharding.get_abstract_mesh().axis_names

    def part(x: Array) -> Array:
        axis = sharded_axis(jnp.shape(x), _sharding.value)
        if axis is None:
            return x
        return jax.lax.with_sharding_constraint(x, jax.P(*[None] * axis, name))

    return jax.tree.map(part, tree)


def shard_map(function: Callable[..., T], axes: Any, *args: Any, out: Any = None) -> T:
    """`function(*args)`, on every device for its own rows of the batch.
    Without several devices, or where a batch does not divide evenly, that is one call with all of
    it.

    Args:
        function: of a batch.
        axes: for each argument its leaves' divided axis, None where all devices have all of it; or
            a tree of those.
        args: arrays, in any trees.
        out: as `axes`, for the result; None where it is equal on all devices.
    """
    mesh, names, num = jax.sharding.get_abstract_mesh(), _divisible(), num_devices()

    def spec(axis: int | None) -> jax.P:
        return jax.P() if axis is None else jax.P(*[None] * axis, names)

    def none(axis: Any) -> bool:
        return axis is None

    def divides(axis: int | None, leaves: Any) -> bool:
        return axis is None or all(x.shape[axis] % num == 0 for x in jax.tree.leaves(leaves))

    if num == 1 or not all(jax.tree.leaves(jax.tree.map(divides, axes, args, is_leaf=none))):
        return function(*args)

    def part(*own: Any) -> T:
        with _axes(names):
            return function(*own)

    return jax.shard_map(
        part,
        mesh=mesh,
        in_specs=jax.tree.map(spec, axes, is_leaf=none),
        out_specs=jax.tree.map(spec, out, is_leaf=none),
        check_vma=False,
    )(*args)


def _divisible() -> tuple[str, ...]:
    """The mesh's axes that `shard_map` divides along here; () where it divides nothing."""
    return tuple(jax.sharding.get_abstract_mesh().auto_axes) if _allowed.value else ()


def num_devices() -> int:
    """Number of devices that `shard_map` would divide a batch among here; 1 inside of it."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in _divisible())


def axis_size() -> int:
    """Number of devices that the batch is divided among, inside of `shard_map`; else 1."""
    return math.prod(jax.lax.axis_size(name) for name in _axes.value)


def psum(tree: T) -> T:
    """The sum over devices of every leaf, exchanged as one array of each type.
    Do not differentiate through it. Use it on gradients, counts and metrics.
    """
    if _sharding.value > 1:
        return _own_part(tree)
    if not _axes.value:
        return tree
    leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
    summed: list[Any] = [None] * len(leaves)
    for dtype in dict.fromkeys(x.dtype for x in leaves):
        places = [i for i, x in enumerate(leaves) if x.dtype == dtype]
        flat = [leaves[i].reshape(-1) for i in places]
        joined = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
        joined = jax.lax.psum(joined, _axes.value)
        start = 0
        for i in places:
            end = start + leaves[i].size
            summed[i] = joined[start:end].reshape(leaves[i].shape)
            start = end
    return jax.tree.unflatten(structure, summed)


def mean_share(x: Array) -> Array:
    """This device's share of the mean of all devices' numbers: `psum` of them is the mean."""
    return jnp.mean(x) / axis_size() if _axes.value else jnp.mean(x)


def all_gather(tree: T, axis: int = 0) -> T:
    """All devices' rows concatenated along `axis`, for example for percentiles.
    All leaves, of one type, are exchanged as one array.
    """
    if not _axes.value:
        return tree
    leaves, structure = jax.tree.flatten(tree)
    rows = [jnp.moveaxis(x, axis, 0) for x in leaves]
    joined = jax.lax.all_gather(jnp.concatenate([x.reshape(-1) for x in rows]), _axes.value)
    ends = np.cumsum([x.size for x in rows])[:-1]
    pieces = zip(rows, jnp.split(joined, ends, axis=1), strict=True)
    whole = [jnp.moveaxis(p.reshape(-1, *x.shape[1:]), 0, axis) for x, p in pieces]
    return jax.tree.unflatten(structure, whole)


def pmax(x: Array) -> Array:
    """Maximum over all devices."""
    if not _axes.value:
        return x
    own = jnp.arange(axis_size()) == jax.lax.axis_index(_axes.value)
    return jnp.max(psum(jnp.where(own, x, jnp.zeros_like(x))))  # joins other sums on their way


def row_offset(size: int) -> Array | int:
    """Index of this device's first row in the whole batch, where each device has `size` rows."""
    return jax.lax.axis_index(_axes.value) * size if _axes.value else 0


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """`jax.lax.top_k`: the k largest of `[..., N]`, best first, and their indices.
    Where rows are divided among devices it is a sort: the compiler would gather them for `top_k`.
    """
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return jax.lax.top_k(x, k)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    falling, places = jax.lax.sort((-x, places), num_keys=1, is_stable=True)
    return -falling[..., :k], places[..., :k]


# Former names, for code outside of mbx.
taking_apart, apart, total, together = data_parallel, shard_map, psum, all_gather
