"""EMPO's equations as pure functions over arrays. Public names are those of `mbx.power`.

(4) Q_r = gamma_r E V_r(s')   (5) pi_r ~ (-Q_r)^-beta_r   (6) V_h^e, policy-weighted attainment
(7) X_h = sum_g w_g V_h^e^zeta   (8) U_r = -(mean_h X_h^-xi)^eta   (9) V_r = U_r + pi_r . Q_r

The reward belongs to the state: Q_r holds the discounted future only, and is below 0 everywhere.
Where the paper (arXiv 2508.00159) has another form it is that of the authors' code: docs/empo.md.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Number: TypeAlias = Array | float

# Abilities are not let below this before they are raised to -xi; how often that happens is counted.
ABILITY_FLOOR = 1e-10


class PowerParams(NamedTuple):
    """Parameters of the equations; numbers may be traced."""

    # inverse temperature of the prior (inf: uniform over the best actions); `solve` takes a tuple,
    # one number a goal, for this and nu_h
    beta_h: Any = 10.0
    gamma_h: Number = 0.99  # humans' discount; 1: V_h^e is the probability of ever getting there
    beta_r: Number = 10.0  # exponent of the robot's policy
    gamma_r: Number = 0.99  # robots' discount, below 1
    zeta: Number = 2.0  # >= 1, risk aversion over goals' values
    xi: Number = 1.0  # >= 1, inequality aversion over humans
    eta: Number = 1.1  # >= 1, inequality aversion over time
    terminal_v_r: Number = -1e-10  # V_r of terminal states, below 0
    reduce: str = "mean"  # or "sum", over humans in eq. (8)
    nu_h: Any = 0.0  # share of the habit policy in eq. (2)
    optimistic: bool = False  # in the prior robots help, not hinder: max, not min, in eq. (1)


def check_params(params: PowerParams, *, theory: bool = True) -> None:
    """Raises ValueError for the first parameter that is not allowed.
    theory: False allows what equations can be solved for, though the theory excludes it: zeta, xi
        and eta above 0, discounts of 0 and 1.
    """
    least = "at least 1" if theory else "a number above 0"
    above = lambda x: x >= 1 if theory else x > 0  # noqa: E731
    gamma_h, gamma_r = params.gamma_h, params.gamma_r
    limits = {
        "beta_h": (np.all(np.asarray(params.beta_h) >= 0), "at least 0"),
        "beta_r": (params.beta_r >= 0, "at least 0"),
        "gamma_h": (0 <= gamma_h <= 1 and (gamma_h or not theory), "a discount, at most 1"),
        "gamma_r": (
            0 < gamma_r < 1 or (not theory and gamma_r in (0, 1)),
            "a discount above 0 and below 1",
        ),
        "zeta": (above(params.zeta), least),
        "xi": (above(params.xi), least),
        "eta": (above(params.eta), least),
        "terminal_v_r": (params.terminal_v_r < 0, "a number below 0, -1e-10 say"),
        "reduce": (params.reduce in ("mean", "sum"), "mean or sum"),
        "nu_h": (np.all(np.abs(np.asarray(params.nu_h) - 0.5) <= 0.5), "a share in [0, 1]"),
    }
    for name, (right, words) in limits.items():
        if not right:
            raise ValueError(f"power.{name}={getattr(params, name)!r}: give {words}")


def robot_policy(q_r: Array, beta_r: Number) -> Array:
    """Eq. (5): pi proportional to (-q)^(-beta_r). `[..., A]`, q < 0 -> `[..., A]`.
    Scale free: pi(c q) = pi(q). beta_r = 0 is uniform. beta_r: number or `[...]`.

    Examples:
        >>> print(np.array(power.robot_policy(jnp.array([-1.0, -3.0]), 1.0)).round(3))
        [0.75 0.25]
    """
    beta_r = jnp.asarray(beta_r, q_r.dtype)
    beta_r = beta_r if beta_r.ndim == 0 else beta_r[..., None]
    logs = jnp.log(jnp.maximum(-q_r, jnp.finfo(q_r.dtype).tiny))
    return jax.nn.softmax(-beta_r * (logs - jnp.min(logs, axis=-1, keepdims=True)), axis=-1)


def aggregate_ability(v_h_e: Array, goal_weight: Array, zeta: Number) -> Array:
    """Eq. (7): X_h = sum_g w_g V_h^e(g)^zeta. `[..., G]`, `[..., G]` -> `[...]`.
    V <= 0 counts 0, with a zero gradient (V^zeta has none there for zeta < 1).
    """
    positive = v_h_e > 0.0
    power = jnp.where(positive, jnp.where(positive, v_h_e, 1.0) ** zeta, 0.0)
    return jnp.sum(goal_weight * power, axis=-1)


def human_aggregate(
    x_h: Array, xi: Number, mask: Array | None = None, reduce: str = "mean"
) -> Array:
    """y = mean (or sum) over humans of X_h^(-xi). `[..., H]` -> `[...]`.
    X_h below `ABILITY_FLOOR` counts as that.
    mask: `[..., H]` bool, humans that exist.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce={reduce!r}: choose mean or sum")
    there = jnp.ones(x_h.shape, bool) if mask is None else mask
    power = jnp.maximum(jnp.where(there, x_h, 1.0), ABILITY_FLOOR) ** (-xi)
    total = jnp.sum(jnp.where(there, power, 0.0), axis=-1)
    return total / jnp.sum(there, axis=-1) if reduce == "mean" else total


def intrinsic_reward(
    x_h: Array, xi: Number, eta: Number, mask: Array | None = None, reduce: str = "mean"
) -> Array:
    """Eq. (8): U_r = -y^eta. `[..., H]` -> `[...]`, <= -1 where X_h <= 1 and reduce="mean"."""
    return -(human_aggregate(x_h, xi, mask, reduce) ** eta)


def attained(
    v_h_e: Array, achieved: Array, gamma_h: Number, terminal: Array | None = None
) -> Array:
    """What a successor is worth to a human: 1 where the goal is achieved, else gamma_h V_h^e.
    A terminal successor that achieves the goal counts 1, any other 0. All of one shape.
    """
    if terminal is not None:
        v_h_e = jnp.where(terminal, 0.0, v_h_e)
    return jnp.where(achieved, 1.0, gamma_h * v_h_e)


def soft_clamp(x: Array, low: float, high: float) -> Array:
    """Identity in [low, high] (widened by 1e-6), bent smoothly into (low - R, high + R) outside.
    R is the widened range. Its slope is 1 at the bounds and falls by e with every R outside: some
    gradient is left nearby, none a hundred R away (float32).
    """
    low, high = low - 1e-6, high + 1e-6
    width = high - low
    over = jnp.maximum(x - high, 0.0) / width
    under = jnp.maximum(low - x, 0.0) / width
    middle = jnp.clip(x, low, high)
    return middle - width * jnp.expm1(-over) + width * jnp.expm1(-under)
