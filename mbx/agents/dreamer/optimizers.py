"""Optimisers of Dreamer: the official one (adaptive clipping, RMS scaling, momentum) and Adam.

Source: official DreamerV3; sheeprl for the Adams.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.settings import GROUPS, Optimizer
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

    def update(grads: Params, state: ScaleState, params: Params = None) -> tuple[Params, Any]:
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


def make_optimizers(own: Optimizer, net: ModelConfig) -> dict[str, optax.GradientTransformation]:
    """An optimiser for each group of parameters."""
    own = own.resolved()

    def of_group(group: str, rate: float, clip: float, eps: float) -> optax.GradientTransformation:
        tensor_of = functools.partial(official_tensor, net, group)
        return make(own.name, rate, clip=clip, eps=eps, warmup=own.warmup, tensor_of=tensor_of)

    numbers = zip(own.learning_rates, own.clips, own.epsilons, strict=True)
    return {group: of_group(group, *given) for group, given in zip(GROUPS, numbers, strict=True)}


def make(
    name: str,
    learning_rate: float,
    *,
    clip: float,
    eps: float,
    warmup: int = 0,
    tensor_of: Callable[[str], Tensor] = Tensor,
) -> optax.GradientTransformation:
    """The optimiser of a name: "laprop", the official one, after an adaptive clip, or "adam" after
    a clip of the global norm. A clip of 0 is none. The rate rises linearly from 0 at the first of
    `warmup` updates.
    """
    rate = optax.linear_schedule(0.0, learning_rate, warmup) if warmup else learning_rate
    if name == "laprop":
        clipping = clip_adaptively(clip, tensor_of=tensor_of)
        solver = (scale_by_laprop(eps=eps), optax.scale_by_learning_rate(rate))
    else:
        clipping, solver = optax.clip_by_global_norm(clip), (optax.adam(rate, eps=eps),)
    return optax.chain(clipping if clip else optax.identity(), *solver)


# Leaves that are one tensor in the official code (`core="dense"`: in sheeprl's).
_JOINED = {
    **{f"rssm/hidden_{x}/kernel": "rssm/hidden/kernel" for x in "hxa"},
    **{f"rssm/in_{x}/kernel": "rssm/in/kernel" for x in "za"},
    **{f"rssm/posterior/{x}/kernel": "rssm/posterior/kernel" for x in ("deter", "tokens")},
}


def official_tensor(net: ModelConfig, group: str, path: str) -> Tensor:
    """The tensor that a leaf of a group of parameters is, or is a part of, in the official code."""
    if group == "model":
        if path.startswith("decoder/vector/out/"):  # a linear output each part of the vector
            sizes = tuple(math.prod(part.shape) for part in net.parts if not part.is_image)
            return Tensor(path, sizes if len(sizes) > 1 else ())
        joined = path in _JOINED and (net.core == "dense" or not path.startswith("rssm/in_"))
        return Tensor(_JOINED[path] if joined else path)
    means_and_stds = group == "actor" and path.startswith("out/") and not net.discrete
    return Tensor(path, (net.action_dim,) * 2 if means_and_stds else ())
