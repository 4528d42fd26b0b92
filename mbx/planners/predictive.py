"""Predictive sampling: the best of some noisy copies of the last plan, that plan among them.

    plan = predictive.plan(key, score, mean, std, config=mppi.MPPIConfig(iterations=1))

The simplest planner there is, with the signature of `mppi.plan`: no weights, no refit; the noise
keeps the deviation it was given. Nothing is averaged, so that a plan is never worse than the last.

Axes: B states planned for at once, N candidates, P proposals, K elites, T horizon, A action dims.
Source: Howell et al. 2022, arXiv 2212.00541, section 3.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from mbx import mppi
from mbx.mppi import Array, MPPIConfig, Plan, Refit, ScoreFn


def plan(
    key: Array,
    score_fn: ScoreFn,
    mean: Array,
    std: Array,
    *,
    proposals: Array | None = None,
    config: MPPIConfig,
    **given: Any,
) -> Plan:
    """Predictive sampling; arguments, result and errors are those of `mppi.plan`.

    The action and the mean are the best candidate's, whatever `config.selection` says, and
    `config.temperature` is not used. Where proposals or `initial` are given they compete, too.

    Args:
        std: `[B, T, A]`, of the noise in every round. The deviation in the result is that of the
            best `config.num_elites` around them (at least `config.min_std`, at most
            `config.max_std`): what exploration noise and stored experts are made of.

    Examples:
        >>> mean = jnp.zeros((1, 4, 1))
        >>> score = lambda key, actions: -jnp.square(actions - 0.5).sum((-2, -1))
        >>> config = mppi.MPPIConfig(num_samples=64, num_elites=8)
        >>> found = predictive.plan(jax.random.key(0), score, mean, mean + 0.3, config=config)
        >>> bool(abs(found.action[0, 0] - 0.5) < 0.2), bool(found.mean[0, 0] == found.chosen[0])
        (True, True)
    """
    num_proposals = 0 if proposals is None else proposals.shape[1]
    draws = mppi.draw(key, mean, config.num_samples - num_proposals, config)
    return plan_with_draws(draws, score_fn, mean, std, proposals=proposals, config=config, **given)


def plan_with_draws(
    draws: mppi.Draws,
    score_fn: ScoreFn,
    mean: Array,
    std: Array,
    *,
    proposals: Array | None = None,
    initial: Array | None = None,
    action_mask: Array | None = None,
    has_aux: bool = False,
    config: MPPIConfig,
) -> Plan:
    """`plan` with its random numbers given.

    Examples:
        >>> mean, config = jnp.zeros((1, 4, 1)), mppi.MPPIConfig(num_samples=8, num_elites=2)
        >>> draws = mppi.draw(jax.random.key(0), mean, 8, config)
        >>> score = lambda key, actions: -jnp.square(actions - 0.5).sum((-2, -1))
        >>> of = dict(config=config)
        >>> plan = lambda mean: predictive.plan_with_draws(draws, score, mean, mean + 1.0, **of)
        >>> jax.eval_shape(plan, mean).actions.shape
        (1, 8, 4, 1)
    """
    mppi.check_shapes(mean, std, proposals, initial, config)
    mask = mppi.expand_mask(action_mask, *mean.shape[::2])
    spread = std[:, None]

    def sample(i: Array, last: Refit) -> Array:
        noise = draws.candidate(i)
        actions = jnp.clip(last.mean[:, None] + spread * noise, -1.0, 1.0) * mask[:, None]
        nominal = jnp.clip(last.mean, -1.0, 1.0)
        actions = jnp.concatenate([nominal[:, None], actions[:, 1:]], axis=1)
        if initial is not None:
            first = initial[:, initial.shape[1] - actions.shape[1] :]
            actions = jnp.where(i == 0, first, actions)
        return actions

    def best(last: Refit, new: Refit) -> Refit:
        return new._replace(mean=new.elite_actions[:, 0])

    return mppi.search(
        draws,
        score_fn,
        mean,
        std,
        sample,
        blend=best,
        proposals=proposals,
        mask=mask,
        has_aux=has_aux,
        config=dataclasses.replace(
            config, selection="best", temperature=0.0, temperature_mode="multiply"
        ),
    )
