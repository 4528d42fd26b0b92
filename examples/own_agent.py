r"""Your own agent: an `Agent` of pure functions, run by the same loop as the others.

    python examples/own_agent.py
    python -m experiments.train --import=examples/own_agent.py --config=examples/own_config.py \
        --workdir=runs/shooting
    python -m experiments.evaluate runs/shooting --import=examples/own_agent.py

It learns a model of what an action changes and of the reward (both quadratic), and acts by random
shooting: it draws action sequences, scores them in the model and takes the best one's first action.
Replay, evaluation, checkpoints, resuming and the log come from the package.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mbx import envs, replay
from mbx.agents.base import Agent
from mbx.agents.settings import Checkpoint, Eval, RunSettings, Train
from mbx.settings import section, setting
from mbx.training import build, run

CANDIDATES, HORIZON = 128, 12
LIMIT = 10.0  # of predicted observations, so that no prediction runs away
OPTIMIZER = optax.adam(3e-2)


@flax.struct.dataclass
class TrainState:
    """What is learned. params: `[F, obs + 1]`; a train state has to have that field."""

    params: jax.Array
    optimizer: Any


def features(obs, action):
    """`[..., F]` of observations `[..., O]` and actions `[..., A]`."""
    terms = jnp.concatenate([obs, action, jnp.ones_like(obs[..., :1])], axis=-1)
    products = terms[..., :, None] * terms[..., None, :]
    return products.reshape(*terms.shape[:-1], -1)


def predict(params, obs, action):
    """Next observation `[..., O]` and reward `[...]`."""
    change = features(obs, action) @ params
    return jnp.clip(obs + change[..., :-1], -LIMIT, LIMIT), change[..., -1]


def shoot(params, obs, key, action_dim):
    """The first action `[E, A]` of the best of random sequences, for observations `[E, O]`."""
    num_envs, size = obs.shape
    actions = jax.random.uniform(key, (HORIZON, num_envs, CANDIDATES, action_dim), minval=-1.0)

    def step(obs, action):
        return predict(params, obs, action)

    start = jnp.broadcast_to(obs[:, None], (num_envs, CANDIDATES, size))
    scores = jax.lax.scan(step, start, actions)[1].sum(0)  # [E, CANDIDATES]
    best = jnp.argmax(scores, axis=-1)
    return jnp.take_along_axis(actions[0], best[:, None, None], axis=1)[:, 0]


def loss(params, rows, mask):
    """Mean squared error over transitions of two rows each: `[2, B, ...]`, mask `[B]`."""
    obs, reward = predict(params, rows["obs"][0], rows["action"][0])
    error = jnp.sum((obs - rows["obs"][1]) ** 2, axis=-1) + (reward - rows["reward"][1]) ** 2
    return jnp.sum(jnp.where(mask, error, 0.0)) / jnp.maximum(jnp.sum(mask), 1)


def make_agent(settings: Settings, spec: envs.EnvSpec) -> Agent:
    """The agent for an environment with vectors of observations and continuous actions."""
    (size,), action_dim = spec.obs_shape, spec.action_dim

    def init(key):
        params = jnp.zeros(((size + action_dim + 1) ** 2, size + 1))
        return TrainState(params, OPTIMIZER.init(params))

    def act(train, actor, obs, is_first, key, evaluate):
        act_key, noise_key = jax.random.split(key)
        action = shoot(train.params, obs, act_key, action_dim)
        noise = 0.0 if evaluate else settings.noise * jax.random.normal(noise_key, action.shape)
        return jnp.clip(action + noise, -1.0, 1.0), actor

    def update(train, buffer, key):
        batch = replay.sample(buffer, key, batch_size=settings.batch_size, length=1)
        value, gradient = jax.value_and_grad(loss)(train.params, batch.rows, batch.mask[0])
        change, optimizer = OPTIMIZER.update(gradient, train.optimizer)
        params = optax.apply_updates(train.params, change)
        return TrainState(params, optimizer), buffer, {"loss/model": value}

    return Agent(
        init=init,
        init_actor=lambda num_envs: jnp.zeros(num_envs),  # nothing is carried between steps
        act=act,
        update=update,
        example_row=lambda: replay.example_row((size,), action_dim),
    )


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of a run: what every run has, with this agent's defaults, and its own."""

    agent: str = setting("shooting", "which agent")
    train: Train = section(
        Train(steps=6_000, seed_steps=500, pretrain_updates=200), "how long a run is"
    )
    eval: Eval = section(Eval(interval=2_000, episodes=8), "evaluations")
    checkpoint: Checkpoint = section(Checkpoint(interval=2_000, keep=1), "when it is saved")
    batch_size: int = setting(128, "transitions an update learns from", at_least=1)
    noise: float = setting(0.3, "standard deviation of what exploring adds to actions")

    def updates_per_step(self) -> float:
        """One update every other step of an environment."""
        return 0.5


build.register("shooting", Settings, make_agent)


def main(workdir: str = "runs/shooting", settings: RunSettings | None = None) -> run.Result:
    """Train it. `mbx.training.run.load` reads such a run wherever the agent is registered."""
    return run.train(settings or Settings(), workdir)


if __name__ == "__main__":
    print(main())
