"""`configs/dreamer.py` and its kin as the Dreamer agent's settings and schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mbx.agents import dreamer
from mbx.agents.base import Agent
from mbx.agents.dreamer import networks as dreamer_networks
from mbx.agents.dreamer.diagnostics import make_diagnostics
from mbx.envs.base import EnvSpec
from mbx.training.state import Schedule

Config = Mapping[str, Any]


def dreamer_model(config: Config, spec: EnvSpec) -> dreamer_networks.ModelConfig:
    """The world model, actor and critic for an environment; what is no image is a flat vector."""
    model, shape = dict(config["model"]), tuple(spec.obs_shape)
    size = model.pop("size")
    if len(shape) == 3:
        integers = np.issubdtype(np.dtype(spec.obs_dtype), np.integer)
        seen = dict(image_shape=shape, image_scale=255.0 if integers else 1.0)
    else:
        seen = dict(vector_dim=math.prod(shape), vector_shape=shape)
    if model["core"] == "dense":
        model["blocks"] = 1
    return dreamer_networks.sized(
        size,
        action_dim=spec.action_dim,
        factors=(spec.action_dim,) if spec.discrete else (),
        **seen,
        **model,
    )


def dreamer_config(config: Config, spec: EnvSpec) -> dreamer.DreamerConfig:
    """`configs/dreamer.py` and its kin as the agent's own settings."""
    loss, dreams, actor, critic, optimizer = (
        dict(config[name]) for name in ("loss", "imagination", "actor", "critic", "optimizer")
    )
    gradient = actor.pop("gradient")
    if gradient == "auto":
        gradient = "reinforce" if spec.discrete else "reparam"
    name = optimizer.pop("name")
    rows = config["replay"]["capacity"] // config["env"]["num_envs"]
    if loss["batch_length"] + 1 > rows:
        raise ValueError(
            f"loss.batch_length={loss['batch_length']} needs one row more than that in every "
            f"environment, but replay.capacity gives {rows}: raise it"
        )
    return dreamer.DreamerConfig(
        model=dreamer_model(config, spec),
        horizon=dreams["horizon"],
        dream_rows=dreams["rows"],
        continues=dreams["continues"],
        first_continue=dreams["first_continue"],
        actor_gradient=gradient,
        gamma=critic["gamma"],
        lambda_=critic["lambda_"],
        critic_tau=critic["tau"],
        critic_every=critic["target_update_freq"],
        critic_regularizer=critic["regularizer"],
        replay_loss=critic["replay_loss"],
        replay_coef=critic["replay_coef"],
        replay_gradient=critic["replay_gradient"],
        replay_context=config["replay"]["context"],
        fresh=config["replay"]["fresh"],
        evaluation=config["eval"]["action"],
        optimizer=name,
        **{key: tuple(x) if isinstance(x, list) else x for key, x in optimizer.items()},
        **loss,
        **actor,
    )


def dreamer_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent, with its diagnostics."""
    own = dreamer_config(config, spec)
    return dreamer.make_agent(own)._replace(diagnostics=make_diagnostics(own))


def dreamer_schedule(config: Config, seed_steps: int, num_envs: int) -> Schedule:
    """The train ratio counts replayed steps per agent step: divided by the rows of a batch."""
    train, loss = config["train"], config["loss"]
    needed = (loss["batch_length"] + 1) * num_envs
    if seed_steps < needed:
        raise ValueError(
            f"train.seed_steps={train['seed_steps']} gives {seed_steps} agent steps, but sequences "
            f"of {loss['batch_length']} rows in {num_envs} environments need {needed}: raise it"
        )
    if train["train_ratio"] < 0:
        raise ValueError(f"train.train_ratio={train['train_ratio']}: must not be negative")
    return Schedule(
        seed_steps=seed_steps,
        pretrain_updates=train["pretrain_updates"],
        utd_ratio=train["train_ratio"] / (loss["batch_size"] * loss["batch_length"]),
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
