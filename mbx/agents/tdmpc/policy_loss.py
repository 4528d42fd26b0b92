"""Policy losses of the TD-MPC agent: a state's loss for every way to learn a policy.

    svg   maximise the critic through the policy's action (TD-MPC2, equation 4)
    awr   advantage-weighted regression onto the planner's actions
    kl    distil the planner's Gaussian (BMPC)
    bc    clone the replay's actions (NEWT, for demonstrations)

Each gives `[S, B]` losses and which of those states count; `policy_loss` mixes them, adds the
entropy bonus and the trust region. Latents carry no gradient, and gradients flow into the policy
alone. Axes: S = T+1 states, B batch, N planner actions, A action dims.
Sources: TD-MPC2 (arXiv 2310.16828); BMPC (arXiv 2503.18871); docs/sources.md, entries
planner-targets, ensembles and behaviour.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mbx import categorical, returns
from mbx import distributions as dist
from mbx.agents.tdmpc.model_loss import repeat_for_heads, select_latents, time_weighted
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch, Noise, PolicyInputs, Scales, ValueScales
from mbx.fast import collectives
from mbx.types import Array, Metrics, Params
from mbx.world_model import (
    WorldModel,
    continue_prob,
    discount_of,
    head_values,
    reduce_dynamics,
)

# The second policy's: weight of the ensembles' standard deviation, factor of its entropy bonus.
OPTIMISM, OPTIMIST_ENTROPY = 1.0, 100.0
# Least probability of an action in an expert that is distilled: its logarithm has to be finite.
EXPERT_LEAST = 1e-3


def state_mask(mask: Array) -> Array:
    """Mask of the T+1 states of windows from that of the T transitions: `[T, B] -> [T+1, B]`."""
    return jnp.concatenate([mask[:1], mask], axis=0)


def policy_inputs(
    settings: Settings, zs: Array, batch: Batch, weights: Array | None, noise: Noise
) -> PolicyInputs:
    """What the policy losses read, repeated where several dynamics heads feed them."""
    strategy, heads = settings.loss.head_strategy, zs.shape[1]
    copied = repeat_for_heads(
        dict(
            mask=state_mask(batch.mask),
            actions=batch.plan_actions,
            weights=weights,
            valid=batch.plan_valid,
            expert=batch.expert,
            behaviour=batch.action,
        ),
        strategy,
        heads,
    )
    return PolicyInputs(
        zs=select_latents(zs, strategy),
        eps=noise.policy_eps,
        heads=noise.policy_heads,
        dropout=noise.policy_dropout,
        counts=batch.counts,
        **copied,
    )


def value_scale(settings: Settings, scales: ValueScales) -> Array:
    """The unit of values in use."""
    if settings.loss.value_scale == "return_ema":
        return returns.return_ema_offset_scale(scales.ema)[1]
    return scales.running.value


def move_value_scale(
    settings: Settings, scales: ValueScales, values: Array
) -> tuple[Array, ValueScales]:
    """Move the unit of values with `values` `[n]`: the unit in use, and both forms."""
    values = collectives.all_gather(values)
    if settings.loss.value_scale == "return_ema":
        scales = scales._replace(ema=returns.update_return_ema(scales.ema, values))
    else:
        running = returns.update_running_scale(scales.running, values, tau=settings.optimizer.tau)
        scales = scales._replace(running=running)
    return value_scale(settings, scales), scales


def policy_value(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    action: Array,
    heads: Array | None,
    std_coef: ArrayLike = 0.0,
    dropout: Array | None = None,
) -> Array:
    """Value of `action` `[..., A]` in `z` `[..., L]`: Q, or one step ahead with a V critic.

    Args:
        heads: value heads in use, None for all.
        dropout: a key; None for values without dropout. TD-MPC2's policy learns from values in
            training mode.
        std_coef: weight of the ensembles' standard deviation (of reward plus discounted value); its
            sign chooses the best, worst or mean dynamics head (docs/sources.md, entry ensembles).
    """
    if model.config.critic == "q":
        q = head_values(model, params["value"], z, action, heads, dropout)
        mean = jnp.mean(q, axis=0)
        return mean + std_coef * returns.ensemble_std(q) if std_coef else mean
    reward = model.reward_mean(params, z[None], action)
    z_next = model.step(params, model.tile_heads(z), action)
    alive = continue_prob(model, params, z_next, settings.loss.termination)
    discount = discount_of(model, settings.loss.discount, z[None])
    discount = discount if alive is None else discount * alive
    value = head_values(model, params["value"], z_next, None, heads, dropout)
    score = jnp.mean(reward, axis=0) + discount * jnp.mean(value, axis=0)
    if std_coef:
        std = returns.ensemble_std(reward) + discount * returns.ensemble_std(value)
        score = score + std_coef * std
    return reduce_dynamics(score, "from_std_coef", std_coef)


def policy_log_prob(model: WorldModel, mean: Array, log_std: Array, action: Array) -> Array:
    """log pi(action) `[...]` of given actions `[..., A]` in the model's parameterisation."""
    if model.config.policy == "categorical":
        return jnp.sum(action * mean, axis=-1)
    if model.config.policy == "tanh_mean":
        eps = (action - jnp.tanh(mean)) * jnp.exp(-log_std)
        return dist.gaussian_log_prob(eps, jnp.broadcast_to(log_std, eps.shape))
    return dist.squashed_log_prob(action, mean, log_std)


def policy_entropy(
    settings: Settings,
    model: WorldModel,
    mean: Array,
    log_std: Array,
    eps: Array,
    mask: Array | None = None,
) -> Array:
    """Entropy bonus `[...]`: -A^entropy_action_dim_power * log pi at one sample.

    With jacobian 0 and power 1 this is TD-MPC2's "scaled entropy". A categorical policy's is its
    entropy itself, of one action dim.

    Args:
        mean, log_std, eps: `[..., A]`.
        mask: `[..., A]`, the actions that a task has; A is their number.
    """
    if model.config.policy == "categorical":
        return categorical.entropy(mean)
    num: Array | int = model.config.action_dim
    if mask is not None:
        eps, num = eps * mask, jnp.sum(mask, axis=-1)
    log_prob = dist.gaussian_log_prob(eps, log_std)
    if model.config.policy == "squashed" and settings.loss.jacobian:
        share = settings.loss.jacobian
        log_prob = dist.squash(mean, mean + jnp.exp(log_std) * eps, log_prob, share)[2]
    return dist.scaled_entropy(log_prob, num, settings.loss.entropy_action_dim_power)


def in_nats(settings: Settings, model: WorldModel, entropy: Array, mask: Array | None) -> Array:
    """The entropy itself of what `policy_entropy` gives, in nats."""
    if model.config.policy == "categorical":
        return entropy
    num: Array | int = model.config.action_dim
    if mask is not None:
        num = jnp.sum(mask, axis=-1)
    entropy = entropy / num**settings.loss.entropy_action_dim_power
    # A dim that a task lacks has the density of a unit Gaussian at 0.
    return entropy - 0.5 * math.log(2.0 * math.pi) * (model.config.action_dim - num)


def entropy_coefficient(settings: Settings, progress: Array | float) -> Array | float:
    """The coefficient at a share of the run.

    Constant, or from entropy_coef to entropy_coef_end between entropy_start and entropy_end,
    linearly or geometrically.
    """
    loss = settings.loss
    first = loss.entropy_coef
    if not settings.changes_entropy:
        return first
    last = loss.entropy_coef_end
    span = loss.entropy_end - loss.entropy_start
    share = jnp.clip((progress - loss.entropy_start) / span, 0.0, 1.0)
    if loss.entropy_schedule == "linear":
        return first + share * (last - first)
    return first * (last / first) ** share


def kl_states(
    mean: Array,
    std: Array,
    expert_mean: Array,
    expert_std: Array,
    forward: bool,
    mask: Array | None = None,
) -> Array:
    """KL of diagonal Gaussians, mean over action dims, `[...]`.

    KL(expert || policy) if `forward` (covers the expert), else KL(policy || expert) (seeks its
    mode).
    """
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
    settings: Settings,
    model: WorldModel,
    policy: tuple[Array, Array],
    inputs: PolicyInputs,
    scale: returns.RunningScale,
) -> tuple[Array, Array, returns.RunningScale]:
    """KL to the stored expert in units of its running scale: losses, mask, the moved scale.

    The last state of a window does not count (BMPC).

    Args:
        policy: as `model.policy` gives it, `[S, B, A]`.
    """
    (mean, log_std), loss = policy, settings.loss
    expert_mean, expert_std = inputs.expert[..., 0, :], inputs.expert[..., 1, :]
    if model.config.policy == "categorical":
        expert = jnp.log(categorical.probabilities(expert_mean, least=EXPERT_LEAST))
        kl = categorical.kl(expert, mean) if loss.kl_forward else categorical.kl(mean, expert)
    else:
        mask = model.action_mask(inputs.zs)
        expert_std = jnp.maximum(loss.expert_std_scale * expert_std, loss.expert_min_std)
        own = jnp.tanh(mean), jnp.exp(log_std)
        kl = kl_states(*own, expert_mean, expert_std, loss.kl_forward, mask)
    valid = inputs.mask * inputs.valid
    first = jax.lax.stop_gradient(jnp.where(valid[0] > 0, kl[0], 0.0))
    scale = returns.update_running_scale(
        scale, collectives.all_gather(first), tau=settings.optimizer.tau, min_=loss.kl_scale_min
    )
    return (kl / scale.value)[:-1], valid[:-1], scale


def cloning(action: Array, wanted: Array, action_mask: Array | None = None) -> Array:
    """Mean squared error over the action dims that a task has: `[..., A]` -> `[...]` (NEWT)."""
    return mean_over_actions(jnp.square(action - wanted), action_mask)


def term_loss(
    name: str,
    settings: Settings,
    model: WorldModel,
    params: Params,
    policy: tuple[Array, Array],
    inputs: PolicyInputs,
    scales: Scales,
) -> tuple[Array, Array, Scales, Metrics]:
    """One of the losses: `[S', B]` losses, their mask, the moved scales, metrics."""
    mean, log_std = policy
    if name == "svg":
        action = model.act(mean, log_std, inputs.eps)
        std_coef = settings.loss.policy_std_coef
        q = policy_value(
            settings, model, params, inputs.zs, action, inputs.heads, std_coef, inputs.dropout
        )
        first = jax.lax.stop_gradient(q[0])
        scale, moved = move_value_scale(settings, scales.value, first)
        return -q / scale, inputs.mask, scales._replace(value=moved), dict(scale=scale)
    if name == "kl":
        loss, mask, scale = distillation(settings, model, policy, inputs, scales.kl)
        return loss, mask, scales._replace(kl=scale), dict(kl=jnp.mean(loss) * scale.value)
    if name == "bc" and model.config.policy == "categorical":
        log_prob = policy_log_prob(model, mean[:-1], log_std[:-1], inputs.behaviour)
        return -log_prob, inputs.mask[:-1], scales, {}
    if name == "bc":
        action = model.act(mean, log_std, inputs.eps)[:-1]
        actions = model.action_mask(inputs.zs[:-1])
        return cloning(action, inputs.behaviour, actions), inputs.mask[:-1], scales, {}
    log_prob = policy_log_prob(model, mean[..., None, :], log_std[..., None, :], inputs.actions)
    loss = -jnp.sum(inputs.weights * log_prob, axis=-1)
    effective = dist.effective_samples(inputs.weights)
    return loss, inputs.mask * inputs.valid, scales, dict(effective_samples=effective)


def trust_region(
    settings: Settings,
    model: WorldModel,
    policy: tuple[Array, Array],
    target: tuple[Array, Array],
    inputs: PolicyInputs,
    scale: returns.RunningScale,
) -> tuple[Array, returns.RunningScale]:
    """KL(EMA policy || policy), summed over action dims, in units of its running scale.

    Squashing both by tanh leaves their KL as it is, so that a squashed policy's is that before it.

    Source: docs/sources.md, entry behaviour.

    Args:
        policy, target: as `model.policy` gives them, `[S, B, A]`.

    Returns:
        A scalar and the moved scale.
    """
    (mean, log_std), (old_mean, old_log_std) = policy, target
    if model.config.policy == "categorical":
        kl = categorical.kl(old_mean, mean)
    else:
        if model.config.policy == "tanh_mean":
            mean, old_mean = jnp.tanh(mean), jnp.tanh(old_mean)
        kl = dist.gaussian_kl(old_mean, jnp.exp(old_log_std), mean, jnp.exp(log_std))
        kl = jnp.sum(kl, axis=-1)
    first = jax.lax.stop_gradient(kl[0])
    first = collectives.all_gather(first)
    scale = returns.update_running_scale(scale, first, tau=settings.optimizer.tau)
    rest = settings.loss.time_weight, inputs.counts.of_policy("trust", kl.shape[0])
    return time_weighted(kl / scale.value, inputs.mask, *rest), scale


def policy_loss(
    settings: Settings,
    model: WorldModel,
    policy: Params,
    params: Params,
    target_policy: Params | None,
    inputs: PolicyInputs,
    scales: Scales,
    progress: Array | float = 0.0,
) -> tuple[Array, tuple[Scales, Metrics]]:
    """The mixture that `loss.policy_loss` names, minus the entropy bonus.

    Args:
        policy: its parameters; gradients flow into them alone.
        params: the model's.
        target_policy: the EMA policy of the trust region.
        progress: share of the run that is done.

    Returns:
        The loss, and the moved scales with metrics.
    """
    params = {**params, "policy": policy}
    mean, log_std = model.policy(params, inputs.zs)
    actions = model.action_mask(inputs.zs)
    entropy = policy_entropy(settings, model, mean, log_std, inputs.eps, actions)
    entropy_coef = entropy_coefficient(settings, progress)
    total: Array | float = 0.0
    metrics: Metrics = {}
    for i, (name, weight) in enumerate(settings.loss.policy_terms.items()):
        loss, mask, scales, extra = term_loss(
            name, settings, model, params, (mean, log_std), inputs, scales
        )
        loss = weight * loss
        if i == 0:
            if settings.svg_first and settings.loss.entropy_scale == "value":
                entropy_coef = entropy_coef / extra["scale"]
            loss = loss - entropy_coef * entropy[: loss.shape[0]]
        count = inputs.counts.of_policy(name, loss.shape[0])
        total = total + time_weighted(loss, mask, settings.loss.time_weight, count)
        metrics |= extra
    if settings.loss.trust_region_coef:
        target = model.policy({**params, "policy": target_policy}, inputs.zs)
        target = jax.lax.stop_gradient(target)
        trust, moved = trust_region(settings, model, (mean, log_std), target, inputs, scales.trust)
        total = total + settings.loss.trust_region_coef * trust
        scales = scales._replace(trust=moved)
        metrics["trust"] = (
            trust * collectives.axis_size()
        )  # of which, as of all here, a mean is taken
    metrics["entropy"] = in_nats(settings, model, entropy, actions)
    if model.config.policy != "categorical":
        metrics["std"] = mean_over_actions(jnp.exp(log_std), actions)
    return settings.loss.policy_coef * total, (scales, metrics)


def optimist_loss(
    settings: Settings,
    model: WorldModel,
    optimist: Params,
    params: Params,
    inputs: PolicyInputs,
    scales: ValueScales,
    progress: Array | float = 0.0,
) -> tuple[Array, ValueScales]:
    """SVG for the second policy: optimistic about the ensembles, and much more random.

    The unit of values is the one that svg or the weights of planner actions move; where they do
    not, it follows the optimist's values. Source: docs/sources.md, entry behaviour.

    Returns:
        The loss, and the scales, moved where nothing else moves them.
    """
    params = {**params, "policy": optimist}
    mean, log_std = model.policy(params, inputs.zs)
    action = model.act(mean, log_std, inputs.eps)
    q = policy_value(
        settings, model, params, inputs.zs, action, inputs.heads, OPTIMISM, inputs.dropout
    )
    if settings.moves_value_scale:
        scale = value_scale(settings, scales)
    else:
        scale, scales = move_value_scale(settings, scales, jax.lax.stop_gradient(q[0]))
    mask = model.action_mask(inputs.zs)
    entropy = policy_entropy(settings, model, mean, log_std, inputs.eps, mask)
    entropy_coef = entropy_coefficient(settings, progress)
    if settings.svg_first and settings.loss.entropy_scale == "value":
        entropy_coef = entropy_coef / scale
    bonus = OPTIMIST_ENTROPY * entropy_coef * entropy
    rest = settings.loss.time_weight, inputs.counts.of_policy("optimist", q.shape[0])
    return time_weighted(-q / scale - bonus, inputs.mask, *rest), scales
