"""Sums, means and maxima over the last axis of many short rows, fast on a CPU.

`[..., F]` -> `[..., 1]`, in float32, with F from tens to hundreds: features of a layer, bins of a
distribution. XLA on a CPU takes about twice as long for a sum as for a product with a vector of
ones, and three times as long for a maximum as for maxima of halves. Elsewhere they are the plain
reductions, which other compilers fuse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

# Columns of ones that a sum is a product with. With one, XLA writes a loop for every product and
# compiles it; with two it calls a library's product, which takes less to compile and more to run.
ONES = 1
# Columns that a maximum is folded down to before the last of them are compared one by one.
_FOLDED = 13


def _on_cpu(plain: Callable[..., Array]) -> Callable[[Callable[..., Array]], Callable[..., Array]]:
    """Decorates a reduction's form for CPUs; elsewhere it is `plain`."""

    def decorate(fast: Callable[..., Array]) -> Callable[..., Array]:
        @jax.jit
        @functools.wraps(fast)
        def reduction(*args: Array) -> Array:
            # A new function at each tracing: of one that it knows JAX would take an old trace.
            return jax.lax.platform_dependent(*args, cpu=lambda *x: fast(*x), default=plain)

        return reduction

    return decorate


def expand(x: Array, ndim: int) -> Array:
    """`x` `[F]` with leading axes of size one, so that rank promotion stays explicit."""
    return x.reshape((1,) * (ndim - 1) + x.shape)


@_on_cpu(lambda x, weights: jnp.stack([(x * expand(w, x.ndim)).sum(-1) for w in weights.T], -1))
def sums(x: Array, weights: Array) -> Array:
    """Weighted sums over the last axis: `[..., F]`, `[F, n]` -> `[..., n]`."""
    return jnp.matmul(x, weights, precision="highest")


@_on_cpu(lambda x: jnp.sum(x, axis=-1, keepdims=True))
def total(x: Array) -> Array:
    """Sum over the last axis, which stays: `[..., F]` -> `[..., 1]`."""
    ones = jnp.ones((x.shape[-1], ONES), x.dtype)
    return jax.lax.slice_in_dim(jnp.matmul(x, ones, precision="highest"), 0, 1, axis=-1)


@_on_cpu(lambda x: jnp.sum(x, axis=tuple(range(x.ndim - 1))))
def down(x: Array) -> Array:
    """Sum over all axes but the last: `[..., F]` -> `[F]`."""
    if x.ndim == 1:
        return x
    # Ones that depend on x: of heads side by side (`jax.vmap`) every head has its own, and the
    # product needs no transposed x. The compiler knows that they are ones.
    ones = jnp.where(x[..., 0] == 0.0, 1.0, 1.0).astype(x.dtype)
    # Where the compiler divides rows among devices, one axis of all would gather them on each.
    if not jax.sharding.get_abstract_mesh().auto_axes:
        ones, x = ones.reshape(-1), x.reshape(-1, x.shape[-1])
    axes = tuple(range(x.ndim - 1))
    ones = ones if ONES == 1 else jnp.stack([ones] * ONES, axis=-1)
    out = jax.lax.dot_general(ones, x, ((axes, axes), ((), ())), precision="highest")
    return out if ONES == 1 else out[0]


def mean(x: Array) -> Array:
    """Mean over the last axis, which stays: `[..., F]` -> `[..., 1]`."""
    return total(x) * (1.0 / x.shape[-1])


@_on_cpu(lambda x: jnp.max(x, axis=-1, keepdims=True))
def largest(x: Array) -> Array:
    """Maximum over the last axis, which stays: `[..., F]` -> `[..., 1]`; NaN where there is one."""
    while (columns := x.shape[-1]) > _FOLDED:
        half = -(-columns // 2)
        x = jnp.maximum(x[..., :half], x[..., columns - half :])
    return jnp.max(jax.lax.optimization_barrier(x), axis=-1, keepdims=True)
