"""Muon for the matrices of a network, another optimiser for the rest.

    scale = optim.scale_by_muon(optax.scale_by_adam())
    optimizer = optax.chain(scale, optax.scale_by_learning_rate(3e-4))

Momentum of a matrix is made nearly orthogonal (Newton-Schulz steps, `optax.contrib.scale_by_muon`)
and scaled so that its entries change about as much as Adam's: rates carry over.

Sources: Jordan et al. 2024 (Muon); Liu et al. 2025, arXiv 2502.16982, equation 4 (the scale).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers
from optax.contrib import scale_by_muon as orthogonalize

from mbx.types import Array, Params

RMS = 0.2  # root mean square of an update before its rate: about Adam's


def is_matrix(path: tuple[Any, ...], leaf: Array) -> bool:
    """Whether a leaf is a matrix by its name, `kernel`: of a layer, an ensemble, a convolution."""
    return getattr(path[-1], "key", None) == "kernel" and 2 <= leaf.ndim <= 4


def scale_by_muon(
    rest: optax.GradientTransformation, momentum: float = 0.95
) -> optax.GradientTransformation:
    """Matrices (`is_matrix`) by Muon with Nesterov's momentum, every other leaf by `rest`.

    A kernel is `[in, out]`; of an ensemble `[H, in, out]`, a matrix a member; of a convolution
    `[height, width, in, out]`, all but the last its input. The learning rate is to follow, as after
    `optax.scale_by_adam`.

    Examples:
        >>> import optax
        >>> optimizer = optim.scale_by_muon(optax.identity())
        >>> grads = {"kernel": jnp.eye(2), "bias": jnp.ones(2)}
        >>> step = lambda grads: optimizer.update(grads, optimizer.init(grads))[0]
        >>> jax.eval_shape(step, grads)["kernel"].shape
        (2, 2)
    """
    matrices = optax.chain(
        orthogonalize(beta=momentum, weight_dimension_numbers=_every(_axes)),
        optax.stateless(lambda updates, _: jax.tree.map(_scaled, updates)),
    )

    def labels(params: Params) -> Any:
        name = lambda path, leaf: "matrices" if is_matrix(path, leaf) else "rest"  # noqa: E731
        return jax.tree_util.tree_map_with_path(name, params)

    return optax.partition({"matrices": matrices, "rest": rest}, labels)


def _every(function: Any) -> Any:
    """Of every leaf that is for Muon (the others are `optax.MaskedNode`s, without leaves)."""
    return lambda updates: jax.tree.map(function, updates)


def _axes(leaf: Array) -> MuonDimensionNumbers:
    """What is summed over, and what comes out; any other axis is of an ensemble."""
    inputs = (0, 1, 2) if leaf.ndim == 4 else (leaf.ndim - 2,)
    return MuonDimensionNumbers(inputs, leaf.ndim - 1)


def _scaled(step: Array) -> Array:
    """An orthogonal step of a root mean square of `RMS`, whatever the matrix's shape."""
    inputs = math.prod(step.shape[:3]) if step.ndim == 4 else step.shape[-2]
    return RMS * math.sqrt(max(inputs, step.shape[-1])) * step
