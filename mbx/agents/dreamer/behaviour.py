"""Behaviour learned from imagination: imagined trajectories, losses of actor and critic per row.

Axes: B batch, K last rows to imagine from, N = K B trajectories, H imagined steps, F features.
Sources: DreamerV3 (arXiv 2301.04104), sections "Critic learning" and "Actor learning"; the critic's
loss on replay rows: docs/sources.md#critic-replay-loss; hard continues and the reparameterised
objective: docs/sources.md#imagined-behaviour.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mbx import returns
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer import policy, rssm
from mbx.agents.dreamer.settings import Settings
from mbx.agents.dreamer.types import (
    Batch,
    Behaviour,
    Given,
    Imagined,
    ModelOutput,
    Noise,
    Norms,
    State,
)
from mbx.fast import collectives
from mbx.types import Array, Params

stop = jax.lax.stop_gradient


# Imagination


def continue_value(settings: Settings, logit: Array) -> Array:
    """The imagined continue: its probability, or ("hard") whether that exceeds 0.5."""
    prob = jax.nn.sigmoid(logit)
    hard = settings.imagination.continues == "hard"
    return (prob > 0.5).astype(jnp.float32) if hard else prob


def action_limit(settings: Settings) -> float:
    """Largest action of the policy; 0 where it is scored by the density of its own samples."""
    return settings.actor.action_clip if settings.actor.gradient == "reparam" else 0.0


def imagine(
    settings: Settings, model: Params, actor: Params, start: State, terminated: Array, noise: Noise
) -> Imagined:
    """Trajectories of H steps from states `[N, ...]` of rows with `terminated` `[N]`.
    The policy sees states without gradient. With "reparam" the gradient reaches its parameters
    through actions, dynamics, rewards and continues; with "reinforce" there is none.
    """
    net = settings.model
    model, start = stop(model), stop(start)
    if settings.actor.gradient == "reinforce":
        actor = stop(actor)

    def act(features: Array, draw: Array | Given) -> Array:
        out = nets.head(actor, stop(features), net.dtype)
        return policy.bound(net, policy.sample(net, out, draw), action_limit(settings))

    states, actions = rssm.imagine(net, model["rssm"], start, act, noise.action, noise.prior)
    features = rssm.features(states)
    rewards = nets.two_hot_mean(net, nets.head(model["reward"], features, net.dtype))
    logit = nets.head(model["continue"], features, net.dtype)[..., 0]
    continues = continue_value(settings, logit)
    if settings.imagination.first_continue == "real":
        real = 1.0 - terminated.astype(jnp.float32)
        continues = jnp.concatenate([real[None], continues[1:]])
    return Imagined(features, actions, rewards, continues)


# Actor and critic


def imagined_losses(
    settings: Settings,
    imagined: Imagined,
    policy_out: Array,
    values: Array,
    value_logits: Array,
    slow_values: Array,
    ema: returns.ReturnEMA,
    norms: Norms = None,
) -> Behaviour:
    """Losses of actor and critic from what the heads say along imagined trajectories.
    At states 0..H: imagined and values `[H+1, N]`, through which gradients flow into the actor loss
    with "reparam" (the baseline included). At states 0..H-1 (or more): policy_out `[H, N, P]`,
    value_logits `[H, N, bins]`, the slow critic's values `[H, N]`. `ema` moves first and is then
    used. Where values are normalised, `norms` make returns of the critic's outputs, and move before
    its targets are normalised.
    """
    own, critic, net = settings.actor, settings.critic, settings.model
    rewards, continues = imagined.rewards, imagined.continues
    horizon = rewards.shape[0] - 1
    gamma = 1.0 if settings.loss.continue_discount else critic.gamma
    weights = stop(returns.discount_weights(continues, gamma))[:-1]
    outputs, values = slow_values, denormalise(settings, norms, values)
    slow_values = denormalise(settings, norms, slow_values)
    targets = returns.lambda_returns(rewards[1:], gamma * continues[1:], values[1:], critic.lambda_)
    # Of all parts of a batch: percentiles, spreads and extremes are no sums of the parts'.
    all_targets, all_values, all_slow, all_weights = collectives.all_gather(
        stop((targets, values[:-1], slow_values, weights)), axis=1
    )
    ema = returns.update_return_ema(
        ema, all_targets, decay=own.return_decay, percentiles=own.return_percentiles
    )
    offset, scale = returns.return_ema_offset_scale(ema, 1.0 / own.return_limit)
    out = policy_out[:horizon]
    entropy = policy.entropy(net, out)
    advantage = objective = _advantages(targets, values[:-1], offset, scale)
    if own.advantage_norm != "none":
        seen = _advantages(all_targets, all_values, offset, scale)
        norms = moved(settings, norms, advantage=seen)
        objective = normalise(settings, norms, "advantage", objective)
    if own.gradient == "reinforce":
        objective = policy.log_prob(net, out, stop(imagined.actions[:-1])) * stop(objective)
    norms = moved(settings, norms, value=all_targets)
    main, regulariser = critic_terms(
        settings,
        value_logits[:horizon],
        stop(normalise(settings, norms, "value", targets)),
        stop(outputs[:horizon]),
    )
    metrics = {
        "value_reg_loss": weights * regulariser,
        "entropy": entropy,
        "lambda_mean": targets,
        "lambda_std": jnp.std(all_targets),
        "lambda_p05": jnp.percentile(all_targets, 5.0),
        "lambda_p95": jnp.percentile(all_targets, 95.0),
        "ema_offset": offset,
        "ema_invscale": scale,
        "discount_mean": weights,
        "discount_min": jnp.min(all_weights),
        "adv_mean": advantage,
        "adv_std": jnp.std(_advantages(all_targets, all_values, offset, scale)),
        "target_critic_mean": slow_values,
        "target_critic_std": jnp.std(all_slow),
        "value_mean": values,
        "dream_reward": rewards[1:],
        "dream_continue": continues[1:],
    }
    actor_loss = -weights * (objective + own.entropy_coef * entropy)
    critic_loss = weights * (main + critic.regularizer * regulariser)
    metrics = stop(jax.tree.map(collectives.mean_share, metrics))
    return Behaviour({"policy": actor_loss, "value": critic_loss}, targets, ema, metrics, norms)


def _advantages(targets: Array, values: Array, offset: Array, scale: Array) -> Array:
    return (targets - offset) / scale - (values - offset) / scale


def norm_kinds(settings: Settings) -> dict[str, str]:
    """How values and advantages are normalised, where they are."""
    kinds = {"value": settings.critic.value_norm, "advantage": settings.actor.advantage_norm}
    return {name: kind for name, kind in kinds.items() if kind != "none"}


def moved(settings: Settings, norms: Norms, **seen: Array) -> Norms:
    """The norms after they have seen numbers of the whole batch."""
    new = {
        name: returns.update_running_norm(norms[name], stop(seen[name]), kind)
        for name, kind in norm_kinds(settings).items()
        if name in seen
    }
    return norms | new if new else norms


def normalise(settings: Settings, norms: Norms, name: str, x: Array) -> Array:
    """`x` in units of its norm, or as it is."""
    if name not in (kinds := norm_kinds(settings)):
        return x
    offset, scale = returns.running_norm_offset_scale(norms[name], kinds[name])
    return (x - offset) / scale


def denormalise(settings: Settings, norms: Norms, outputs: Array) -> Array:
    """Values that a critic's outputs mean."""
    if settings.critic.value_norm == "none":
        return outputs
    offset, scale = returns.running_norm_offset_scale(norms["value"], settings.critic.value_norm)
    return outputs * scale + offset


def critic_terms(
    settings: Settings, logits: Array, targets: Array, slow_values: Array
) -> tuple[Array, Array]:
    """Cross-entropies `[...]` with the returns and with the slow critic's mean."""
    net = settings.model
    return nets.two_hot_loss(net, logits, targets), nets.two_hot_loss(net, logits, slow_values)


def replay_critic(
    settings: Settings,
    value_logits: Array,
    slow_values: Array,
    annotations: Array,
    batch: Batch,
    norms: Norms = None,
) -> Array:
    """Critic loss on replay rows, `[K-1, B]`, unscaled; `norms` have seen their returns.
    Row t trains on the reward, flags and annotation of row t+1. The trace is cut at the last row
    that an episode has, which weighs 0: its end, or where that was not stored (after a fault, say)
    the row before the next episode's first. Of all K rows: value_logits `[K, B, bins]`, the slow
    critic's values and annotations `[K, B]`, the imagined return that starts at each row.
    """
    targets, last = replay_returns(settings, annotations, batch)
    targets = normalise(settings, norms, "value", targets)
    main, regulariser = critic_terms(settings, value_logits[:-1], targets, stop(slow_values[:-1]))
    return (1.0 - last[:-1]) * (main + settings.critic.regularizer * regulariser)


def replay_returns(settings: Settings, annotations: Array, batch: Batch) -> tuple[Array, Array]:
    """Lambda returns of replay rows `[K-1, B]`, and where episodes end, `[K, B]`."""
    critic = settings.critic
    next_first = jnp.concatenate([batch.is_first[1:], jnp.zeros_like(batch.is_first[:1])])
    last = (batch.is_last | next_first).astype(jnp.float32)
    terminated = batch.terminated.astype(jnp.float32)
    targets = returns.replay_lambda_returns(
        batch.reward, terminated, last, stop(annotations), critic.gamma, critic.lambda_
    )
    return targets, last


def behaviour_losses(
    settings: Settings,
    params: Params,
    slow_critic: Params,
    output: ModelOutput,
    batch: Batch,
    ema: returns.ReturnEMA,
    noise: Noise,
    norms: Norms = None,
) -> Behaviour:
    """Losses "policy", "value" (and "replay_value"), imagined from a batch's last rows.
    Gradients: "policy" reaches the actor alone and "value" the critic alone; "replay_value" reaches
    the critic and, through `output.features` where `replay_gradient`, the representation.
    """
    net, rows = settings.model, settings.imagination.rows
    actor, critic = params["actor"], params["critic"]
    batch, states, features = jax.tree.map(  # the last `rows` of each, 0: all
        lambda x: x[-rows:], (batch, output.observed.states, output.features)
    )
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    imagined = imagine(settings, params["model"], actor, flat, batch.terminated.reshape(-1), noise)
    seen = stop(imagined.features)
    logits = nets.head(critic, seen, net.dtype)
    if settings.actor.gradient == "reinforce":
        values = nets.two_hot_mean(net, stop(logits))
    else:
        values = nets.two_hot_mean(net, nets.head(stop(critic), imagined.features, net.dtype))

    def slow_values(features: Array) -> Array:
        return nets.two_hot_mean(net, nets.head(slow_critic, features, net.dtype))

    out = nets.head(actor, seen[:-1], net.dtype)
    slow = slow_values(seen[:-1])
    result = imagined_losses(settings, imagined, out, values, logits, slow, ema, norms)
    if settings.critic.replay_loss == "none":
        return result
    features = features if settings.critic.replay_gradient else stop(features)
    annotations = result.returns[0].reshape(features.shape[:2])
    replayed = nets.head(critic, features, net.dtype)
    slow, norms = slow_values(stop(features)), result.norms
    if settings.critic.value_norm != "none":
        targets = collectives.all_gather(replay_returns(settings, annotations, batch)[0], axis=1)
        norms = moved(settings, norms, value=targets)
    loss = replay_critic(settings, replayed, slow, annotations, batch, norms)
    return result._replace(losses=result.losses | {"replay_value": loss}, norms=norms)
