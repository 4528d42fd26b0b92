"""What humans reach beside robots: trained, exact, helping, random and frozen ones.

    python -m experiments.empo_robots --workdir=runs/empo-grid_rock_1h1r-s0-…
    python -m experiments.empo_robots --worlds=grid_rock_1h1r,multigrid/rock_loop \
        --out=docs/results/empo_helpers.csv

Every human keeps one goal through an episode and acts by its prior. Where the world is small enough
to be solved there are also the exact robot, a helper that knows what humans want and one that
infers it (`mbx.empo.agent.robots`), and of a run the learner's errors.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from mbx.commands.results import write_rows
from mbx.empo import TIME_LIMIT, named_world
from mbx.empo.agent import evaluation as empo_evaluation
from mbx.empo.agent import resolve, robots
from mbx.empo.power.named import NamedWorld
from mbx.power import PowerParams
from mbx.training import environments, run

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.")
WORLDS = flags.DEFINE_list("worlds", [], "Worlds instead of a run, with nobody learned.")
WHICH = flags.DEFINE_string("which", "latest", "latest, best, or the step of a checkpoint.")
ROBOTS = flags.DEFINE_list("robots", [], "Which robots; all that there can be.")
EPISODES = flags.DEFINE_integer("episodes", 10_000, "Episodes a robot.", lower_bound=2)
LENGTH = flags.DEFINE_integer("length", TIME_LIMIT, "Steps of an episode.", lower_bound=1)
OUT = flags.DEFINE_string("out", None, "CSV file for the rows.")


def available(found: NamedWorld, learned: bool) -> list[str]:
    """The robots that there can be in a world."""
    names = ["learned"] if learned else []
    if found.solution is not None:
        names += ["exact", "helper", "inferring"]
    return [*names, "random", "frozen"]


def compare(
    name: str, found: NamedWorld, gamma: float, problem: Any = None, train: Any = None
) -> list[dict[str, Any]]:
    """A row a robot, printed on the way. Raises ValueError for a robot that cannot be had."""
    rows = []
    print(f"{name}\n{'robot':10}{'reached':>10}{'+-':>8}{'all reached':>13}{'discounted':>12}")
    for robot in ROBOTS.value or available(found, train is not None):
        policy = robots.make_robot(robot, found, gamma, problem, train)
        key, sizes = jax.random.key(0), dict(episodes=EPISODES.value, length=LENGTH.value)
        r = empo_evaluation.goal_reaching(found.world, policy, key, gamma=gamma, **sizes)
        rows.append({"world": name, "robot": robot, **r})
        print(
            f"{robot:10}{r['reached']:10.3f}{r['reached_error']:8.3f}{r['all_reached']:13.3f}"
            f"{r['discounted']:12.3f}",
            flush=True,
        )
    return rows


def of_run(workdir: str) -> list[dict[str, Any]]:
    """The rows of a run. Raises ValueError for another agent's."""
    _, train, settings = run.load(workdir, which=WHICH.value)
    if settings.agent != "empo":
        raise ValueError(f"{workdir} is a run of agent {settings.agent!r}, not empo")
    spec = environments.make_environment(settings, 1, seed=0).spec
    problem, found = resolve(settings, spec), spec.world
    name = settings.env.name.removeprefix("empo:")
    rows = compare(name, found, float(problem.params.gamma_h), problem, train)
    if found.solution is not None:
        states = np.flatnonzero(~np.asarray(found.table.terminal))
        errors = empo_evaluation.exact_errors(problem, found.solution, train, states)
        print("errors at all states, visited or not:", {k: round(v, 4) for k, v in errors.items()})
    return rows


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    if bool(WORKDIR.value) == bool(WORLDS.value):
        sys.exit("error: give --workdir or --worlds")
    try:
        if WORKDIR.value:
            rows = of_run(WORKDIR.value)
        else:
            rows = []
            for name in WORLDS.value:
                found = named_world(name, default=PowerParams())
                params = found.params or PowerParams()
                rows += compare(name, found, float(params.gamma_h))
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if OUT.value:
        write_rows(OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
