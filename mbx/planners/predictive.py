"""Predictive sampling: the best of some noisy copies of the last plan, that plan among them.

    plan = predictive.plan(key, score, mean, std, config=mppi.MPPIConfig(iterations=1))

The simplest planner, with the signature of `mppi.plan`: no weights, no refit, constant noise.
Nothing is averaged, so that a plan is never worse than the last.

Axes: B states planned for at once, N candidates, P proposals, K elites, T horizon, A action dims.
Source: Howell et al. 2022, arXiv 2212.00541, section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from mbx import mppi
from mbx.mppi import Array, Key, MPPIConfig, Plan, Refit, ScoreFn
from mbx.planners import Planner


def plan(
    key: Key, score_fn: ScoreFn, mean: Array, std: Array, *, config: MPPIConfig, **given: Any
) -> Plan:
    """Predictive sampling; arguments, result and errors are those of `mppi.plan`.
    The action and the mean are the best candidate's (`config.selection` and `config.temperature`
    are not used); proposals and `initial` compete, too. `std` `[B, T, A]` is the noise in every
    round. The resulting deviation, for exploration noise and stored experts, is that of the best
    `config.num_elites` around them, within `config.min_std` and `config.max_std`.
    """
    config = dataclasses.replace(
        config, selection="best", temperature=0.0, temperature_mode="multiply"
    )
    return mppi.plan(key, score_fn, mean, std, method=_rounds, config=config, **given)


def _rounds(frame: mppi.Frame) -> mppi.Rounds:
    def sample(i: Array, last: Refit) -> Array:
        actions = last.mean[:, None] + frame.std[:, None] * frame.draws.candidate(i)
        return jnp.concatenate([last.mean[:, None], actions[:, 1:]], axis=1)

    def best(last: Refit, new: Refit) -> Refit:
        return new._replace(mean=new.elite_actions[:, 0])

    return mppi.Rounds(sample, best)


PLANNERS = {"predictive": Planner(plan)}
