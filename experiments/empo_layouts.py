"""What humans reach beside a robot trained on many maps: there, and on maps it has never seen.

    python -m experiments.train --config=configs/empo_layouts.py --workdir=runs/layouts
    python -m experiments.empo_layouts --workdir=runs/layouts --out=docs/results/empo_layouts

Robots: the learned one by its network of Q_r, and a step ahead ("ahead": `eval.lookahead`,
whatever the run's settings say), a random and a frozen one; on maps held out of training also the
exact one of the run's parameters (`mbx.power.solve`; on maps of at most --exact_states states), and
the helper, which knows what every human wants and makes its ways as short as they can be
(`mbx.power.solve_assistance`): each such map is listed and solved for them, which takes a minute or
more and is kept in OUT_maps.csv (`experiments/map_by_map.py`). A map's own number is its mean over
episodes; standard errors are over maps, so that they say what other maps would give.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from mbx.commands.results import write_rows
from mbx.empo.agent import evaluation as empo_evaluation
from mbx.empo.agent import resolve
from mbx.empo.agent.types import Problem
from mbx.empo.multigrid.many import Choice, choose
from mbx.training import environments, run

from .map_by_map import Sizes, known_by_map, reached_by_map, row

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.", required=True)
WHICH = flags.DEFINE_string("which", "latest", "latest, best, or the step of a checkpoint.")
EPISODES = flags.DEFINE_integer("episodes", 128, "Episodes a robot on a held-out map.")
TRAINED = flags.DEFINE_integer("trained", 2_048, "Episodes a robot over all maps trained on.")
LENGTH = flags.DEFINE_integer("length", 50, "Steps of an episode.")
STATES = flags.DEFINE_integer("states", 400_000, "Most states of a map that is solved.")
EXACT_STATES = flags.DEFINE_integer(
    "exact_states",
    40_000,
    "Most states of a map, rounded up to a power of 2, with an exact robot.",
)
OUT = flags.DEFINE_string("out", None, "How the names of both CSV files begin.")
USUAL = Sizes()


def depends(humans: Any) -> dict[str, str]:
    """What differs from what rows of solved maps leave unsaid: humans, and the length."""
    more = {} if humans.model == "world" else {"humans": f"{humans.model}:{humans.beta:g}"}
    return more | ({} if LENGTH.value == USUAL.length else {"length": str(LENGTH.value)})


def compare(workdir: str) -> list[dict[str, Any]]:
    """The rows of a run. Raises ValueError for one that was not trained on many maps."""
    _, train, settings = run.load(workdir, which=WHICH.value)
    if settings.agent != "empo" or not settings.env.name.startswith("empo:maps/"):
        raise ValueError(f"{workdir} is no run on many maps: env.name={settings.env.name!r}")
    if not settings.env.held_out:
        raise ValueError(f"env.held_out=0 in {workdir}: there is no map that it was not trained on")
    spec = environments.make_environment(settings, 1, seed=0).spec
    problem, found = resolve(settings, spec), spec.world
    env = settings.env
    choice = Choice(env.maps, env.held_out, env.map_seed)
    family, *_ = choose(env.name.removeprefix("empo:maps/"), choice)
    words = [np.asarray(x).reshape(len(family.layouts), -1) for x in family.places]
    words, num = np.concatenate(words, axis=1), env.held_out
    robots = {
        "learned": empo_evaluation.learned_policy(_looking(problem, False), train),
        "ahead": empo_evaluation.learned_policy(_looking(problem, True), train),
        "random": empo_evaluation.random_policy(found.world),
        "frozen": empo_evaluation.frozen_policy,
    }
    name = f"{env.name.removeprefix('empo:')} seed {env.map_seed}"
    sizes = Sizes(EPISODES.value, LENGTH.value, STATES.value, EXACT_STATES.value)
    path = f"{OUT.value}_maps.csv" if OUT.value else None
    given = found.held_out, family, name, num, problem.params, sizes, path
    solved = known_by_map(*given, **depends(settings.humans))
    rows = []
    for maps, world, own, episodes in (
        ("held out", found.held_out, words[:num], EPISODES.value * num),
        ("trained on", found.world, words[num:], TRAINED.value),
    ):
        each = {
            robot: reached_by_map(
                world, policy, own, jax.random.key(1), episodes=episodes, length=LENGTH.value
            )
            for robot, policy in robots.items()
        }
        if maps == "held out":
            each |= solved
        for robot, values in each.items():
            rows.append(row(maps, robot, values, each["learned"]))
            print(rows[-1], flush=True)
        if maps == "held out":
            for robot in solved:
                there = ~np.isnan(each[robot])
                mean = {name: float(values[there].mean()) for name, values in each.items()}
                for robots_of in ("learned", "ahead"):
                    share = (mean[robots_of] - mean["random"]) / (mean[robot] - mean["random"])
                    print(
                        f"{robots_of}, from random to {robot}: {share:.3f} of the way", flush=True
                    )
    return rows


def _looking(problem: Problem, ahead: bool) -> Problem:
    """The problem of a robot that acts by Q_r's network, or a step ahead."""
    settings = problem.settings
    look = dataclasses.replace(settings.eval, lookahead=ahead)
    return dataclasses.replace(problem, settings=dataclasses.replace(settings, eval=look))


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    try:
        rows = compare(WORKDIR.value)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    if OUT.value:
        write_rows(f"{OUT.value}.csv", rows)


if __name__ == "__main__":
    app.run(main)
