"""Planners compared in true dynamics: the cost they reach, and how long a plan takes.

    python -m benchmarks.planners --out=runs/planners.csv
    python -m benchmarks.planners --only=mppi,cem --tasks=pendulum --out=runs/planners.csv

Tasks are formulas: a pendulum that is too weak to be lifted at once (as Gymnasium's Pendulum), and
a pole that hangs from a cart and has to be swung up (Barto, Sutton and Anderson's equations). All
planners plan the same episodes with as many simulated sequences per plan. Temperature and deviation
of each are found by `mbx.planners.tuning.tune` on episodes from other starts.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from mbx import mppi
from mbx.commands import jobs
from mbx.fast import allocator
from mbx.planners import bases, cem, evosax, predictive, tuning

WITHOUT_TEMPERATURE = ("cem", "icem", "predictive", "evosax:CMA_ES")


class Task(NamedTuple):
    """A task: `step(state [..., S], action [..., 1]) -> (next state, cost [...])`.

    Actions are in [-1, 1], starts between the states low and high; a plan looks horizon steps
    ahead, an episode has length steps.
    """

    step: Any
    low: tuple[float, ...]
    high: tuple[float, ...]
    horizon: int
    length: int


def pendulum(state: Any, action: Any) -> tuple[Any, Any]:
    """Angle (0 upright) and velocity; 20 steps a second."""
    angle, velocity, torque = state[..., 0], state[..., 1], 2.0 * action[..., 0]
    wrapped = (angle + math.pi) % (2.0 * math.pi) - math.pi
    cost = wrapped**2 + 0.1 * velocity**2 + 0.001 * torque**2
    velocity = jnp.clip(velocity + 0.05 * (15.0 * jnp.sin(angle) + 3.0 * torque), -8.0, 8.0)
    return jnp.stack([angle + 0.05 * velocity, velocity], -1), cost


def cartpole(state: Any, action: Any) -> tuple[Any, Any]:
    """Position, velocity, angle (0 upright), angular velocity; 25 steps a second, 10 N at most."""
    x, v, angle, spin = (state[..., i] for i in range(4))
    force, sin, cos = 10.0 * action[..., 0], jnp.sin(angle), jnp.cos(angle)
    cost = (1.0 - cos) + 0.05 * x**2 + 0.005 * spin**2 + 0.001 * action[..., 0] ** 2
    cart, pole, half = 1.0, 0.1, 0.5
    push = (force + pole * half * spin**2 * sin) / (cart + pole)
    turn = (9.8 * sin - cos * push) / (half * (4.0 / 3.0 - pole * cos**2 / (cart + pole)))
    pull = push - pole * half * turn * cos / (cart + pole)
    v, spin = v + 0.04 * pull, spin + 0.04 * turn
    return jnp.stack([x + 0.04 * v, v, angle + 0.04 * spin, spin], -1), cost


HANGS = math.pi
TASKS = {
    "pendulum": Task(pendulum, (HANGS - 0.5, -0.5), (HANGS + 0.5, 0.5), 20, 100),
    "cartpole": Task(cartpole, (-0.2, 0, HANGS - 0.2, 0), (0.2, 0, HANGS + 0.2, 0), 30, 125),
}


class Method(NamedTuple):
    """A planner with its settings; `make` is given the horizon."""

    make: Callable[[int], Any]
    config: mppi.MPPIConfig


def methods(samples: int) -> dict[str, Method]:
    """Those compared; each simulates about `samples` sequences a plan."""
    rounds = dict(iterations=3, num_samples=samples // 3, num_elites=samples // 24)
    rounds |= dict(temperature_mode="divide", selection="mean")
    three = mppi.MPPIConfig(**rounds)
    # All samples are weighed and the deviation stays: the textbook's, as pytorch-mppi does.
    once = dataclasses.replace(three, iterations=1, num_samples=samples, num_elites=samples)

    def knots(horizon: int) -> Any:
        basis = bases.control_points(horizon // 4, horizon=horizon, kind="cubic")
        return bases.over(mppi.plan, basis)

    found = {
        "mppi": Method(lambda _: mppi.plan, three),
        "mppi one round": Method(lambda _: mppi.plan, once),
        "mppi cubic knots": Method(knots, three),
        "mppi smoothed": Method(
            lambda horizon: bases.over(mppi.plan, bases.smoothing(1.0, horizon=horizon)), three
        ),
        "cem": Method(lambda _: cem.cem, three),
        "icem": Method(lambda _: cem.icem, cem.ICEMConfig(**rounds)),
        "predictive": Method(lambda _: predictive.plan, three),
    }
    try:
        evosax.planner("CMA_ES")
    except ValueError:  # not installed
        return found
    return found | {"evosax:CMA_ES": Method(lambda _: evosax.planner("CMA_ES"), three)}


def score_from(task: Task, states: Any) -> mppi.ScoreFn:
    """Minus the cost of every candidate from states `[B, S]`."""

    def score(key: Any, actions: Any) -> Any:
        start = jnp.broadcast_to(states[:, None], (*actions.shape[:2], states.shape[1]))
        return -jax.lax.scan(task.step, start, jnp.moveaxis(actions, 2, 0))[1].sum(0)

    return score


def tuned(method: Method, temperature: Any, deviation: Any) -> mppi.MPPIConfig:
    """Its settings with these numbers; with all samples as elites the deviation stays as it is."""
    stays = method.config.num_elites == method.config.num_samples
    least = deviation if stays else jnp.minimum(method.config.min_std, deviation)
    return dataclasses.replace(
        method.config, temperature=temperature, max_std=deviation, min_std=least
    )


def make_costs(task: Task, method: Method) -> Callable[..., Any]:
    """(key, temperature, deviation, starts `[B, S]`) -> costs of an episode from each, `[B]`."""
    plan = method.make(task.horizon)

    def costs(key: Any, temperature: Any, deviation: Any, starts: Any) -> Any:
        config = tuned(method, temperature, deviation)

        def step(carry: Any, key: Any) -> Any:
            states, mean = carry
            std = jnp.full_like(mean, deviation)
            found = plan(key, score_from(task, states), mean, std, config=config)
            states, cost = task.step(states, found.action)
            return (states, mppi.warm_start(found.mean, jnp.zeros(len(mean), bool))), cost

        mean = jnp.zeros((len(starts), task.horizon, 1))
        return jax.lax.scan(step, (starts, mean), jax.random.split(key, task.length))[1].sum(0)

    return costs


def draw_starts(task: Task, seed: int, num: int) -> np.ndarray:
    """Start states `[num, S]`."""
    drawn = np.random.default_rng(seed).uniform(task.low, task.high, (num, len(task.low)))
    return drawn.astype(np.float32)


def milliseconds(
    task: Task, method: Method, found: tuning.Tuned, start: Any, num: int
) -> np.ndarray:
    """Of `num` plans for one state, compiled: `[2, num]` by the clock, and of the processor."""
    config, plan = tuned(method, found.temperature, found.deviation), method.make(task.horizon)

    @jax.jit
    def one(key: Any, state: Any, mean: Any) -> Any:
        std = jnp.full_like(mean, found.deviation)
        return plan(key, score_from(task, state), mean, std, config=config).action

    times, mean = [], jnp.zeros((1, task.horizon, 1))
    for key in jax.random.split(jax.random.key(0), num + 1):
        before = time.perf_counter(), time.process_time()
        one(key, start[None], mean).block_until_ready()
        times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
    return 1e3 * np.array(times[1:]).T  # the first compiles


def measure(name: str, method: Method, task: Task, settings: Any) -> dict[str, Any]:
    """A row without its task."""
    costs, starts = make_costs(task, method), draw_starts(task, 0, settings.starts)
    others = draw_starts(task, 1, settings.tuning_starts)

    def value(key: Any, temperature: Any, deviation: Any) -> Any:
        return -jnp.mean(costs(key, temperature, deviation, others))

    found = tuning.tune(jax.random.key(1), value, num=settings.pairs)
    run = jax.jit(costs)
    reached = np.asarray(run(jax.random.key(2), found.temperature, found.deviation, starts))
    clock, processor = milliseconds(task, method, found, starts[0], settings.timed)
    rounds = method.config.rounds(1)
    return dict(
        method=name,
        samples=rounds * method.config.num_samples,
        rounds=rounds,
        temperature="" if name in WITHOUT_TEMPERATURE else found.temperature,
        deviation=found.deviation,
        cost=float(reached.mean()),
        worst=float(reached.max()),
        least_ms=float(clock.min()),
        processor_ms=float(np.median(processor)),
    )


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_list("tasks", list(TASKS), "Tasks.")
    flags.DEFINE_list("only", [], "Methods; empty: all that are installed.")
    flags.DEFINE_integer("samples", 384, "Sequences simulated per plan.", lower_bound=48)
    flags.DEFINE_integer("pairs", 8, "Pairs of temperature and deviation tried.", lower_bound=1)
    flags.DEFINE_integer("tuning_starts", 2, "Episodes that they are tried on.", lower_bound=1)
    flags.DEFINE_integer("starts", 8, "Other episodes that are measured.", lower_bound=1)
    flags.DEFINE_integer("timed", 100, "Plans that are timed.", lower_bound=1)
    flags.DEFINE_string("out", "planners.csv", "CSV file of the rows.")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    allocator.dispatch_inline()
    given, rows = flags.FLAGS, []
    known = methods(given.samples)
    if unknown := [*(set(given.only) - {*known}), *(set(given.tasks) - {*TASKS})]:
        choices = ", ".join([*known, *TASKS])
        sys.exit(f"error: {unknown[0]!r} is unknown or not installed; there are {choices}")
    for name in given.tasks:
        for method in given.only or known:
            rows.append({"task": name, **measure(method, known[method], TASKS[name], given)})
            print(rows[-1], flush=True)
            jobs.write_rows(given.out, rows)


if __name__ == "__main__":
    define_flags()
    app.run(main)
