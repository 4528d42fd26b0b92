"""Discrete actions: one-hot draws, and MPPI over sequences of them.

The planner is that of `mbx.mppi` with a categorical distribution a step in the place of a Gaussian:
candidates are sequences of one-hot actions, and probabilities are refitted to the elites by their
weights. It knows no model either.

Axes: B states planned for at once, N candidates, P proposals, K elites, T horizon, A actions.
Sources: Rubinstein 1999 (the cross-entropy method on discrete variables); Williams et al. 2017
(weights of MPPI). What is ours: every action begins a candidate, and the least probability.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import log_ndtr

from mbx import mppi
from mbx.mppi import Key, MPPIConfig, Plan, Refit, ScoreFn

# Distributions over A classes


def mixed_logits(logits: Array, unimix: float) -> Array:
    """Log-probabilities of (1 - unimix) softmax + unimix / A, float32 `[..., A]`.
    Source: DreamerV3 (arXiv 2301.04104), "unimix categoricals".
    """
    logits = logits.astype(jnp.float32)
    if unimix == 0.0:
        return jax.nn.log_softmax(logits)
    probs = jax.nn.softmax(logits)
    return jnp.log((1.0 - unimix) * probs + unimix / logits.shape[-1])


def masked(logits: Array, mask: Array) -> Array:
    """Logits `[..., A]` of no chance where `mask` is False; where all of it is, equal ones."""
    return jnp.where(mask, logits, -1e4)


def straight_through(log_probs: Array, one_hot: Array) -> Array:
    """`one_hot` in value, the probabilities in derivative: both `[..., A]`."""
    probs = jnp.exp(log_probs)
    return jax.lax.stop_gradient(one_hot) + (probs - jax.lax.stop_gradient(probs))


def draw(log_probs: Array, eps: Array) -> Array:
    """One-hot draws `[..., A]` made of standard normal numbers `[..., A]`.
    Normal numbers become Gumbel ones by their distribution functions, and the largest sum wins
    (Gumbel-max). With `eps` 0, as for a Gaussian policy without noise, it is the likeliest action.

    Examples:
        >>> log_probs = jnp.log(jnp.array([0.2, 0.8]))
        >>> categorical.draw(log_probs, jnp.zeros(2)).tolist()
        [0.0, 1.0]
        >>> categorical.draw(log_probs, jnp.array([2.0, -1.0])).tolist()
        [1.0, 0.0]
    """
    gumbel = -jnp.log(-log_ndtr(eps))
    chosen = jnp.argmax(log_probs + gumbel, axis=-1)
    return jax.nn.one_hot(chosen, log_probs.shape[-1], dtype=jnp.float32)


def disturb(one_hot: Array, probs: Array, share: Array | float, eps: Array) -> Array:
    """One-hot draws of the mixture (1 - share) one_hot + share probs: `[..., A]` all."""
    return draw(jnp.log((1.0 - share) * one_hot + share * probs), eps)


def entropy(log_probs: Array) -> Array:
    """Entropy of normalised log-probabilities `[..., A]`: `[...]`."""
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def kl(p: Array, q: Array) -> Array:
    """KL(p || q) of log-probabilities `[..., A]`: `[...]`."""
    return jnp.sum(jnp.exp(p) * (p - q), axis=-1)


# The planner


def probabilities(weights: Array, mask: Array | None = None, least: Array | float = 0.0) -> Array:
    """Weights `[..., A]`, 0 or more, as probabilities of at least `least` (at most one in A) each.
    They are uniform where all weights are 0. mask: `[..., A]`, 0 for actions that do not exist.
    """
    mask = jnp.ones_like(weights) if mask is None else jnp.broadcast_to(mask, weights.shape)
    weights = weights * mask
    total = jnp.sum(weights, axis=-1, keepdims=True)
    num = jnp.sum(mask, axis=-1, keepdims=True)
    shares = jnp.where(total > 0.0, weights / jnp.where(total > 0.0, total, 1.0), 1.0 / num)
    return mask * ((1.0 - least * num) * shares + least)


def plan(
    key: Key, score_fn: ScoreFn, mean: Array, std: Array, *, config: MPPIConfig, **given: Any
) -> Plan:
    """`mppi.plan` for discrete actions: arguments and result are its, all actions are one-hot.

    Where there are at least twice as many samples as actions, one candidate a round begins with
    each action, so that none is overlooked because it became unlikely.

    Args:
        mean: `[B, T, A]`, probabilities (or weights) of round one; where all are 0, uniform. A
            warm start by `mppi.warm_start` thus begins uniformly at the freed step.
        std: not read.
        config: `min_std` is the least standard deviation of a refitted indicator, so that no
            action's probability falls below its square (1 / A at most); `max_std` is not read;
            `action_noise`, 0 to 1, is how much of the probabilities is mixed into the chosen
            action; with `selection` "mean" the likeliest action is chosen.

    Raises:
        ValueError: as `mppi.plan`; and for auxiliaries with `selection` "mean", which chooses no
            candidate.

    Examples:
        >>> wanted = jnp.array([2, 0])  # the third action, then the first
        >>> def score(key, actions):  # [B, N, T, A] -> [B, N]
        ...     return (actions.argmax(-1) == wanted[None, None]).sum(-1).astype(jnp.float32)
        >>> config = mppi.MPPIConfig(num_samples=32, num_elites=4, selection="best")
        >>> uniform = jnp.zeros((1, 2, 3))
        >>> found = categorical.plan(jax.random.key(0), score, uniform, uniform, config=config)
        >>> found.action.tolist(), found.mean[0].argmax(-1).tolist()
        ([[0.0, 0.0, 1.0]], [2, 0])
    """
    if given.get("has_aux") and config.selection == "mean":
        raise ValueError("selection='mean' chooses no candidate to have auxiliaries: 'best' does")
    return mppi.plan(key, score_fn, mean, std, method=_rounds, config=config, **given)


def _rounds(frame: mppi.Frame) -> mppi.Rounds:
    size, mask, config = frame.mask.shape[-1], frame.mask, frame.config
    num = jnp.sum(mask, axis=-1, keepdims=True)
    least = jnp.minimum(jnp.square(config.min_std), 1.0 / num)
    one_hot = jnp.eye(size, dtype=jnp.float32)

    def sample(i: Array, last: Refit) -> Array:
        actions = draw(jnp.log(last.mean)[:, None], frame.draws.candidate(i))
        if 2 * size <= actions.shape[1]:
            # An action that does not exist leaves its candidate as it was drawn.
            begin = jnp.where(mask[:, 0, :, None] > 0.0, one_hot, actions[:, :size, 0])
            actions = actions.at[:, :size, 0].set(begin)
        return actions

    def floored(last: Refit, new: Refit) -> Refit:
        return new._replace(mean=probabilities(new.mean, mask, least))

    def select(last: Refit) -> tuple[Array, Array]:
        first = last.mean[:, 0]
        if config.selection == "mean":
            chosen = jax.nn.one_hot(jnp.argmax(first, axis=-1), size, dtype=jnp.float32)
        else:
            chosen = mppi.select_first(last, frame.draws, config.selection)
        return chosen, disturb(chosen, first, config.action_noise, frame.draws.action)

    begin = probabilities(frame.mean, mask)
    return mppi.Rounds(sample, floored, begin=begin, select=select)
