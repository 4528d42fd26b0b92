"""Jumanji (pip install jumanji): a package with an interface of its own, as two functions.

    python -m experiments.train --config=configs/dreamer.py \
        --config.env.name=jax:examples/own_jumanji.py:make --config.env.kwargs.name=Snake-v1

Tasks of one discrete action and one agent that have a `time_limit` (Snake, Maze, Sokoban).
What they observe are named numbers, a dictionary to mbx: --config.env.observe=grid,step_count.
"""

from __future__ import annotations

import jax.numpy as jnp
import jumanji

from mbx import envs


def make(name: str = "Snake-v1", time_limit: int = 500) -> envs.RawEnvironment:
    """A task by its id; time_limit: steps of an episode."""
    # Its own limit, which it takes for an end, lies behind the wrapper's, which is a cut.
    env = jumanji.make(name, time_limit=time_limit + 1)
    fields = env.observation_spec.generate_value()._asdict()

    def observe(timestep):
        seen = timestep.observation._asdict()
        return {field: jnp.ravel(x).astype(jnp.float32) for field, x in seen.items()}

    def reset(key):
        state, timestep = env.reset(key)
        return state, observe(timestep)

    def step(key, state, action):  # actions come one-hot
        state, timestep = env.step(state, jnp.argmax(action))
        return state, observe(timestep), timestep.reward, timestep.last()

    return envs.RawEnvironment(
        name=f"jumanji:{name}",
        obs_shape={field: (x.size,) for field, x in fields.items()},
        obs_dtype=dict.fromkeys(fields, jnp.float32),
        action_dim=int(env.action_spec.num_values),
        time_limit=time_limit,
        reset=reset,
        step=step,
        discrete=True,
    )
