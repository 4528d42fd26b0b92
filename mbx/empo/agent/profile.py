"""Milliseconds of an update's parts, each compiled as a program of its own (`eval.profile`)."""

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
    draw: states and human actions; successors: all that may follow; features: what networks read of
    these; networks: their values; aggregation: sums over successors; targets: all but draw.
    experience: (observations, key) -> states, human actions, and successors where they are stored.
    """
    loss, room = problem.settings.loss, problem.capacity

    @jax.jit
    def draw(buffer: replay.ReplayState, key: Array) -> tuple[Any, ...]:
        batch = replay.sample(buffer, key, batch_size=loss.batch_size, length=1)
        states, human, listed = experience(batch.rows["obs"], key)
        return states, human, batch.mask[0], listed

    @jax.jit
    def expand(states: Any, human: targets.Profiles, mask: Array, listed: Any) -> Any:
        return targets.expand(problem.world, states, human.actions, room, mask, listed)[0]

    @jax.jit
    def network(train: Any, codes: Array) -> Any:
        return targets.values(problem, train, codes, by_network=True)[:2]

    @jax.jit
    def aggregate(values: Any, flat: Any) -> Any:
        where = flat.prob, flat.segment, len(flat.lost_mass)
        return [successors.segment_expectation(x, *where) for x in values]

    @jax.jit
    def whole(train: Any, *drawn: Any) -> Any:
        options = {"capacity": room, "unique": loss.unique, "listed": drawn[3]}
        return targets.make_targets(problem, train, *drawn[:3], **options)

    encode = jax.jit(problem.model.encode)

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

        drawn = timed("draw", draw, buffer, key)
        flat = timed("successors", expand, *drawn)
        values = timed("networks", network, train, timed("features", encode, flat.state))
        timed("aggregation", aggregate, values, flat)
        timed("targets", whole, train, *drawn)
        metrics["profile/successors"] = float(flat.count)
        line = "  ".join(f"{name[8:]} {value:.3g}" for name, value in metrics.items())
        print(f"profile  states {loss.batch_size}  {line}", flush=True)
        return found._replace(metrics=found.metrics | metrics)

    return measure
