r"""Train with every combination of values of some settings and several seeds, and compare them.

    mbx sweep --set=optimizer.learning_rate=1e-4,3e-4,1e-3 --seeds=3 --workers=2
    mbx sweep --config=configs/dreamer.py --set=env.name=gymnax:CartPole-v1 \
        --set=train.steps=2e4 --set=loss.free_nats=0.3,1,3 --out=runs/nats
    mbx sweep --set=loss.rho=0.5,0.7 --seeds=5 --slurm > sweep.sh
    mbx sweep --search=optuna --trials=30 --set='optimizer.learning_rate=1e-4..1e-2 log' \
        --set=loss.batch_size=64..256 --set=model.size=tiny,1

A setting with one value holds for all runs; of several, every combination is run. Values are split
at commas outside brackets and quotes. All settings are checked before the first run starts. Runs
are in OUT/SETTINGS-sSEED; complete ones are not repeated, the others resume. At the end, or with
--norun for results so far, OUT holds curves.png, scores.md, scores.csv and scores.tex
(interquartile means with bootstrap intervals, probabilities of improvement over the first setting),
and the data: curves.csv with runs.json. --slurm prints the sweep as a script for sbatch, an array
of jobs; --only=N runs one of them.

--search=optuna tries --trials combinations, chosen by the highest last --metric of those before, a
mean over seeds. A range is LOW..HIGH, of whole numbers if both are, or 'LOW..HIGH log'. Its
database is OUT/optuna.db, or --storage=URL; the tables show the eight best trials, best first.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from mbx.analysis import curves, runs, tables
from mbx.commands import search
from mbx.commands.arguments import at_least, make_parser
from mbx.commands.jobs import Job, make_job, run_all, write_curves, write_manifest
from mbx.config import extensions, load

_UNSAFE = re.compile(r"[^\w.=+-]+")  # in the name of a directory
_OWN = {"seed": "--seeds", "num_seeds": "--seeds", "resume": "the same command, which continues"}


def main(arguments: list[str]) -> None:
    """Run `mbx sweep`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add = parser.add_argument
    add("--config", default="configs/tdmpc.py", help="Configuration, a name or a file.")
    add(
        "--set",
        action="append",
        default=[],
        help="Values of a setting: SETTING=VALUE or SETTING=VALUE,VALUE.",
    )
    add("--seeds", type=at_least(1), default=3, help="Number of seeds a combination.")
    add("--workers", type=at_least(1), default=1, help="Number of runs at a time.")
    add("--devices", type=at_least(0), default=0, help="GPUs that workers share (0: cores).")
    add("--out", default="runs/sweep", help="Folder of the runs, the figure and the tables.")
    add(
        "--metric",
        default="eval/return_mean",
        help="Metric to compare, KIND/NAME of metrics.jsonl.",
    )
    add("--no-run", "--norun", action="store_true", help="Only draw and compare what is there.")
    add("--slurm", action="store_true", help="Print a script for sbatch: a job array.")
    add("--only", type=at_least(0), help="Number of the only run to make (for --slurm).")
    add("--search", default="grid", choices=("grid", "optuna"), help="How values are chosen.")
    add("--trials", type=at_least(1), default=20, help="Number of trials of --search=optuna.")
    add("--storage", help="URL of the database of --search=optuna.")
    options = parser.parse_args(arguments)
    if not arguments:
        raise ValueError(
            "nothing is swept: give --set=SETTING=VALUE,VALUE (optimizer.learning_rate=1e-4,3e-4), "
            "or --seeds=N for N runs of the default; --help tells more"
        )
    folder = os.path.abspath(os.path.expanduser(options.out))
    if options.search == "optuna":
        return _end(*_searched(options, folder), folder, options.metric)
    jobs = make_jobs(
        options.config, options.set, seeds=options.seeds, folder=folder, metric=options.metric
    )
    if options.slurm:
        kept = [x for x in arguments if x.lstrip("-") != "slurm"] + list(extensions.flags())
        print(slurm(kept, len(jobs), options.workers), end="")
        return
    os.makedirs(folder, exist_ok=True)
    if options.only is not None:
        if options.only >= len(jobs):
            raise ValueError(f"--only={options.only}: there are runs 0 to {len(jobs) - 1}")
        problems = run_all(jobs[options.only : options.only + 1], workers=1)
        sys.exit("\n".join(problems) or 0)
    problems = []
    if not options.no_run:
        problems = run_all(jobs, workers=options.workers, devices=options.devices)
    _end(jobs, problems, folder, options.metric)


def _end(jobs: Sequence[Job], problems: Sequence[str], folder: str, metric: str) -> None:
    report(jobs, folder, metric)
    if problems:
        sys.exit("failed runs:\n" + "\n".join(problems))


def _searched(options: argparse.Namespace, folder: str) -> tuple[list[Job], list[str]]:
    """Runs of the best trials of --search=optuna, and error messages."""
    if options.slurm or options.only is not None:
        raise ValueError("--search=optuna makes its own runs: leave out --slurm and --only")
    axes = _axes(options.set)

    def make(values: Mapping[str, str]) -> list[Job]:
        chosen = [f"{name}={value}" for name, value in values.items()]
        free = [x for x, name in zip(chosen, values, strict=True) if x not in options.set]
        names = dict(label=", ".join(free) or "all", folder=folder, metric=options.metric)
        return [_job(options.config, chosen, seed, **names) for seed in range(options.seeds)]

    os.makedirs(folder, exist_ok=True)
    jobs, problems = search.search(
        axes,
        make,
        trials=0 if options.no_run else options.trials,
        workers=options.workers,
        devices=options.devices,
        storage=options.storage or f"sqlite:///{folder}/optuna.db",
    )
    if jobs:
        print(f"best: {jobs[0].label}")
    return jobs[: 8 * options.seeds], problems


def split(values: str) -> list[str]:
    """Split text at commas outside brackets and quotes: 1,(2, 3),'a,b' is 1 and (2, 3) and a,b."""
    found, depth, quote = [""], 0, ""
    for character in values:
        if quote or character in "'\"":
            quote = "" if character == quote else quote or character
        depth += (character in "([{") - (character in ")]}") if not quote else 0
        if character == "," and not depth and not quote:
            found.append("")
        else:
            found[-1] += character
    trimmed = [value.strip() for value in found]
    return [v[1:-1] if len(v) > 1 and v[0] == v[-1] and v[0] in "'\"" else v for v in trimmed]


def combinations(given: Sequence[str]) -> list[tuple[str, ...]]:
    """Every combination of "SETTING=VALUE,VALUE", the last setting changing fastest.
    Raises ValueError for malformed or repeated settings, and for ranges.
    """
    axes = _axes(given)
    for name, values in axes.items():
        if any(search.bounds(value) for value in values):
            raise ValueError(f"--set={name}: a range is for --search=optuna, give values")
    pairs = ([f"{name}={value}" for value in values] for name, values in axes.items())
    return list(itertools.product(*pairs))


def _axes(given: Sequence[str]) -> dict[str, list[str]]:
    """Values of each setting of "SETTING=VALUE,VALUE"."""
    axes: dict[str, list[str]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        name = name.removeprefix("config.")
        if not equals or not name or not all(split(values)):
            raise ValueError(f"--set={text}: write SETTING=VALUE or SETTING=VALUE,VALUE")
        if name in axes:
            raise ValueError(f"--set={text}: {name} is given twice, give all its values at once")
        if name in _OWN:
            raise ValueError(f"--set={text}: not here, use {_OWN[name]}")
        axes[name] = list(dict.fromkeys(split(values)))
    return axes


def make_jobs(
    config: str, given: Sequence[str], *, seeds: int, folder: str, metric: str
) -> list[Job]:
    """All runs of a sweep, the first seed of every combination before the second.
    Raises ValueError for unknown settings or invalid combinations.
    """
    every = combinations(given)
    shared = set.intersection(*(set(one) for one in every))
    found = []
    for seed, chosen in itertools.product(range(seeds), every):
        label = ", ".join(x for x in chosen if x not in shared) or "all"
        found.append(_job(config, chosen, seed, label=label, folder=folder, metric=metric))
    if len({job.workdir for job in found}) < len(found):
        raise ValueError("two of these values make the same file name: give them in two sweeps")
    return found


def _job(
    config: str, chosen: Sequence[str], seed: int, *, label: str, folder: str, metric: str
) -> Job:
    return make_job(
        label,
        seed,
        os.path.join(folder, f"{_UNSAFE.sub('-', label)}-s{seed}"),
        config=config,
        steps=load(config, chosen).train.steps,
        overrides=[x for x in chosen if not x.startswith("train.steps=")],
        metric=metric,
    )


def slurm(arguments: Sequence[str], number: int, workers: int) -> str:
    """A script for sbatch, an array in which each job makes run $SLURM_ARRAY_TASK_ID of the sweep.
    arguments: of the sweep, without --slurm; number: of runs; workers: jobs at a time.
    """
    command = shlex.join(["mbx", "sweep", *arguments])
    return f"""#!/bin/bash
#SBATCH --job-name=mbx-sweep
#SBATCH --array=0-{number - 1}%{workers}
#SBATCH --cpus-per-task=2
#SBATCH --mem=8G
#SBATCH --time=12:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
# Add your cluster's lines (partition, account, --gres=gpu:1) and its environment here. A job that
# runs out of time saves; submit the script again to go on, complete runs end at once. Afterwards:
#   {command} --norun
trap 'kill -TERM "$run"; wait "$run"' TERM
{command} --only="$SLURM_ARRAY_TASK_ID" &
run=$!
wait "$run"
"""


def report(jobs: Sequence[Job], folder: str, metric: str) -> None:
    """Write figure, tables and data of the results so far."""
    done = [job for job in jobs if job.curve().steps.size]
    if not done:
        print("nothing has been measured yet")
        return
    found = runs.group([job.workdir for job in done], [job.label for job in done])
    table = tables.scores(found, metric=metric, step=min(job.steps for job in jobs))
    for ending in ("md", "csv", "tex"):
        tables.write(os.path.join(folder, f"scores.{ending}"), table)
    several_tasks = len({one.task for one in found}) > 1
    names = {path: one for one in found for path in one.runs}
    curves.plot_runs(
        [job.workdir for job in done],
        os.path.join(folder, "curves.png"),
        metric=metric,
        labels=[job.label for job in done],
        title="" if several_tasks else found[0].task,
    )
    each = [(names[job.workdir].task, job.label, job) for job in done]
    write_curves(os.path.join(folder, "curves.csv"), each)
    write_manifest(os.path.join(folder, "runs.json"), jobs)
    missing = sum(not job.complete() for job in jobs)
    print(tables.render(table, "md"))
    print(f"{len(jobs)} runs, {missing} not complete; figure and tables: {folder}")
