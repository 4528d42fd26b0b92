"""Gradient transformations of the official DreamerV3, as optax has them: clipping and LaProp."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mbx.fast import reductions
from mbx.types import Array, Params


class ScaleState(NamedTuple):
    """Updates made, int32, and the averages of squared and of scaled gradients."""

    count: Array
    square: Params
    momentum: Params


class Tensor(NamedTuple):
    """What a leaf is to adaptive clipping."""

    name: str  # leaves of one name are one tensor
    sizes: tuple[int, ...] = ()  # of parts of the last axis that are a tensor each; (): one


def clip_adaptively(
    ratio: float = 0.3, minimum: float = 1e-3, tensor_of: Callable[[str], Tensor] = Tensor
) -> optax.GradientTransformation:
    """Every tensor's gradient norm at most `ratio` times its parameter's (at least `minimum`).
    `tensor_of` gives the tensor of a leaf from its path, names joined by "/".
    Source: adaptive gradient clipping (arXiv 2102.06171) without its units, as in the official
    code of DreamerV3.
    """

    def squares(leaf: Array, sizes: tuple[int, ...]) -> Array:
        parts = jnp.split(leaf, np.cumsum(sizes)[:-1], axis=-1) if sizes else [leaf]
        return jnp.stack([jnp.sum(jnp.square(part)) for part in parts])

    def clipped(tensor: Tensor, grad: Array, norms: dict[str, Array]) -> Array:
        norm, own = jnp.sqrt(norms[tensor.name])
        divisor = jnp.maximum(1.0, norm / (ratio * jnp.maximum(own, minimum)))
        if tensor.sizes:
            sizes = np.asarray(tensor.sizes)
            divisor = jnp.repeat(divisor, sizes, total_repeat_length=grad.shape[-1])
        return grad / reductions.expand(divisor, grad.ndim)

    def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        flat, tree = jax.tree_util.tree_flatten_with_path(grads)
        tensors = [tensor_of("/".join(key.key for key in path)) for path, _ in flat]
        norms: dict[str, Array] = {}
        for tensor, (_, grad), param in zip(tensors, flat, jax.tree.leaves(params), strict=True):
            both = jnp.stack([squares(grad, tensor.sizes), squares(param, tensor.sizes)])
            norms[tensor.name] = norms.get(tensor.name, 0.0) + both
        leaves = [clipped(t, grad, norms) for t, (_, grad) in zip(tensors, flat, strict=True)]
        return jax.tree.unflatten(tree, leaves), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_laprop(
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-20
) -> optax.GradientTransformation:
    """Momentum of gradients that are first divided by their root mean square, both bias-corrected.
    Source: LaProp (arXiv 2002.04839).
    """

    def init(params: Params) -> ScaleState:
        zeros = functools.partial(jax.tree.map, jnp.zeros_like, params)
        return ScaleState(jnp.int32(0), zeros(), zeros())

    def update(
        grads: Params, state: ScaleState, params: Params | None = None
    ) -> tuple[Params, Any]:
        count = state.count + 1
        power = count.astype(jnp.float32)
        bias2, bias1 = 1.0 - beta2**power, 1.0 - beta1**power

        def squared(v: Array, g: Array) -> Array:
            return beta2 * v + (1.0 - beta2) * jnp.square(g)

        def moved(m: Array, g: Array, v: Array) -> Array:
            return beta1 * m + (1.0 - beta1) * g / (jnp.sqrt(v / bias2) + eps)

        square = jax.tree.map(squared, state.square, grads)
        momentum = jax.tree.map(moved, state.momentum, grads, square)
        return jax.tree.map(lambda m: m / bias1, momentum), ScaleState(count, square, momentum)

    return optax.GradientTransformation(init, update)
