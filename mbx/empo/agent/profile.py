"""Milliseconds of each part of an update's targets (`eval.profile`), each as a program of its own.

draw        states from the replay, and the human actions to average over
successors  all that may follow them: `targets.expand`
features    what networks read of the successors
networks    their values
aggregation sums over successors
targets     all of these but `draw`, and the values of the states, as the learner compiles them
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mbx import replay, successors
from mbx.agents.base import Diagnostics
from mbx.empo.agent import targets
from mbx.empo.agent.types import Problem
from mbx.types import Array

REPEATS = 5


def make_profile(
    problem: Problem, experience: Callable[[Array, Array], Any], others: Any = None
) -> Callable[[Any, replay.ReplayState, Array], Diagnostics]:
    """Diagnostics `profile/..._ms`, medians, with counts of a batch, after those of `others`.
    experience: (observations, key) -> states, human actions, and successors where they are stored.
    """
    world, loss, evaluate = problem.world, problem.settings.loss, jax.jit(problem.model.encode)

    def draw(buffer: replay.ReplayState, key: Array) -> tuple[Any, Array]:
        batch = replay.sample(buffer, key, batch_size=loss.batch_size, length=1)
        return experience(batch.rows["obs"], key), batch.mask[0]

    def expand(drawn: Any) -> Any:
        (states, human, listed), mask = drawn
        return targets.expand(world, states, human.actions, problem.capacity, mask, listed)[0]

    def whole(train: Any, drawn: Any) -> Any:
        (states, human, listed), mask = drawn
        options = {"capacity": problem.capacity, "unique": loss.unique, "listed": listed}
        return targets.make_targets(problem, train, states, human, mask, **options)

    def aggregate(values: Any, flat: Any) -> Any:
        where = flat.prob, flat.segment, len(flat.lost_mass)
        return [successors.segment_expectation(x, *where) for x in values]

    def network(train: Any, codes: Array) -> Any:
        return targets.values(problem, train, codes, by_network=True)[:2]

    parts = [jax.jit(part) for part in (draw, expand, network, aggregate, whole)]

    def measure(train: Any, buffer: replay.ReplayState, key: Array) -> Diagnostics:
        found = Diagnostics({}, {}) if others is None else others(train, buffer, key)
        metrics = {}

        def timed(name: str, function: Callable[..., Any], *given: Any) -> Any:
            result, seconds = jax.block_until_ready(function(*given)), []
            for _ in range(REPEATS):
                began = time.perf_counter()
                jax.block_until_ready(function(*given))
                seconds.append(time.perf_counter() - began)
            metrics[f"profile/{name}_ms"] = 1e3 * float(np.median(seconds))
            return result

        drawn = timed("draw", parts[0], buffer, key)
        flat = timed("successors", parts[1], drawn)
        codes = timed("features", evaluate, flat.state)
        timed("aggregation", parts[3], timed("networks", parts[2], train, codes), flat)
        timed("targets", parts[4], train, drawn)
        metrics["profile/successors"] = float(flat.count)
        line = "  ".join(f"{name[8:]} {value:.3g}" for name, value in metrics.items())
        print(f"profile  states {loss.batch_size}  {line}", flush=True)
        return found._replace(metrics=found.metrics | metrics)

    return measure
