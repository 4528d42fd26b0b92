r"""Sweep one setting over several seeds, draw one figure, write one table.

    python -m benchmarks.ablate --sweep=rounds --seeds=3 --out=runs/rounds
    python -m benchmarks.ablate --sweep=reanalyze --seeds=3 --workers=2 --steps=6000
    python -m benchmarks.ablate --sweep=replay_loss --config=configs/dreamer.py \
        --set=env.name=gymnax:Catch-bsuite --steps=10000

Every run is one of `mbx train` in OUT/SWEEP-VARIANT-sSEED; complete runs are not repeated and the
others continue. OUT/SWEEP holds the figure, the table of scores, the curves and what made them.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

from absl import app, flags

from mbx.commands import jobs, sweep
from mbx.commands.jobs import Job

from . import suites

# Sweep -> variant -> settings on top of the configuration, one factor at a time.
SWEEPS: dict[str, dict[str, list[str]]] = suites.DATA["sweeps"]


def make_jobs(given: Any) -> list[Job]:
    """All runs of the sweep that the flags describe, the first seed of every variant first."""
    shared = (f"eval.interval={given.eval_interval}", f"eval.episodes={given.episodes}")
    found = []
    for seed in range(given.seeds):
        for variant, overrides in SWEEPS[given.sweep].items():
            name = re.sub("[= ,']", "", f"{given.sweep}-{variant}-s{seed}")
            job = jobs.make_job(
                variant,
                seed,
                os.path.join(given.out, name),
                config=given.config,
                steps=given.steps,
                overrides=(*shared, *overrides, *given.set),
            )
            found.append(job)
    return found


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_string("config", "configs/tdmpc.py", "Configuration.")
    flags.DEFINE_enum("sweep", "rounds", list(SWEEPS), "Which setting to vary.")
    flags.DEFINE_integer("seeds", 3, "Seeds per variant.", lower_bound=1)
    flags.DEFINE_integer("steps", 6000, "Environment steps per run.", lower_bound=1)
    flags.DEFINE_integer("eval_interval", 1500, "Environment steps between evaluations.")
    flags.DEFINE_integer("episodes", 10, "Episodes per evaluation.", lower_bound=1)
    flags.DEFINE_integer("workers", 1, "Runs at a time.", lower_bound=1)
    flags.DEFINE_string("out", "runs/ablation", "Directory of the runs and of OUT/SWEEP.")
    flags.DEFINE_multi_string("set", [], "Further overrides for all runs: env.name=...")


def main(_: list[str]) -> None:
    given = flags.FLAGS
    found, folder = make_jobs(given), os.path.join(given.out, given.sweep)
    problems = jobs.run_all(found, workers=given.workers)
    os.makedirs(folder, exist_ok=True)
    sweep.report(found, folder, "eval/return_mean")
    if problems:
        sys.exit("failed runs:\n" + "\n".join(problems))


if __name__ == "__main__":
    define_flags()
    app.run(main)
