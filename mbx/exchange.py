"""What a batch shares that is divided among devices: the sums of its parts, in one exchange.

A loss is a function of a batch and knows no devices. Where a run has several
(`mbx.training.sharding`), `apart` calls it once on each of them, with that device's own rows, and
inside of it

    count = exchange.total(jnp.sum(mask))                 # of the whole batch
    share = jnp.sum(x * mask) / count                     # the parts' shares add up to the mean
    grads, metrics = exchange.total((grads, metrics))     # all of it travels as one array

On one device, and outside of `apart`, the parts are the whole: `total(x)` is `x`. Where large
parameters are divided as well (`gathering`) nothing is taken apart: layers ask for `whole` kernels,
and `total` leaves every device its part of a gradient.
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
_gathering = jax.make_user_context(1)
_alike = jax.make_user_context(False)

_LARGE = 2**18  # numbers


def taking_apart(allowed: bool = True) -> AbstractContextManager[None]:
    """A context in which `apart` divides its work among the devices of the mesh that is set.

    For whoever compiles a program for several devices. Not where parameters are divided, too.

    Examples:
        >>> with exchange.taking_apart():  # one device: nothing is divided
        ...     exchange.apart(lambda x: exchange.parts(), (0,), jnp.ones(4))
        1
    """
    return _allowed(allowed)


def gathering(parts: int) -> AbstractContextManager[None]:
    """A context in which large parameters are divided among `parts` devices (1: none are).

    Layers then gather what they use (`whole`), and of a gradient's `total` a device keeps its part.

    Examples:
        >>> with exchange.gathering(8):  # eight devices: the longest axis of large parameters
        ...     exchange.divided_axis((512, 1024), 8)
        1
    """
    return _gathering(parts)


def all_alike(alike: bool) -> AbstractContextManager[None]:
    """A context in which every device holds all states: the compiler has no rows to divide.

    Whoever makes much of each state then takes them `apart` (`alike`).

    Examples:
        >>> with exchange.all_alike(True):
        ...     exchange.alike()
        True
    """
    return _alike(alike)


def alike() -> bool:
    """Whether every device holds all states.

    Examples:
        >>> exchange.alike()
        False
    """
    return bool(_alike.value)


def divided_axis(shape: tuple[int, ...], parts: int) -> int | None:
    """The axis along which parameters of a shape are divided: the longest that can be.

    None for small ones, which are not worth the gathering, and for those with no such axis.

    Examples:
        >>> exchange.divided_axis((5, 512, 1024), 8), exchange.divided_axis((512,), 8)
        (2, None)
    """
    fits = [i for i, n in enumerate(shape) if n % parts == 0]
    if math.prod(shape) < _LARGE or not fits:
        return None
    return max(fits, key=lambda i: shape[i])


def whole(tree: T) -> T:
    """Parameters of which every device may hold a part, whole: as a layer needs them.

    Examples:
        >>> exchange.whole(jnp.ones((2, 2))).shape
        (2, 2)
    """
    if _gathering.value == 1:
        return tree
    return jax.lax.with_sharding_constraint(tree, jax.P())


def _own_part(tree: T) -> T:
    """What a device keeps of gradients where parameters are divided."""
    axis = jax.sharding.get_abstract_mesh().axis_names

    def part(x: Array) -> Array:
        along = divided_axis(jnp.shape(x), _gathering.value)
        if along is None:
            return x
        return jax.lax.with_sharding_constraint(x, jax.P(*[None] * along, axis))

    return jax.tree.map(part, tree)


def apart(function: Callable[..., T], axes: Any, *args: Any, out: Any = None) -> T:
    """`function(*args)`, on every device for its own rows of the batch.

    Without several devices, or where a batch does not divide evenly among them, that is one call
    with all of it.

    Args:
        function: of a batch, whose parts `total` and the rest of this module put together.
        axes: for each argument the axis of its leaves that is divided, None where all devices have
            all of it; or a tree of those, as the argument is one.
        args: arrays, in any trees.
        out: likewise for the result; None where it is the same on all devices.

    Examples:
        >>> exchange.apart(lambda x: exchange.total(jnp.sum(x)), (0,), jnp.ones(4)).tolist()
        4.0
    """
    mesh, names, num = jax.sharding.get_abstract_mesh(), _divisible(), devices()

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
    """The mesh's axes that `apart` divides along here; () where it divides nothing."""
    return tuple(jax.sharding.get_abstract_mesh().auto_axes) if _allowed.value else ()


def devices() -> int:
    """Devices that `apart` would divide a batch among here; 1 inside of it.

    Examples:
        >>> exchange.devices()
        1
    """
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[name] for name in _divisible())


def parts() -> int:
    """Devices that the batch is divided among, inside of `apart`; else 1.

    Examples:
        >>> exchange.parts()
        1
    """
    return math.prod(jax.lax.axis_size(name) for name in _axes.value)


def total(tree: T) -> T:
    """The sum over all parts of every leaf, exchanged as one array of each type.

    Carries no gradient: what is summed is a gradient itself, or a count.

    Examples:
        >>> exchange.total({"loss": 2.0})
        {'loss': 2.0}
    """
    if _gathering.value > 1:
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


def mean(x: Array) -> Array:
    """This part's share of the mean over all parts, which are equally large: they add up to it.

    Examples:
        >>> float(exchange.mean(jnp.array([1.0, 3.0])))
        2.0
    """
    return jnp.mean(x) / parts() if _axes.value else jnp.mean(x)


def together(tree: T, axis: int = 0) -> T:
    """All parts' rows behind one another along `axis`, for what has to see them all: percentiles.

    All leaves, of one type, travel as one array.

    Examples:
        >>> exchange.together(jnp.arange(3)).tolist()
        [0, 1, 2]
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


def largest(x: Array) -> Array:
    """The largest of all parts' numbers.

    Examples:
        >>> exchange.largest(jnp.float32(3.0)).tolist()
        3.0
    """
    if not _axes.value:
        return x
    own = jnp.arange(parts()) == jax.lax.axis_index(_axes.value)
    return jnp.max(total(jnp.where(own, x, jnp.zeros_like(x))))  # joins other sums on their way


def first_row(size: int) -> Array | int:
    """The place of this part's first row among all, of parts of `size` rows.

    Examples:
        >>> exchange.first_row(8)
        0
    """
    return jax.lax.axis_index(_axes.value) * size if _axes.value else 0


def top_k(x: Array, k: int) -> tuple[Array, Array]:
    """`jax.lax.top_k`: the k largest of `[..., N]`, best first, and where they are.

    Where the compiler divides the rows among devices it cannot divide that operation, and would
    gather them; it can divide a sort.

    Examples:
        >>> [x.tolist() for x in exchange.top_k(jnp.array([1.0, 3.0, 2.0]), 2)]
        [[3.0, 2.0], [1, 2]]
    """
    if not jax.sharding.get_abstract_mesh().auto_axes:
        return jax.lax.top_k(x, k)
    places = jax.lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    falling, places = jax.lax.sort((-x, places), num_keys=1, is_stable=True)
    return -falling[..., :k], places[..., :k]
