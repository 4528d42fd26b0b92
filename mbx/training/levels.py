"""What a return means: the level of random actions and, where it is known, a solved task's."""

from __future__ import annotations

import glob
import os
import re
from typing import NamedTuple

import gymnasium
import numpy as np

from mbx.training.logging import read_episodes
from mbx.training.rundir import load_config

# Where Gymnasium registers no threshold; docs/quickstart.md says what it looks like.
_SOLVED = {"Pendulum-v1": -150.0}
_NUMBER = re.compile(r"-?\d+(\.\d*)?(e[+-]\d+)?")  # finite; a damaged row's is left out


class Levels(NamedTuple):
    """Returns of an episode to compare a run with; None where they are not known.

    Attributes:
        random: mean over the training episodes that ended in the seed phase, whose actions are
            random.
        solved: the threshold that Gymnasium registers for the task (`gym:`, `gymnax:`).
    """

    random: float | None = None
    solved: float | None = None

    def __str__(self) -> str:
        words = {"random actions": self.random, "solved": self.solved}
        return "; ".join(f"{name}: {x:,.5g}" for name, x in words.items() if x is not None)


def of_run(workdir: str) -> Levels:
    """The levels of a run, or of several seeds together. Raises as `rundir.load_config`."""
    seeds = sorted(glob.glob(os.path.join(glob.escape(workdir), "seed-*")))
    alone = not seeds or os.path.exists(os.path.join(workdir, "config.json"))
    workdirs, found = [workdir] if alone else seeds, []
    config = load_config(workdirs[0])
    last = config["train"].get("seed_steps", 0)
    for one in workdirs:
        rows = read_episodes(os.path.join(one, "training_episodes.csv"), last)
        found += [float(row[3]) for row in rows if _NUMBER.fullmatch(row[3])]
    return Levels(float(np.mean(found)) if found else None, _solved(config["env"]["name"]))


def _solved(task: str) -> float | None:
    suite, _, name = task.partition(":")
    if suite not in ("gym", "gymnax"):
        return None
    registered = gymnasium.registry.get(name)
    threshold = None if registered is None else registered.reward_threshold
    return _SOLVED.get(name) if threshold is None else threshold
