"""What run directories say when they are read together: rows, times, complaints, defaults."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from mbx.files import read_json
from mbx.settings import flatten, to_dict
from mbx.training import build
from mbx.training.checkpoint import load_config
from mbx.training.metrics import read_rows


class Run(NamedTuple):
    """What a run directory says: name, configuration, rows, attempts (of run.json, if there)."""

    name: str
    path: str
    config: dict[str, Any]
    rows: list[dict[str, Any]]
    attempts: list[dict[str, Any]]

    def curve(self, kind: str, key: str) -> tuple[list[float], list[float]]:
        """Steps and values of one metric."""
        own = [row for row in self.rows if row.get("kind") == kind and is_number(row.get(key))]
        return [row["step"] for row in own], [row[key] for row in own]


def read_run(path: str, name: str) -> Run:
    """Read a run directory. Raises FileNotFoundError or ValueError where there is none."""
    config = load_config(path)
    rows = []
    if os.path.exists(log := os.path.join(path, "metrics.jsonl")):
        rows = [row for row in read_rows(log) if is_number(row.get("step"))]
    attempts: Any = []
    record = os.path.join(path, "run.json")
    if not os.path.exists(record):  # that of a seed's whole run
        record = os.path.join(os.path.dirname(os.path.abspath(path)), "run.json")
    if os.path.exists(record):
        try:
            attempts = read_json(record).get("attempts")
        except ValueError:
            attempts = []
    known = [one for one in attempts if isinstance(one, dict)] if isinstance(attempts, list) else []
    return Run(name, path, config, rows, known)


def seeds_of(path: str) -> list[str]:
    """The directories of a run's seeds: itself where it has its own rows."""
    found = sorted(glob.glob(os.path.join(glob.escape(path), "seed-*", "metrics.jsonl")))
    if os.path.exists(os.path.join(path, "metrics.jsonl")) or not found:
        return [path]
    return [os.path.dirname(one) for one in found]


def is_number(value: Any) -> bool:
    """Whether a value of a row can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def short_names(paths: Sequence[str]) -> list[str]:
    """The ends of paths, as long as it takes to tell them apart."""
    parts = [os.path.abspath(path).split(os.sep) for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({i})" for i, part in enumerate(parts)]


def complaints(run: Run) -> list[str]:
    """What should be known before a run's numbers are believed."""
    found = []
    if not run.rows:
        found.append("metrics.jsonl holds no row")
    train = run.config.get("train")
    planned = train.get("steps") if isinstance(train, dict) else None
    done = max((row["step"] for row in run.rows), default=0)
    if is_number(planned) and run.rows and done < 0.99 * planned:
        found.append(f"it stopped at {done:,.0f} of {planned:,.0f} steps")
    faults = sum(row["faults"] for row in run.rows if is_number(row.get("faults")))
    if faults:
        found.append(f"{faults:,.0f} steps of the environment were not finite")
    lost = sorted({key for row in run.rows for key, value in row.items() if value is None})
    if lost:
        found.append(f"not finite at least once: {', '.join(lost)}")
    _, returns = run.curve("eval", "return_mean")
    if len(returns) > 2 and returns[-1] < max(returns) - 0.5 * (max(returns) - min(returns)):
        found.append(
            f"the last evaluation ({returns[-1]:.5g}) lies far below the best ({max(returns):.5g})"
        )
    for attempt in run.attempts:
        if attempt.get("outcome") not in (None, "complete"):
            found.append(f"an attempt from {attempt.get('started')} ended: {attempt['outcome']}")
    return found


def starts(run: Run) -> list[list[dict[str, Any]]]:
    """The rows that have a time, by the start of the run that wrote them: each counts again."""
    found: list[list[dict[str, Any]]] = []
    for row in run.rows:
        if is_number(row.get("seconds")):
            if not found or row["seconds"] < found[-1][-1]["seconds"]:
                found.append([])
            found[-1].append(row)
    return found


def times(run: Run) -> dict[str, float]:
    """Seconds of a run, all its starts together: starting and compiling, training, evaluating.

    From the rows: an interval's end and an evaluation's, and that of the row before it. The first
    interval of a start holds the compilation; what it took beyond a later one of the same length
    counts as starting.
    """
    total: dict[str, float] = {}
    for rows in starts(run):
        for name, seconds in _times(rows).items():
            total[name] = total.get(name, 0.0) + seconds
    return total


def _times(rows: list[dict[str, Any]]) -> dict[str, float]:
    """`times` of one start."""
    trained, evaluated, before = [], 0.0, 0.0
    for row in rows:
        if row.get("kind") == "train":
            trained.append(row["seconds"] - before)
        elif row.get("kind") == "eval":
            evaluated += row["seconds"] - before
        before = row["seconds"]
    later = sorted(trained[1:])
    usual = later[len(later) // 2] if later else 0.0
    starting = max(trained[0] - usual, 0.0) if trained else 0.0
    return {
        "start and compilation": starting,
        "training (with what is saved)": sum(trained) - starting,
        "evaluation": evaluated,
    }


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flat settings as the agent's class declares them; {} for an agent that is not known here."""
    try:
        return dict(flatten(to_dict(build.settings_class(str(config.get("agent")))())))
    except (ValueError, ImportError, TypeError):
        return {}
