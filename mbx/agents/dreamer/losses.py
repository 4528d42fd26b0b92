"""Dreamer's losses: world model, dreams, actor, critic, critic on replay rows.

Pure functions of parameters, batches and draws. Reward and flags arrive with a row; the action of a
`Batch` row is the one that led to it. Losses are per row, `[T, B]` or `[H, N]`; sums of their means
are taken by the agent.
Axes: T time, B batch, K last rows that dreams start from, N = K B dreams, H imagined steps.
Sources: documents 002 and 003 with the corrections of their indices; DreamerV3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import returns
from mbx.agents.dreamer import encoders as observations
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer import policy, rssm
from mbx.agents.dreamer.config import DreamerConfig

Array = jax.Array
Params = dict[str, Any]
stop = jax.lax.stop_gradient


class Batch(NamedTuple):
    """Rows `[T, B, ...]`: obs (a dict), action that led to the row, reward, flags (bool)."""

    obs: observations.Observation
    action: Array
    reward: Array
    is_first: Array
    is_last: Array
    terminated: Array


class Draws(NamedTuple):
    """Random numbers of an update: posterior `[T, B, S]`, prior `[H, N, S]`, action `[H+1, N, …]`.

    Whatever `choose` and `choose_action` take in their place serves as well.
    """

    posterior: Array
    prior: Array
    action: Array


class Chooser(NamedTuple):
    """How draws become latents and actions; tests put given ones in."""

    latent: rssm.Choose = rssm.sample_one_hot
    action: Callable[..., Array] | None = None


# -------------------------------------------------------------------------------------------------
# World model


class ModelOutput(NamedTuple):
    """Losses per row by name `[T, B]`, the observed sequence, its features `[T, B, F]`, metrics."""

    losses: dict[str, Array]
    observed: rssm.Observed
    features: Array
    metrics: dict[str, Array]


def world_model(
    config: DreamerConfig,
    model: Params,
    batch: Batch,
    carry: rssm.State,
    draws: Array,
    choose: rssm.Choose = rssm.sample_one_hot,
) -> ModelOutput:
    """Reconstruction, reward, continue and KL losses of a batch."""
    net = config.model
    tokens = observations.encode(net, model["encoder"], batch.obs)
    observed = rssm.observe(
        net, model["rssm"], carry, tokens, batch.action, batch.is_first, draws, choose
    )
    features = rssm.features(observed.states)
    prediction = observations.decode(net, model["decoder"], features)
    losses = observations.reconstruction_loss(net, prediction, batch.obs)
    seen = features if config.reward_gradient else stop(features)
    logits = nets.head(model["reward"], seen, net.dtype)
    losses["reward"] = nets.two_hot_loss(net, logits, batch.reward)
    logit = nets.head(model["continue"], features, net.dtype)[..., 0]
    losses["continue"] = continue_loss(config, logit, batch.terminated)
    posterior = rssm.mixed_logits(observed.posterior, net.unimix)
    prior = rssm.mixed_logits(observed.prior, net.unimix)
    losses["dynamics"], losses["representation"], kl = rssm.kl_losses(
        posterior, prior, config.free_nats, keep_gradient=config.free_nats_gradient
    )
    metrics = {
        "kl": jnp.mean(kl),
        "kl_clipped": jnp.mean(kl < config.free_nats),
        "posterior_entropy": jnp.mean(jnp.sum(rssm.entropy(posterior), axis=-1)),
        "prior_entropy": jnp.mean(jnp.sum(rssm.entropy(prior), axis=-1)),
    }
    return ModelOutput(losses, observed, features, metrics)


def continue_loss(config: DreamerConfig, logit: Array, terminated: Array) -> Array:
    """Cross-entropy of the continue head; with `continue_discount` its target holds gamma, too."""
    target = 1.0 - terminated.astype(jnp.float32)
    if config.continue_discount:
        target = target * config.gamma
    return -(target * jax.nn.log_sigmoid(logit) + (1.0 - target) * jax.nn.log_sigmoid(-logit))


def continue_value(config: DreamerConfig, logit: Array) -> Array:
    """The head's continue in dreams: its probability, or ("hard") whether that exceeds 0.5."""
    prob = jax.nn.sigmoid(logit)
    return (prob > 0.5).astype(jnp.float32) if config.continues == "hard" else prob


def scaled_sum(config: DreamerConfig, losses: dict[str, Array]) -> Array:
    """Sum of the means of losses, each times its coefficient."""
    scales = {"dynamics": config.dynamics_coef, "representation": config.representation_coef}
    return sum(scales.get(name, 1.0) * jnp.mean(loss) for name, loss in losses.items())


# -------------------------------------------------------------------------------------------------
# Dreams


class Dream(NamedTuple):
    """features `[H+1, N, F]`, actions `[H+1, N, A]`, rewards and continues `[H+1, N]`.

    Row 0 of the rewards is unused; row 0 of the continues is the replay row's own, or predicted.
    """

    features: Array
    actions: Array
    rewards: Array
    continues: Array


def dream(
    config: DreamerConfig,
    model: Params,
    actor: Params,
    start: rssm.State,
    terminated: Array,
    draws: Draws,
    chooser: Chooser = Chooser(),  # noqa: B008
) -> Dream:
    """Dreams of H steps from states `[N, ...]` of rows with `terminated` `[N]`.

    The policy sees states without gradient. With "reparam" the gradient reaches its parameters
    through actions, dynamics, rewards and continues; with "reinforce" a dream has none.
    """
    net = config.model
    model, start = stop(model), stop(start)
    choose = chooser.action
    if config.actor_gradient == "reinforce":
        actor = stop(actor)
        choose = choose or policy.sample
    choose = choose or policy.sample_bounded

    def act(features: Array, draw: Array) -> Array:
        return choose(net, nets.head(actor, stop(features), net.dtype), draw)

    states, actions = rssm.imagine(
        net, model["rssm"], start, act, draws.action, draws.prior, chooser.latent
    )
    features = rssm.features(states)
    rewards = nets.two_hot_mean(net, nets.head(model["reward"], features, net.dtype))
    logit = nets.head(model["continue"], features, net.dtype)[..., 0]
    continues = continue_value(config, logit)
    if config.first_continue == "real":
        real = 1.0 - terminated.astype(jnp.float32)
        continues = jnp.concatenate([real[None], continues[1:]])
    return Dream(features, actions, rewards, continues)


# -------------------------------------------------------------------------------------------------
# Actor and critic


class Behaviour(NamedTuple):
    """Losses per row: actor, critic `[H, N]`; lambda returns `[H, N]`; moved ReturnEMA; metrics."""

    actor: Array
    critic: Array
    returns: Array
    ema: returns.ReturnEMA
    metrics: dict[str, Array]


def behaviour(
    config: DreamerConfig,
    policy_out: Array,
    actions: Array,
    rewards: Array,
    continues: Array,
    values: Array,
    value_logits: Array,
    slow_values: Array,
    ema: returns.ReturnEMA,
) -> Behaviour:
    """Losses of actor and critic from what the heads say along dreams.

    Args:
      policy_out: `[H, N, P]` or more rows, at states 0..H-1. actions: `[H+1, N, A]`.
      rewards, continues, values: `[H+1, N]` at states 0..H; gradients flow through them into the
        actor loss with "reparam" (the baseline included).
      value_logits: `[H, N, bins]` or more rows; slow_values: `[H, N]` or more, the slow critic's.
      ema: moves first and is then used.
    """
    horizon = rewards.shape[0] - 1
    gamma = 1.0 if config.continue_discount else config.gamma
    weights = stop(returns.discount_weights(continues, gamma))[:-1]
    targets = returns.lambda_returns(rewards[1:], gamma * continues[1:], values[1:], config.lambda_)
    ema = returns.update_return_ema(
        ema, stop(targets), decay=config.return_decay, percentiles=config.return_percentiles
    )
    offset, scale = returns.return_ema_offset_scale(ema, 1.0 / config.return_limit)
    advantage = (targets - offset) / scale - (values[:-1] - offset) / scale
    out = policy_out[:horizon]
    entropy = policy.entropy(config.model, out)
    if config.actor_gradient == "reinforce":
        log_prob = policy.log_prob(config.model, out, stop(actions[:-1]))
        objective = log_prob * stop(advantage)
    else:
        objective = advantage
    actor = -weights * (objective + config.entropy_coef * entropy)
    main, regulariser = critic_terms(
        config, value_logits[:horizon], stop(targets), stop(slow_values[:horizon])
    )
    metrics = {
        "value_reg_loss": jnp.mean(weights * regulariser),
        "entropy": jnp.mean(entropy),
        "lambda_mean": jnp.mean(targets),
        "lambda_std": jnp.std(targets),
        "lambda_p05": jnp.percentile(targets, 5.0),
        "lambda_p95": jnp.percentile(targets, 95.0),
        "ema_offset": offset,
        "ema_invscale": scale,
        "discount_mean": jnp.mean(weights),
        "discount_min": jnp.min(weights),
        "adv_mean": jnp.mean(advantage),
        "adv_std": jnp.std(advantage),
        "target_critic_mean": jnp.mean(slow_values),
        "target_critic_std": jnp.std(slow_values),
        "value_mean": jnp.mean(values),
        "dream_reward": jnp.mean(rewards[1:]),
        "dream_continue": jnp.mean(continues[1:]),
    }
    critic = weights * (main + config.critic_regularizer * regulariser)
    return Behaviour(actor, critic, targets, ema, stop(metrics))


def critic_terms(
    config: DreamerConfig, logits: Array, targets: Array, slow_values: Array
) -> tuple[Array, Array]:
    """Cross-entropies `[...]` with the returns and with the slow critic's mean."""
    net = config.model
    return nets.two_hot_loss(net, logits, targets), nets.two_hot_loss(net, logits, slow_values)


def replay_critic(
    config: DreamerConfig,
    value_logits: Array,
    slow_values: Array,
    annotations: Array,
    batch: Batch,
) -> Array:
    """Critic loss on replay rows, `[K-1, B]` (aligned) or `[K, B]` (literal), unscaled.

    annotations: `[K, B]`, the imagined return that starts at each row. "aligned" trains row t on
    the reward, flags and annotation of row t+1, cuts the trace at ends and weighs end rows 0.
    "literal" is document 002 as written, for comparison: everything on row t's own index, closed by
    zero, the mask on the targets, no regulariser.
    """
    annotations, last = stop(annotations), batch.is_last.astype(jnp.float32)
    terminated = batch.terminated.astype(jnp.float32)
    if config.replay_loss == "literal":
        target = returns.lambda_returns(
            batch.reward,
            config.gamma * (1.0 - terminated),
            annotations,
            config.lambda_,
            jnp.zeros_like(annotations[0]),
        )
        return nets.two_hot_loss(config.model, value_logits, target * (1.0 - last))
    targets = returns.replay_lambda_returns(
        batch.reward, terminated, last, annotations, config.gamma, config.lambda_
    )
    main, regulariser = critic_terms(config, value_logits[:-1], targets, stop(slow_values[:-1]))
    return (1.0 - last[:-1]) * (main + config.critic_regularizer * regulariser)


def last_rows(tree: Any, num: int) -> Any:
    """The last `num` rows of every leaf (0: all)."""
    return jax.tree.map(lambda x: x[-num:] if num else x, tree)


def behaviour_losses(
    config: DreamerConfig,
    model: Params,
    actor: Params,
    critic: Params,
    slow: Params,
    output: ModelOutput,
    batch: Batch,
    ema: returns.ReturnEMA,
    draws: Draws,
    chooser: Chooser = Chooser(),  # noqa: B008
) -> tuple[dict[str, Array], Behaviour]:
    """Losses "policy", "value" (and "replay_value") of dreams from a batch's last rows.

    Gradients: "policy" reaches the actor alone and "value" the critic alone; "replay_value" reaches
    the critic and, through `output.features` where `replay_gradient`, the representation.
    """
    net, rows = config.model, config.dream_rows
    batch, states = last_rows((batch, output.observed.states), rows)
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), states)
    dreamt = dream(config, model, actor, flat, batch.terminated.reshape(-1), draws, chooser)
    seen = stop(dreamt.features)
    logits = nets.head(critic, seen, net.dtype)
    if config.actor_gradient == "reinforce":
        values = nets.two_hot_mean(net, stop(logits))
    else:
        values = nets.two_hot_mean(net, nets.head(stop(critic), dreamt.features, net.dtype))
    slow_values = nets.two_hot_mean(net, nets.head(slow, seen[:-1], net.dtype))
    result = behaviour(
        config,
        nets.head(actor, seen[:-1], net.dtype),
        dreamt.actions,
        dreamt.rewards,
        dreamt.continues,
        values,
        logits,
        slow_values,
        ema,
    )
    losses = {"policy": result.actor, "value": result.critic}
    if config.replay_loss != "none":
        features = last_rows(output.features, rows)
        features = features if config.replay_gradient else stop(features)
        annotations = result.returns[0].reshape(features.shape[:2])
        slow_replay = nets.two_hot_mean(net, nets.head(slow, stop(features), net.dtype))
        losses["replay_value"] = replay_critic(
            config, nets.head(critic, features, net.dtype), slow_replay, annotations, batch
        )
    return losses, result
