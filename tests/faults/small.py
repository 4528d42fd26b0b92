"""A whole run that compiles in a second: a linear model, learned from uniform batches of rows.

    python -m tests.faults.small WORKDIR --steps=400 [--resume]

It ends as the command `experiments.train` does.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import Agent
from mbx.agents.settings import Checkpoint, Env, Eval, Replay, RunSettings, Train
from mbx.settings import section, setting, to_dict
from mbx.training import build
from tests.helpers import register_toy


@flax.struct.dataclass
class TrainState:
    """What is learned; `params` `[obs + action, obs + 1]`."""

    params: jax.Array
    step: jax.Array


def make_agent(config: Any, spec: Any) -> Agent:
    """Predicts the next observation and the reward; acts at random."""
    (size,), action_dim = spec.obs_shape, spec.action_dim

    def init(key: jax.Array) -> TrainState:
        params = 0.1 * jax.random.normal(key, (size + action_dim, size + 1))
        return TrainState(params, jnp.int32(0))

    def act(train, actor, obs, is_first, key, evaluate):
        noise = 0.0 if evaluate else jax.random.normal(key, (obs.shape[0], action_dim))
        return jnp.tanh(obs @ train.params[:size, :action_dim] + noise), actor

    def loss(params, rows, mask):
        inputs = jnp.concatenate([rows["obs"][0], rows["action"][0]], axis=-1)
        wanted = jnp.concatenate([rows["obs"][1], rows["reward"][1][:, None]], axis=-1)
        error = jnp.sum(jnp.square(inputs @ params - wanted), axis=-1)
        return jnp.sum(jnp.where(mask, error, 0.0)) / jnp.maximum(jnp.sum(mask), 1)

    def update(train, buffer, key):
        batch = replay.sample(buffer, key, batch_size=8, length=1)
        value, slope = jax.value_and_grad(loss)(train.params, batch.rows, batch.mask[0])
        return TrainState(train.params - 0.01 * slope, train.step + 1), buffer, {"loss": value}

    row = functools.partial(replay.example_row, (size,), action_dim)
    return Agent(init, lambda num: jnp.zeros(num), act, update, row)


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """Of a run of a second."""

    agent: str = setting("small", "which agent")
    env: Env = section(Env(name="toy:point", num_envs=2))
    train: Train = section(Train(steps=80, seed_steps=16, pretrain_updates=2, log_interval=20))
    eval: Eval = section(Eval(interval=40, episodes=2))
    checkpoint: Checkpoint = section(Checkpoint(interval=20, keep=3))
    replay: Replay = section(Replay(capacity=400))

    def updates_per_step(self) -> float:
        return 0.5


def small_config(**sections: Any) -> dict[str, Any]:
    """The run's configuration; keyword arguments update whole sections."""
    register_toy()
    build.register("small", Settings, make_agent)
    config = to_dict(Settings())
    for name, values in sections.items():
        config[name].update(values) if isinstance(values, dict) else config.update({name: values})
    return config


def main() -> None:
    """The command of the first lines."""
    from mbx.commands import train
    from mbx.config import load
    from mbx.training import files

    files.tolerate_closed_output()  # as `mbx.cli` does

    parser = argparse.ArgumentParser()
    parser.add_argument("workdir")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    config = small_config(resume=given.resume, train=dict(steps=given.steps))
    train.train(load(config), given.workdir)


if __name__ == "__main__":
    main()
