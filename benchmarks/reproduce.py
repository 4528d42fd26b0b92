"""Run a suite of tasks, compare it with published values and judge it; or vary a setting.

    python -m benchmarks.reproduce --list
    python -m benchmarks.reproduce --suite=smoke                        # minutes
    python -m benchmarks.reproduce --suite=dmc15 --workers=2 --out=~/mbx-results
    python -m benchmarks.reproduce --suite=dmc15 --norun                # of what there is so far
    python -m benchmarks.reproduce --suite=dmc15 --norun --keep=docs/results
    python -m benchmarks.reproduce --sweep=rounds --seeds=3 --steps=6000 --out=runs/rounds

Every run is a process with a run directory in OUT/SUITE; a command that was stopped goes on where
it was. OUT/SUITE/table.md holds returns and statistics, verdict.json every gate with what was
measured. The exit status is 1 where a run failed or a gate is missed or cannot be measured yet.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import app, flags

from mbx.analysis import tables
from mbx.commands import jobs as processes
from mbx.commands import sweep
from mbx.training.files import atomic_write

from . import suites
from .suites import Run, Runs, Suite


def make_jobs(
    suite: Suite, folder: str, *, seeds: int = 0, tasks: Sequence[str] = (), extra: Sequence[str]
) -> list[processes.Job]:
    """All runs of a suite, the first seed of every task before the second."""
    unknown = set(tasks) - {task.name for task in suite.tasks}
    if unknown:
        names = ", ".join(task.name for task in suite.tasks)
        raise ValueError(f"tasks={sorted(unknown)} are not of this suite: choose from {names}")
    found = []
    for task in suite.tasks:
        for seed in range(seeds or task.seeds or suite.seeds):
            if tasks and task.name not in tasks:
                continue
            name = f"{task.name.replace(':', '-').replace('/', '-')}-s{seed}"
            job = processes.make_job(
                task.name,
                seed,
                os.path.join(folder, name),
                config=task.config or suite.config,
                steps=task.steps,
                overrides=(f"env.name={task.name}", *suite.overrides, *task.overrides, *extra),
                metric=task.metric or suite.metric,
            )
            found.append(job)
    return sorted(found, key=lambda job: job.seed)


def make_sweep(given: Any, folder: str) -> list[processes.Job]:
    """A configuration with each variant of a sweep, the first seed of every variant first."""
    shared = (f"eval.interval={given.eval_interval}", f"eval.episodes={given.episodes}")
    every = suites.DATA["sweeps"][given.sweep].items()
    return [
        processes.make_job(
            variant,
            seed,
            os.path.join(folder, re.sub("[= ,']", "", f"{variant}-s{seed}")),
            config=given.config,
            steps=given.steps,
            overrides=(*shared, *overrides, *given.set),
        )
        for seed in range(given.seeds or 3)
        for variant, overrides in every
    ]


def collect(suite: Suite, jobs: Sequence[processes.Job]) -> dict[str, list[Run]]:
    """Task -> its runs that have been evaluated at least once, in the suite's order."""
    runs: dict[str, list[Run]] = {task.name: [] for task in suite.tasks}
    for job in jobs:
        curve = job.curve()
        if curve.steps.size:
            runs[job.label].append(Run(job.seed, curve, processes.processor_hours(job)))
    return runs


def _cell(values: Sequence[float]) -> str:
    known = [x for x in values if not math.isnan(x)]
    if not known:
        return ""
    each = f" ({', '.join(f'{x:.4g}' for x in known)})" if len(known) > 1 else ""
    return f"{np.mean(known):.4g}{each}"


def table(suite: Suite, runs: Runs, published: suites.Published) -> str:
    """Markdown: a row a task, the mean over seeds and each seed at the suite's steps; statistics of
    the tasks that have a value there; the published means beside them."""
    agents = sorted({agent for task, agent in published if task in runs})
    head = ["task", "seeds", *(f"{step:,}" for step in suite.at)]
    head += [f"{agent}, {step:,}" for agent in agents for step in suite.at if _any(published, step)]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for task, own in runs.items():
        cells = [_cell([suites.value_at(run.curve, step) for run in own]) for step in suite.at]
        for agent in agents:
            points = published.get((task, agent), {})
            steps = [step for step in suite.at if _any(published, step)]
            cells += [f"{points[s][0]:.4g}" if s in points else "" for s in steps]
        lines.append(f"| {task} | {len(own)} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(summary(suite, runs, step) for step in suite.at)]) + "\n"


def _any(published: suites.Published, step: int) -> bool:
    return any(step in points for points in published.values())


def summary(suite: Suite, runs: Runs, step: int) -> str:
    """One line: mean over tasks and IQM at a step, with intervals where they can be had."""
    scores, unfinished = [], 0
    for task in suite.tasks:
        values = np.array([suites.value_at(run.curve, step) for run in runs.get(task.name, ())])
        values = values[~np.isnan(values)]
        unfinished += not values.size
        if values.size:
            scores.append((values - task.low) / (task.high - task.low))
    if not scores:
        return f"* {step:,} steps: nothing measured yet"
    parts = []
    for name, statistic in (
        ("mean over tasks", tables.mean_of_tasks),
        ("IQM of runs", tables.interquartile_mean),
    ):
        found = tables.stratified_bootstrap(scores, statistic)
        interval = f" [{found[0]:.3f}, {found[1]:.3f}]" if found else ""
        parts.append(f"{name} {statistic(scores):.3f}{interval}")
    single = sum(x.size == 1 for x in scores)
    note = f"; no interval: {single} tasks have one seed" if single else ""
    missing = f"; {unfinished} tasks not measured" if unfinished else ""
    runs_in_all = sum(x.size for x in scores)
    return f"* {step:,} steps, normalised, {runs_in_all} runs: {', '.join(parts)}{note}{missing}"


def report(name: str, jobs: Sequence[processes.Job], folder: str) -> list[suites.Verdict]:
    """Write table, figures and verdict of what the runs have measured so far."""
    suite, published = suites.SUITES[name], suites.load_published()
    runs = collect(suite, jobs)
    verdicts = [suites.judge(gate, runs, published) for gate in suite.gates]
    text = table(suite, runs, published)
    atomic_write(os.path.join(folder, "table.md"), text.encode())
    rows = [
        {**v._asdict(), "measured": None if math.isnan(v.measured) else v.measured}
        for v in verdicts
    ]
    content = {"suite": name, "passed": all(v.passed for v in verdicts), "gates": rows}
    atomic_write(
        os.path.join(folder, "verdict.json"), (json.dumps(content, indent=1) + "\n").encode()
    )
    print(text)
    for v in verdicts:
        shown = "not measured" if math.isnan(v.measured) else f"{v.measured:.4g}"
        print(f"{'passed' if v.passed else 'MISSED'}  {v.what}: {shown}")
    return verdicts


def keep(name: str, jobs: Sequence[processes.Job], folder: str) -> None:
    """Write the data of a suite that are tracked: FOLDER/NAME.csv and FOLDER/NAME.json."""
    each = [(job.label, name, job) for job in jobs]
    processes.write_curves(os.path.join(folder, f"{name}.csv"), each)
    processes.write_manifest(os.path.join(folder, f"{name}.json"), jobs)


def listing() -> str:
    """What `--list` prints."""
    lines = []
    for name, suite in suites.SUITES.items():
        lines += [f"{name}: {suite.help}", f"    {suite.config} {' '.join(suite.overrides)}"]
        for task in suite.tasks:
            seeds = task.seeds or suite.seeds
            lines.append(f"    {task.name}: {task.steps:,} steps, {seeds} seed{'s' * (seeds > 1)}")
        for gate in suite.gates:
            lines.append(f"    gate: {suites.judge(gate, {}, {}).what}")
    return "\n".join(lines)


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_enum("suite", None, list(suites.SUITES), "Which suite.")
    flags.DEFINE_enum("sweep", None, list(suites.DATA["sweeps"]), "Which setting to vary instead.")
    flags.DEFINE_string("config", "configs/tdmpc.py", "Configuration of a sweep.")
    flags.DEFINE_integer("steps", 6000, "Environment steps per run of a sweep.", lower_bound=1)
    flags.DEFINE_integer("eval_interval", 1500, "Environment steps between its evaluations.")
    flags.DEFINE_integer("episodes", 10, "Episodes per evaluation of a sweep.", lower_bound=1)
    flags.DEFINE_bool("list", False, "Say what each suite runs and must reach.")
    flags.DEFINE_string("out", "~/mbx-results", "Folder of all runs, figures and tables.")
    flags.DEFINE_bool("run", True, "Run what is missing; --norun: only draw and judge.")
    flags.DEFINE_integer("workers", os.cpu_count() or 1, "Runs at a time.", lower_bound=1)
    flags.DEFINE_integer("devices", 0, "GPUs that the workers share (0: cores).")
    flags.DEFINE_integer("seeds", 0, "Seeds per task (0: the suite's).", lower_bound=0)
    flags.DEFINE_list("tasks", [], "Only these tasks.")
    flags.DEFINE_multi_string("set", [], "Further settings for all runs: train.utd_ratio=2")
    flags.DEFINE_string("keep", "", "Folder for SUITE.csv and SUITE.json, the data to track.")


def main(_: list[str]) -> None:
    given = flags.FLAGS
    if given.list:
        print(listing())
        return
    if bool(given.suite) == bool(given.sweep):
        sys.exit(f"error: give --sweep, or --suite, one of {', '.join(suites.SUITES)}, or --list")
    folder = os.path.join(os.path.expanduser(given.out), given.suite or given.sweep)
    chosen = dict(seeds=given.seeds, tasks=given.tasks, extra=given.set)
    try:
        if given.sweep:
            jobs = make_sweep(given, folder)
        else:
            jobs = make_jobs(suites.SUITES[given.suite], folder, **chosen)
    except ValueError as error:
        sys.exit(f"error: {error}")
    os.makedirs(folder, exist_ok=True)
    problems = []
    if given.run:
        problems = processes.run_all(jobs, workers=given.workers, devices=given.devices)
    if given.sweep:
        sweep.report(jobs, folder, "eval/return_mean")
        sys.exit("failed runs:\n" + "\n".join(problems) if problems else 0)
    verdicts = report(given.suite, jobs, folder)
    if given.keep:
        keep(given.suite, jobs, given.keep)
    if problems:
        print("failed runs:\n" + "\n".join(problems), file=sys.stderr)
    sys.exit(1 if problems or not all(v.passed for v in verdicts) else 0)


if __name__ == "__main__":
    define_flags()
    app.run(main)
