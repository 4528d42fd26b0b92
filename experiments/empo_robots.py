"""What humans reach beside a trained robot, a random and a frozen one.

    python -m experiments.empo_robots --workdir=runs/empo-grid_rock_1h1r-s0-…

Every human keeps one goal through an episode and acts by its prior. Where the world is small enough
to be solved, the exact robot is a fourth row and the learner's errors are printed too.
"""

from __future__ import annotations

import sys

import jax
import numpy as np
from absl import app, flags

from mbx.agents.empo import evaluation as empo_evaluation
from mbx.agents.empo import resolve
from mbx.envs.empo import TIME_LIMIT
from mbx.training import environments, run

WORKDIR = flags.DEFINE_string("workdir", None, "Run directory.", required=True)
WHICH = flags.DEFINE_string("which", "latest", "latest, best, or the step of a checkpoint.")
EPISODES = flags.DEFINE_integer("episodes", 10_000, "Episodes a robot.", lower_bound=2)
LENGTH = flags.DEFINE_integer("length", TIME_LIMIT, "Steps of an episode.", lower_bound=1)


def main(_: list[str]) -> None:
    _, train, settings = run.load(WORKDIR.value, which=WHICH.value)
    if settings.agent != "empo":
        sys.exit(f"{WORKDIR.value} is a run of agent {settings.agent!r}, not empo")
    spec = environments.make_environment(settings, 1, seed=0).spec
    problem, found = resolve(settings, spec), spec.world
    world, solution = found.world, found.solution
    robots = {"learned": empo_evaluation.learned_policy(problem, train)}
    if solution is not None:
        robots["exact"] = empo_evaluation.exact_policy(solution)
    robots["random"] = empo_evaluation.random_policy(world)
    robots["frozen"] = empo_evaluation.frozen_policy
    print(f"{'robot':10}{'reached':>10}{'+-':>8}{'all reached':>13}{'discounted':>12}")
    for name, policy in robots.items():
        r = empo_evaluation.goal_reaching(
            world,
            policy,
            jax.random.key(0),
            episodes=EPISODES.value,
            length=LENGTH.value,
            gamma=float(problem.params.gamma_h),
        )
        print(
            f"{name:10}{r['reached']:10.3f}{r['reached_error']:8.3f}{r['all_reached']:13.3f}"
            f"{r['discounted']:12.3f}"
        )
    if solution is not None:
        states = np.flatnonzero(~np.asarray(found.table.terminal))
        errors = empo_evaluation.exact_errors(problem, solution, train, states)
        print("errors at all states, visited or not:", {k: round(v, 4) for k, v in errors.items()})


if __name__ == "__main__":
    app.run(main)
