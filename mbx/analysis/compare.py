"""Scores of groups of runs as a table: means, interquartile means, and which group is better.

print(tables.render(scores(group(find_runs(["runs/sweep"]))), "md"))
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import numpy as np

from mbx.analysis import statistics
from mbx.analysis.curves import Curve, load_curve, value_at
from mbx.analysis.groups import Group
from mbx.analysis.tables import Cell, Table
from mbx.training.metrics import read_rows

_NOTHING = [math.nan, math.nan, math.nan]


def scores(
    groups: Sequence[Group], *, metric: str = "eval/return_mean", step: float | None = None
) -> Table:
    """A row a group: evaluations of its seeds at a step, and how likely it beats the first group.

    Of several tasks a last row a setting says how likely it is better over all of them, for which
    returns need no common scale.

    Args:
        groups: as `mbx.analysis.groups.group` makes them; the first of a task is what the others
            are compared with.
        metric: KIND/NAME of the rows.
        step: environment steps; None: the last that every run has reached. Runs without an
            evaluation from nine tenths of it on are not counted.

    Returns:
        Columns: task (of several), settings, seeds, mean, interquartile mean and the ends of its
        95 % bootstrap interval, the probability that a run of the group is better than one of the
        first and the ends of its interval, the mean of all evaluations, seconds a run.

    Raises:
        ValueError: where nothing was measured.
    """
    curves = {one: [load_curve(path, metric) for path in one.runs] for one in groups}
    curves = {one: [c for c in own if c.steps.size] for one, own in curves.items()}
    if not any(curves.values()):
        raise ValueError(f"none of these runs has the metric {metric!r}")
    if step is None:
        step = float(min(c.steps[-1] for own in curves.values() for c in own))
    found = {(one.task, one.settings): _values(curves[one], step) for one in groups}
    tasks = list(dict.fromkeys(one.task for one in groups))
    first = {task: next(g.settings for g in groups if g.task == task) for task in tasks}
    rows: list[tuple[Cell, ...]] = []
    for one in groups:
        values, base = found[one.task, one.settings], first[one.task]
        cells: list[Cell] = [one.task, one.settings or "all", len(values), *_center(values)]
        theirs = found[one.task, base]
        cells += _better([values], [theirs]) if one.settings != base else _NOTHING
        every = [c.values.mean() for c in curves[one]]
        cells += [float(np.mean(every)) if every else math.nan, _seconds(one.runs)]
        rows.append(tuple(cells))
    if len(tasks) > 1:
        rows += _over_tasks(found, tasks, first)
    names = set(first.values())
    other = (names.pop() or "all") if len(names) == 1 else "the first"
    columns = ("task", "settings", "seeds", f"mean at {step:,.0f}", "IQM", "IQM low", "IQM high")
    columns += (f"P(better than {other})", "P low", "P high", "mean of all evaluations", "s a run")
    skip = int(len(tasks) == 1)
    return Table(columns[skip:], tuple(row[skip:] for row in rows))


def _values(curves: Sequence[Curve], step: float) -> np.ndarray:
    values = np.array([value_at(curve, step) for curve in curves], float)
    return values[~np.isnan(values)]


def _center(values: np.ndarray) -> list[Cell]:
    """Mean, interquartile mean and its interval."""
    if not values.size:
        return [math.nan, *_NOTHING]
    interval = statistics.stratified_bootstrap([values])
    return [float(np.mean(values)), statistics.interquartile_mean([values]), *_ends(interval)]


def _better(values: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> list[Cell]:
    """The probability of improvement over tasks, and its interval from five seeds on.

    Of fewer, resampling says nothing: two seeds that are both better would give [1, 1].
    """
    if not all(x.size for x in (*values, *others)):
        return list(_NOTHING)
    probability = statistics.probability_of_improvement(values, others)
    fewest = sum(min(x.size, y.size) for x, y in zip(values, others, strict=True))
    interval = statistics.improvement_interval(values, others) if fewest >= 5 else None
    return [probability, *_ends(interval)]


def _over_tasks(
    found: dict[tuple[str, str], np.ndarray], tasks: Sequence[str], first: dict[str, str]
) -> list[tuple[Cell, ...]]:
    """A row a setting that every task has, and that is no task's first."""
    rows: list[tuple[Cell, ...]] = []
    for settings in dict.fromkeys(settings for _, settings in found):
        if settings not in first.values() and all((task, settings) in found for task in tasks):
            values = [found[task, settings] for task in tasks]
            others = [found[task, first[task]] for task in tasks]
            seeds = sum(x.size for x in values)
            better = _better(values, others)
            blank = [math.nan] * 4
            rows.append(("all tasks", settings, seeds, *blank, *better, math.nan, math.nan))
    return rows


def _ends(interval: tuple[float, float] | None) -> list[Cell]:
    return list(interval) if interval else [math.nan, math.nan]


def _seconds(run_dirs: Sequence[str]) -> float:
    """Mean over runs of what the last row says that they took."""
    found = []
    for path in run_dirs:
        rows = read_rows(os.path.join(path, "metrics.jsonl"))
        found += [row["seconds"] for row in rows[-1:] if row.get("seconds") is not None]
    return float(np.mean(found)) if found else math.nan
