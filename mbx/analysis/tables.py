"""Scores of groups of runs as a table in Markdown, CSV or LaTeX, with the field's statistics.

    write("scores.tex", scores(group(find_runs(["runs/sweep"]))))

Scores are one array `[seeds]` a task; tasks may have different numbers of seeds. Source: Agarwal et
al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (arXiv 2108.13264).
"""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mbx.analysis.curves import load_curve, value_at
from mbx.analysis.runs import Group
from mbx.training.files import atomic_write, prepare_output
from mbx.training.logging import read_rows

Cell = str | int | float
Scores = Sequence[np.ndarray]

_NONE = (math.nan, math.nan, math.nan)
_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"$<$",
    ">": r"$>$",
}


class Table(NamedTuple):
    """Names of the columns, and rows of as many cells; NaN is an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def scores(
    groups: Sequence[Group], *, metric: str = "eval/return_mean", step: float | None = None
) -> Table:
    """Scores of each group, and the probability that it is better than the first group.
    With several tasks, a last row per setting that every task has compares over all of them.

    Args:
        groups: from `mbx.analysis.runs.group`; the first of each task is the baseline.
        metric: KIND/NAME of the rows.
        step: environment steps; None: the last that every run has reached. Runs without an
            evaluation from 0.9 `step` on are left out.

    Returns:
        Columns: task (if several), settings, seeds, mean, interquartile mean with its 95 %
            bootstrap interval, probability of improvement with its interval, mean of all
            evaluations, seconds per run.

    Raises:
        ValueError: where nothing was measured.
    """
    curves = {
        one: [c for path in one.runs if (c := load_curve(path, metric)).steps.size]
        for one in groups
    }
    if not any(curves.values()):
        raise ValueError(f"none of these runs has the metric {metric!r}")
    if step is None:
        step = float(min(c.steps[-1] for own in curves.values() for c in own))
    found: dict[str, dict[str, np.ndarray]] = {}  # by task and settings, in the order of `groups`
    for one, own in curves.items():
        values = np.array([value_at(curve, step) for curve in own])
        found.setdefault(one.task, {})[one.settings] = values[~np.isnan(values)]
    first = {task: next(iter(kinds)) for task, kinds in found.items()}
    rows: list[tuple[Cell, ...]] = []
    for one, own in curves.items():
        values, base = found[one.task][one.settings], first[one.task]
        better = _NONE if one.settings == base else _better([values], [found[one.task][base]])
        ends = [read_rows(os.path.join(path, "metrics.jsonl"))[-1:] for path in one.runs]
        seconds = [row["seconds"] for end in ends for row in end if row.get("seconds") is not None]
        last = [_mean([c.values.mean() for c in own]), _mean(seconds)]
        name = one.settings or "all"
        rows.append((one.task, name, len(values), *_center(values), *better, *last))
    if len(found) > 1:
        for settings in dict.fromkeys(name for kinds in found.values() for name in kinds):
            if settings in first.values() or not all(settings in x for x in found.values()):
                continue
            values = [kinds[settings] for kinds in found.values()]
            better = _better(values, [found[task][base] for task, base in first.items()])
            seeds = sum(x.size for x in values)
            rows.append(("all tasks", settings, seeds, math.nan, *_NONE, *better, *_NONE[:2]))
    names = set(first.values())
    other = (names.pop() or "all") if len(names) == 1 else "the first"
    columns = ("task", "settings", "seeds", f"mean at {step:,.0f}", "IQM", "IQM low", "IQM high")
    columns += (f"P(better than {other})", "P low", "P high", "mean of all evaluations", "s a run")
    skip = int(len(found) == 1)
    return Table(columns[skip:], tuple(row[skip:] for row in rows))


def _center(values: np.ndarray) -> tuple[float, ...]:
    """Mean, interquartile mean and its interval."""
    if not values.size:
        return math.nan, *_NONE
    interval = stratified_bootstrap([values]) or _NONE[:2]
    return float(np.mean(values)), interquartile_mean([values]), *interval


def _better(values: Scores, others: Scores) -> tuple[float, ...]:
    """The probability of improvement over tasks, and its interval from five seeds on.
    Of fewer, resampling says nothing: two seeds that are both better would give [1, 1].
    """
    if not all(x.size for x in (*values, *others)):
        return _NONE
    fewest = sum(min(x.size, y.size) for x, y in zip(values, others, strict=True))
    interval = improvement_interval(values, others) if fewest >= 5 else None
    return probability_of_improvement(values, others), *(interval or _NONE[:2])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def interquartile_mean(scores: Scores) -> float:
    """Mean of the middle half of all tasks' scores; a quarter is cut at either end."""
    ordered = np.sort(np.concatenate([np.asarray(x, float) for x in scores]))
    cut = ordered.size // 4
    return float(np.mean(ordered[cut : ordered.size - cut]))


def mean_of_tasks(scores: Scores) -> float:
    """Mean over tasks of the mean over seeds."""
    return float(np.mean([np.mean(x) for x in scores]))


def stratified_bootstrap(
    scores: Scores,
    statistic: Callable[[Scores], float] = interquartile_mean,
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval (low, high) of a statistic; seeds are resampled within every task.
    None where a task has a single seed.
    """
    scores = [np.asarray(x, float) for x in scores]
    if min(x.size for x in scores) < 2:
        return None
    rng = np.random.default_rng(seed)
    found = [statistic([x[rng.integers(0, x.size, x.size)] for x in scores]) for _ in range(draws)]
    low, high = np.percentile(found, [50.0 * (1.0 - level), 50.0 * (1.0 + level)])
    return float(low), float(high)


def probability_of_improvement(scores: Scores, others: Scores) -> float:
    """Mean over tasks of the share of pairs of runs in which the first is better; ties: half."""
    each = []
    for ours, theirs in zip(scores, others, strict=True):
        gain = np.asarray(ours, float)[:, None] - np.asarray(theirs, float)[None, :]
        each.append(np.mean(np.where(gain > 0, 1.0, np.where(gain == 0, 0.5, 0.0))))
    return float(np.mean(each))


def improvement_interval(
    scores: Scores, others: Scores, **options: float
) -> tuple[float, float] | None:
    """`stratified_bootstrap` of `probability_of_improvement`, both groups resampled."""
    num = len(scores)

    def statistic(both: Scores) -> float:
        return probability_of_improvement(both[:num], both[num:])

    return stratified_bootstrap([*scores, *others], statistic, **options)  # type: ignore[arg-type]


def render(table: Table, form: str) -> str:
    """The table as text. form: "md", "csv" (full precision) or "tex"; ValueError for others."""
    if form not in _FORMS:
        raise ValueError(f"a table in the format {form!r}: choose one of {sorted(_FORMS)}")
    return _FORMS[form](table)


def write(path: str, table: Table) -> None:
    """Write the table in the format of the file's ending; missing folders are created."""
    text = render(table, os.path.splitext(path)[1].removeprefix("."))
    prepare_output(path)
    atomic_write(path, text.encode())


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.4g}"
    return str(cell)


def _markdown(table: Table) -> str:
    rows = [table.columns, *table.rows]
    lines = [" | ".join(_shown(cell).replace("|", r"\|") for cell in row) for row in rows]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], "|" + "---|" * len(table.columns), *lines[1:]]) + "\n"


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow(["" if isinstance(x, float) and math.isnan(x) else x for x in row])
    return text.getvalue()


def _latex(table: Table) -> str:
    def line(row: Sequence[Cell]) -> str:
        cells = ["".join(_LATEX.get(c, c) for c in _shown(cell)) for cell in row]
        return " & ".join(cells) + r" \\"

    texts = [any(isinstance(x, str) for x in column) for column in zip(*table.rows, strict=True)]
    kinds = "".join("l" if text else "r" for text in texts)
    head = [rf"\begin{{tabular}}{{{kinds}}}", r"\hline", line(table.columns), r"\hline"]
    return "\n".join([*head, *map(line, table.rows), r"\hline", r"\end{tabular}"]) + "\n"


_FORMS: dict[str, Callable[[Table], str]] = {"md": _markdown, "csv": _csv, "tex": _latex}
