"""Starting from another run: its parameters for a new task, or its rows without acting.

`train.init_from=RUN` begins with the best parameters of RUN (fine-tuning), for agents that have
`Agent.start_from`. A run of several tasks (`multi:...`) may be fine-tuned on others: they are
padded to the sizes of RUN. `train.dataset=FILE` learns from rows that were recorded before
(`mbx.training.datasets`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.training import build, datasets, trust
from mbx.training.checkpoint import Checkpointer, load_settings
from mbx.training.environments import environment_spec


def resolve(settings: RunSettings) -> RunSettings:
    """`settings` with values from another run or a dataset filled in.
    Raises ValueError for several seeds, which cannot start from another run.
    """
    train, env, replay = settings.train, settings.env, settings.replay
    for field, value in (("init_from", train.init_from), ("dataset", train.dataset)):
        if value and settings.num_seeds > 1:
            raise ValueError(
                f"train.{field}={value!r} with num_seeds={settings.num_seeds}: start one run a seed"
            )
    if train.init_from and settings.several_tasks:
        spec = environment_spec(_settings(train.init_from))
        pad_to = (spec.obs_shape[0] - len(spec.tasks), spec.action_dim)
        env = dataclasses.replace(env, pad_to=pad_to)
    if train.dataset:
        num_envs, rows = datasets.shape(train.dataset)
        env = dataclasses.replace(env, num_envs=num_envs)
        replay = dataclasses.replace(replay, capacity=num_envs * rows)
    return dataclasses.replace(settings, env=env, replay=replay)


def _settings(source: str) -> RunSettings:
    """The settings of another run, whose sizes the environment will have."""
    settings = load_settings(source)
    trust.check(settings.env.name, source, False)
    return settings


def check(settings: RunSettings, agent: Agent) -> None:
    """Raise ValueError where the agent cannot start from another run."""
    if settings.train.init_from and agent.start_from is None:
        raise ValueError(
            f"train.init_from={settings.train.init_from!r}: agent {settings.agent!r} cannot start "
            "from another run, leave it empty"
        )


def start_from(source: str, settings: RunSettings, agent: Agent, train: Any) -> Any:
    """The fresh state `train` of a new run with the parameters of the run in `source`.
    Optimisers, scales and the update counter stay fresh. settings: the new run's, `for_task`.
    Raises ValueError, naming the component or setting, where the models' shapes or the meaning of
    parameters differ (`RunSettings.check_start`).
    """
    before = _settings(source)
    spec = environment_spec(before)
    for reason in settings.check_start(before.for_task(spec)):
        raise ValueError(reason)
    example = jax.eval_shape(build.build_agent(before, spec).init, jax.random.key(0))
    with Checkpointer(source) as checkpointer:
        old, _ = checkpointer.restore_best(example)
    started = agent.start_from(train, old, spec)
    for name, wanted in train.params.items():
        have = jax.tree.map(jnp.shape, started.params.get(name))
        if have != jax.tree.map(jnp.shape, wanted):
            raise ValueError(
                f"train.init_from={source}: the component '{name}' has other shapes there: use the "
                "same config.model, and a task with the same sizes or a multi:… one"
            )
    return started
