"""What random actions find: mean returns by how long each action is held and how it is drawn.

    python -m experiments.random_actions --tasks=dmc:finger-spin,dmc:reacher-hard --out=held.csv

A run begins with such actions (`train.seed_steps`, `train.seed_hold`), and where they meet no
reward there is nothing to learn from. Minutes a task on a laptop.
"""

from __future__ import annotations

from absl import app, flags, logging

from mbx.commands.results import write_rows

from .held_actions import DRAWS, measure

TASKS = flags.DEFINE_list("tasks", ["dmc:finger-spin"], "SUITE:TASK,SUITE:TASK.")
HOLDS = flags.DEFINE_list("holds", ["1", "4", "8"], "Agent steps that an action is held.")
EPISODES = flags.DEFINE_integer("episodes", 12, "Episodes of each.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 1, "Of resets and actions.")
OUT = flags.DEFINE_string("out", "random_actions.csv", "File to write.")


def main(_: list[str]) -> None:
    """Measure every combination, print and write it."""
    logging.set_verbosity(logging.ERROR)
    rows = []
    for task in TASKS.value:
        for draw in DRAWS:
            for hold in map(int, HOLDS.value):
                rows.append(measure(task, draw, hold, EPISODES.value, SEED.value))
                print(*rows[-1].values(), flush=True)
                write_rows(OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
