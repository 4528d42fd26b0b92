"""Your own model in the planner: `mbx.mppi` needs nothing but a function that scores actions.

    python examples/own_model.py

A point mass is steered past a round obstacle to a goal. The model is the three functions below;
the planner knows only `score`. Planning anew at every step, from where the last plan ended
(`warm_start`), is one compiled scan.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mbx import mppi

GOAL = jnp.array([1.0, 1.0])
OBSTACLE, RADIUS = jnp.array([0.5, 0.45]), 0.25
CONFIG = mppi.MPPIConfig(
    iterations=4, num_samples=128, num_elites=16, temperature=5.0, selection="mean"
)


def dynamics(state, action):
    """Position and velocity `[..., 4]` after an action `[..., 2]` in [-1, 1]."""
    position, velocity = state[..., :2], state[..., 2:]
    velocity = 0.9 * velocity + 0.1 * action
    return jnp.concatenate([position + 0.5 * velocity, velocity], axis=-1)


def reward(state):
    """`[...]`: nearer to the goal is better, inside the obstacle is bad."""
    position = state[..., :2]
    to_goal = jnp.linalg.norm(position - GOAL, axis=-1)
    inside = jnp.maximum(RADIUS - jnp.linalg.norm(position - OBSTACLE, axis=-1), 0.0)
    return -to_goal - 20.0 * inside


def returns(state, actions):
    """The model's return of action sequences `[B, N, T, 2]` from states `[B, 4]`: `[B, N]`."""

    def step(states, action):
        states = dynamics(states, action)
        return states, reward(states)

    batch, candidates = actions.shape[:2]
    states = jnp.broadcast_to(state[:, None], (batch, candidates, 4))
    return jax.lax.scan(step, states, jnp.moveaxis(actions, 2, 0))[1].sum(0)


def drive(key, state, *, steps: int = 40, horizon: int = 12):
    """Plan and move `steps` times from states `[B, 4]`: the states on the way, `[steps, B, 4]`."""

    def step(carry, key):
        state, mean = carry
        plan = mppi.plan(
            key,
            lambda _, actions: returns(state, actions),
            mean,
            jnp.full_like(mean, 0.7),
            config=CONFIG,
        )
        state = dynamics(state, plan.action)
        going_on = jnp.zeros(state.shape[0], bool)
        return (state, mppi.warm_start(plan.mean, going_on)), state

    mean = jnp.zeros((state.shape[0], horizon, 2))
    return jax.lax.scan(step, (state, mean), jax.random.split(key, steps))[1]


def main(**options: int) -> jax.Array:
    """Drive from three places at once and say how near they came; returns the paths."""
    start = jnp.array([[0.0, 0.0, 0.0, 0.0], [0.4, 0.0, 0.0, 0.0], [0.0, 0.4, 0.0, 0.0]])
    path = jax.jit(lambda key, start: drive(key, start, **options))(jax.random.key(0), start)
    left = jnp.linalg.norm(path[-1, :, :2] - GOAL, axis=-1)
    nearest = jnp.linalg.norm(path[..., :2] - OBSTACLE, axis=-1).min(0)
    for i in range(start.shape[0]):
        print(
            f"from {start[i, :2]}: {left[i]:.2f} from the goal, passed {nearest[i]:.2f} from the "
            f"obstacle's centre (radius {RADIUS})"
        )
    return path


if __name__ == "__main__":
    main()
