"""Dreamer's policies: categorical (one or several factors) and bounded-mean Gaussian.

Functions of the policy head's output `[..., P]`. Discrete: P = A, the logits of one-hot factors
that are mixed with `policy_unimix` of the uniform distribution; log-probabilities and entropies are
summed over factors. Continuous: P = 2 A, mean = tanh(m), std = (max - min) sigmoid(s + init) + min.
Source: DreamerV3 and its official code.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from mbx import categorical
from mbx.agents.dreamer import rssm
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.types import Given
from mbx.types import Array


def output_dim(config: ModelConfig) -> int:
    """P, the size of the policy head's output."""
    return config.action_dim if config.discrete else 2 * config.action_dim


def draw(config: ModelConfig, key: Array, lead: tuple[int, ...]) -> Array:
    """What `sample` needs, `[*lead, ...]`: a uniform number a factor, or a normal one a dim."""
    if config.discrete:
        return jax.random.uniform(key, (*lead, len(config.factors)))
    return jax.random.normal(key, (*lead, config.action_dim))


def _factors(config: ModelConfig, x: Array) -> list[Array]:
    return jnp.split(x, np.cumsum(config.factors)[:-1].tolist(), axis=-1)


def _mixed(config: ModelConfig, out: Array) -> list[Array]:
    return [rssm.mixed_logits(part, config.policy_unimix) for part in _factors(config, out)]


def possible(config: ModelConfig, out: Array, mask: Array | None) -> tuple[ModelConfig, Array]:
    """Configuration and output of the same policy among possible actions, by a mask `[..., A]`."""
    if mask is None:
        return config, out
    mixed = jnp.concatenate(_mixed(config, out), axis=-1)
    return dataclasses.replace(config, policy_unimix=0.0), categorical.masked(mixed, mask)


def mean_std(config: ModelConfig, out: Array) -> tuple[Array, Array]:
    """Mean and standard deviation `[..., A]` of a continuous policy."""
    mean, raw = jnp.split(out, 2, axis=-1)
    width = config.max_std - config.min_std
    return jnp.tanh(mean), width * jax.nn.sigmoid(raw + config.init_std) + config.min_std


def sample(config: ModelConfig, out: Array, draw: Array | Given) -> Array:
    """An action `[..., A]`: straight-through one-hots, or a reparameterised, unclipped Gaussian."""
    if isinstance(draw, Given):
        return draw.sample
    if config.discrete:
        parts = [
            rssm.straight_through(mixed, rssm.sample_one_hot(mixed, draw[..., i]))
            for i, mixed in enumerate(_mixed(config, out))
        ]
        return jnp.concatenate(parts, axis=-1)
    mean, std = mean_std(config, out)
    return mean + std * draw


def bound(config: ModelConfig, action: Array, limit: float) -> Array:
    """Continuous actions brought to at most `limit` (0: none), which has no gradient: sheeprl's."""
    return action if config.discrete or not limit else rssm.squash_action(action, limit)


def mode(config: ModelConfig, out: Array) -> Array:
    """The likeliest action."""
    if config.discrete:
        parts = [rssm.mode_one_hot(part) for part in _factors(config, out)]
        return jnp.concatenate(parts, axis=-1)
    return mean_std(config, out)[0]


def log_prob(config: ModelConfig, out: Array, action: Array) -> Array:
    """Log-probability or density `[...]` of actions, summed over factors or dimensions."""
    if config.discrete:
        parts = zip(_mixed(config, out), _factors(config, action), strict=True)
        return sum(jnp.sum(mixed * one_hot, axis=-1) for mixed, one_hot in parts)
    mean, std = mean_std(config, out)
    normal = jnp.square((action - mean) / std) + math.log(2.0 * math.pi)
    return jnp.sum(-0.5 * normal - jnp.log(std), axis=-1)


def entropy(config: ModelConfig, out: Array) -> Array:
    """Entropy `[...]`, summed over factors or dimensions."""
    if config.discrete:
        return sum(categorical.entropy(mixed) for mixed in _mixed(config, out))
    std = mean_std(config, out)[1]
    return jnp.sum(jnp.log(std) + 0.5 * math.log(2.0 * math.pi * math.e), axis=-1)
