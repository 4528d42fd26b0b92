"""Plans with fewer parameters than steps: control points, smoothing, and both, for any planner.

    basis = bases.control_points(5, horizon=20, kind="cubic")
    plan = bases.over(mppi.plan, basis)(key, score, mean, std, config=config)

A basis is two matrices: from parameters to actions and back. `over` lets a planner search among the
parameters while the score, the warm start and the result stay sequences of actions.

Axes: B states, N candidates, P proposals, T horizon, A action dims, K parameters a dimension.
Sources: Howell et al. 2022, arXiv 2212.00541, section 3 (splines); Vlahov et al. 2024, arXiv
2307.15239 (smooth noise in MPPI). Inversion by least squares and smoothing as a basis are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mbx import mppi
from mbx.mppi import Array, MPPIConfig, Plan, ScoreFn

KINDS = ("zero", "linear", "cubic")


class Basis(NamedTuple):
    """Linear maps between a dimension's actions and its parameters."""

    forward: Any  # `[T, K]`: actions = forward @ parameters, clipped to [-1, 1]
    back: Any  # `[K, T]`: parameters = back @ actions


def control_points(num: int, *, horizon: int, kind: str = "linear") -> Basis:
    """Sequences through `num` points, evenly spread over the horizon; back by least squares.

    Args:
        num: points K, 1 to T. The first action is the first point.
        horizon: steps T.
        kind: interpolation: "zero" keeps the last point (stretches of equal length), "linear", or
            "cubic" (natural spline).

    Raises:
        ValueError: for another kind, or no such number of points.

    Examples:
        >>> bases.control_points(2, horizon=3, kind="linear").forward.tolist()
        [[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]
        >>> bases.control_points(2, horizon=4, kind="zero").back.round(2).tolist()
        [[0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r}: choose one of {KINDS}")
    if not 1 <= num <= horizon:
        raise ValueError(f"num={num} control points: 1 to horizon={horizon} are distinct")
    points, steps = np.eye(num), np.arange(horizon)
    if kind == "zero":
        forward = points[steps * num // horizon]
    elif num == 1:
        forward = np.ones((horizon, 1))
    else:
        at = np.linspace(0.0, horizon - 1.0, num)
        forward = np.stack([np.interp(steps, at, point) for point in points], axis=1)
        if kind == "cubic" and num > 2:
            from scipy.interpolate import CubicSpline  # comes with JAX

            forward = CubicSpline(at, points, bc_type="natural")(steps)
            forward[0] = points[0]
    return Basis(forward, np.linalg.pinv(forward))


def smoothing(width: ArrayLike, *, horizon: int) -> Basis:
    """Sequences smoothed by a Gaussian along the steps; the inverse is the identity.
    Rows are weights that sum to 1: actions keep their bounds, and near the ends fewer steps are
    averaged. Warm starts and proposals are thus smoothed again. `width` is the standard deviation
    in steps; it may be traced, and 0 smooths nothing. Raises ValueError for a width below 0.

    Examples:
        >>> bases.smoothing(0.5, horizon=3).forward.round(2).tolist()
        [[0.88, 0.12, 0.0], [0.11, 0.79, 0.11], [0.0, 0.12, 0.88]]
    """
    own: Any = np if isinstance(width, int | float) else jnp  # a traced one stays in the program
    if own is np and width < 0.0:
        raise ValueError(f"width={width} must be 0 or more")
    steps = np.arange(horizon)
    distance = np.square(steps[:, None] - steps).astype(np.float32)
    weights = own.exp(-0.5 * distance / own.maximum(width, 1e-3) ** 2)
    return Basis(weights / weights.sum(axis=1, keepdims=True), np.eye(horizon))


def chain(first: Basis, second: Basis) -> Basis:
    """Basis with the sequences of `first`, made into actions by `second`."""
    return Basis(second.forward @ first.forward, first.back @ second.back)


def over(plan: Any, basis: Basis) -> Any:
    """The planner `plan`, searching among the parameters of a basis; a function of its signature.
    Proposals, `initial` and the mean are mapped to parameters by `back`, so that candidates, values
    and targets are those of the basis's sequences. Deviations are mapped as if steps were
    independent. Unless `config.selection` is "mean", `plan` must take `has_aux` as `mppi.plan`.
    Raises ValueError when it is called with a mean of another horizon than the basis'.
    """
    forward, back = basis.forward, basis.back
    weights = back**2 / (back**2).sum(axis=1, keepdims=True)  # either may be traced

    def planned(
        key: Array,
        score_fn: ScoreFn,
        mean: Array,
        std: Array,
        *,
        proposals: Array | None = None,
        initial: Array | None = None,
        has_aux: bool = False,
        config: MPPIConfig,
        **given: Any,
    ) -> Plan:
        if mean.shape[1] != forward.shape[0]:
            raise ValueError(
                f"the basis is of horizon={forward.shape[0]} and the plan of {mean.shape[1]} steps"
            )

        asks = has_aux or config.selection != "mean"  # the mean's first action needs no score

        def score(key: Array, parameters: Array) -> Any:
            actions = _bounded(forward, parameters)
            if not asks:
                return score_fn(key, actions)
            values, aux = mppi.checked_score(score_fn, has_aux)(key, actions)
            return values, (actions[:, :, 0], aux)  # the first action is seldom a parameter

        if asks:
            given["has_aux"] = True
        found: Plan = plan(
            key,
            score,
            _bounded(back, mean),
            jnp.sqrt(_along_time(weights, jnp.square(std))),
            proposals=_bounded(back, proposals),
            initial=_bounded(back, initial),
            config=config,
            **given,
        )
        means = _bounded(forward, found.mean)
        first, aux = found.aux if asks else (None, None)
        chosen = means[:, 0] if config.selection == "mean" else first
        return Plan(
            action=jnp.clip(chosen + found.action - found.chosen, -1.0, 1.0),
            mean=means,
            std=jnp.sqrt(_along_time(forward**2, jnp.square(found.std))),
            actions=_bounded(forward, found.actions),
            values=found.values,
            chosen=chosen,
            aux=aux,
        )

    return planned


def _along_time(matrix: Any, x: Array) -> Array:
    """A matrix `[S, R]` times the steps of `x` `[..., R, A]`."""
    return jnp.einsum("sr,...ra->...sa", jnp.asarray(matrix, jnp.float32), x)


def _bounded(matrix: Any, x: Array | None) -> Any:
    """`_along_time`, clipped to the range of actions; None stays None."""
    return None if x is None else jnp.clip(_along_time(matrix, x), -1.0, 1.0)
