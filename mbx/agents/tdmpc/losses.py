"""What TD-MPC minimises: the losses of world model and values, then those of the policy.

In: a batch of windows, latents, targets (`value_targets`) and `Weights`, the rows that count with
their numbers in the whole batch. Out: a scalar and metrics. Every loss is a weighted sum of rows,
so that losses of several devices add up; every random number is an argument.

    svg   maximise the critic through the policy's action (TD-MPC2, equation 4)
    awr   advantage-weighted regression onto the planner's actions
    kl, bc: `policies`, with values of actions, units and entropy

Time-major: T transitions, S = T+1 states, B batch, H dynamics heads, R reward heads,
V value heads, G auxiliary discounts, N planner actions, L latent dims, A action dims, K bins.
Sources: TD-MPC2 (arXiv 2310.16828), equations 3 and 4, and its reference code; BMPC (arXiv
2503.18871); docs/sources.md, entries planner-targets, ensembles and behaviour.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx.agents.tdmpc.policies import (
    Policy,
    Term,
    clone,
    distil,
    entropy_coefficient,
    in_nats,
    mean_over_actions,
    move_value_scale,
    policy_log_prob,
    trust_region,
)
from mbx.agents.tdmpc.types import Batch, Noise, PolicyInputs, Rows, Scales, ValueTarget, Weights
from mbx.fast import collectives
from mbx.heads import Heads, Window
from mbx.types import Array, Metrics, Params
from mbx.world_model import WorldModel, masked

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings


# -------------------------------------------------------------------------------------------------
# Rows and their weights


def step_weights(settings: Settings, critic: str, batch: Batch) -> Weights:
    """The rows of a batch that count, and their numbers over all devices; critic: "q" or "v"."""
    states = jnp.concatenate([batch.mask[:1], batch.mask])
    masks = dict(rows=batch.mask, states=states, values=target_mask(settings, critic, batch))
    if batch.plan_valid is not None:
        masks["plans"] = states * batch.plan_valid
    counts = collectives.psum({name: jnp.sum(mask, axis=1) for name, mask in masks.items()})
    rho = settings.loss.time_weight
    return Weights(**{name: Rows(mask, counts[name], rho) for name, mask in masks.items()})


def target_mask(settings: Settings, critic: str, batch: Batch) -> Array:
    """Which states of a batch have a value target: 1 or 0, `[T, B]` or `[T+1, B]`.

    A V critic's targets are imagined, so that with `loss.value_last_state` a window's last state
    counts, too, if it belongs to the episode and is not terminal. Planner targets need a plan.
    """
    loss, mask = settings.loss, batch.mask
    if critic == "q" or loss.value_target == "lambda":
        return mask
    if loss.value_last_state:
        last = batch.mask[-1:] * (1.0 - batch.terminated[-1:])
        mask = jnp.concatenate([mask, last])
    return mask * batch.plan_valid[: mask.shape[0]] if loss.value_target == "planner" else mask


def select_latents(zs: Array) -> Array:
    """The latents that value and policy train on: `[S, H, B, L] -> [S, B, L]`.

    Head h has chunk h of the batch. Source: docs/sources.md, entry ensembles.
    """
    heads, batch = zs.shape[1:3]
    if heads == 1:
        return jnp.squeeze(zs, 1)
    chunk = batch // heads
    return jnp.concatenate([zs[:, h, h * chunk : (h + 1) * chunk] for h in range(heads)], axis=1)


def rollout(model: WorldModel, params: Params, z: Array, actions: Array) -> Array:
    """Latents of all heads along `actions` `[T, B, A]` from `z` `[B, L]`: `[T+1, H, B, L]`."""
    state = model.tile_heads(z)
    zs = [state]
    for action in actions:
        state = model.step(params, state, action)
        zs.append(state)
    return jnp.stack(zs)


def consistency(zs: Array, z_next: Array) -> Array:
    """Squared error of latents `[T, H, B, L]` against `[T, B, L]`: `[T, B]`.

    Mean over heads and dims. The caller stops the target's gradient.
    """
    return jnp.mean(jnp.square(zs - z_next[:, None]), axis=(1, 3))


def reward_loss(logits: Array, reward: Array, bins: Array) -> Array:
    """Cross-entropy of `[R, T, H, B, K]`, mean over heads: `[T, B]`."""
    target = jnp.broadcast_to(reward[None, :, None], logits.shape[:-1])
    return jnp.mean(dist.two_hot_cross_entropy(logits, target, bins), axis=(0, 2))


def termination_loss(logit: Array, terminated: Array, rows: Rows) -> Array:
    """Mean binary cross-entropy of logits `[T, H, B]` with `[T, B]`: a scalar."""
    bce = jax.nn.softplus(logit) - logit * terminated[:, None]
    return rows.even(jnp.mean(bce, axis=1))


def value_loss(logits: Array, target: ValueTarget, bins: Array) -> Array:
    """Cross-entropy of value heads `[V, T, B, K]` with their target, mean over heads: `[T, B]`."""
    if target.samples.shape[-1] == 1 and target.samples.shape[0] == 1:
        real = jnp.broadcast_to(target.samples[..., 0], logits.shape[:-1])
        cross_entropy = dist.two_hot_cross_entropy(logits, real, bins)
    else:
        two_hot = jnp.broadcast_to(target.two_hot(bins), logits.shape)
        cross_entropy = dist.cross_entropy(logits, two_hot)
    return jnp.mean(cross_entropy, axis=0)


# -------------------------------------------------------------------------------------------------
# World model and values


def consistency_losses(
    settings: Settings, zs: Array, encoded: Array, rows: Rows, progress: Array | float
) -> dict[str, Array]:
    """Losses of dynamics towards the encoder and, if enabled, of the encoder towards the dynamics.

    Args:
        zs: rolled out, `[T, H, B, L]`, without the task's part.
        encoded: `[T, B, L]`, with gradient only for the encoder's loss.
        progress: share of the run that is done; the encoder's loss starts after its warm-up.
    """
    still = jax.lax.stop_gradient
    losses = {"consistency": rows.mean(consistency(zs, still(encoded)))}
    if settings.loss.encoder_consistency_coef:
        loss = rows.mean(consistency(still(zs), encoded))
        started = progress >= settings.loss.encoder_consistency_warmup
        losses["encoder_consistency"] = jnp.where(started, loss, 0.0)
    return losses


def reward_logits(model: WorldModel, params: Params, zs: Array, actions: Array) -> Array:
    """Logits `[R, T, H, B, K]` of latents `[T, H, B, L]`, actions `[T, B, A]`, in one product."""
    logits = model.reward(params, jnp.swapaxes(zs, 0, 1), jnp.swapaxes(actions[:, None], 0, 1))
    return jnp.swapaxes(logits, 1, 2)


def value_losses(
    settings: Settings,
    model: WorldModel,
    params: Params,
    zs: Array,
    batch: Batch,
    targets: tuple[ValueTarget, Array | None],
    rows: Rows,
    noise: Noise,
) -> dict[str, Array]:
    """Losses of the value heads and the auxiliary ones on latents `[T+1, H, B, L]`.

    Args:
        targets: of the value heads, and of the auxiliary ones `[G, T, B]`.
        rows: states with a target.
    """
    bins, (target, aux_target) = model.bins(), targets
    action = batch.action if model.config.critic == "q" else None
    states = select_latents(zs[: rows.mask.shape[0]])
    logits = model.value(params["value"], states, action, noise.dropout)
    losses = {"value": rows.mean(value_loss(logits, target, bins))}
    if aux_target is not None:
        steps = aux_target.shape[1]
        logits = model.aux_value(params["aux_value"], states[:steps], action)
        cross_entropy = jnp.mean(dist.two_hot_cross_entropy(logits, aux_target, bins), axis=0)
        losses["aux_value"] = rows.first(steps).mean(cross_entropy)
    return losses


def head_losses(
    model: WorldModel, params: Params, zs: Array, batch: Batch, weights: Weights
) -> tuple[dict[str, Array], Metrics]:
    """Losses and metrics of the auxiliary heads, mean over dynamics heads.

    Args:
        zs: latents rolled out from the first state, `[T+1, H, B, L]`.
    """
    assert model.heads is not None
    heads, tasks = model.heads, model.config.tasks
    encoded = jnp.concatenate([zs[:1, 0], model.encode(params, batch.obs[1:])])
    action = masked(model, batch.action, encoded[:-1])

    def of(latents: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        seen = [z if tasks is None else tasks.inputs(z) for z in (encoded, latents)]
        rest = action, batch.reward, batch.terminated, batch.mask
        return heads.losses(params["heads"], Window(heads.seen(batch.obs), *seen, *rest))

    losses, metrics = jax.tree.map(lambda x: jnp.mean(x, axis=0), jax.vmap(of)(zs.swapaxes(0, 1)))
    return (
        {f"heads/{name}": weights.rows.mean(x) for name, x in losses.items()},
        {f"heads/{name}": weights.rows.even(x) for name, x in metrics.items()},
    )


def total_loss(
    settings: Settings,
    losses: dict[str, Array],
    value_due: Array | float = 1.0,
    heads: Heads | None = None,
) -> Array:
    """The weighted sum of losses; value_due is 0 in updates that skip the value heads."""
    loss = settings.loss
    coefficients = dict(
        consistency=loss.consistency_coef,
        encoder_consistency=loss.encoder_consistency_coef,
        reward=loss.reward_coef,
        value=loss.value_coef * value_due,
        aux_value=loss.aux_coef * value_due,
        termination=loss.termination_coef,
    )
    if heads is not None:
        coefficients |= {f"heads/{name}": coef for name, coef in heads.coefs.items()}
    terms = [coefficients[name] * x for name, x in losses.items()]
    return sum(terms[1:], terms[0])


def model_loss(
    settings: Settings,
    model: WorldModel,
    params: Params,
    batch: Batch,
    encoded: Array,
    targets: tuple[ValueTarget, Array | None],
    weights: Weights,
    noise: Noise,
    *,
    progress: Array | float = 0.0,
    value_due: Array | float = 1.0,
) -> tuple[Array, tuple[Array, Metrics]]:
    """The weighted sum of the losses of world model, values and auxiliary heads.

    Args:
        encoded: latents of the next states `[T, B, L]`, without gradient (encoded again here where
            the encoder learns from consistency).
        targets: of the value heads, and of the auxiliary ones `[G, T, B]`.
        progress: share of the run that is done.
        value_due: 0 in updates that skip the value heads.

    Returns:
        The loss, and the rolled-out latents `[T+1, H, B, L]` with metrics.
    """
    zs = rollout(model, params, model.encode(params, batch.obs[0]), batch.action)
    if settings.loss.encoder_consistency_coef:
        encoded = model.encode(params, batch.obs[1:])
    latents = slice(model.config.latent)  # without the task's part, equal in both
    losses = consistency_losses(
        settings, zs[1:, ..., latents], encoded[..., latents], weights.rows, progress
    )
    logits = reward_logits(model, params, zs[:-1], batch.action)
    losses["reward"] = weights.rows.mean(reward_loss(logits, batch.reward, model.bins()))
    losses |= value_losses(settings, model, params, zs, batch, targets, weights.values, noise)
    if model.config.episodic:
        logit = model.termination(params, zs[1:])
        losses["termination"] = termination_loss(logit, batch.terminated, weights.rows)
    extra: Metrics = {}
    if model.heads is not None:
        more, extra = head_losses(model, params, zs, batch, weights)
        losses |= more
    total = total_loss(settings, losses, value_due, model.heads)
    metrics = {f"loss/{name}": value for name, value in losses.items()} | extra
    metrics["loss/total"] = total
    metrics["value/target"] = weights.values.even(targets[0].mean())
    return total, (zs, metrics)


# -------------------------------------------------------------------------------------------------
# The policy


def policy_inputs(
    zs: Array, batch: Batch, weights: Weights, plan_weights: Array | None, noise: Noise
) -> PolicyInputs:
    """Inputs of the policy losses from the latents `[S, H, B, L]` of all dynamics heads."""
    return PolicyInputs(
        zs=select_latents(zs),
        states=weights.states,
        plans=weights.plans,
        eps=noise.policy_eps,
        heads=noise.policy_heads,
        dropout=noise.policy_dropout,
        actions=batch.plan_actions,
        weights=plan_weights,
        expert=batch.expert,
        behaviour=batch.action,
    )


def svg(policy: Policy, scales: Scales) -> Term:
    """Minus the value of the policy's action, divided by the value scale (TD-MPC2)."""
    loss = policy.settings.loss
    q = policy.value(loss.policy_std_coef, loss.policy_reduction)
    unit, scales = move_value_scale(policy.settings, scales, q[0])
    return -q / unit, policy.inputs.states, scales, dict(scale=unit)


def awr(policy: Policy, scales: Scales) -> Term:
    """Minus the weighted log-probability of the planner's actions."""
    inputs = policy.inputs
    mean, log_std = policy.mean[..., None, :], policy.log_std[..., None, :]
    log_prob = policy_log_prob(policy.model, mean, log_std, inputs.actions)
    loss = -jnp.sum(inputs.weights * log_prob, axis=-1)
    effective = dist.effective_samples(inputs.weights)
    return loss, inputs.plans, scales, dict(effective_samples=effective)


POLICY_LOSSES: dict[str, Callable[[Policy, Scales], Term]] = {
    "svg": svg,
    "awr": awr,
    "kl": distil,
    "bc": clone,
}


def policy_loss(
    policy: Policy, target: Params | None, scales: Scales, progress: Array | float = 0.0
) -> tuple[Array, tuple[Scales, Metrics]]:
    """The mixture that `loss.policy_loss` names, minus the entropy bonus.

    Args:
        target: parameters of the EMA policy, for the trust region.
        progress: share of the run that is done.

    Returns:
        The loss, and the updated scales with metrics, arrays to be averaged.
    """
    settings, model, inputs = policy.settings, policy.model, policy.inputs
    entropy, entropy_coef = policy.entropy(), entropy_coefficient(settings, progress)
    total: Array | float = 0.0
    metrics: Metrics = {}
    for i, (name, weight) in enumerate(settings.loss.policy_terms.items()):
        loss, rows, scales, extra = POLICY_LOSSES[name](policy, scales)
        loss = weight * loss
        if i == 0:
            if settings.svg_first and settings.loss.entropy_scale == "value":
                entropy_coef = entropy_coef / extra["scale"]
            loss = loss - entropy_coef * entropy[: loss.shape[0]]
        total = total + rows.mean(loss)
        metrics |= extra
    if settings.loss.trust_region_coef:
        old = model.policy({**policy.params, "policy": target}, inputs.zs)
        trust, scales = trust_region(policy, *jax.lax.stop_gradient(old), scales)
        total = total + settings.loss.trust_region_coef * inputs.states.mean(trust)
        metrics["trust"] = trust
    actions = model.action_mask(inputs.zs)
    metrics["entropy"] = in_nats(settings, model, entropy, actions)
    if model.config.policy != "categorical":
        metrics["std"] = mean_over_actions(jnp.exp(policy.log_std), actions)
    return settings.loss.policy_coef * total, (scales, metrics)
