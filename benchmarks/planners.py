"""Planners side by side, in true dynamics: the cost they reach, and how long a plan takes.

Two tasks are formulas (planner_tasks.py); the third, `arm`, is simulated by MuJoCo in JAX (MJX).

    python -m benchmarks.planners --out=runs/planners.csv
    python -m benchmarks.planners --only=mppi,cem --tasks=pendulum --out=runs/planners.csv
    python -m benchmarks.planners --tasks=arm --out=runs/planners.csv
    python -m venv peer && peer/bin/pip install torch pytorch-mppi
    python -m benchmarks.planners --peer=peer/bin/python --out=runs/planners.csv

All plan the same episodes with as many simulated sequences a plan. Temperature and deviation of
each are found by `mbx.planners.tuning.tune` on episodes from other starts, with as many trials for
each. With --peer pytorch-mppi is measured, too, in the environment of that interpreter, on the
tasks that are formulas. Rows of the same task and method in an --out that is there are replaced,
the others stay.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from mbx import mppi
from mbx.commands import results
from mbx.fast import allocator
from mbx.planners import bases, cem, evosax, predictive, tuning

from .planner_tasks import TASKS as FORMULAS
from .planner_tasks import Task

XML = pathlib.Path(__file__).with_name("arm.xml").read_text()
REPEAT = 2  # simulated steps of a decision: 25 decisions a second


def arm() -> Task:
    """Two links that hang, with a motor in each joint; the tip shall stand straight up.

    Neither motor can lift what hangs on it at once. States are the two angles (0 upright, the
    elbow's relative) and their velocities.
    """
    import mujoco  # a second, for this task alone
    from mujoco import mjx

    model = mujoco.MjModel.from_xml_string(XML)
    simulated, empty = mjx.put_model(model), mjx.make_data(model)

    def one(state: Any, action: Any) -> tuple[Any, Any]:
        data = empty.replace(qpos=state[:2], qvel=state[2:], ctrl=action)
        data = jax.lax.fori_loop(0, REPEAT, lambda _, data: mjx.step(simulated, data), data)
        after = jax.numpy.concatenate([data.qpos, data.qvel])
        low = 1.0 - 0.5 * jax.numpy.cos(after[0]) - 0.5 * jax.numpy.cos(after[0] + after[1])
        cost = low + 0.005 * (data.qvel**2).sum() + 0.001 * (action**2).sum()
        return after, cost

    simulate = jax.jit(jax.vmap(one))

    def step(xp: Any, state: Any, action: Any) -> tuple[Any, Any]:
        lead = state.shape[:-1]
        states, costs = simulate(state.reshape(-1, 4), action.reshape(-1, 2))
        return states.reshape(*lead, 4), costs.reshape(lead)

    low, high = (math.pi - 0.3, -0.3, 0.0, 0.0), (math.pi + 0.3, 0.3, 0.0, 0.0)
    return Task(step, low, high, horizon=25, length=100, actions=2)


TASKS: dict[str, Callable[[], Task]] = {
    **{name: functools.partial(FORMULAS.get, name) for name in FORMULAS},
    "arm": arm,
}
Times = list[tuple[float, float]]  # seconds a plan: by the clock, and of processor time
COLUMNS = (
    "task method samples rounds temperature deviation cost worst least_ms processor_ms".split()
)


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

    def of(basis: Callable[[int], bases.Basis]) -> Callable[[int], Any]:
        return lambda horizon: bases.over(mppi.plan, basis(horizon))

    def knots(horizon: int) -> bases.Basis:
        return bases.control_points(horizon // 4, horizon=horizon, kind="cubic")

    def smooth(horizon: int) -> bases.Basis:
        return bases.smoothing(1.0, horizon=horizon)

    found = {
        "mppi": Method(lambda _: mppi.plan, three),
        "mppi one round": Method(lambda _: mppi.plan, once),
        "mppi cubic knots": Method(of(knots), three),
        "mppi smoothed": Method(of(smooth), three),
        "cem": Method(lambda _: cem.cem, three),
        "icem": Method(lambda _: cem.icem, cem.ICEMConfig(**rounds)),
        "predictive": Method(lambda _: predictive.plan, three),
    }
    try:
        found["evosax:CMA_ES"] = Method(lambda _: evosax.planner("CMA_ES"), three)
        evosax.planner("CMA_ES")
    except ValueError:
        del found["evosax:CMA_ES"]
    return found


def score_from(task: Task, states: Any) -> mppi.ScoreFn:
    """Minus the cost of every candidate from states `[B, S]`."""

    def score(key: Any, actions: Any) -> Any:
        start = jnp.broadcast_to(states[:, None], (*actions.shape[:2], states.shape[1]))
        step = lambda state, action: task.step(jnp, state, action)  # noqa: E731
        return -jax.lax.scan(step, start, jnp.moveaxis(actions, 2, 0))[1].sum(0)

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
            states, cost = task.step(jnp, states, found.action)
            return (states, mppi.warm_start(found.mean, jnp.zeros(len(mean), bool))), cost

        mean = jnp.zeros((len(starts), task.horizon, task.actions))
        return jax.lax.scan(step, (starts, mean), jax.random.split(key, task.length))[1].sum(0)

    return costs


def draw_starts(task: Task, seed: int, num: int) -> np.ndarray:
    """Start states `[num, S]`."""
    drawn = np.random.default_rng(seed).uniform(task.low, task.high, (num, len(task.low)))
    return drawn.astype(np.float32)


def timed(task: Task, method: Method, found: tuning.Tuned, start: Any, num: int) -> Times:
    """Of each of `num` plans for one state, compiled."""
    config, plan = tuned(method, found.temperature, found.deviation), method.make(task.horizon)

    @jax.jit
    def one(key: Any, state: Any, mean: Any) -> Any:
        std = jnp.full_like(mean, found.deviation)
        return plan(key, score_from(task, state), mean, std, config=config).action

    times, mean = [], jnp.zeros((1, task.horizon, task.actions))
    for key in jax.random.split(jax.random.key(0), num + 1):
        before = time.perf_counter(), time.process_time()
        one(key, start[None], mean).block_until_ready()
        times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
    return times[1:]  # the first compiles


def measure(name: str, method: Method, task: Task, settings: Any) -> dict[str, Any]:
    """A row."""
    costs, starts = make_costs(task, method), draw_starts(task, 0, settings.starts)
    others = draw_starts(task, 1, settings.tuning_starts)
    compiled = jax.jit(costs)

    def value(key: Any, temperature: Any, deviation: Any) -> Any:
        return -jnp.mean(costs(key, temperature, deviation, others))

    found = tuning.tune(jax.random.key(1), value, num=settings.pairs)
    reached = np.asarray(compiled(jax.random.key(2), found.temperature, found.deviation, starts))
    times = timed(task, method, found, starts[0], settings.timed)
    config = method.config
    return row(
        method=name,
        samples=config.rounds(1) * config.num_samples,
        rounds=config.rounds(1),
        temperature="" if name in WITHOUT_TEMPERATURE else found.temperature,
        deviation=found.deviation,
        costs=reached,
        times=times,
    )


WITHOUT_TEMPERATURE = ("cem", "icem", "predictive", "evosax:CMA_ES")


def row(costs: Any, times: Times, **given: Any) -> dict[str, Any]:
    """A row without its task: milliseconds at the least by the clock, and of processor time."""
    given |= dict(cost=float(np.mean(costs)), worst=float(np.max(costs)))
    clock, processor = 1e3 * np.array(times).T
    return given | dict(least_ms=float(clock.min()), processor_ms=float(np.median(processor)))


def measure_random(task: Task, settings: Any) -> dict[str, Any]:
    """The row of uniformly random actions."""
    states, total = draw_starts(task, 0, settings.starts), 0.0
    rng = np.random.default_rng(2)
    for _ in range(task.length):
        states, cost = task.step(np, states, rng.uniform(-1.0, 1.0, (len(states), task.actions)))
        total = total + cost
    words = dict(method="random actions", samples="", rounds="", temperature="", deviation="")
    return row(costs=total, times=[(0.0, 0.0)], **words) | dict(least_ms="", processor_ms="")


def measure_peer(python: str, name: str, settings: Any) -> dict[str, Any]:
    """The row of pytorch-mppi, run by another interpreter."""
    share = np.random.default_rng(1).uniform(size=(settings.pairs, 2))
    low, high = np.log([[0.01, 0.05], [100.0, 2.0]])  # as mbx.planners.tuning.tune
    asked = dict(
        task=name,
        samples=settings.samples,
        pairs=np.exp(low + share * (high - low)).tolist(),
        tune=draw_starts(FORMULAS[name], 1, settings.tuning_starts).tolist(),
        starts=draw_starts(FORMULAS[name], 0, settings.starts).tolist(),
        timed=settings.timed,
    )
    done = subprocess.run(
        [python, "-c", "import planner_tasks; planner_tasks.main()"],
        cwd=pathlib.Path(__file__).parent,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        input=json.dumps(asked),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    return row(method="pytorch-mppi", samples=settings.samples, rounds=1, **found)


def keep(path: str, new: dict[str, Any]) -> None:
    """Put a row into a file of them, in the place of that of the same task and method."""
    rows = results.read_rows(path) if os.path.exists(path) else []
    rows = [x for x in rows if (x["task"], x["method"]) != (new["task"], new["method"])]
    rows.append({name: new[name] for name in COLUMNS})
    rows.sort(key=lambda x: list(TASKS).index(x["task"]))
    results.write_rows(path, rows)


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_list("tasks", list(FORMULAS), "Of pendulum, cartpole, arm (simulated, slower).")
    flags.DEFINE_list("only", [], "Methods; empty: all that are installed.")
    flags.DEFINE_string("peer", None, "Python interpreter that has pytorch-mppi.")
    flags.DEFINE_integer("samples", 384, "Sequences simulated for a plan.", lower_bound=48)
    flags.DEFINE_integer("pairs", 8, "Pairs of temperature and deviation tried.", lower_bound=1)
    flags.DEFINE_integer("tuning_starts", 2, "Episodes that they are tried on.", lower_bound=1)
    flags.DEFINE_integer("starts", 8, "Other episodes that are measured.", lower_bound=1)
    flags.DEFINE_integer("timed", 100, "Plans that are timed.", lower_bound=1)
    flags.DEFINE_string("out", "planners.csv", "CSV file of the rows.")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    allocator.dispatch_inline()
    given = flags.FLAGS
    known = methods(given.samples)
    if unknown := [*(set(given.only) - {*known, "pytorch-mppi"}), *(set(given.tasks) - {*TASKS})]:
        choices = ", ".join([*known, "pytorch-mppi", *TASKS])
        sys.exit(f"error: {unknown[0]!r} is unknown or not installed; there are {choices}")
    for name in given.tasks:
        task = TASKS[name]()

        def put(row: dict[str, Any], name: str = name) -> None:
            print(
                ", ".join(
                    f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()
                )
            )
            keep(given.out, row | {"task": name})

        for method, own in known.items():
            if not given.only or method in given.only:
                put(measure(method, own, task, given))
        if given.peer and name in FORMULAS and (not given.only or "pytorch-mppi" in given.only):
            put(measure_peer(given.peer, name, given))
        if not given.only:
            put(measure_random(task, given))


if __name__ == "__main__":
    define_flags()
    app.run(main)
