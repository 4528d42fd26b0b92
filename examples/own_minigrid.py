"""XLand-MiniGrid (pip install xminigrid): a package with an interface of its own, as two functions.

    python -m experiments.train --config=configs/tdmpc.py \
        --config.env.name=jax:examples/own_minigrid.py:make \
        --config.env.kwargs.name=MiniGrid-Empty-5x5

Its tiles and colours are numbers of kinds, no brightness, so that they are seen one-hot; the grid
is what lies before the robot. Navix and others of this sort take the same twenty lines.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import xminigrid
from xminigrid.core.constants import NUM_COLORS, NUM_TILES

from mbx import envs


def make(name: str = "MiniGrid-Empty-5x5", max_steps: int = 0) -> envs.RawEnvironment:
    """A task by its id; max_steps: of an episode, 0 for the task's own."""
    env, params = xminigrid.make(name, **({"max_steps": max_steps} if max_steps else {}))
    height, width, _ = env.observation_shape(params)

    def observe(timestep):
        kinds, colors = timestep.observation[..., 0], timestep.observation[..., 1]
        seen = jax.nn.one_hot(kinds, NUM_TILES), jax.nn.one_hot(colors, NUM_COLORS)
        return jnp.concatenate(seen, axis=-1).reshape(-1)

    def reset(key):
        timestep = env.reset(params, key)
        return timestep, observe(timestep)

    def step(key, timestep, action):  # actions come one-hot
        new = env.step(params, timestep, jnp.argmax(action))
        # A discount of 0 is an end by itself; the time limit is kept by the wrapper.
        return new, observe(new), new.reward, new.discount == 0.0

    return envs.RawEnvironment(
        name=f"minigrid:{name}",
        obs_shape=(height * width * (NUM_TILES + NUM_COLORS),),
        obs_dtype=jnp.float32,
        action_dim=env.num_actions(params),
        time_limit=params.max_steps,
        reset=reset,
        step=step,
        discrete=True,
    )
