"""Losses of the TD-MPC agent: world model and value in one, policy in the other.

Both take a batch of windows and every random draw as arguments. Time-major: T transitions, T+1
states, B batch, N planner actions, A action dims, L latent dims, V value heads, K bins.
Sources: TD-MPC2 (arXiv 2310.16828) and its reference code; document 000 for planner targets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx import networks
from mbx.agents import tdmpc_planning as planning
from mbx.world_model import Params, WorldModel

Array = jax.Array

VALUE_WEIGHTINGS = ("uniform", "weighted", "best_n")
ADVANTAGE_SCALES = ("none", "range", "state")


class Batch(NamedTuple):
    """Windows of the replay.

    obs `[T+1, B, ...]`; action `[T, B, A]`; reward, terminated, mask `[T, B]` (mask 0: the
    transition lies behind the episode's end). Planner targets of the rows: actions
    `[T+1, B, N, A]`, values `[T+1, B, N]`, valid `[T+1, B]`; None where the agent uses none.
    """

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    mask: Array
    target_actions: Array | None = None
    target_values: Array | None = None
    target_valid: Array | None = None


class Draws(NamedTuple):
    """Every random number of one update.

    target_eps `[T, B, A]`: noise of the TD target's action. target_heads, policy_heads: value heads
    in use, None for all. policy_eps `[T+1, B, A]`: noise of the policy loss.
    dropout: a key or None.
    """

    target_eps: Array
    target_heads: Array | None
    policy_eps: Array
    policy_heads: Array | None
    dropout: Array | None = None


def state_mask(mask: Array) -> Array:
    """Mask of the T+1 states of windows from that of the T transitions: `[T, B] -> [T+1, B]`."""
    return jnp.concatenate([mask[:1], mask], axis=0)


def time_weighted(loss: Array, mask: Array, rho: float) -> Array:
    """Mean over time of rho^t times the masked batch mean: `[T, B]` -> scalar (TD-MPC2)."""
    count = jnp.maximum(jnp.sum(mask, axis=1), 1.0)
    per_step = jnp.sum(loss * mask, axis=1) / count
    return jnp.mean(rho ** jnp.arange(loss.shape[0]) * per_step)


def planner_weights(
    values: Array, *, temperature: float, scale: Array | float, advantage_scale: str
) -> Array:
    """Weights over the N planner actions of a state: softmax of scaled values, `[..., N]`.

    advantage_scale: "none" divides by the temperature alone (document 000), "range" also by the
    running range of values (`scale`), "state" by the standard deviation over this state's actions.
    """
    if advantage_scale == "range":
        values = values / scale
    elif advantage_scale == "state":
        values = values / (jnp.std(values, axis=-1, keepdims=True) + 1e-6)
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


def reduce_heads(values: Array, how: str) -> Array:
    """Combine the value heads `[V, ...] -> [...]`: "min" (TD-MPC2) or "mean" (BMPC)."""
    return jnp.min(values, axis=0) if how == "min" else jnp.mean(values, axis=0)


def _heads(value_params: Params, heads: Array | None) -> Params:
    return value_params if heads is None else networks.take_heads(value_params, heads)


def q_targets(
    model: WorldModel,
    params: Params,
    target_value: Params,
    z_next: Array,
    batch: Batch,
    draws: Draws,
    config: Any,
    policy_weights: Array | None,
) -> Array:
    """TD targets of a Q critic, `[T, B]`: r + gamma (1 - terminated) * next value.

    The next value is Q(z', a'), a' from the policy (TD-MPC2), or, with planner targets, the
    weighted mean over the actions that the planner stored for the next row; rows without targets
    (an episode's last) fall back to the policy's action.
    """
    heads = _heads(target_value, draws.target_heads)

    def q(z: Array, action: Array) -> Array:
        return reduce_heads(model.decode(model.value(heads, z, action)), config.value_reduction)

    next_value = q(z_next, model.act(*model.policy(params, z_next), draws.target_eps))
    if policy_weights is not None:
        actions, weights = value_actions(
            batch, config.value_weighting, policy_weights, config.value_best_n
        )
        planned = jnp.sum(weights[1:] * q(z_next[:, :, None], actions[1:]), axis=-1)
        next_value = jnp.where(batch.target_valid[1:], planned, next_value)
    return batch.reward + config.discount * (1.0 - batch.terminated) * next_value


def v_targets(
    model: WorldModel,
    params: Params,
    target_value: Params,
    z: Array,
    actions: Array,
    draws: Draws,
    config: Any,
) -> Array:
    """One-step targets of a V critic for given actions: `[..., L]`, `[..., N, A]` -> `[..., N]`.

    Reward and termination are the model's own (DESIGN: the replay's belong to another action).
    """
    root = jnp.expand_dims(z, -2)
    reward = model.decode(model.reward(params, root, actions))
    z_next = model.step(params, root, actions)
    heads = _heads(target_value, draws.target_heads)
    next_value = reduce_heads(model.decode(model.value(heads, z_next)), config.value_reduction)
    alive = planning.alive_factor(model, params, z_next, config.termination)
    discount = config.discount if alive is None else config.discount * alive
    return reward + discount * next_value


def model_loss(
    params: Params,
    model: WorldModel,
    target_value: Params,
    batch: Batch,
    draws: Draws,
    config: Any,
    policy_weights: Array | None,
) -> tuple[Array, dict[str, Any]]:
    """Consistency, reward, value and termination losses; aux holds metrics and latents `zs`.

    policy_weights `[T+1, B, N]`: weights of the planner targets, None for TD-MPC2's own target.
    """
    frozen = jax.lax.stop_gradient(params)
    z_next = jax.lax.stop_gradient(model.encode(params, batch.obs[1:]))
    z = model.encode(params, batch.obs[0])
    zs = [z]
    for t in range(batch.action.shape[0]):
        z = model.step(params, z, batch.action[t])
        zs.append(z)
    zs = jnp.stack(zs)

    bins = model.bins()
    consistency = jnp.mean(jnp.square(zs[1:] - z_next), axis=-1)
    reward_logits = model.reward(params, zs[:-1], batch.action)
    reward = dist.two_hot_cross_entropy(reward_logits, batch.reward, bins)
    losses = dict(
        consistency=time_weighted(consistency, batch.mask, config.rho),
        reward=time_weighted(reward, batch.mask, config.rho),
    )
    if model.config.critic == "q":
        target = q_targets(
            model, frozen, target_value, z_next, batch, draws, config, policy_weights
        )
        target = jax.lax.stop_gradient(target)
        logits = model.value(params["value"], zs[:-1], batch.action, draws.dropout)
        cross_entropy = dist.two_hot_cross_entropy(
            logits, jnp.broadcast_to(target, logits.shape[:-1]), bins
        )
        weight = batch.mask
    else:
        z_true = jnp.concatenate([jax.lax.stop_gradient(zs[:1]), z_next[:-1]])
        actions, weights = value_actions(
            batch, config.value_weighting, policy_weights, config.value_best_n
        )
        weights = weights[:-1]
        samples = v_targets(model, frozen, target_value, z_true, actions[:-1], draws, config)
        # Cross-entropy is linear in the target, so the mean over actions of the cross-entropies is
        # the cross-entropy with the mean of the two-hot targets: one instead of N.
        two_hot = jnp.sum(weights[..., None] * dist.two_hot(samples, bins), axis=-2)
        two_hot = jax.lax.stop_gradient(two_hot)
        target = jax.lax.stop_gradient(jnp.sum(weights * samples, axis=-1))
        logits = model.value(params["value"], zs[:-1], None, draws.dropout)
        cross_entropy = -jnp.sum(two_hot[None] * jax.nn.log_softmax(logits), axis=-1)
        weight = batch.mask * batch.target_valid[:-1]
    losses["value"] = time_weighted(jnp.mean(cross_entropy, axis=0), weight, config.rho)

    if model.config.episodic:
        logit = model.termination(params, zs[1:])
        bce = jax.nn.softplus(logit) - logit * batch.terminated
        losses["termination"] = jnp.sum(bce * batch.mask) / jnp.maximum(jnp.sum(batch.mask), 1.0)
    total = (
        config.consistency_coef * losses["consistency"]
        + config.reward_coef * losses["reward"]
        + config.value_coef * losses["value"]
        + config.termination_coef * losses.get("termination", 0.0)
    )
    metrics = {f"loss/{name}": value for name, value in losses.items()}
    metrics["loss/total"] = total
    metrics["value/target"] = jnp.sum(target * weight) / jnp.maximum(jnp.sum(weight), 1.0)
    return total, dict(metrics=metrics, zs=zs)


def policy_value(
    model: WorldModel, params: Params, z: Array, action: Array, heads: Array | None, config: Any
) -> Array:
    """Value of `action` `[..., A]` in `z` `[..., L]`: Q, or one step ahead with a V critic."""
    if model.config.critic == "q":
        return planning.mean_value(model, params["value"], z, action, heads)
    reward = model.decode(model.reward(params, z, action))
    z_next = model.step(params, z, action)
    alive = planning.alive_factor(model, params, z_next, config.termination)
    discount = config.discount if alive is None else config.discount * alive
    return reward + discount * planning.mean_value(model, params["value"], z_next, None, heads)


def policy_log_prob(model: WorldModel, mean: Array, log_std: Array, action: Array) -> Array:
    """log pi(action) `[...]` of given actions `[..., A]` in the model's parameterisation."""
    if model.config.policy == "tanh_mean":
        eps = (action - jnp.tanh(mean)) * jnp.exp(-log_std)
        return dist.gaussian_log_prob(eps, jnp.broadcast_to(log_std, eps.shape))
    return dist.squashed_log_prob(action, mean, log_std)


def policy_entropy(model: WorldModel, log_std: Array, eps: Array, power: float) -> Array:
    """Entropy bonus `[...]`: -A^power * log pi before squashing, at one sample.

    With power 1 this is TD-MPC2's "scaled entropy", in which the tanh Jacobian cancels.
    """
    scale = dist.entropy_multiplier(model.config.action_dim, power)
    return -scale * dist.gaussian_log_prob(eps, log_std)


def svg_loss(
    policy_params: Params,
    model: WorldModel,
    params: Params,
    zs: Array,
    q_scale: Any,
    mask: Array,
    draws: Draws,
    config: Any,
) -> tuple[Array, dict[str, Any]]:
    """Maximise the critic through the policy's action (TD-MPC2's policy loss).

    zs `[T+1, B, L]`, no gradient. q_scale(q at t = 0 `[B]`) -> (scale, state to keep): the running
    scale is updated before it is used. Gradient flows into `policy_params` alone.
    """
    full = {**params, "policy": policy_params}
    mean, log_std = model.policy(full, zs)
    q = policy_value(
        model, full, zs, model.act(mean, log_std, draws.policy_eps), draws.policy_heads, config
    )
    scale, kept = q_scale(jax.lax.stop_gradient(q[0]))
    entropy = policy_entropy(model, log_std, draws.policy_eps, config.entropy_action_dim_power)
    loss = time_weighted(-(q / scale + config.entropy_coef * entropy), mask, config.rho)
    return loss, dict(kept=kept, scale=scale, entropy=entropy, std=jnp.exp(log_std))


def awr_loss(
    policy_params: Params,
    model: WorldModel,
    params: Params,
    zs: Array,
    batch: Batch,
    weights: Array,
    mask: Array,
    draws: Draws,
    config: Any,
) -> tuple[Array, dict[str, Any]]:
    """Advantage-weighted regression onto the planner's actions (document 000).

    weights `[T+1, B, N]` sum to one over N. States without valid targets do not count.
    """
    mean, log_std = model.policy({**params, "policy": policy_params}, zs)
    actions = batch.target_actions
    log_prob = policy_log_prob(model, mean[..., None, :], log_std[..., None, :], actions)
    entropy = policy_entropy(model, log_std, draws.policy_eps, config.entropy_action_dim_power)
    loss = -jnp.sum(weights * log_prob, axis=-1) - config.entropy_coef * entropy
    loss = time_weighted(loss, mask * batch.target_valid, config.rho)
    effective = jnp.mean(1.0 / jnp.sum(jnp.square(weights), axis=-1))
    return loss, dict(entropy=entropy, std=jnp.exp(log_std), effective_samples=effective)
