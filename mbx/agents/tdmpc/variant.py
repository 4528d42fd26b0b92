"""Optional policy losses: distillation, cloning, trust region, a second, optimistic policy.

    kl    distil the planner's Gaussian (BMPC)
    bc    clone the replay's actions (NEWT, for demonstrations)

Interface and axes as in `losses`: S = T+1 states, B batch, A action dims. Sources: BMPC (arXiv
2503.18871); docs/sources.md, entries ensembles and behaviour.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mbx import categorical, returns
from mbx import distributions as dist
from mbx.agents.tdmpc.policies import (
    Policy,
    Term,
    entropy_coefficient,
    kl_states,
    mean_over_actions,
    move_scale,
    move_value_scale,
    policy_entropy,
    policy_log_prob,
    policy_value,
    value_scale,
)
from mbx.agents.tdmpc.types import PolicyInputs, Scales, ValueScales
from mbx.types import Array, Params
from mbx.world_model import WorldModel

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings

# Second policy: weight of the ensembles' standard deviation, factor of the entropy bonus.
OPTIMISM, OPTIMIST_ENTROPY = 1.0, 100.0
# Lowest probability of an action in a distilled expert, so that its logarithm is finite.
EXPERT_LEAST = 1e-3


def distil(
    settings: Settings,
    model: WorldModel,
    params: Params,
    policy: Policy,
    inputs: PolicyInputs,
    scales: Scales,
) -> Term:
    """KL to the stored expert over its running scale, without a window's last state (BMPC)."""
    (mean, log_std), loss = policy, settings.loss
    expert_mean, expert_std = inputs.expert[..., 0, :], inputs.expert[..., 1, :]
    if model.config.policy == "categorical":
        expert = jnp.log(categorical.probabilities(expert_mean, least=EXPERT_LEAST))
        kl = categorical.kl(expert, mean) if loss.kl_forward else categorical.kl(mean, expert)
    else:
        mask = model.action_mask(inputs.zs)
        expert_std = jnp.maximum(expert_std, loss.expert_min_std)
        own = jnp.tanh(mean), jnp.exp(log_std)
        kl = kl_states(*own, expert_mean, expert_std, loss.kl_forward, mask)
    first = jnp.where(inputs.plans.mask[0] > 0, kl[0], 0.0)
    scale = move_scale(settings, scales.kl, first, min_=loss.kl_scale_min)
    loss = kl[:-1] / scale.value
    return loss, inputs.plans.first(len(loss)), scales._replace(kl=scale), dict(kl=kl[:-1])


def clone(
    settings: Settings,
    model: WorldModel,
    params: Params,
    policy: Policy,
    inputs: PolicyInputs,
    scales: Scales,
) -> Term:
    """Squared distance from the replay's actions (NEWT), or their log-probability if discrete."""
    mean, log_std = policy
    if model.config.policy == "categorical":
        loss = -policy_log_prob(model, mean[:-1], log_std[:-1], inputs.behaviour)
    else:
        action = model.act(mean, log_std, inputs.eps)[:-1]
        loss = cloning(action, inputs.behaviour, model.action_mask(inputs.zs[:-1]))
    return loss, inputs.states.first(len(loss)), scales, {}


def cloning(action: Array, wanted: Array, action_mask: Array | None = None) -> Array:
    """Mean squared error over a task's action dims: `[..., A] -> [...]` (NEWT)."""
    return mean_over_actions(jnp.square(action - wanted), action_mask)


def trust_region(
    settings: Settings,
    model: WorldModel,
    policy: Policy,
    target: Policy,
    inputs: PolicyInputs,
    scale: returns.RunningScale,
) -> tuple[Array, returns.RunningScale]:
    """KL(EMA policy || policy), summed over action dims, divided by its running scale, `[S, B]`.

    The KL before tanh equals that after it. Source: docs/sources.md, entry behaviour.
    """
    (mean, log_std), (old_mean, old_log_std) = policy, target
    if model.config.policy == "categorical":
        kl = categorical.kl(old_mean, mean)
    else:
        if model.config.policy == "tanh_mean":
            mean, old_mean = jnp.tanh(mean), jnp.tanh(old_mean)
        kl = dist.gaussian_kl(old_mean, jnp.exp(old_log_std), mean, jnp.exp(log_std))
        kl = jnp.sum(kl, axis=-1)
    scale = move_scale(settings, scale, kl[0])
    return kl / scale.value, scale


def optimist_loss(
    settings: Settings,
    model: WorldModel,
    optimist: Params,
    params: Params,
    inputs: PolicyInputs,
    scales: ValueScales,
    progress: Array | float = 0.0,
) -> tuple[Array, ValueScales]:
    """SVG for the second policy: optimistic about the ensembles, with a large entropy bonus.

    Returns:
        The loss, and the value scales, which follow the optimist's values where nothing else moves
        them. Source: docs/sources.md, entry behaviour.
    """
    params = {**params, "policy": optimist}
    mean, log_std = model.policy(params, inputs.zs)
    action = model.act(mean, log_std, inputs.eps)
    q = policy_value(
        settings, model, params, inputs.zs, action, inputs.heads, OPTIMISM, inputs.dropout
    )
    if settings.uses_svg:
        scale = value_scale(settings, scales)
    else:
        scale, scales = move_value_scale(settings, scales, jax.lax.stop_gradient(q[0]))
    mask = model.action_mask(inputs.zs)
    entropy = policy_entropy(settings, model, mean, log_std, inputs.eps, mask)
    entropy_coef = entropy_coefficient(settings, progress)
    if settings.svg_first and settings.loss.entropy_scale == "value":
        entropy_coef = entropy_coef / scale
    bonus = OPTIMIST_ENTROPY * entropy_coef * entropy
    return inputs.states.mean(-q / scale - bonus), scales
