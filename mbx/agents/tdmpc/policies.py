"""Parts of the policy losses: the critic's value of an action, units, densities, entropy.

Axes: S = T+1 states, B batch, A action dims, L latent dims; `...` are free. Sources: TD-MPC2 (arXiv
2310.16828) and its reference code; docs/sources.md, entry ensembles.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mbx import categorical, returns
from mbx import distributions as dist
from mbx.agents.tdmpc.types import Rows, Scales, ValueScales
from mbx.fast import collectives
from mbx.types import Array, Metrics, Params
from mbx.world_model import WorldModel, continue_prob, discount_of, head_values, reduce_dynamics

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings

Policy = tuple[Array, Array]  # mean and log_std, [S, B, A]
Term = tuple[Array, Rows, Scales, Metrics]


def value_scale(settings: Settings, scales: ValueScales) -> Array:
    """The unit of values in use."""
    if settings.loss.value_scale == "return_ema":
        return returns.return_ema_offset_scale(scales.ema)[1]
    return scales.running.value


def move_value_scale(
    settings: Settings, scales: ValueScales, values: Array
) -> tuple[Array, ValueScales]:
    """The unit of values after an update with `values` `[n]`, and both its forms."""
    values = collectives.all_gather(values)
    if settings.loss.value_scale == "return_ema":
        scales = scales._replace(ema=returns.update_return_ema(scales.ema, values))
    else:
        running = returns.update_running_scale(scales.running, values, tau=settings.optimizer.tau)
        scales = scales._replace(running=running)
    return value_scale(settings, scales), scales


def move_scale(
    settings: Settings, scale: returns.RunningScale, values: Array, **limits: float
) -> returns.RunningScale:
    """A running scale updated with the values `[B]` of the whole batch, without gradient."""
    values = collectives.all_gather(jax.lax.stop_gradient(values))
    return returns.update_running_scale(scale, values, tau=settings.optimizer.tau, **limits)


def q_value(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    action: Array,
    heads: Array | None,
    std_coef: ArrayLike,
    dropout: Array | None,
) -> Array:
    """Q(z, a), mean over heads: `CRITICS["q"]`, see `policy_value`."""
    q = head_values(model, params["value"], z, action, heads, dropout)
    mean = jnp.mean(q, axis=0)
    return mean + std_coef * returns.ensemble_std(q) if std_coef else mean


def one_step_value(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    action: Array,
    heads: Array | None,
    std_coef: ArrayLike,
    dropout: Array | None,
) -> Array:
    """r(z, a) + gamma V(z') in the model: `CRITICS["v"]`, see `policy_value`."""
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


CRITICS: dict[str, Callable[..., Array]] = {"q": q_value, "v": one_step_value}


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
        std_coef: weight of the ensembles' standard deviation (of reward plus discounted value); its
            sign chooses the best, worst or mean dynamics head (docs/sources.md, entry ensembles).
        dropout: a key, since TD-MPC2's policy learns from values in training mode; None: none.
    """
    value = CRITICS[model.config.critic]
    return value(settings, model, params, z, action, heads, std_coef, dropout)


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


def kl_states(
    mean: Array,
    std: Array,
    expert_mean: Array,
    expert_std: Array,
    forward: bool,
    mask: Array | None = None,
) -> Array:
    """KL of diagonal Gaussians, mean over action dims, `[...]`.

    KL(expert || policy), which covers the expert, if `forward`, else the mode-seeking
    KL(policy || expert).
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
