"""Mean and variance of what a network reads, made from the batches that it learns from.

    statistics = running_statistics.init(3)
    statistics = running_statistics.update(statistics, rows)    # `[..., 3]`
    inputs = running_statistics.normalize(statistics, rows)     # of mean 0 and variance 1

Every batch counts alike; in SimBa's RSNorm (arXiv 2410.09754) every observation that comes does.
They are among a model's parameters, so that whoever has those has them, but no gradient moves them.
"""

from __future__ import annotations

import jax.numpy as jnp

from mbx import exchange
from mbx.types import Array, Params

# What did not vary so far is no more than a hundred times as large once it does.
LEAST_VARIANCE = 1e-4


def init(size: int) -> Params:
    """Before the first batch: numbers stay as they are, but for the least variance.

    Args:
        size: of a row, D.

    Returns:
        "mean" and "variance" `[D]`, "count" of batches.
    """
    return dict(mean=jnp.zeros(size), variance=jnp.ones(size), count=jnp.float32(0.0))


def update(statistics: Params, rows: Array) -> Params:
    """Statistics of one batch more, `[..., D]`: of all its parts where devices share it.

    Means and variances of the two are joined about the old mean, so that large numbers which vary
    by little cost no precision (Chan, Golub, LeVeque 1983).

    Examples:
        >>> known = running_statistics.update(running_statistics.init(1), jnp.array([[1.0], [3.0]]))
        >>> known["mean"].tolist(), known["variance"].tolist()
        ([2.0], [1.0])
    """
    mean, variance, count = (statistics[name] for name in ("mean", "variance", "count"))
    off = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32) - mean[None]
    share = 1.0 / exchange.parts()
    moments = jnp.mean(off, axis=0) * share, jnp.mean(off**2, axis=0) * share
    moved, squares = exchange.total(moments)
    weight = 1.0 / (count + 1.0)
    own = jnp.maximum(squares - moved**2, 0.0)
    return dict(
        mean=mean + weight * moved,
        variance=(1.0 - weight) * (variance + weight * moved**2) + weight * own,
        count=count + 1.0,
    )


def normalize(statistics: Params, rows: Array) -> Array:
    """Rows `[..., D]` less the mean, in standard deviations."""
    shape = (1,) * (rows.ndim - 1) + (-1,)
    mean, variance = (statistics[name].reshape(shape) for name in ("mean", "variance"))
    return (rows - mean) / jnp.sqrt(variance + LEAST_VARIANCE)
