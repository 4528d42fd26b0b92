"""Results as tracked data: one small CSV of curves per suite, and a manifest of their origin."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mbx.analysis.curves import Curve
from mbx.training.files import atomic_write, prepare_output

from .jobs import Job, attempts, processor_hours

_COLUMNS = ("task", "setting", "seed", "step", "value")


class Series(NamedTuple):
    """One run's curve with task, setting and seed."""

    task: str
    setting: str
    seed: int
    curve: Curve


def write_curves(path: str, series: Iterable[Series]) -> None:
    """Write all curves as rows: task, setting, seed, step, value (the mean of an evaluation)."""
    rows = [
        (one.task, one.setting, one.seed, f"{step:.0f}", float(value))
        for one in series
        for step, value in zip(one.curve.steps, one.curve.values, strict=True)
    ]
    _write(path, _COLUMNS, rows)


def write_rows(path: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a CSV file of rows with the first one's columns, numbers to six digits."""
    columns = tuple(rows[0])
    _write(path, columns, [[row[name] for name in columns] for row in rows])


def _write(path: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow(f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
    prepare_output(path)
    atomic_write(path, text.getvalue().encode())


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a CSV file, cells as text."""
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_manifest(path: str, jobs: Iterable[Job]) -> None:
    """Command, commit, versions, machine, processor hours and date of every started run.
    Entries common to all runs are written once, under "all".
    """
    runs = []
    for job in jobs:
        records = attempts(job)
        if records:
            last: dict[str, Any] = dict(records[-1])
            for name in ("exit_status", "wall_seconds", "processor_seconds"):
                last.pop(name)
            last["processor_hours"] = round(processor_hours(job), 3)
            last |= {"complete": job.complete(), "attempts": len(records)}
            runs.append({"run": f"{job.label} seed {job.seed}", **last})
    shared = _shared(runs) if len(runs) > 1 else {}
    text = {
        "all": shared,
        "processor_hours": round(sum(run["processor_hours"] for run in runs), 2),
        "runs": [{k: v for k, v in run.items() if k not in shared} for run in runs],
    }
    atomic_write(path, (json.dumps(text, indent=1) + "\n").encode())


def _shared(runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    first = runs[0]
    return {k: v for k, v in first.items() if all(run.get(k) == v for run in runs)}
