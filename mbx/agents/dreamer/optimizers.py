"""Optimisers of Dreamer: the official one (adaptive clipping, RMS scaling, momentum), and Adam.

Source: official DreamerV3; sheeprl for the Adams.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mbx.types import Array, Params


class ScaleState(NamedTuple):
    """Updates made, int32, and the averages of squared and of scaled gradients."""

    count: Array
    square: Params
    momentum: Params


def clip_adaptively(ratio: float = 0.3, minimum: float = 1e-3) -> optax.GradientTransformation:
    """Every tensor's gradient norm at most `ratio` times its parameter's (at least `minimum`)."""

    def clip(grad: Array, param: Array) -> Array:
        limit = ratio * jnp.maximum(jnp.linalg.norm(param.reshape(-1)), minimum)
        return grad / jnp.maximum(1.0, jnp.linalg.norm(grad.reshape(-1)) / limit)

    def update(grads: Params, state: Any, params: Params) -> tuple[Params, Any]:
        return jax.tree.map(clip, grads, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def scale_by_laprop(
    beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-20
) -> optax.GradientTransformation:
    """Momentum of gradients that are first divided by their root mean square, both bias-corrected.

    Source: LaProp (arXiv 2002.04839).
    """

    def init(params: Params) -> ScaleState:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return ScaleState(jnp.int32(0), zeros, jax.tree.map(jnp.zeros_like, params))

    def update(grads: Params, state: ScaleState, params: Params = None) -> tuple[Params, Any]:
        count = state.count + 1
        square = jax.tree.map(
            lambda v, g: beta2 * v + (1.0 - beta2) * jnp.square(g), state.square, grads
        )
        power = count.astype(jnp.float32)
        bias2, bias1 = 1.0 - beta2**power, 1.0 - beta1**power
        momentum = jax.tree.map(
            lambda m, g, v: beta1 * m + (1.0 - beta1) * g / (jnp.sqrt(v / bias2) + eps),
            state.momentum,
            grads,
            square,
        )
        updates = jax.tree.map(lambda m: m / bias1, momentum)
        return updates, ScaleState(count, square, momentum)

    return optax.GradientTransformation(init, update)


def laprop(
    learning_rate: float, *, clip: float = 0.3, eps: float = 1e-20, warmup: int = 1000
) -> optax.GradientTransformation:
    """The official optimiser; the rate rises linearly from 0 at the first of `warmup` updates."""
    rate = learning_rate
    if warmup:
        rate = optax.linear_schedule(0.0, learning_rate, warmup)
    return optax.chain(
        clip_adaptively(clip), scale_by_laprop(eps=eps), optax.scale_by_learning_rate(rate)
    )


def adam(
    learning_rate: float, *, clip: float, eps: float, warmup: int = 0
) -> optax.GradientTransformation:
    """Adam after a global-norm clip (0: none)."""
    rate = optax.linear_schedule(0.0, learning_rate, warmup) if warmup else learning_rate
    clipping = optax.clip_by_global_norm(clip) if clip else optax.identity()
    return optax.chain(clipping, optax.adam(rate, eps=eps))
