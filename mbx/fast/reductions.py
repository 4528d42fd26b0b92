"""Sums, means and maxima over the last axis of many short rows, fast on a CPU.

`[..., F]` -> `[..., 1]`, in float32, with F from tens to hundreds: features of a layer, bins of a
distribution. XLA on a CPU takes about twice as long for a sum as for a product with a vector of
ones, and three times as long for a maximum as for maxima of halves. Elsewhere they are the plain
reductions, which other compilers fuse.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

# Columns of ones that a sum is a product with. With one, XLA writes a loop for every product and
# compiles it; with two it calls a library's product, which takes less to compile and more to run.
ONES = 1
# Columns that a maximum is folded down to before the last of them are compared one by one.
_FOLDED = 13


@jax.jit
def sums(x: Array, weights: Array) -> Array:
    """Weighted sums over the last axis: `[..., F]`, `[F, n]` -> `[..., n]`."""

    def product(x: Array, weights: Array) -> Array:
        return jnp.matmul(x, weights, precision="highest")

    def plain(x: Array, weights: Array) -> Array:
        each = [jnp.sum(x * expand(w, x.ndim), axis=-1) for w in weights.T]
        return jnp.stack(each, axis=-1)

    return jax.lax.platform_dependent(x, weights, cpu=product, default=plain)


def expand(x: Array, ndim: int) -> Array:
    """`x` `[F]` with leading axes of size one, so that rank promotion stays explicit."""
    return x.reshape((1,) * (ndim - 1) + x.shape)


@jax.jit
def total(x: Array) -> Array:
    """Sum over the last axis, which stays: `[..., F]` -> `[..., 1]`."""

    def product(x: Array) -> Array:
        ones = jnp.ones((x.shape[-1], ONES), x.dtype)
        return jax.lax.slice_in_dim(jnp.matmul(x, ones, precision="highest"), 0, 1, axis=-1)

    def plain(x: Array) -> Array:
        return jnp.sum(x, axis=-1, keepdims=True)

    return jax.lax.platform_dependent(x, cpu=product, default=plain)


@jax.jit
def down(x: Array) -> Array:
    """Sum over all axes but the last: `[..., F]` -> `[F]`."""
    lead = tuple(range(x.ndim - 1))

    def product(x: Array) -> Array:
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

    def plain(x: Array) -> Array:
        return jnp.sum(x, axis=lead)

    return jax.lax.platform_dependent(x, cpu=product, default=plain) if lead else x


def mean(x: Array) -> Array:
    """Mean over the last axis, which stays: `[..., F]` -> `[..., 1]`."""
    return total(x) * (1.0 / x.shape[-1])


@jax.jit
def largest(x: Array) -> Array:
    """Maximum over the last axis, which stays: `[..., F]` -> `[..., 1]`; NaN where there is one."""

    def plain(x: Array) -> Array:
        return jnp.max(x, axis=-1, keepdims=True)

    def folded(x: Array) -> Array:
        while (columns := x.shape[-1]) > _FOLDED:
            half = -(-columns // 2)
            x = jnp.maximum(x[..., :half], x[..., columns - half :])
        return plain(jax.lax.optimization_barrier(x))

    return jax.lax.platform_dependent(x, cpu=folded, default=plain)
