"""Return estimates from ensembles: what a plan is worth, and how sure the model is of it.

Pure functions of decoded predictions; they know no model. Axes: R reward heads, H dynamics heads
(1 where a state has not been stepped yet), V value heads, T steps; `...` are states and candidates.
Source: document 001, section 6; the spec's a.5 for what its text leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mbx import returns, successors

Array = jax.Array


class Estimate(NamedTuple):
    """value `[...]`: the score. std `[...]`: mean over dynamics heads of the ensembles' standard
    deviation of the return. disagreement `[...]`: standard deviation of the score over them."""

    value: Array
    std: Array
    disagreement: Array


def trajectory_estimate(
    rewards: Sequence[Array],
    values: Sequence[Array],
    factors: Sequence[Array | float],
    *,
    std_coef: float = 0.0,
    aggregate: bool = False,
) -> Estimate:
    """The return of T predicted steps: mean + std_coef * std, reduced over dynamics heads.

    rewards: T times `[R, H or 1, ...]`. values: `[V, H, ...]` of the states after steps 1..T, or of
    the last alone where `aggregate` is off. factors: T+1 weights, the discount times the
    probability of being alive, `[H, ...]` or numbers; factors[t] weighs reward t, factors[T] the
    last value. Variances of rewards and value add over time. The best dynamics head counts where
    std_coef > 0, the worst where < 0, their mean at 0.

    With `aggregate` a head's score is the mean over horizons 1..T of its estimates.
    """
    total: Array | float = 0.0
    variance: Array | float = 0.0
    scores, stds = [], []
    steps = len(rewards)
    for t, reward in enumerate(rewards):
        total = total + factors[t] * jnp.mean(reward, axis=0)
        variance = variance + jnp.square(factors[t] * returns.ensemble_std(reward))
        if aggregate or t + 1 == steps:
            value = values[t] if aggregate else values[-1]
            estimate = total + factors[t + 1] * jnp.mean(value, axis=0)
            value_std = factors[t + 1] * returns.ensemble_std(value)
            std = _safe_sqrt(variance + jnp.square(value_std))
            scores.append(estimate + std_coef * std if std_coef else estimate)
            stds.append(std)
    score = sum(scores[1:], scores[0]) / len(scores)
    std = sum(stds[1:], stds[0]) / len(stds)
    return Estimate(
        value=reduce_dynamics(score, "from_std_coef", std_coef),
        std=jnp.mean(std, axis=0),
        disagreement=returns.ensemble_std(score),
    )


def reduce_dynamics(x: Array, how: str, std_coef: float) -> Array:
    """Over dynamics heads, `[H, ...] -> [...]`, by "mean", "min", "max" or "from_std_coef".

    The heads' next latents are equally likely successors of a state and an action, so their mean is
    a successor expectation (DESIGN, "one train step with all four pieces").
    """
    if x.shape[0] == 1:
        return jnp.squeeze(x, 0)
    if how == "mean" or (how == "from_std_coef" and std_coef == 0.0):
        x = jnp.moveaxis(x, 0, -1)
        return successors.dense_expectation(x, jnp.full_like(x, 1.0 / x.shape[-1]))
    return returns.reduce_heads(x, how, std_coef)


def latent_disagreement(z: Array) -> Array:
    """Variance over dynamics heads, averaged over latent dims: `[H, ..., L] -> [...]`."""
    return jnp.mean(jnp.var(z, axis=0), axis=-1)


def _safe_sqrt(x: Array) -> Array:
    """Square root whose gradient is 0, not infinite, at 0."""
    positive = x > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)
