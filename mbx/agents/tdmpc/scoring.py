"""The score of plans: the value of a candidate action sequence in the latent model.

Axes: B states, N candidates, T horizon, A action dims, L latent dims, H dynamics heads, R reward
heads, V value heads; `...` are states and candidates.
Sources: TD-MPC2 (arXiv 2310.16828), section 3.2 and reference code; docs/sources.md, entry
ensembles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.typing import ArrayLike

from mbx import mppi, returns
from mbx.fast import collectives, rng
from mbx.types import Array, Params, streams
from mbx.world_model import (
    WorldModel,
    choose_heads,
    continue_prob,
    discount_of,
    head_values,
)

if TYPE_CHECKING:
    from mbx.agents.tdmpc.planner_settings import Search
    from mbx.agents.tdmpc.settings import Settings


def trajectory_estimate(
    rewards: Sequence[Array],
    values: Sequence[Array],
    factors: Sequence[Array | float],
    *,
    std_coef: ArrayLike = 0.0,
    aggregate: bool = False,
) -> tuple[Array, Array]:
    """The return of T predicted steps: mean + std_coef * std, and std, `[H, ...]` each.

    Variances of rewards and value add over time. Source: docs/sources.md, entry ensembles.

    Args:
        rewards: T times `[R, H or 1, ...]`; 1 for the state before the first step.
        values: `[V, H, ...]` of the states after steps 1..T; without `aggregate` of the last.
        factors: T+1 weights, the discount times the probability of being alive, `[H, ...]` or
            numbers; factors[t] weighs reward t, factors[T] the last value.
        aggregate: a head's score is the mean over horizons 1..T of its estimates, not the last.
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
            std = returns.safe_sqrt(variance + jnp.square(value_std))
            scores.append(estimate + std_coef * std if std_coef else estimate)
            stds.append(std)
    return sum(scores[1:], scores[0]) / len(scores), sum(stds[1:], stds[0]) / len(stds)


def latent_disagreement(z: Array) -> Array:
    """Variance over dynamics heads, averaged over latent dims: `[H, ..., L] -> [...]`."""
    return jnp.mean(jnp.var(z, axis=0), axis=-1)


def estimate_value(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    actions: Array,
    *,
    planner: Search,
    eps: Array,
    heads: Array | None,
) -> Array:
    """Discounted predicted rewards plus the last state's value, `[B, N]`. Source: TD-MPC2, eq. 5.

    Args:
        z: `[B, L]`.
        actions: `[B, N, T, A]`.
        planner: its discount and how it combines heads (value_reduction, std_coef, aggregate,
            disagreement).
        eps: `[B, N, A]`, noise of a Q critic's bootstrap action.
        heads: the value heads in use, None for all.
    """
    steps = actions.shape[2]
    state = model.tile_heads(z[:, None])
    discount = plan_discount(settings, model, planner, state)
    states, values, factors = [state], [], [1.0]
    for t in range(steps):
        state = model.step(params, state, actions[:, :, t])
        states.append(state)
        alive = continue_prob(model, params, state, settings.loss.termination)
        factor = factors[-1] * discount
        factors.append(factor if alive is None else factor * alive)
        if planner.aggregate or t + 1 == steps:
            bootstrap = None
            if model.config.critic == "q":
                bootstrap = model.act(*model.policy(params, state), eps[None])
            how = planner.value_reduction
            value = head_values(model, params["value"], state, bootstrap, heads, reduction=how)
            values.append(value)
    rewards = rollout_rewards(model, params, states[:-1], actions)
    scores, _ = trajectory_estimate(
        rewards, values, factors, std_coef=planner.std_coef, aggregate=planner.aggregate
    )
    # The best dynamics head counts where std_coef > 0, the worst where < 0, their mean at 0.
    score = returns.reduce_heads(scores, "from_std_coef", planner.std_coef)
    if planner.disagreement:
        latents = state[..., : model.config.latent]
        score = score + planner.disagreement * latent_disagreement(latents)
    return score


def plan_discount(settings: Settings, model: WorldModel, planner: Search, z: Array) -> Any:
    """The discount inside plans: the planner's own, or the agent's where that is 0."""
    return planner.discount or discount_of(model, settings.loss.discount, z)


def rollout_rewards(
    model: WorldModel, params: Params, states: list[Array], actions: Array
) -> list[Array]:
    """Predicted rewards of T steps; all after the first are computed in one product.

    Args:
        states: before each step: the root `[H, B, 1, L]`, then `[H, B, N, L]`.
        actions: `[B, N, T, A]`.

    Returns:
        T arrays `[R, H, B, N]`, the first `[R, 1, B, N]`.
    """
    # In the root all heads are in the same state: its reward is computed once.
    first = model.reward_mean(params, states[0][:1], actions[:, :, 0])
    if len(states) == 1:
        return [first]
    batch, _, _, size = actions.shape
    later = jnp.swapaxes(actions[:, :, 1:], 1, 2).reshape(batch, -1, size)
    rewards = model.reward_mean(params, jnp.concatenate(states[1:], axis=2), later)
    return [first, *jnp.split(rewards, len(states) - 1, axis=-1)]


def score_function(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    planner: Search,
) -> mppi.ScoreFn:
    """`estimate_value` from states `z` `[B, L]`, in the form `mppi.plan` takes.

    Several devices share the states, or the candidates where the states do not divide evenly.
    """

    def estimate(params: Params, z: Array, actions: Array, eps: Array, heads: Any) -> Array:
        return estimate_value(
            settings, model, params, z, actions, planner=planner, eps=eps, heads=heads
        )

    def score(key: Array, actions: Array) -> Array:
        keys = streams(key, "eps", "heads")
        batch, num, _, action_dim = actions.shape
        eps = rng.normal(keys["eps"], (batch, num, action_dim))
        heads = choose_heads(keys["heads"], model.config.num_values, settings.loss.num_heads)
        even, given = batch % collectives.num_devices() == 0, (params, z, actions, eps, heads)
        if even and not collectives.states_are_replicated():
            return estimate(*given)  # which the compiler divides as the states
        axes = (None, 0, 0, 0, None) if even else (None, None, 1, 1, None)
        return collectives.shard_map(estimate, axes, *given, out=0 if even else 1)

    return score
