r"""Train with every combination of values of some settings and several seeds, and compare them.

    python -m experiments.sweep --set=optimizer.learning_rate=1e-4,3e-4,1e-3 --seeds=3 --workers=2
    python -m experiments.sweep --config=configs/dreamer.py --set=env.name=gymnax:CartPole-v1 \
        --set=train.steps=2e4 --set=loss.free_nats=0.3,1,3 --out=runs/nats
    python -m experiments.sweep --set=loss.rho=0.5,0.7 --seeds=5 --slurm > sweep.sh

A setting with one value holds for all runs; of several, every combination is run. Values are split
at commas outside brackets and quotes. All settings are checked before the first run starts. Every
run is a `python -m experiments.train` of its own in OUT/SETTINGS-sSEED; complete runs are not
repeated and the others go on where they were. In the end, or with --norun of what there is so far,
OUT holds curves.png, scores.md, scores.csv and scores.tex (interquartile means with bootstrap
intervals, how likely a setting is better than the first), and curves.csv with runs.json: the data
and what made them. --slurm prints the same sweep as a script for sbatch, an array of jobs; --only=N
runs one of them.
"""

from __future__ import annotations

import os
import sys

from absl import app, flags

from mbx.config import extensions

from . import grid
from . import jobs as processes

CONFIG = flags.DEFINE_string("config", "configs/tdmpc.py", "Configuration file.")
SET = flags.DEFINE_multi_string("set", [], "SETTING=VALUE or SETTING=VALUE,VALUE,...")
SEEDS = flags.DEFINE_integer("seeds", 3, "Seeds a combination.", lower_bound=1)
WORKERS = flags.DEFINE_integer("workers", 1, "Runs at a time.", lower_bound=1)
DEVICES = flags.DEFINE_integer("devices", 0, "GPUs that the workers share (0: cores).")
OUT = flags.DEFINE_string("out", "runs/sweep", "Folder of the runs, the figure and the tables.")
METRIC = flags.DEFINE_string("metric", "eval/return_mean", "KIND/NAME that is compared.")
RUN = flags.DEFINE_bool("run", True, "Run what is missing; --norun: only draw and compare.")
SLURM = flags.DEFINE_bool("slurm", False, "Print a script for sbatch: a job array, one run a job.")
ONLY = flags.DEFINE_integer("only", None, "Number of the only run to make (for --slurm).")


def main(_: list[str]) -> None:
    folder = os.path.abspath(os.path.expanduser(OUT.value))
    try:
        grid.check_arguments(sys.argv[1:])
        jobs = grid.make_jobs(
            CONFIG.value, SET.value, seeds=SEEDS.value, folder=folder, metric=METRIC.value
        )
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    if SLURM.value:
        kept = [x for x in sys.argv[1:] if x.lstrip("-") != "slurm"] + list(extensions.flags())
        print(grid.slurm(kept, len(jobs), WORKERS.value), end="")
        return
    os.makedirs(folder, exist_ok=True)
    if ONLY.value is not None:
        if not 0 <= ONLY.value < len(jobs):
            sys.exit(f"error: --only={ONLY.value}: there are runs 0 to {len(jobs) - 1}")
        problems = processes.run_all(jobs[ONLY.value : ONLY.value + 1], workers=1)
        sys.exit("\n".join(problems) or 0)
    problems = []
    if RUN.value:
        problems = processes.run_all(jobs, workers=WORKERS.value, devices=DEVICES.value)
    grid.report(jobs, folder, METRIC.value)
    if problems:
        sys.exit("failed runs:\n" + "\n".join(problems))


if __name__ == "__main__":
    app.run(main)
