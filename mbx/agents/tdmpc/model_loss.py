"""Loss of the world model and the value heads.

Takes a batch of windows and every random number as arguments. Time-major: T transitions, T+1
states, B batch, H dynamics heads, R reward heads, V value heads, G auxiliary discounts, L latent
dims, K bins.
Sources: TD-MPC2 (arXiv 2310.16828), equations 3 and 4, and its reference code; docs/sources.md,
entry ensembles.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch, Counts, Noise, ValueTarget
from mbx.fast import collectives
from mbx.heads import Heads, Window, masked_mean
from mbx.types import Array, Metrics, Params
from mbx.world_model import WorldModel, masked

_NO_COUNTS = Counts()


def time_weighted(loss: Array, mask: Array, rho: float, count: Array | None = None) -> Array:
    """Mean over time of rho^t times the masked batch mean: `[T, B]` -> scalar (TD-MPC2).

    Of a part of a batch (`mbx.fast.collectives`) its share of that mean.

    Args:
        count: rows of the whole batch in the mask, `[T]`, where they are known.
    """
    count = collectives.psum(jnp.sum(mask, axis=1)) if count is None else count
    per_step = jnp.sum(loss * mask, axis=1) / jnp.maximum(count, 1.0)
    return jnp.mean(rho ** jnp.arange(loss.shape[0]) * per_step)


def select_latents(zs: Array, strategy: str) -> Array:
    """The latents that value and policy train on: `[S, H, B, L] -> [S, B', L]`.

    "single": head 0's; no gradient reaches other heads. "split": chunk h of the batch is head h's,
    B' = B. "concat": all, head by head, B' = H B. Source: docs/sources.md, entry ensembles.
    """
    heads, batch = zs.shape[1:3]
    if heads == 1:
        return jnp.squeeze(zs, 1)
    if strategy == "single":
        return zs[:, 0]
    if strategy == "concat":
        return zs.reshape(zs.shape[0], heads * batch, zs.shape[3])
    chunk = batch // heads
    return jnp.concatenate([zs[:, h, h * chunk : (h + 1) * chunk] for h in range(heads)], axis=1)


def repeat_for_heads(tree: Any, strategy: str, heads: int, axis: int = 1) -> Any:
    """What belongs to the states of `select_latents`, repeated as those are: axis B -> B'."""
    if strategy != "concat" or heads == 1:
        return tree
    return jax.tree.map(lambda x: jnp.concatenate([x] * heads, axis=axis), tree)


def rollout(model: WorldModel, params: Params, z: Array, actions: Array) -> Array:
    """Latents of all heads along `actions` `[T, B, A]` from `z` `[B, L]`: `[T+1, H, B, L]`."""
    state = model.tile_heads(z)
    zs = [state]
    for action in actions:
        state = model.step(params, state, action)
        zs.append(state)
    return jnp.stack(zs)


def consistency(zs: Array, z_next: Array) -> Array:
    """Squared error of predicted latents, mean over heads and dims: `[T, H, B, L]` and `[T, B, L]`
    -> `[T, B]`. Stop the gradient of whichever side is the target."""
    return jnp.mean(jnp.square(zs - z_next[:, None]), axis=(1, 3))


def reward_loss(logits: Array, reward: Array, bins: Array) -> Array:
    """Cross-entropy, mean over reward and dynamics heads: logits `[R, T, H, B, K]`, `[T, B]` ->
    `[T, B]`."""
    target = jnp.broadcast_to(reward[None, :, None], logits.shape[:-1])
    return jnp.mean(dist.two_hot_cross_entropy(logits, target, bins), axis=(0, 2))


def termination_loss(
    logit: Array, terminated: Array, mask: Array, counts: Counts = _NO_COUNTS
) -> Array:
    """Binary cross-entropy over the states of all heads: a scalar.

    Args:
        logit: `[T, H, B]`.
        terminated, mask: `[T, B]`.
        counts: of the whole batch, where they are known.
    """
    rows = collectives.psum(jnp.sum(mask)) if counts.rows is None else jnp.sum(counts.rows)
    bce = jax.nn.softplus(logit) - logit * terminated[:, None]
    return jnp.sum(jnp.mean(bce, axis=1) * mask) / jnp.maximum(rows, 1.0)


def value_loss(logits: Array, target: ValueTarget, bins: Array, rho: float) -> Array:
    """Cross-entropy of the value heads `[V, T, B, K]` with their target, mean over heads.

    With a single bin the squared error in symlog space, mean over samples.
    """
    if target.samples.shape[-1] == 1 and target.samples.shape[0] == 1:
        real = jnp.broadcast_to(target.samples[..., 0], logits.shape[:-1])
        cross_entropy = dist.two_hot_cross_entropy(logits, real, bins)
    elif bins.shape[0] == 1:
        each = jnp.broadcast_to(target.samples, (*logits.shape[:-1], target.samples.shape[-1]))
        repeated = jnp.broadcast_to(logits[..., None, :], (*each.shape, 1))
        errors = dist.two_hot_cross_entropy(repeated, each, bins)
        cross_entropy = jnp.sum(target.weights[None] * errors, axis=-1)
    else:
        two_hot = jnp.broadcast_to(target.two_hot(bins), logits.shape)
        cross_entropy = dist.cross_entropy(logits, two_hot)
    return time_weighted(jnp.mean(cross_entropy, axis=0), target.mask, rho, target.count)


def consistency_losses(
    settings: Settings, zs: Array, encoded: Array, batch: Batch, progress: Array | float
) -> dict[str, Array]:
    """The dynamics towards the encoder and, where asked for, the encoder towards the dynamics.

    Args:
        zs: rolled out, `[T, H, B, L]`, without what belongs to a task.
        encoded: `[T, B, L]`, with gradient only in the second case.
        progress: share of the run that is done; the encoder's part starts after its warm-up.
    """
    rest = batch.mask, settings.loss.time_weight, batch.counts.rows
    still = jax.lax.stop_gradient
    losses = {"consistency": time_weighted(consistency(zs, still(encoded)), *rest)}
    if settings.loss.encoder_consistency_coef:
        loss = time_weighted(consistency(still(zs), encoded), *rest)
        started = progress >= settings.loss.encoder_consistency_warmup
        losses["encoder_consistency"] = jnp.where(started, loss, 0.0)
    return losses


def total_loss(
    settings: Settings,
    losses: dict[str, Array],
    value_due: Array | float = 1.0,
    heads: Heads | None = None,
) -> Array:
    """The weighted sum; value_due is 0 in updates that leave the value heads alone."""
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


def reward_logits(model: WorldModel, params: Params, zs: Array, actions: Array) -> Array:
    """Of all heads along a window, in one product: `[T, H, B, L]`, `[T, B, A]` ->
    `[R, T, H, B, K]`."""
    logits = model.reward(params, jnp.swapaxes(zs, 0, 1), jnp.swapaxes(actions[:, None], 0, 1))
    return jnp.swapaxes(logits, 1, 2)


def value_losses(
    settings: Settings,
    model: WorldModel,
    params: Params,
    zs: Array,
    batch: Batch,
    target: ValueTarget,
    aux_target: Array | None,
    noise: Noise,
) -> dict[str, Array]:
    """Of the value heads and the auxiliary ones, on the latents `[T+1, H, B, L]` that feed them."""
    bins, rho = model.bins(), settings.loss.time_weight
    strategy, heads = settings.loss.head_strategy, zs.shape[1]
    action = repeat_for_heads(batch.action, strategy, heads)
    action = action if model.config.critic == "q" else None
    states = select_latents(zs[: target.mask.shape[0]], strategy)
    copies = ValueTarget(
        repeat_for_heads(target.samples, strategy, heads, axis=2),
        *repeat_for_heads((target.weights, target.mask), strategy, heads),
        target.count,
    )
    logits = model.value(params["value"], states, action, noise.dropout)
    losses = {"value": value_loss(logits, copies, bins, rho)}
    if aux_target is not None:
        wanted = repeat_for_heads(aux_target, strategy, heads, axis=2)
        steps = wanted.shape[1]
        logits = model.aux_value(params["aux_value"], states[:steps], action)
        cross_entropy = jnp.mean(dist.two_hot_cross_entropy(logits, wanted, bins), axis=0)
        count = None if target.count is None else target.count[:steps]
        losses["aux_value"] = time_weighted(cross_entropy, copies.mask[:steps], rho, count)
    return losses


def head_losses(
    settings: Settings, model: WorldModel, params: Params, zs: Array, batch: Batch
) -> tuple[dict[str, Array], Metrics]:
    """Of the auxiliary heads, weighed in time as the others, mean over dynamics heads; metrics.

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
    count = batch.counts.rows
    weigh = functools.partial(
        time_weighted, mask=batch.mask, rho=settings.loss.time_weight, count=count
    )
    losses = {f"heads/{name}": weigh(x) for name, x in losses.items()}
    mean = functools.partial(masked_mean, mask=batch.mask, count=count)
    return losses, {f"heads/{name}": mean(x) for name, x in metrics.items()}


def model_loss(
    settings: Settings,
    model: WorldModel,
    params: Params,
    batch: Batch,
    encoded: Array,
    targets: tuple[ValueTarget, Array | None],
    noise: Noise,
    *,
    progress: Array | float = 0.0,
    value_due: Array | float = 1.0,
) -> tuple[Array, tuple[Array, Metrics]]:
    """The sum of all of them.

    Args:
        encoded: latents of the next states `[T, B, L]`, without gradient (they are encoded again
            here where the encoder learns from consistency).
        targets: of the value heads, and of the auxiliary ones `[G, T, B]`.
        progress: share of the run that is done.
        value_due: 0 in updates that leave the value heads alone.

    Returns:
        The loss, and the latents `[T+1, H, B, L]` rolled out with metrics.
    """
    zs = rollout(model, params, model.encode(params, batch.obs[0]), batch.action)
    if settings.loss.encoder_consistency_coef:
        encoded = model.encode(params, batch.obs[1:])
    latents = slice(model.config.latent)  # what belongs to a task follows them, equal in both
    losses = consistency_losses(
        settings, zs[1:, ..., latents], encoded[..., latents], batch, progress
    )
    logits = reward_logits(model, params, zs[:-1], batch.action)
    reward = reward_loss(logits, batch.reward, model.bins())
    losses["reward"] = time_weighted(
        reward, batch.mask, settings.loss.time_weight, batch.counts.rows
    )
    target, aux_target = targets
    losses |= value_losses(settings, model, params, zs, batch, target, aux_target, noise)
    if model.config.episodic:
        logit = model.termination(params, zs[1:])
        losses["termination"] = termination_loss(
            logit,
            batch.terminated,
            batch.mask,
            batch.counts,
        )
    extra: Metrics = {}
    if model.heads is not None:
        more, extra = head_losses(settings, model, params, zs, batch)
        losses |= more
    total = total_loss(settings, losses, value_due, model.heads)
    metrics = {f"loss/{name}": value for name, value in losses.items()}
    metrics["loss/total"] = total
    metrics["value/target"] = masked_mean(target.mean(), target.mask, target.count)
    return total, (zs, metrics | extra)
