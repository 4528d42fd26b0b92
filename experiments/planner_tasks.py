"""Two tasks in closed form, for any library of arrays: numpy, jax.numpy or torch.

A pendulum that is too weak to be lifted at once (as Gymnasium's Pendulum), and a pole that hangs
from a cart and has to be swung up by pushing the cart (Barto, Sutton and Anderson's equations).
Nothing here loads any of those libraries, so that another package's environment can read it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple


class Task(NamedTuple):
    """A task: `step(xp, state [..., S], action [..., A]) -> (next state, cost [...])`.

    Attributes:
        step: with `xp` the library; actions lie in [-1, 1].
        low, high: starts are drawn uniformly between these states.
        horizon: steps that a plan looks ahead.
        length: steps of an episode.
        actions: their number, A.
    """

    step: Any
    low: tuple[float, ...]
    high: tuple[float, ...]
    horizon: int
    length: int
    actions: int = 1


def pendulum(xp: Any, state: Any, action: Any) -> tuple[Any, Any]:
    """Angle (0 upright) and velocity; 20 steps a second."""
    angle, velocity, torque = state[..., 0], state[..., 1], 2.0 * action[..., 0]
    wrapped = (angle + math.pi) % (2.0 * math.pi) - math.pi
    cost = wrapped**2 + 0.1 * velocity**2 + 0.001 * torque**2
    velocity = xp.clip(velocity + 0.05 * (15.0 * xp.sin(angle) + 3.0 * torque), -8.0, 8.0)
    return xp.stack([angle + 0.05 * velocity, velocity], -1), cost


def cartpole(xp: Any, state: Any, action: Any) -> tuple[Any, Any]:
    """Position, velocity, angle (0 upright), angular velocity; 25 steps a second, 10 N at most."""
    x, v, angle, spin = (state[..., i] for i in range(4))
    force, sin, cos = 10.0 * action[..., 0], xp.sin(angle), xp.cos(angle)
    cost = (1.0 - cos) + 0.05 * x**2 + 0.005 * spin**2 + 0.001 * action[..., 0] ** 2
    cart, pole, half = 1.0, 0.1, 0.5
    push = (force + pole * half * spin**2 * sin) / (cart + pole)
    turn = (9.8 * sin - cos * push) / (half * (4.0 / 3.0 - pole * cos**2 / (cart + pole)))
    pull = push - pole * half * turn * cos / (cart + pole)
    v, spin = v + 0.04 * pull, spin + 0.04 * turn
    return xp.stack([x + 0.04 * v, v, angle + 0.04 * spin, spin], -1), cost


TASKS = {
    "pendulum": Task(pendulum, (math.pi - 0.5, -0.5), (math.pi + 0.5, 0.5), 20, 100),
    "cartpole": Task(
        cartpole, (-0.2, 0.0, math.pi - 0.2, 0.0), (0.2, 0.0, math.pi + 0.2, 0.0), 30, 125
    ),
}
