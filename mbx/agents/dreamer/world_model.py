"""The world model's losses on a batch of replay rows.

Reward and flags arrive with a row; the action of a `Batch` row is the one that led to it. Losses
are per row, `[T, B]`.
Axes: T time, B batch, S latents.
Source: DreamerV3 (arXiv 2301.04104), section "World model learning", and its official code.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mbx import categorical
from mbx.agents.dreamer import encoders, rssm
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.settings import Settings
from mbx.agents.dreamer.types import Batch, Given, Losses, ModelOutput, State
from mbx.fast import collectives
from mbx.heads import Window, masked_mean
from mbx.observations import is_packed, named
from mbx.types import Array, Metrics, Params

stop = jax.lax.stop_gradient


def model_losses(
    settings: Settings, model: Params, batch: Batch, carry: State, noise: Array | Given
) -> ModelOutput:
    """Reconstruction, reward, continue and KL losses of a batch `[T, B, ...]`, from the state
    `carry` `[B, ...]` before row 0 and draws of the posterior `[T, B, S]`.
    """
    net, loss = settings.model, settings.loss
    tokens = encoders.encode(net, model["encoder"], batch.obs)
    observed = rssm.observe(net, model["rssm"], carry, tokens, batch.action, batch.is_first, noise)
    features = rssm.features(observed.states)
    if loss.representation == "decoder":
        prediction = encoders.decode(net, model["decoder"], features)
        losses = encoders.reconstruction_loss(net, prediction, batch.obs)
    else:
        guess = nets.linear(model["projector"], features, net.dtype).astype(jnp.float32)
        losses = {loss.representation: representation_loss(settings, guess, stop(tokens))}
    seen = features if loss.reward_gradient else stop(features)
    logits = nets.head(model["reward"], seen, net.dtype)
    losses["reward"] = nets.two_hot_loss(net, logits, batch.reward)
    logit = nets.head(model["continue"], features, net.dtype)[..., 0]
    losses["continue"] = continue_loss(settings, logit, batch.terminated)
    posterior, prior = (
        rssm.mixed_logits(x, net.unimix) for x in (observed.posterior, observed.prior)
    )
    losses["dynamics"], losses["representation"], kl = rssm.kl_losses(
        posterior, prior, loss.free_nats
    )
    metrics = {
        "kl": kl,
        "kl_clipped": kl < loss.free_nats,
        "posterior_entropy": jnp.sum(categorical.entropy(posterior), axis=-1),
        "prior_entropy": jnp.sum(categorical.entropy(prior), axis=-1),
    }
    metrics = jax.tree.map(collectives.mean_share, metrics)
    if net.heads is not None:
        more, extra = head_losses(net, model["heads"], features, batch)
        losses, metrics = losses | more, metrics | extra
    return ModelOutput(losses, observed, features, metrics)


def representation_loss(settings: Settings, guess: Array, tokens: Array) -> Array:
    """Loss of a guess of the tokens `[T, B, E]` from latents, over all rows of the batch.
    "barlow": the matrix of their correlations should be the identity (R2-Dreamer); "infonce": of
    all tokens, a row's own are the likeliest by inner product.
    Source: R2-Dreamer (ICLR 2026) and its code.
    """
    rows = guess.reshape(-1, guess.shape[-1]), tokens.reshape(-1, tokens.shape[-1])
    guess, tokens = collectives.all_gather(rows)
    if settings.loss.representation == "infonce":
        return -jnp.mean(jnp.diag(jax.nn.log_softmax(guess @ tokens.T)))

    def standard(x: Array) -> Array:
        x = x - jnp.mean(x, axis=0, keepdims=True)
        return x / (jnp.sqrt(jnp.var(x, axis=0, keepdims=True, ddof=1) + 1e-16) + 1e-8)

    correlations = standard(guess).T @ standard(tokens) / len(guess)
    own, squares = jnp.diag(correlations), jnp.sum(jnp.square(correlations))
    others = squares - jnp.sum(jnp.square(own))
    return jnp.sum(jnp.square(own - 1.0)) + settings.loss.redundancy * others


def head_losses(
    net: nets.ModelConfig, params: Params, features: Array, batch: Batch
) -> tuple[Losses, Metrics]:
    """Means of the auxiliary heads' losses and metrics over the transitions within episodes."""
    assert net.heads is not None
    mask = 1.0 - batch.is_first[1:].astype(jnp.float32)
    if is_packed(net.parts):
        obs: Any = named(net.parts, batch.obs)
    else:
        obs = batch.obs["image" if net.image_shape is not None else "vector"]
        obs = obs.reshape(*obs.shape[:2], *net.obs_shape)
    arrived = batch.action, batch.reward, batch.terminated.astype(jnp.float32)
    window = Window(obs, features, features, *(x[1:] for x in arrived), mask)
    losses, metrics = (
        {f"heads/{name}": masked_mean(x, mask) for name, x in found.items()}
        for found in net.heads.losses(params, window)
    )
    # Of a part of a batch these are shares of a mean; a loss is what a mean is yet taken of.
    return jax.tree.map(lambda x: x * collectives.axis_size(), losses), metrics


def continue_loss(settings: Settings, logit: Array, terminated: Array) -> Array:
    """Cross-entropy of the continue head; with `continue_discount` its target holds gamma, too."""
    target = 1.0 - terminated.astype(jnp.float32)
    if settings.loss.continue_discount:
        target = target * settings.critic.gamma
    return -(target * jax.nn.log_sigmoid(logit) + (1.0 - target) * jax.nn.log_sigmoid(-logit))
