"""Risk measures: the value of a plan where the model, or the score of a plan, is random.

    cautious = risk.over_samples(score, 8, kind="cvar", share=0.25)
    plan = mppi.plan(key, cautious, mean, std, config=config)

Axes: M samples (of chance, or models), B states, N candidates.
Source: Rockafellar and Uryasev 2000 (CVaR).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mbx.mppi import ScoreFn, may_hold

MEASURES = ("mean", "worst", "cvar")


def measure(values: Array, kind: str = "mean", share: Array | float = 0.25) -> Array:
    """Values of M samples as one: `[M, ...] -> [...]`; higher is better.
    A NaN in any sample makes the result NaN, which planners rank last.

    Args:
        values: `[M, ...]`.
        kind: "mean"; "worst", the lowest; "cvar", the mean of the lowest `share` of the samples
            (the last of them weighted by its fraction in that share).
        share: above 0, to 1 (which is the mean); may be traced.

    Raises:
        ValueError: for another kind, or a share out of range.

    Examples:
        >>> values = jnp.array([4.0, 1.0, 3.0, 2.0])
        >>> [risk.measure(values, kind, 0.5).item() for kind in risk.MEASURES]
        [2.5, 1.0, 1.5]
        >>> round(risk.measure(values, "cvar", 0.375).item(), 4)  # (1 + 2 / 2) / 1.5
        1.3333
    """
    if kind not in MEASURES:
        raise ValueError(f"kind={kind!r}: choose one of {MEASURES}")
    if not (may_hold(share > 0.0) and may_hold(share <= 1.0)):
        raise ValueError(f"share={share} must lie above 0, and be 1 at most")
    if kind == "mean":
        return jnp.mean(values, axis=0)
    if kind == "worst":
        return jnp.min(values, axis=0)
    ordered, num = jnp.sort(values, axis=0), values.shape[0]
    counted = share * num
    weights = jnp.clip(counted - jnp.arange(num), 0.0, 1.0) / counted
    return jnp.tensordot(weights, ordered, axes=1)


def over_samples(
    score_fn: ScoreFn, num: int, *, kind: str = "mean", share: Array | float = 0.25
) -> ScoreFn:
    """A score of plans over `num` samples of a random score; all candidates share the samples.
    `score_fn` maps (key, actions `[B, N, T, A]`) to values `[B, N]`; the key draws a disturbance,
    or one of several models (`jax.random.randint`). It is called once, under `jax.vmap`; its
    auxiliaries are averaged. kind, share: see `measure`.
    Raises ValueError for fewer samples than one, and as `measure`.
    """
    if num < 1:
        raise ValueError(f"num={num} samples: at least one is needed")
    measure(jnp.zeros(1), kind, share)  # refuses what it refuses now, not while planning

    def score(key: Array, actions: Array) -> Any:
        found = jax.vmap(score_fn, (0, None))(jax.random.split(key, num), actions)
        if type(found) is not tuple:
            return measure(found, kind, share)
        values, aux = found
        return measure(values, kind, share), jax.tree.map(lambda x: jnp.mean(x, axis=0), aux)

    return score
