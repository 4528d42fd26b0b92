"""Policy losses of the TD-MPC agent: a state's loss for every way to learn a policy.

    svg   maximise the critic through the policy's action (TD-MPC2)
    awr   advantage-weighted regression onto the planner's actions (document 000)
    kl    distil the planner's Gaussian (BMPC; document 001, section 2.2)
    bc    clone the replay's actions (NEWT, for demonstrations)

Each gives `[S, B]` losses and which of those states count; `policy_loss` mixes them, adds the
entropy bonus and the trust region. Latents carry no gradient, and gradients flow into the policy
alone. Axes: S = T+1 states, B batch, N planner actions, A action dims.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx import returns
from mbx.agents.tdmpc import planning, scoring
from mbx.agents.tdmpc.config import TDMPCConfig
from mbx.agents.tdmpc.model_loss import time_weighted
from mbx.world_model import Params, WorldModel

Array = jax.Array


class PolicyInputs(NamedTuple):
    """What the losses read: latents zs `[S, B, L]`, mask `[S, B]`, and where the planner's targets
    are in use actions `[S, B, N, A]`, weights `[S, B, N]`, valid `[S, B]`, expert `[S, B, 2, A]`.
    eps `[S, B, A]`: the policy's noise; heads: value heads in use; behaviour `[T, B, A]`: the
    replay's actions."""

    zs: Array
    mask: Array
    eps: Array
    heads: Array | None
    actions: Array | None = None
    weights: Array | None = None
    valid: Array | None = None
    expert: Array | None = None
    behaviour: Array | None = None


class Scales(NamedTuple):
    """Running scales of the losses' units: of values, of the KL and of the trust region's."""

    value: Any
    kl: returns.RunningScale
    trust: returns.RunningScale


def policy_value(
    model: WorldModel,
    params: Params,
    z: Array,
    action: Array,
    heads: Array | None,
    config: TDMPCConfig,
    std_coef: float = 0.0,
) -> Array:
    """Value of `action` `[..., A]` in `z` `[..., L]`: Q, or one step ahead with a V critic.

    std_coef: weight of the ensembles' standard deviation (of reward plus discounted value); its
    sign chooses the best, worst or mean dynamics head (document 001, section 2.1).
    """
    if model.config.critic == "q":
        q = planning.head_values(model, params["value"], z, action, heads)
        mean = jnp.mean(q, axis=0)
        return mean + std_coef * returns.ensemble_std(q) if std_coef else mean
    reward = model.reward_mean(params, z[None], action)
    z_next = model.step(params, model.spread(z), action)
    alive = planning.alive_factor(model, params, z_next, config.termination)
    discount = planning.discount_of(model, config.discount, z[None])
    discount = discount if alive is None else discount * alive
    value = planning.head_values(model, params["value"], z_next, None, heads)
    score = jnp.mean(reward, axis=0) + discount * jnp.mean(value, axis=0)
    if std_coef:
        std = returns.ensemble_std(reward) + discount * returns.ensemble_std(value)
        score = score + std_coef * std
    return scoring.reduce_dynamics(score, "from_std_coef", std_coef)


def policy_log_prob(model: WorldModel, mean: Array, log_std: Array, action: Array) -> Array:
    """log pi(action) `[...]` of given actions `[..., A]` in the model's parameterisation."""
    if model.config.policy == "tanh_mean":
        eps = (action - jnp.tanh(mean)) * jnp.exp(-log_std)
        return dist.gaussian_log_prob(eps, jnp.broadcast_to(log_std, eps.shape))
    return dist.squashed_log_prob(action, mean, log_std)


def policy_entropy(
    model: WorldModel,
    mean: Array,
    log_std: Array,
    eps: Array,
    power: float,
    jacobian: float = 0.0,
    mask: Array | None = None,
) -> Array:
    """Entropy bonus `[...]`: -A^power * log pi at one sample.

    jacobian: share of the tanh Jacobian in log pi; 0, with power 1, is TD-MPC2's "scaled entropy".
    mask: `[..., A]`, the actions that a task has; A is their number.
    """
    num: Array | int = model.config.action_dim
    if mask is not None:
        eps, num = eps * mask, jnp.sum(mask, axis=-1)
    log_prob = dist.gaussian_log_prob(eps, log_std)
    if jacobian and model.config.policy == "squashed":
        log_prob = dist.squash(mean, mean + jnp.exp(log_std) * eps, log_prob, jacobian)[2]
    return -dist.entropy_multiplier(num, power) * log_prob


def entropy_coefficient(config: TDMPCConfig, progress: Array) -> Array | float:
    """The coefficient at a share of the run: constant, or from entropy_coef to entropy_coef_end
    between entropy_start and entropy_end, linearly or geometrically (document 001's code)."""
    first, last = config.entropy_coef, config.entropy_coef_end
    if last < 0.0:
        return first
    span = config.entropy_end - config.entropy_start
    share = jnp.clip((progress - config.entropy_start) / span, 0.0, 1.0)
    if config.entropy_schedule == "linear":
        return first + share * (last - first)
    return first * (last / first) ** share


def gaussians(
    model: WorldModel, params: Params, policy: Params, zs: Array
) -> tuple[Array, Array, Array]:
    """The policy's raw mean, log std and the mean of its actions, `[S, B, A]` each."""
    mean, log_std = model.policy({**params, "policy": policy}, zs)
    return mean, log_std, jnp.tanh(mean)


def kl_states(
    mean: Array,
    std: Array,
    expert_mean: Array,
    expert_std: Array,
    forward: bool,
    mask: Array | None = None,
) -> Array:
    """KL of diagonal Gaussians, mean over action dims, `[...]`: KL(expert || policy) if `forward`
    (covers the expert), else KL(policy || expert) (seeks its mode)."""
    pairs = (
        (expert_mean, expert_std, mean, std) if forward else (mean, std, expert_mean, expert_std)
    )
    return mean_over_actions(dist.gaussian_kl(*pairs), mask)


def mean_over_actions(x: Array, mask: Array | None = None) -> Array:
    """Mean over the action dims that a task has (all without a mask): `[..., A] -> [...]`."""
    if mask is None:
        return jnp.mean(x, axis=-1)
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.sum(x * mask, axis=-1) / jnp.sum(mask, axis=-1)


def distillation(
    mean: Array,
    log_std: Array,
    inputs: PolicyInputs,
    config: TDMPCConfig,
    scale: Any,
    mask: Array | None = None,
) -> tuple[Array, Array, Any]:
    """KL to the stored expert in units of its running scale: losses, mask, the moved scale.

    The last state of a window does not count (BMPC).
    """
    expert_mean, expert_std = inputs.expert[..., 0, :], inputs.expert[..., 1, :]
    expert_std = jnp.maximum(config.expert_std_scale * expert_std, config.expert_min_std)
    kl = kl_states(
        jnp.tanh(mean), jnp.exp(log_std), expert_mean, expert_std, config.kl_forward, mask
    )
    valid = inputs.mask * inputs.valid
    first = jax.lax.stop_gradient(jnp.where(valid[0] > 0, kl[0], 0.0))
    scale = returns.update_running_scale(scale, first, tau=config.tau)
    return (kl / scale.value)[:-1], valid[:-1], scale


def cloning(action: Array, wanted: Array, action_mask: Array | None = None) -> Array:
    """Mean squared error over the action dims that a task has: `[..., A]` -> `[...]` (NEWT)."""
    return mean_over_actions(jnp.square(action - wanted), action_mask)


def term_loss(
    name: str,
    model: WorldModel,
    params: Params,
    policy: tuple[Array, Array],
    inputs: PolicyInputs,
    scales: Scales,
    move_scale: Any,
    config: TDMPCConfig,
) -> tuple[Array, Array, Scales, dict[str, Array]]:
    """One of the losses: `[S', B]` losses, their mask, the moved scales, metrics."""
    mean, log_std = policy
    if name == "svg":
        action = model.act(mean, log_std, inputs.eps)
        q = policy_value(
            model, params, inputs.zs, action, inputs.heads, config, config.policy_std_coef
        )
        scale, kept = move_scale(scales.value, jax.lax.stop_gradient(q[0]))
        return -q / scale, inputs.mask, scales._replace(value=kept), dict(scale=scale)
    if name == "kl":
        actions = model.action_mask(inputs.zs)
        loss, mask, scale = distillation(mean, log_std, inputs, config, scales.kl, actions)
        return loss, mask, scales._replace(kl=scale), dict(kl=jnp.mean(loss) * scale.value)
    if name == "bc":
        action = model.act(mean, log_std, inputs.eps)[:-1]
        actions = model.action_mask(inputs.zs[:-1])
        return cloning(action, inputs.behaviour, actions), inputs.mask[:-1], scales, {}
    log_prob = policy_log_prob(model, mean[..., None, :], log_std[..., None, :], inputs.actions)
    loss = -jnp.sum(inputs.weights * log_prob, axis=-1)
    effective = dist.effective_samples(inputs.weights)
    return loss, inputs.mask * inputs.valid, scales, dict(effective_samples=effective)


def trust_region(
    mean: Array,
    log_std: Array,
    target: tuple[Array, Array],
    inputs: PolicyInputs,
    scale: Any,
    config: TDMPCConfig,
) -> tuple[Array, Any]:
    """KL(EMA policy || policy), summed over action dims, in units of its running scale: a scalar
    and the moved scale (document 001, section 2.4)."""
    kl = dist.gaussian_kl(jnp.tanh(target[0]), jnp.exp(target[1]), jnp.tanh(mean), jnp.exp(log_std))
    kl = jnp.sum(kl, axis=-1)
    scale = returns.update_running_scale(scale, jax.lax.stop_gradient(kl[0]), tau=config.tau)
    return time_weighted(kl / scale.value, inputs.mask, config.time_weight), scale


def policy_loss(
    policy: Params,
    model: WorldModel,
    params: Params,
    target_policy: Params | None,
    inputs: PolicyInputs,
    scales: Scales,
    move_scale: Any,
    config: TDMPCConfig,
    entropy_coef: Array | float,
) -> tuple[Array, dict[str, Any]]:
    """The mixture that `config.policy_loss` names, minus the entropy bonus.

    move_scale(value scale, values `[B]`) -> (divisor, moved scale). aux: metrics and `scales`.
    """
    mean, log_std, _ = gaussians(model, params, policy, inputs.zs)
    entropy = policy_entropy(
        model,
        mean,
        log_std,
        inputs.eps,
        config.entropy_action_dim_power,
        config.jacobian,
        model.action_mask(inputs.zs),
    )
    total: Array | float = 0.0
    metrics: dict[str, Array] = {}
    for i, (name, weight) in enumerate(config.policy_terms.items()):
        loss, mask, scales, extra = term_loss(
            name,
            model,
            {**params, "policy": policy},
            (mean, log_std),
            inputs,
            scales,
            move_scale,
            config,
        )
        loss = weight * loss
        if i == 0:
            if config.entropy_scale == "value":
                entropy_coef = entropy_coef / extra["scale"]
            loss = loss - entropy_coef * entropy[: loss.shape[0]]
        total = total + time_weighted(loss, mask, config.time_weight)
        metrics |= extra
    if config.trust_region_coef:
        target = jax.lax.stop_gradient(gaussians(model, params, target_policy, inputs.zs)[:2])
        trust, moved = trust_region(mean, log_std, target, inputs, scales.trust, config)
        total = total + config.trust_region_coef * trust
        scales = scales._replace(trust=moved)
        metrics["trust"] = trust
    metrics |= dict(entropy=entropy, std=jnp.exp(log_std))
    return total, dict(metrics=metrics, scales=scales)


def optimist_loss(
    optimist: Params,
    model: WorldModel,
    params: Params,
    inputs: PolicyInputs,
    scale: Array,
    config: TDMPCConfig,
    entropy_coef: Array | float,
) -> Array:
    """SVG for the second policy: optimistic about the ensembles, and much more random."""
    mean, log_std, _ = gaussians(model, params, optimist, inputs.zs)
    action = model.act(mean, log_std, inputs.eps)
    q = policy_value(
        model, params, inputs.zs, action, inputs.heads, config, config.optimist_std_coef
    )
    entropy = policy_entropy(
        model,
        mean,
        log_std,
        inputs.eps,
        config.entropy_action_dim_power,
        config.jacobian,
        model.action_mask(inputs.zs),
    )
    bonus = config.optimist_entropy_scale * entropy_coef * entropy
    return time_weighted(-q / scale - bonus, inputs.mask, config.time_weight)
