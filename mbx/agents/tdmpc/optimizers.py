"""Optimisers of the TD-MPC agent: one global-norm clip, Adam, and a learning rate a group.

Groups are the model's components (document 001, section 7): the encoder has its own rate, which may
step down late in the run; ensembles may be given more, since their losses are means over heads;
random priors are never trained.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mbx.agents.tdmpc.config import TDMPCConfig
from mbx.world_model import Params

Array = jax.Array


def learning_rates(config: TDMPCConfig) -> dict[str, float]:
    """The rate of every component besides the encoder's schedule; "model" is all others'."""
    lr, world = config.learning_rate, config.world
    if not config.ensemble_lr_scaling:
        return dict(model=lr)
    return dict(
        model=lr,
        dynamics=lr * world.num_dynamics,
        reward=lr * world.num_rewards,
        value=lr * world.num_values / 5,
        aux_value=lr * max(world.num_aux, 1) / 5,
    )


def encoder_rate(config: TDMPCConfig) -> float | optax.Schedule:
    """A constant, or a step to a part of it after `encoder_lr_step_at` of the run's updates."""
    lr = config.learning_rate * config.encoder_lr_scale
    if config.encoder_lr_step_at >= 1.0:
        return lr
    step = int(config.encoder_lr_step_at * config.total_updates)
    return optax.piecewise_constant_schedule(lr, {step: config.encoder_lr_step_scale})


def make_optimizers(
    config: TDMPCConfig,
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Optimisers of the model (values included) and of a policy."""
    rates = learning_rates(config)

    def labels(params: Params) -> Any:
        def label(path: tuple, _: Array) -> str:
            names = [entry.key for entry in path]
            if "prior" in names:
                return "prior"
            return names[0] if names[0] in ("encoder", *rates) else "model"

        return jax.tree_util.tree_map_with_path(label, params)

    decay = optax.add_decayed_weights(config.weight_decay)

    def group(rate: float | optax.Schedule) -> optax.GradientTransformation:
        scale = optax.scale_by_learning_rate(rate)
        return optax.chain(decay, scale) if config.weight_decay else scale

    groups = {name: group(rate) for name, rate in rates.items()}
    groups |= dict(encoder=group(encoder_rate(config)), prior=optax.set_to_zero())
    clip = optax.clip_by_global_norm(config.grad_clip_norm)
    model = optax.chain(clip, optax.scale_by_adam(), optax.partition(groups, labels))
    rate = config.learning_rate * config.policy_lr_scale
    adam = optax.adam(rate, eps=config.policy_adam_eps)
    if config.weight_decay:
        adam = optax.adamw(rate, eps=config.policy_adam_eps, weight_decay=config.weight_decay)
    return model, optax.chain(clip, adam)


def hold(new: Any, old: Any, components: tuple[str, ...], held: Array) -> Any:
    """`new`, but `old` in the leaves of `components` where `held`: their turn has not come."""

    def choose(path: tuple, a: Array, b: Array) -> Array:
        names = [getattr(entry, "key", None) for entry in path]
        return jnp.where(held, b, a) if set(components) & set(names) else a

    return jax.tree_util.tree_map_with_path(choose, new, old)
