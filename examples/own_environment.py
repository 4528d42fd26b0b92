r"""Your own environment: two pure functions, registered under a name, trained with TD-MPC.

    python examples/own_environment.py
    python -m experiments.train --config=configs/tdmpc.py \
        --config.env.name=jax:examples/own_environment.py:rail

A cart on a rail, pushed left and right, has to come to rest in the middle. Batching, time limits,
action repeat, resets and the compiled training loop come from the package.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from configs import tdmpc
from mbx import envs
from mbx.training import run

DT = 0.1  # seconds a step


def reset(key):
    """A new episode: (state, observation); here both are position and velocity `[2]`."""
    state = jax.random.uniform(key, (2,), minval=-1.0)
    return state, state


def step(key, state, action):
    """One step with an action `[1]` in [-1, 1]: (state, observation, reward, terminated)."""
    position, velocity = state
    velocity = velocity + DT * (4.0 * action[0] - 0.1 * velocity)
    position = position + DT * velocity
    reward = jnp.exp(-4.0 * position**2) - 0.05 * velocity**2
    state = jnp.stack([position, velocity])
    return state, state, reward, jnp.abs(position) > 4.0  # off the rail: no value beyond that


def rail(task="rail"):
    """What `--config.env.name=mine:rail` stands for: sizes, a time limit and the two functions."""
    return envs.RawEnvironment(f"mine:{task}", (2,), jnp.float32, 1, 100, reset, step)


def configuration() -> dict:
    """TD-MPC's, for this task."""
    config = tdmpc.get_config()
    config.env.name = "mine:rail"
    config.train.steps = 8_000
    return config.to_dict()


def main(workdir: str = "runs/rail", config: dict | None = None) -> run.Result:
    """Train on it, with the configuration above or another agent's."""
    envs.register("mine", envs.Suite(raw=rail))
    return run.train(config or configuration(), workdir)


if __name__ == "__main__":
    print(main())
