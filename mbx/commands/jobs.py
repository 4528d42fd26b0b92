"""Training runs as processes: several at a time, resumable; and their results as data.

Every run is a process `mbx train` with `--config.resume=True`, so that stopped runs continue and
complete ones are not repeated. Next to the run directory is its output (DIRECTORY.log).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import csv
import io
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mbx.analysis.curves import Curve, load_curve
from mbx.config import extensions
from mbx.training import rundir
from mbx.training.files import atomic_write, prepare_output

_RESUME = "--config.resume=True"  # left out where there is no directory yet
_RECORDED = ("commit", "changed_files", "versions", "machine", "devices")  # in run.json
CONTINUES = "the same command continues"  # in messages of runs that a signal stopped
UNMEASURED = "was never logged"  # in messages of runs without their metric
_STOPPED = (129, 130, 143)  # exit statuses of runs that a signal stopped: saved, not failed


class Job(NamedTuple):
    """One run; complete after `steps`."""

    label: str  # task or variant
    seed: int
    workdir: str
    steps: int
    command: tuple[str, ...]
    metric: str = "eval/return_mean"

    def curve(self) -> Curve:
        """Learning curve so far; empty before the first evaluation."""
        return load_curve(self.workdir, self.metric)

    def complete(self) -> bool:
        """Whether the run has its last evaluation."""
        steps = self.curve().steps
        return bool(steps.size and steps[-1] >= self.steps)


def make_job(
    label: str,
    seed: int,
    workdir: str,
    *,
    config: str,
    steps: int,
    overrides: Sequence[str] = (),
    metric: str = "eval/return_mean",
) -> Job:
    """A run of `mbx train`. overrides: settings as "train.utd_ratio=2"."""
    workdir = os.path.abspath(workdir)
    command = (
        sys.executable,
        "-m",
        "mbx.cli",
        "train",
        f"--config={config}",
        f"--workdir={workdir}",
        _RESUME,
        f"--config.seed={seed}",
        f"--config.train.steps={steps}",
        *(f"--config.{override}" for override in overrides),
        *extensions.flags(),
    )
    return Job(label, seed, workdir, steps, command, metric)


def run_all(jobs: Sequence[Job], *, workers: int, devices: int = 0) -> list[str]:
    """Run the jobs that are not complete, `workers` at a time; returns error messages.
    Each process has its own core where there are as many as workers, so that processor times can be
    compared; with `devices` accelerators, its own accelerator instead. SIGTERM is forwarded to the
    processes, which save and end; no further one is started then.
    """
    running: set[int] = set()
    places: queue.SimpleQueue[int] = queue.SimpleQueue()
    for place in range(workers):
        places.put(place)

    def say(text: str) -> str:
        print(text + "\n", end="", flush=True)  # in one piece: threads share the output
        return text

    def run(job: Job) -> str | None:
        if job.complete():
            return None
        place, name = places.get(), f"{job.label} seed {job.seed}"
        try:
            if stopped.is_set():
                return f"{name}: not run, {CONTINUES}"
            say(f"{name}: begins, see {job.workdir}.log")
            code = _run(job, place if workers > 1 or devices else None, devices, running)
        finally:
            places.put(place)
        if code in _STOPPED:
            return say(f"{name}: stopped and saved, {CONTINUES} it")
        if code:
            return say(f"{name}: failed, see {job.workdir}.log")
        if not job.curve().steps.size:
            return say(
                f"{name}: {job.metric} {UNMEASURED}, choose one of {job.workdir}/metrics.csv"
            )
        say(f"{name}: done")
        return None

    with _handed_on(running) as stopped, concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return [problem for problem in pool.map(run, jobs) if problem]


@contextlib.contextmanager
def _handed_on(running: set[int]) -> Iterator[threading.Event]:
    """Forward SIGTERM to the running processes; the event says that it came."""
    stopped = threading.Event()

    def hand_on(number: int, _: Any) -> None:
        stopped.set()
        for process in tuple(running):
            with contextlib.suppress(ProcessLookupError):  # just ended
                os.kill(process, number)

    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGTERM, hand_on)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(job: Job, place: int | None, devices: int, running: set[int]) -> int:
    os.makedirs(os.path.dirname(job.workdir), exist_ok=True)
    environment = dict(os.environ)
    if devices and place is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(place % devices)
    begun = os.path.isdir(job.workdir)
    command = [part for part in job.command if begun or part != _RESUME]
    with open(job.workdir + ".log", "a") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        running.add(process.pid)
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if place is not None and not devices and place < len(cores):
            os.sched_setaffinity(process.pid, {cores[place]})
        code = process.wait()
        running.discard(process.pid)
    return code


def _shown(job: Job) -> str:
    """The command as another user would type it: without this machine's paths."""
    kept = [part for part in job.command[3:] if not part.startswith("--workdir=")]
    return " ".join(["mbx", *kept])


def processor_hours(job: Job) -> float:
    """Processor hours of all attempts together that were not killed."""
    found = rundir.attempts(job.workdir)
    return sum(one.get("processor_seconds") or 0.0 for one in found) / 3600.0


def write_curves(path: str, runs: Iterable[tuple[str, str, Job]]) -> None:
    """Write the curves of runs, each with its task and setting, as rows of a CSV file:
    task, setting, seed, step, value (the mean of an evaluation)."""
    rows = [
        dict(task=task, setting=setting, seed=job.seed, step=f"{step:.0f}", value=float(value))
        for task, setting, job in runs
        for step, value in zip(*job.curve(), strict=True)
    ]
    write_rows(path, rows, ("task", "setting", "seed", "step", "value"))


def write_rows(
    path: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None
) -> None:
    """Write a CSV file of rows, by default with the first one's columns; numbers to six digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    columns = tuple(rows[0]) if columns is None else columns
    writer.writerow(columns)
    for row in rows:
        cells = (row[name] for name in columns)
        writer.writerow(f"{cell:.6g}" if isinstance(cell, float) else cell for cell in cells)
    prepare_output(path)
    atomic_write(path, text.getvalue().encode())


def write_manifest(path: str, jobs: Iterable[Job]) -> None:
    """Command, commit, versions, machine, processor hours and date of every started run.
    Entries common to all runs are written once, under "all". Of a run whose run.json is damaged
    the attempts are "damaged".
    """
    runs: list[dict[str, Any]] = []
    for job in jobs:
        records: list[dict[str, Any]] = [{}]
        number: int | str = "damaged"
        hours = 0.0
        with contextlib.suppress(ValueError, TypeError):
            hours, records = processor_hours(job), rundir.attempts(job.workdir)
            number = len(records)
        if records:
            last = {name: records[-1].get(name) for name in _RECORDED}
            last |= {"command": _shown(job), "date": str(records[-1].get("started", ""))[:10]}
            last |= {"processor_hours": round(hours, 3)}
            last |= {"complete": job.complete(), "attempts": number}
            runs.append({"run": f"{job.label} seed {job.seed}", **last})
    first = runs[0] if len(runs) > 1 else {}
    shared = {k: v for k, v in first.items() if all(run.get(k) == v for run in runs)}
    text = {
        "all": shared,
        "processor_hours": round(sum(run["processor_hours"] for run in runs), 2),
        "runs": [{k: v for k, v in run.items() if k not in shared} for run in runs],
    }
    atomic_write(path, (json.dumps(text, indent=1) + "\n").encode())
