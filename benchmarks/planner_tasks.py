"""Two tasks in closed form, for any library of arrays: numpy, jax.numpy or torch.

A pendulum that is too weak to be lifted at once (as Gymnasium's Pendulum), and a pole that hangs
from a cart and has to be swung up by pushing the cart (Barto, Sutton and Anderson's equations).
Importing this loads none of them, so that another package's environment can run it.
"""

from __future__ import annotations

import json
import math
import sys
import time
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


def main() -> None:
    """Plan the same episodes by pytorch-mppi, in an environment that has it and no mbx.

    `benchmarks.planners` runs it there: {task, samples, pairs, tune, starts, timed} comes in as
    JSON, {temperature, deviation, costs, times} goes out.
    """
    import numpy as np
    import torch
    from pytorch_mppi import MPPI

    asked = json.load(sys.stdin)
    torch.set_num_threads(1)
    task = TASKS[asked["task"]]

    def planner(temperature: float, deviation: float, seed: int) -> Any:
        torch.manual_seed(seed)
        return MPPI(
            lambda state, action: task.step(torch, state, action)[0],
            lambda state, action: task.step(torch, state, action)[1],
            len(task.low),
            torch.tensor([[deviation**2]]),
            num_samples=asked["samples"],
            horizon=task.horizon,
            lambda_=temperature,
            u_min=torch.tensor([-1.0]),
            u_max=torch.tensor([1.0]),
        )

    def cost(pair: tuple[float, float], start: list[float], seed: int) -> float:
        plan, state, total = planner(*pair, seed), torch.tensor(start), 0.0
        for _ in range(task.length):
            state, one = task.step(torch, state, torch.clip(plan.command(state), -1.0, 1.0))
            total += float(one)
        return total

    # As mbx.planners.tuning.tune: all pairs once, the better half again, until one is left.
    left, sums, seed = list(map(tuple, asked["pairs"])), {}, 0
    while True:
        seed += 1
        for pair in left:
            found = np.mean([cost(pair, start, seed) for start in asked["tune"]])
            sums[pair] = sums.get(pair, 0.0) + (found if np.isfinite(found) else np.inf)
        left = sorted(left, key=sums.get)
        if len(left) == 1:
            break
        left = left[: -(-len(left) // 2)]
    costs = [cost(left[0], start, 100 + i) for i, start in enumerate(asked["starts"])]
    plan, state, times = planner(*left[0], 0), torch.tensor(asked["starts"][0]), []
    for _ in range(asked["timed"]):
        before = time.perf_counter(), time.process_time()
        plan.command(state)
        times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
    json.dump(
        dict(temperature=left[0][0], deviation=left[0][1], costs=costs, times=times), sys.stdout
    )
