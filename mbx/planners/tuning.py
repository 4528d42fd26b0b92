"""Random search for a planner's temperature and deviation on given scores.

    found = tuning.tune(key, tuning.plan_value(score, mean, config=config))
    config = dataclasses.replace(
        config, temperature=found.temperature, max_std=found.deviation
    )
    std = jnp.full_like(mean, found.deviation)

Successive halving: every pair is tried once, the better half again, and so on. These two numbers
have no natural unit in MPPI: the temperature has that of the score (or its inverse).

Axes: B states, T horizon, A action dims.
Sources: Bergstra and Bengio 2012 (random search); Jamieson and Talwalkar 2016, arXiv 1502.07943
(successive halving).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx import mppi
from mbx.mppi import MPPIConfig, ScoreFn

ValueFn = Callable[[Array, Array, Array], Array]  # (key, temperature, deviation) -> value


class Tuned(NamedTuple):
    """Result of `tune`: the best pair, and the mean of its values."""

    temperature: float
    deviation: float
    value: float


def tune(
    key: Array,
    value_fn: ValueFn,
    *,
    temperatures: tuple[float, float] = (0.01, 100.0),
    deviations: tuple[float, float] = (0.05, 2.0),
    num: int = 16,
) -> Tuned:
    """The best of `num` pairs of temperature and deviation, drawn log-uniformly.
    In each pass all remaining pairs are valued with the same new key, and the worse half by mean
    value is dropped, until one is left: about 2 `num` values in all. Values that are not finite
    rank last.

    Args:
        key: consumed.
        value_fn: (key, temperature, deviation) -> a number, higher is better; compiled once.
            `plan_value`, or a custom episode.
        temperatures, deviations: lowest and highest.
        num: pairs drawn.

    Raises:
        ValueError: for a range that is not above 0 or is reversed, or no pair.
    """
    for name, (low, high) in (("temperatures", temperatures), ("deviations", deviations)):
        if not 0.0 < low <= high < math.inf:
            raise ValueError(f"{name}={(low, high)} must be (lowest, highest), both above 0")
    if num < 1:
        raise ValueError(f"num={num} pairs: at least one is needed")
    draw_key, key = jax.random.split(key)
    low, high = np.log(np.array([temperatures, deviations])).T
    share = np.asarray(jax.random.uniform(draw_key, (num, 2), jnp.float32))
    pairs = np.exp(low + share * (high - low)).astype(np.float32)
    compiled = jax.jit(value_fn)
    sums, left, passes = np.zeros(num), np.arange(num), 0
    while True:
        key, one = jax.random.split(key)
        found = np.array([float(compiled(one, *map(jnp.float32, pairs[i]))) for i in left])
        sums[left] += np.where(np.isfinite(found), found, -math.inf)
        left, passes = left[np.argsort(-sums[left], kind="stable")], passes + 1
        if len(left) == 1:
            temperature, deviation = map(float, pairs[left[0]])
            return Tuned(temperature, deviation, float(sums[left[0]]) / passes)
        left = left[: -(-len(left) // 2)]


def plan_value(
    score_fn: ScoreFn, mean: Array, *, config: MPPIConfig, plan: Any = mppi.plan
) -> ValueFn:
    """Value of plans from `mean` `[B, T, A]` by their own score, averaged over states.
    The plan valued is what `config.selection` executes: with "mean" the refitted mean, scored once
    more; else the best candidate of the last round. The score is the planner's: what a short
    horizon misses, it misses, too. `plan` has the signature of `mppi.plan`.
    """

    def value(key: Array, temperature: Array, deviation: Array) -> Array:
        own = dataclasses.replace(
            config,
            temperature=temperature,
            max_std=deviation,
            min_std=jnp.minimum(config.min_std, deviation),
        )
        plan_key, score_key = jax.random.split(key)
        found = plan(plan_key, score_fn, mean, jnp.full_like(mean, deviation), config=own)
        if config.selection != "mean":
            return jnp.mean(jnp.max(found.values, axis=1))
        return jnp.mean(mppi.checked_score(score_fn)(score_key, found.mean[:, None])[0])

    return value
