"""The same episodes planned by pytorch-mppi, in an environment that has it and no mbx.

`experiments.planners` runs it there: one JSON document comes in, one goes out.
"""

import json
import sys
import time

import numpy as np
import planner_tasks
import torch
from pytorch_mppi import MPPI


def main() -> None:
    """Read {task, samples, pairs, tune, starts, timed}; write {temperature, deviation, …}."""
    asked = json.load(sys.stdin)
    torch.set_num_threads(1)
    task = planner_tasks.TASKS[asked["task"]]

    def planner(temperature: float, deviation: float, seed: int) -> MPPI:
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
