"""Your own agent: an `Agent` of pure functions, run by the same loop as the others.

    python examples/own_agent.py

It learns a model of what an action changes and of the reward (both quadratic), and acts by random
shooting: it draws action sequences, scores them in the model and takes the best one's first action.
Replay, evaluation, checkpoints, resuming and the log come from the package.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from mbx import envs, replay
from mbx.agents.base import Agent
from mbx.training import build, run

CANDIDATES, HORIZON, BATCH = 128, 12, 128
LIMIT = 10.0  # of predicted observations, so that no dream runs away
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
    told = features(obs, action) @ params
    return jnp.clip(obs + told[..., :-1], -LIMIT, LIMIT), told[..., -1]


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


def make_agent(config, spec: envs.EnvSpec) -> Agent:
    """The agent for an environment with vectors of observations and continuous actions."""
    (size,), action_dim = spec.obs_shape, spec.action_dim

    def init(key):
        params = jnp.zeros(((size + action_dim + 1) ** 2, size + 1))
        return TrainState(params, OPTIMIZER.init(params))

    def act(train, actor, obs, is_first, key, evaluate):
        act_key, noise_key = jax.random.split(key)
        action = shoot(train.params, obs, act_key, action_dim)
        noise = 0.0 if evaluate else 0.3 * jax.random.normal(noise_key, action.shape)
        return jnp.clip(action + noise, -1.0, 1.0), actor

    def update(train, buffer, key):
        batch = replay.sample(buffer, key, batch_size=BATCH, length=1)
        value, gradient = jax.value_and_grad(loss)(train.params, batch.rows, batch.mask[0])
        change, optimizer = OPTIMIZER.update(gradient, train.optimizer)
        params = optax.apply_updates(train.params, change)
        return TrainState(params, optimizer), buffer, {"loss/model": value}

    def example_row():
        def array(*shape, dtype=jnp.float32):
            return jax.ShapeDtypeStruct(shape, dtype)

        flags = {name: array(dtype=bool) for name in ("is_first", "is_last", "terminated")}
        return dict(obs=array(size), action=array(action_dim), reward=array(), **flags)

    return Agent(
        init=init,
        init_actor=lambda num_envs: jnp.zeros(num_envs),  # nothing to remember between steps
        act=act,
        update=update,
        example_row=example_row,
    )


CONFIG = dict(
    agent="shooting",
    seed=0,
    resume=False,
    env=dict(name="gymnax:Pendulum-v1", num_envs=4, action_repeat=0, episode_length=0),
    train=dict(
        steps=6_000,
        seed_steps=500,
        pretrain_updates=200,
        utd_ratio=0.5,
        log_interval=500,
        check_finite=True,
    ),
    eval=dict(interval=2_000, episodes=8),
    checkpoint=dict(interval=2_000, keep=1),
    replay=dict(capacity=10_000),
)


def main(workdir: str = "runs/shooting", config: dict = CONFIG) -> run.Result:
    """Train it. `mbx.training.run.load` reads such a run wherever the agent is registered."""
    build.register("shooting", make_agent)
    return run.train(config, workdir)


if __name__ == "__main__":
    print(main())
