"""Suites of tasks and the gates that results must pass, both declared in suites.json.

A gate measures one number from the runs of a suite and compares it with a bar.
"""

from __future__ import annotations

import csv
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mbx.analysis.curves import Curve, value_at

PUBLISHED = pathlib.Path(__file__).resolve().parents[1] / "docs/results/published.csv"


class Task(NamedTuple):
    """A task of a suite: env.name, environment steps, and seeds (0: the suite's number).

    low, high: returns that count as 0 and 1 in statistics over tasks. overrides: settings of this
    task alone; config, metric: others than the suite's.
    """

    name: str
    steps: int
    seeds: int = 0
    low: float = 0.0
    high: float = 1000.0
    overrides: tuple[str, ...] = ()
    config: str = ""
    metric: str = ""


class Gate(NamedTuple):
    """A bar to reach: `measure` says what is compared with `bar`, see `MEASURES`.

    step: where, or from where on, in environment steps. tasks: () for all of the suite. agent:
    whose published values. share: of the seeds that must hold.
    """

    measure: str
    bar: float
    step: int = 0
    tasks: tuple[str, ...] = ()
    agent: str = ""
    share: float = 1.0


class Run(NamedTuple):
    """One seed's curve and the processor hours it took."""

    seed: int
    curve: Curve
    hours: float = 0.0


class Suite(NamedTuple):
    """Tasks that are run with one configuration. at: steps whose returns the table shows."""

    help: str
    config: str
    tasks: tuple[Task, ...]
    seeds: int
    at: tuple[int, ...]
    overrides: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    metric: str = "eval/return_mean"


class Verdict(NamedTuple):
    """Outcome of a gate; measured is NaN where runs for it are missing."""

    what: str
    measured: float
    passed: bool


Runs = Mapping[str, Sequence[Run]]
Published = Mapping[tuple[str, str], Mapping[int, tuple[float, float, float]]]


def load_published(path: pathlib.Path = PUBLISHED) -> Published:
    """(task, agent) -> step -> (mean, low, high), from a CSV with those columns."""
    found: dict[tuple[str, str], dict[int, tuple[float, float, float]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            point = tuple(float(row[name]) for name in ("mean", "low", "high"))
            found.setdefault((row["task"], row["agent"]), {})[int(row["step"])] = point
    return found


def _mean(gate: Gate, runs: Runs, published: Published) -> float:
    """Mean over tasks of the mean over seeds, at a step."""
    each = [[value_at(run.curve, gate.step) for run in own] for own in runs.values()]
    return float(np.mean([np.mean(x) if x else math.nan for x in each]))


def _median(gate: Gate, runs: Runs, published: Published) -> float:
    """The median over seeds at a step, of the task where it is least."""
    each = [[value_at(run.curve, gate.step) for run in own] for own in runs.values()]
    return float(np.min([np.median(x) if x else math.nan for x in each]))


def _median_held(gate: Gate, runs: Runs, published: Published) -> float:
    """The least median over seeds of all evaluations from a step on."""
    least = math.inf
    for own in runs.values():
        late = [run.curve.values[run.curve.steps >= 0.98 * gate.step] for run in own]
        if not late or len({x.size for x in late}) > 1 or not late[0].size:
            return math.nan
        least = min(least, float(np.median(late, axis=0).min()))
    return least


def _held(gate: Gate, runs: Runs, published: Published) -> float:
    """What `share` of the seeds reach at every evaluation from a step on, on every task."""
    least = math.inf
    for own in runs.values():
        worst = [run.curve.values[run.curve.steps >= 0.98 * gate.step] for run in own]
        if not worst or not all(x.size for x in worst):
            return math.nan
        ordered = np.sort([x.min() for x in worst])[::-1]
        least = min(least, float(ordered[math.ceil(gate.share * len(own)) - 1]))
    return least


def _against(gate: Gate, runs: Runs, published: Published) -> float:
    """Mean over seeds over the published mean at a step, of the task where that is least."""
    ratios = []
    for task, own in runs.items():
        values = [value_at(run.curve, gate.step) for run in own]
        theirs = published[task, gate.agent][gate.step][0]
        ratios.append(np.mean(values) / max(theirs, 1e-9) if values else math.nan)
    return float(np.min(ratios))


def _collapse(gate: Gate, runs: Runs, published: Published) -> float:
    """The least evaluation from a step on, as a share of the best before it, of all runs."""
    least = math.inf
    for own in runs.values():
        if not own:
            return math.nan
        for run in own:
            best = np.maximum.accumulate(run.curve.values)[:-1]
            late = run.curve.steps[1:] >= 0.98 * gate.step
            if not late.any():
                return math.nan
            share = run.curve.values[1:][late] / np.maximum(best[late], 1e-9)
            least = min(least, float(share.min()))
    return least


def _minutes(gate: Gate, runs: Runs, published: Published) -> float:
    """Processor minutes of the longest run, negative, so that less is better."""
    hours = [run.hours for own in runs.values() for run in own]
    return -60.0 * max(hours) if hours and all(hours) else math.nan


Measure = Callable[[Gate, Runs, Published], float]
MEASURES: dict[str, tuple[Measure, str]] = {
    "mean": (_mean, "mean over tasks at {step:,} steps"),
    "median": (_median, "median over seeds at {step:,} steps"),
    "median held": (_median_held, "median over seeds at every evaluation from {step:,} steps on"),
    "held": (_held, "every evaluation from {step:,} steps on, {share:.0%} of the seeds"),
    "published": (_against, "share of {agent}'s published mean at {step:,} steps, every task"),
    "collapse": (_collapse, "evaluation over the best before it, from {step:,} steps on"),
    "minutes": (_minutes, "processor minutes a run (negative)"),
}


def judge(gate: Gate, runs: Runs, published: Published) -> Verdict:
    """Compare a gate's measure with its bar; one that cannot be measured is not passed."""
    own = {task: found for task, found in runs.items() if not gate.tasks or task in gate.tasks}
    measure, text = MEASURES[gate.measure]
    measured = measure(gate, own, published) if own else math.nan
    what = text.format(**gate._asdict())
    tasks = f" ({', '.join(gate.tasks)})" if gate.tasks else ""
    return Verdict(f"{what}{tasks}: at least {gate.bar:g}", measured, measured >= gate.bar)


def frozen(value: Any) -> Any:
    """JSON's lists as tuples."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def read_suite(fields: Mapping[str, Any]) -> Suite:
    """A suite of suites.json."""
    own = {name: frozen(value) for name, value in fields.items()}
    for name, kind in (("tasks", Task), ("gates", Gate)):
        parts = ({k: frozen(v) for k, v in one.items()} for one in fields.get(name, ()))
        own[name] = tuple(kind(**one) for one in parts)
    return Suite(**own)


DATA = json.loads(pathlib.Path(__file__).with_suffix(".json").read_text())
SUITES = {name: read_suite(fields) for name, fields in DATA["suites"].items()}
