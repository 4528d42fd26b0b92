"""Every combination of values of some settings: runs, a job array, and what came of them."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Sequence

from mbx.analysis import compare, curves, groups, tables
from mbx.config import help as usage

from . import jobs as processes
from . import results
from .jobs import Job

_UNSAFE = re.compile(r"[^\w.=+-]+")  # in the name of a directory
_OWN = {"seed": "--seeds", "num_seeds": "--seeds", "resume": "the same command, which continues"}


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise ValueError for a command line of a sweep that asks for nothing."""
    if not arguments:
        raise ValueError(
            "nothing is swept: give --set=SETTING=VALUE,VALUE (optimizer.learning_rate=1e-4,3e-4), "
            "or --seeds=N for N runs of the default; --help tells more"
        )


def split(values: str) -> list[str]:
    """Text at commas outside brackets and quotes: 1,(2, 3),'a,b' is 1 and (2, 3) and a,b."""
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

    Raises ValueError for what is not written so, or is given twice.
    """
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
    pairs = ([f"{name}={value}" for value in values] for name, values in axes.items())
    return list(itertools.product(*pairs))


def make_jobs(
    config: str, given: Sequence[str], *, seeds: int, folder: str, metric: str
) -> list[Job]:
    """All runs of a sweep, the first seed of every combination before the second.

    Raises ValueError for settings that do not exist or that no run can have.
    """
    every = combinations(given)
    shared = set.intersection(*(set(one) for one in every))
    found = []
    for seed, chosen in itertools.product(range(seeds), every):
        settings = usage.read_settings(config, chosen)
        label = ", ".join(x for x in chosen if x not in shared) or "all"
        found.append(
            processes.make_job(
                label,
                seed,
                os.path.join(folder, f"{_UNSAFE.sub('-', label)}-s{seed}"),
                config=config,
                steps=settings.train.steps,
                overrides=[x for x in chosen if not x.startswith("train.steps=")],
                metric=metric,
            )
        )
    if len({job.workdir for job in found}) < len(found):
        raise ValueError("two of these values make the same file name: give them in two sweeps")
    return found


def slurm(arguments: Sequence[str], number: int, workers: int) -> str:
    """A script for sbatch that makes run $SLURM_ARRAY_TASK_ID of the sweep in each job of an array.

    Args:
        arguments: of the sweep, without --slurm.
        number: of runs.
        workers: jobs at a time.
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
    """Write figure, tables and data of what the runs have measured so far."""
    done = [job for job in jobs if job.curve().steps.size]
    if not done:
        print("nothing has been measured yet")
        return
    found = groups.labelled([job.workdir for job in done], [job.label for job in done])
    table = compare.scores(found, metric=metric, step=min(job.steps for job in jobs))
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
    series = [
        results.Series(names[job.workdir].task, job.label, job.seed, job.curve()) for job in done
    ]
    results.write_curves(os.path.join(folder, "curves.csv"), series)
    results.write_manifest(os.path.join(folder, "runs.json"), jobs)
    missing = sum(not job.complete() for job in jobs)
    print(tables.render(table, "md"))
    print(f"{len(jobs)} runs, {missing} not complete; figure and tables: {folder}")
