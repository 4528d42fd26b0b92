"""Policies in their losses: values and densities of actions, units, distillation, the optimist.

    kl    distil the planner's Gaussian (BMPC): `distil`
    bc    clone the replay's actions (NEWT, for demonstrations): `clone`

Axes: S = T+1 states, B batch, A action dims, L latent dims; `...` are free. Sources: TD-MPC2 (arXiv
2310.16828) and its reference code; BMPC (arXiv 2503.18871); docs/sources.md, entries ensembles and
behaviour.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mbx import categorical, returns
from mbx import distributions as dist
from mbx.agents.tdmpc.types import PolicyInputs, Rows, Scales
from mbx.fast import collectives
from mbx.types import Array, Metrics, Params
from mbx.world_model import WorldModel, continue_prob, discount_of, head_values

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings

# The optimist: weight of the ensembles' standard deviation, factor of the entropy bonus.
OPTIMISM, OPTIMIST_ENTROPY = 1.0, 100.0
# Lowest probability of an action, and standard deviation, of an expert, so that states without one
# have finite losses.
EXPERT_LEAST = 1e-3

Term = tuple[Array, Rows, Scales, Metrics]  # losses [S', B], rows that count, new scales, metrics


class Policy(NamedTuple):
    """A policy in the states of a batch, as the rows of `losses.POLICY_LOSSES` read it."""

    settings: Settings
    model: WorldModel
    params: Params  # the model's, with this policy
    mean: Array  # `[S, B, A]`, before any squashing, as log_std
    log_std: Array
    inputs: PolicyInputs

    def act(self) -> Array:
        """Actions drawn with the inputs' noise, `[S, B, A]`."""
        return self.model.act(self.mean, self.log_std, self.inputs.eps)

    def value(self, std_coef: ArrayLike, reduction: str = "mean") -> Array:
        """`policy_value` of `act`, `[S, B]`."""
        x, own = self.inputs, (self.settings, self.model, self.params)
        return policy_value(*own, x.zs, self.act(), x.heads, std_coef, x.dropout, reduction)

    def entropy(self) -> Array:
        """`policy_entropy`, `[S, B]`."""
        mask = self.model.action_mask(self.inputs.zs)
        return policy_entropy(
            self.settings, self.model, self.mean, self.log_std, self.inputs.eps, mask
        )


def policy_of(
    settings: Settings, model: WorldModel, params: Params, policy: Params, inputs: PolicyInputs
) -> Policy:
    """The policy with parameters `policy`, in the model of `params`."""
    params = {**params, "policy": policy}
    return Policy(settings, model, params, *model.policy(params, inputs.zs), inputs)


def value_scale(settings: Settings, scales: Scales) -> Array:
    """The unit of values."""
    if settings.loss.value_scale == "return_ema":
        return returns.return_ema_offset_scale(scales.return_ema)[1]
    return scales.scale.value


def move_value_scale(settings: Settings, scales: Scales, values: Array) -> tuple[Array, Scales]:
    """The unit of values after an update with `values` `[n]`, and the moved scales."""
    if settings.loss.value_scale == "return_ema":
        values = collectives.all_gather(jax.lax.stop_gradient(values))
        scales = scales._replace(return_ema=returns.update_return_ema(scales.return_ema, values))
    else:
        scales = scales._replace(scale=move_scale(settings, scales.scale, values))
    return value_scale(settings, scales), scales


def move_scale(
    settings: Settings, scale: returns.RunningScale, values: Array, **limits: float
) -> returns.RunningScale:
    """A running scale updated with the values `[B]` of the whole batch, without gradient."""
    values = collectives.all_gather(jax.lax.stop_gradient(values))
    return returns.update_running_scale(scale, values, tau=settings.optimizer.tau, **limits)


def policy_value(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    action: Array,
    heads: Array | None,
    std_coef: ArrayLike = 0.0,
    dropout: Array | None = None,
    reduction: str = "mean",
) -> Array:
    """Value of `action` `[..., A]` in `z` `[..., L]`: Q(z, a), or r + gamma V(z') in the model.

    Args:
        heads: value heads in use, None for all.
        std_coef: weight of the ensembles' standard deviation (of reward plus discounted value); its
            sign chooses the best, worst or mean dynamics head (docs/sources.md, entry ensembles).
        dropout: a key, since TD-MPC2's policy learns from values in training mode; None: none.
        reduction: over value heads, "mean" or "min".
    """
    if model.config.critic == "q":
        q = head_values(model, params["value"], z, action, heads, dropout, reduction)
        mean = jnp.mean(q, axis=0)
        return mean + std_coef * returns.ensemble_std(q) if std_coef else mean
    reward = model.reward_mean(params, z[None], action)
    z_next = model.step(params, model.tile_heads(z), action)
    alive = continue_prob(model, params, z_next, settings.loss.termination)
    discount = discount_of(model, settings.loss.discount, z[None])
    discount = discount if alive is None else discount * alive
    value = head_values(model, params["value"], z_next, None, heads, dropout, reduction)
    score = jnp.mean(reward, axis=0) + discount * jnp.mean(value, axis=0)
    if std_coef:
        std = returns.ensemble_std(reward) + discount * returns.ensemble_std(value)
        score = score + std_coef * std
    return returns.reduce_heads(score, "from_std_coef", std_coef)


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

    With jacobian 0 and power 1 this is TD-MPC2's "scaled entropy"; for a categorical policy it is
    the entropy.

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
    """The bonus of `policy_entropy` converted to nats."""
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

    Constant, or linear or geometric from entropy_coef to entropy_coef_end between entropy_start and
    entropy_end.
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


def mean_over_actions(x: Array, mask: Array | None = None) -> Array:
    """Mean over the action dims that a task has (all without a mask): `[..., A] -> [...]`."""
    if mask is None:
        return jnp.mean(x, axis=-1)
    mask = jnp.broadcast_to(mask, x.shape)
    return jnp.sum(x * mask, axis=-1) / jnp.sum(mask, axis=-1)


# -------------------------------------------------------------------------------------------------
# Distillation, cloning, trust region, the optimist


def distil(policy: Policy, scales: Scales) -> Term:
    """KL to the stored expert over its running scale, without a window's last state (BMPC).

    KL(expert || policy), which covers the expert, with `loss.kl_forward`, else the mode-seeking
    KL(policy || expert); of Gaussians the mean over action dims.
    """
    loss, model, inputs = policy.settings.loss, policy.model, policy.inputs
    expert_mean, expert_std = inputs.expert[..., 0, :], inputs.expert[..., 1, :]
    if model.config.policy == "categorical":
        expert = jnp.log(categorical.probabilities(expert_mean, least=EXPERT_LEAST))
        pair = (expert, policy.mean) if loss.kl_forward else (policy.mean, expert)
        kl = categorical.kl(*pair)
    else:
        expert = expert_mean, jnp.maximum(expert_std, EXPERT_LEAST)
        own = jnp.tanh(policy.mean), jnp.exp(policy.log_std)
        pairs = (*expert, *own) if loss.kl_forward else (*own, *expert)
        kl = mean_over_actions(dist.gaussian_kl(*pairs), model.action_mask(inputs.zs))
    first = jnp.where(inputs.plans.mask[0] > 0, kl[0], 0.0)
    scale = move_scale(policy.settings, scales.kl_scale, first, min_=loss.kl_scale_min)
    kl = kl[:-1]
    rows = inputs.plans.first(len(kl))
    return kl / scale.value, rows, scales._replace(kl_scale=scale), dict(kl=kl)


def clone(policy: Policy, scales: Scales) -> Term:
    """Squared distance from the replay's actions (NEWT), or their log-probability if discrete."""
    model, inputs = policy.model, policy.inputs
    if model.config.policy == "categorical":
        mean, log_std = policy.mean[:-1], policy.log_std[:-1]
        loss = -policy_log_prob(model, mean, log_std, inputs.behaviour)
    else:
        mask = model.action_mask(inputs.zs[:-1])
        loss = cloning(policy.act()[:-1], inputs.behaviour, mask)
    return loss, inputs.states.first(len(loss)), scales, {}


def cloning(action: Array, wanted: Array, action_mask: Array | None = None) -> Array:
    """Mean squared error over a task's action dims: `[..., A] -> [...]` (NEWT)."""
    return mean_over_actions(jnp.square(action - wanted), action_mask)


def trust_region(
    policy: Policy, old_mean: Array, old_log_std: Array, scales: Scales
) -> tuple[Array, Scales]:
    """KL(EMA policy || policy), summed over action dims, divided by its running scale, `[S, B]`.

    The KL before tanh equals that after it. Source: docs/sources.md, entry behaviour.
    """
    mean, kind = policy.mean, policy.model.config.policy
    if kind == "categorical":
        kl = categorical.kl(old_mean, mean)
    else:
        if kind == "tanh_mean":
            mean, old_mean = jnp.tanh(mean), jnp.tanh(old_mean)
        kl = dist.gaussian_kl(old_mean, jnp.exp(old_log_std), mean, jnp.exp(policy.log_std))
        kl = jnp.sum(kl, axis=-1)
    scale = move_scale(policy.settings, scales.trust_scale, kl[0])
    return kl / scale.value, scales._replace(trust_scale=scale)


def optimist_loss(
    policy: Policy, scales: Scales, progress: Array | float = 0.0
) -> tuple[Array, Scales]:
    """SVG for the second policy: optimistic about the ensembles, with a large entropy bonus.

    Returns:
        The loss, and the scales, whose unit of values follows the optimist's values where nothing
        else moves it. Source: docs/sources.md, entry behaviour.
    """
    settings, q = policy.settings, policy.value(OPTIMISM)
    if settings.uses_svg:
        unit = value_scale(settings, scales)
    else:
        unit, scales = move_value_scale(settings, scales, q[0])
    entropy_coef = entropy_coefficient(settings, progress)
    if settings.svg_first and settings.loss.entropy_scale == "value":
        entropy_coef = entropy_coef / unit
    bonus = OPTIMIST_ENTROPY * entropy_coef * policy.entropy()
    return policy.inputs.states.mean(-q / unit - bonus), scales
