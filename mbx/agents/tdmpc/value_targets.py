"""Value targets of the TD-MPC agent: what the value heads are told to predict.

    planner   one step ahead from the actions that the training planner stored (document 000)
    td        TD-MPC2's target from the replay's reward and the policy's next action (Q critic), or
              rollouts of the policy in the model (V critic; documents 001 and BMPC)
    lambda    lambda return of the replay's rewards, with the planner's value of every row as the
              annotation (document 002 inside TD-MPC)

All give samples `[V', T, B, n]` (V' = 1 where heads share a target) with weights `[T, B, n]`, whose
two-hot codes are averaged. Axes: T transitions, B batch, N planner actions, n of them in use, A
action dims, L latent dims, R, H, V reward, dynamics and value heads.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx import networks, returns
from mbx.agents.tdmpc import planning, scoring
from mbx.agents.tdmpc.config import TDMPCConfig
from mbx.world_model import Params, WorldModel

Array = jax.Array


class Batch(NamedTuple):
    """Windows of the replay.

    obs `[T+1, B, ...]`; action `[T, B, A]`; reward, terminated, mask `[T, B]` (mask 0: the
    transition lies behind the episode's end). Planner targets of the rows: actions
    `[T+1, B, N, A]`, values `[T+1, B, N]`, valid `[T+1, B]`, expert `[T+1, B, 2, A]` (mean and
    standard deviation); None where the agent uses none.
    """

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    mask: Array
    target_actions: Array | None = None
    target_values: Array | None = None
    target_valid: Array | None = None
    target_expert: Array | None = None


class Draws(NamedTuple):
    """Every random number of one update.

    target_eps `[T, B, A]`: noise of the TD target's action. target_heads, policy_heads: value heads
    in use, None for all. policy_eps `[T+1, B', A]`: noise of the policy loss. dropout: a key or
    None. rollout_eps `[td_horizon, T, B, n, A]`: noise of imagined rollouts. dynamics_head: index
    of the dynamics head in targets, None for all. optimist_eps: as policy_eps.
    """

    target_eps: Array
    target_heads: Array | None
    policy_eps: Array
    policy_heads: Array | None
    dropout: Array | None = None
    rollout_eps: Array | None = None
    dynamics_head: Array | None = None
    optimist_eps: Array | None = None


class ValueTarget(NamedTuple):
    """samples `[V', T, B, n]`, their weights `[T, B, n]` (sum 1 over n), and which states count,
    `[T, B]`."""

    samples: Array
    weights: Array
    mask: Array

    def mean(self) -> Array:
        """`[T, B]`, over samples and heads."""
        return jnp.mean(jnp.sum(self.weights[None] * self.samples, axis=-1), axis=0)

    def two_hot(self, bins: Array) -> Array:
        """`[V', T, B, K]`: cross-entropy is linear in the target, so the mean over samples of the
        cross-entropies is the cross-entropy with the mean code, one instead of n."""
        codes = dist.two_hot(self.samples, bins)
        if codes.shape[-2] == 1:
            return codes[..., 0, :]
        return jnp.sum(self.weights[None, ..., None] * codes, axis=-2)


def planner_weights(
    values: Array,
    *,
    temperature: float,
    scale: Array | float,
    advantage_scale: str,
    effective_samples: float = 0.0,
    mask: Array | None = None,
) -> Array:
    """Weights over the N planner actions of a state: softmax of scaled values, `[..., N]`.

    advantage_scale: "none" divides by the temperature alone (document 000), "range" also by the
    running range of values (`scale`), "state" by the standard deviation over this state's actions.
    effective_samples: above 0, the temperature is instead the one at which a state has so many in
    the mean over those of `mask` `[...]`: one number for the whole batch, so that states where the
    choice of action matters more than elsewhere have fewer (with "state" all have about as many).
    """
    if advantage_scale == "range":
        values = values / scale
    elif advantage_scale == "state":
        values = values / (jnp.std(values, axis=-1, keepdims=True) + 1e-6)
    if effective_samples:
        temperature = dist.solve_temperature(values, effective_samples, mask)
    return dist.awr_weights(values, temperature, mode="divide")


def value_actions(
    batch: Batch, weighting: str, policy_weights: Array, best_n: int
) -> tuple[Array, Array]:
    """The planner actions a value target averages over, and their weights (document 000's options).

    "uniform" and "weighted" (by `policy_weights` `[T+1, B, N]`) use all N actions; "best_n" only
    the n best by stored value, so that the model is evaluated for no others. Returns actions
    `[T+1, B, n, A]` and weights `[T+1, B, n]`.
    """
    actions, values = batch.target_actions, batch.target_values
    if weighting == "weighted":
        return actions, policy_weights
    if weighting == "best_n" and best_n < values.shape[-1]:
        values, index = jax.lax.top_k(values, best_n)
        actions = jnp.take_along_axis(actions, index[..., None], axis=-2)
    return actions, jnp.full_like(values, 1.0 / values.shape[-1])


def bootstrap(
    rewards: Array, values: Array, discount: float | Array, terminated: Array, config: TDMPCConfig
) -> Array:
    """Targets `[V', ...]` from `[R, H, ...]` rewards and `[V, H, ...]` next values.

    terminated `[H, ...]`: whether, or how probably, the step ended the episode. V' is V where every
    head bootstraps from itself (`value_reduction="local"`), else 1. Source: document 001, section
    1.
    """
    if config.value_reduction == "min":  # of the heads drawn, as TD-MPC2 and RedQ do
        values = jnp.min(values, axis=0, keepdims=True)
    targets = returns.td_targets(
        rewards,
        values,
        discount,
        terminated,
        std_coef=config.td_std_coef,
        dynamics_reduction=None,
        local_bootstrap=config.value_reduction != "mean",
    )
    if config.value_reduction != "local":
        targets = targets[:1]
    return scoring.reduce_dynamics(
        jnp.swapaxes(targets, 0, 1), config.td_dynamics_reduction, config.td_std_coef
    )


def next_values(
    model: WorldModel,
    params: Params,
    target_value: Params,
    z_next: Array,
    draws: Draws,
    actions: Array | None = None,
) -> Array:
    """Target values of `z_next` `[T, B, L]`: `[V', T, B]`, or `[V', T, B, n]` for planner actions
    `[T, B, n, A]`. A Q critic without actions takes the policy's."""
    if model.config.critic == "v":
        return planning.head_values(model, target_value, z_next, None, draws.target_heads)
    if actions is None:
        actions = model.act(*model.policy(params, z_next), draws.target_eps)
    else:
        z_next = z_next[:, :, None]
    return planning.head_values(model, target_value, z_next, actions, draws.target_heads)


def q_targets(
    model: WorldModel,
    params: Params,
    target_value: Params,
    z_next: Array,
    batch: Batch,
    draws: Draws,
    config: TDMPCConfig,
    policy_weights: Array | None,
) -> Array:
    """TD targets of a Q critic, `[V', T, B]`: r + gamma (1 - terminated) * next value.

    The next value is Q(z', a'), a' from the policy (TD-MPC2), or, with planner targets, the
    weighted mean over the actions that the planner stored for the next row; rows without targets
    (an episode's last) fall back to the policy's action.
    """
    values = next_values(model, params, target_value, z_next, draws)
    if policy_weights is not None:
        actions, weights = value_actions(
            batch, config.value_weighting, policy_weights, config.value_best_n
        )
        planned = next_values(model, params, target_value, z_next, draws, actions[1:])
        if config.value_reduction == "min":  # an action at a time, as its plan was scored
            planned = jnp.broadcast_to(jnp.min(planned, axis=0), planned.shape)
        planned = jnp.sum(weights[None, 1:] * planned, axis=-1)
        values = jnp.where(batch.target_valid[None, 1:], planned, values)
    discount = planning.discount_of(model, config.discount, z_next[None])
    return bootstrap(
        batch.reward[None, None], values[:, None], discount, batch.terminated[None], config
    )


def v_targets(
    model: WorldModel,
    params: Params,
    target_value: Params,
    z: Array,
    actions: Array,
    draws: Draws,
    config: TDMPCConfig,
    policy: Params | None = None,
) -> Array:
    """Imagined targets of a V critic: z `[..., L]`, first actions `[..., n, A]` -> `[V', ..., n]`.

    Reward and termination are the model's own (DESIGN: the replay's belong to another action).
    policy: who goes on after the first action where `td_horizon` > 1.
    """
    if draws.dynamics_head is not None:
        params = {
            **params,
            "dynamics": networks.take_heads(params["dynamics"], draws.dynamics_head[None]),
        }
    root = jnp.expand_dims(z, -2)[None]
    heads = networks.num_heads(params["dynamics"])
    state = jnp.broadcast_to(root, (heads, *root.shape[1:]))
    total, alive, factor = 0.0, jnp.ones(root.shape[:-1]), 1.0
    discount = planning.discount_of(model, config.discount, root)
    for t in range(1 if policy is None else config.td_horizon):
        if t:
            mean, log_std = model.policy({**params, "policy": policy}, state)
            actions = model.act(mean, log_std, draws.rollout_eps[t][None])
        reward = model.reward_mean(params, state if t else root, actions)
        total = total + factor * alive[None] * reward
        state = model.step(params, state, actions)
        now = planning.alive_factor(model, params, state, config.termination)
        alive = alive if now is None else alive * now
        factor = factor * discount
    values = planning.head_values(model, target_value, state, None, draws.target_heads)
    total = jnp.broadcast_to(total, (total.shape[0], *values.shape[1:]))
    ended = jnp.broadcast_to(1.0 - alive, values.shape[1:])
    return bootstrap(total, values, factor, ended, config)


def lambda_targets(
    model: WorldModel,
    params: Params,
    target_value: Params,
    z_next: Array,
    batch: Batch,
    draws: Draws,
    config: TDMPCConfig,
    policy_weights: Array,
) -> Array:
    """Lambda returns of the replay's own rewards and terminations, `[1, T, B]`.

    The value of every row is what the planner found there (the weighted mean of its actions'
    values), or the target network's where a row has none; the trace is cut at an episode's end.
    Sources: document 002 (value annotations); `returns.lambda_returns`.
    """
    fallback = jnp.mean(next_values(model, params, target_value, z_next, draws), axis=0)
    planned = jnp.sum(policy_weights[1:] * batch.target_values[1:], axis=-1)
    annotations = jnp.where(batch.target_valid[1:], planned, fallback)
    # Row t+1 continues the trace only where its own transition is part of the episode.
    inside = jnp.concatenate([batch.mask[1:], jnp.zeros_like(batch.mask[:1])])
    discount = planning.discount_of(model, config.discount, z_next) * (1.0 - batch.terminated)
    returned = returns.lambda_returns(batch.reward, discount, annotations, config.lambda_ * inside)
    return returned[None]


def value_target(
    model: WorldModel,
    params: Params,
    target_value: Params,
    policy: Params,
    zs: tuple[Array, Array],
    batch: Batch,
    draws: Draws,
    config: TDMPCConfig,
    policy_weights: Array | None,
) -> ValueTarget:
    """The target that `config.value_target` names; nothing in it carries a gradient.

    zs: encoded latents `[T, B, L]` of the states acted in, and of the next ones. policy: who acts
    in targets (the online or the EMA policy). policy_weights `[T+1, B, N]`: of planner actions.
    """
    z, z_next = zs
    params = {**params, "policy": policy}
    one = jnp.ones((*batch.reward.shape, 1))
    if config.value_target == "lambda":
        samples = lambda_targets(
            model, params, target_value, z_next, batch, draws, config, policy_weights
        )
        target = ValueTarget(samples[..., None], one, batch.mask)
    elif model.config.critic == "q":
        weights = policy_weights if config.value_target == "planner" else None
        samples = q_targets(model, params, target_value, z_next, batch, draws, config, weights)
        target = ValueTarget(samples[..., None], one, batch.mask)
    elif config.value_target == "planner":
        actions, weights = value_actions(
            batch, config.value_weighting, policy_weights, config.value_best_n
        )
        samples = v_targets(model, params, target_value, z, actions[:-1], draws, config)
        target = ValueTarget(samples, weights[:-1], batch.mask * batch.target_valid[:-1])
    else:
        mean, log_std = model.policy(params, z)
        actions = model.act(mean[..., None, :], log_std[..., None, :], draws.rollout_eps[0])
        samples = v_targets(model, params, target_value, z, actions, draws, config, policy)
        weights = jnp.full(samples.shape[1:], 1.0 / samples.shape[-1])
        target = ValueTarget(samples, weights, batch.mask)
    return jax.tree.map(jax.lax.stop_gradient, target)


def aux_targets(
    model: WorldModel,
    params: Params,
    target_aux: Params,
    zs: tuple[Array, Array],
    batch: Batch,
    draws: Draws,
    config: TDMPCConfig,
) -> Array:
    """One-step targets of the auxiliary values, `[G, T, B]`: each with its own discount.

    A Q critic's follow the replay's reward and the policy's next action; a V critic's the policy's
    action in the model (its first dynamics and reward heads' mean).
    """
    z, z_next = zs
    gammas = jnp.asarray(config.aux_gammas).reshape(-1, 1, 1)
    if model.config.critic == "q":
        action = model.act(*model.policy(params, z_next), draws.target_eps)
        value = model.decode(model.aux_value(target_aux, z_next, action))
        going_on = 1.0 - batch.terminated
        reward = batch.reward
    else:
        action = model.act(*model.policy(params, z), draws.target_eps)
        reward = jnp.mean(model.reward_mean(params, z[None], action), axis=(0, 1))
        stepped = model.step(params, model.spread(z), action)[0]
        value = model.decode(model.aux_value(target_aux, stepped))
        alive = planning.alive_factor(model, params, stepped, config.termination)
        going_on = jnp.ones_like(reward) if alive is None else alive
    return jax.lax.stop_gradient(reward[None] + gammas * going_on[None] * value)
