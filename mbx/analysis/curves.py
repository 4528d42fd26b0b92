"""Learning curves: read them from run directories, aggregate over seeds, draw them."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mbx.analysis import runs
from mbx.training import levels
from mbx.training.files import atomic_write, prepare_output
from mbx.training.logging import read_rows
from mbx.training.rundir import load_config

_WIDEST = 90  # characters of a line below the axes
MARKERS = "Dos^v"  # of published points, one a source


class Curve(NamedTuple):
    """One seed's curve: steps and values, both `[n]`."""

    steps: np.ndarray
    values: np.ndarray


def load_curve(run_dir: str, metric: str = "eval/return_mean") -> Curve:
    """A metric `KIND/NAME` of a run over environment steps; empty if it was never logged."""
    kind, _, name = metric.partition("/")
    rows = read_rows(os.path.join(run_dir, "metrics.jsonl"))
    points = [(r["step"], r[name]) for r in rows if r["kind"] == kind and r.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return Curve(np.asarray(steps, float), np.asarray(values, float))


def value_at(curve: Curve, step: float) -> float:
    """The last evaluation between 0.9 and 1.02 times `step`; NaN where the run has none there."""
    found = curve.values[(curve.steps >= 0.9 * step) & (curve.steps <= 1.02 * step)]
    return float(found[-1]) if found.size else math.nan


def aggregate(curves: Sequence[Curve], points: int = 200) -> tuple[np.ndarray, ...]:
    """Steps, mean, lower and upper band `[points]` on the steps that all seeds have.
    The band is the range of the seeds below five of them, else a bootstrap 95 % interval of the
    mean. Raises ValueError when the curves have no step in common.
    """
    start = max(c.steps[0] for c in curves)
    stop = min(c.steps[-1] for c in curves)
    if start > stop:
        spans = ", ".join(f"{c.steps[0]:g}..{c.steps[-1]:g}" for c in curves)
        raise ValueError(
            f"curves of one group share no steps ({spans}): leave out the short ones, or give "
            "them labels of their own"
        )
    grid = np.linspace(start, stop, points)
    values = np.stack([np.interp(grid, c.steps, c.values) for c in curves])
    mean = values.mean(axis=0)
    if len(curves) < 5:
        return grid, mean, values.min(axis=0), values.max(axis=0)
    draws = np.random.default_rng(0).integers(0, len(curves), (2000, len(curves)))
    low, high = np.percentile(values[draws].mean(axis=1), [2.5, 97.5], axis=0)
    return grid, mean, low, high


def load_reference(path: str) -> tuple[np.ndarray, ...]:
    """Published points: steps, mean, low, high, `[n]` each.
    The CSV has columns step,mean,lcb,ucb, or step,reward,seed (then the range of the seeds, at the
    steps that every seed has). Raises ValueError for other files, FileNotFoundError for none.
    """
    wanted = "step,mean,lcb,ucb or step,reward,seed"
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} does not exist: give a CSV of published values with columns {wanted}"
        )
    with open(path, newline="", encoding="utf-8-sig") as file:  # spreadsheets write such a mark
        rows = list(csv.DictReader(file))
    columns, lines = set(rows[0]) if rows else set(), list(enumerate(rows, 2))

    def numbers(name: str) -> np.ndarray:
        return np.array([_number(row[name], f"{path}, line {i}: {name!r}") for i, row in lines])

    if {"step", "mean", "lcb", "ucb"} <= columns:
        return tuple(map(numbers, ("step", "mean", "lcb", "ucb")))
    if not {"step", "reward", "seed"} <= columns:
        raise ValueError(
            f"{path} has {len(rows)} rows of columns {sorted(map(str, columns))}: give some, with "
            f"columns {wanted}"
        )
    seeds: dict[str, dict[float, list[float]]] = {}
    for row, step, reward in zip(rows, numbers("step"), numbers("reward"), strict=True):
        # A few published seeds hold two runs, which count as one.
        seeds.setdefault(row["seed"], {}).setdefault(step, []).append(reward)
    steps = sorted(set.intersection(*map(set, seeds.values())))
    if not steps:
        raise ValueError(f"{path}: its {len(seeds)} seeds share no step, so they have no mean")
    values = np.array([[np.mean(own[step]) for step in steps] for own in seeds.values()])
    return np.array(steps), values.mean(axis=0), values.min(axis=0), values.max(axis=0)


def _number(cell: str | None, where: str) -> float:
    try:
        return float(cell or "")
    except ValueError:
        words = f"{where} is {cell!r}, not a number: fill in the cell, or remove the line"
        raise ValueError(words) from None


def draw_seeds(axes: Any, name: str, curves: Sequence[Curve], color: str) -> None:
    """Draw the mean over seeds, thin lines for the seeds, and the band of `aggregate`.
    Seeds with a single step in common get a dot.
    """
    for curve in curves:
        axes.plot(curve.steps, curve.values, color=color, alpha=0.3, linewidth=0.8)
    steps, mean, low, high = aggregate(curves)
    seeds = f" ({len(curves)} seeds)" if len(curves) > 1 else ""
    marker = "" if steps[0] < steps[-1] else "o"
    label = f"{name}{seeds}"
    label = f" {label}" if label.startswith("_") else label  # matplotlib hides such names
    axes.plot(steps, mean, color=color, label=label, marker=marker, markevery=[0])
    axes.fill_between(steps, low, high, color=color, alpha=0.15, linewidth=0)


def draw_levels(axes: Any, paths: Sequence[str]) -> None:
    """Draw the returns of random actions (the runs' mean) and of a solved task, where all runs have
    one task."""
    tasks = [(env["name"], env.get("kwargs")) for env in (load_config(x)["env"] for x in paths)]
    if any(task != tasks[0] for task in tasks):
        return
    found = [levels.of_run(path) for path in paths]
    random = [one.random for one in found if one.random is not None]
    mean = float(np.mean(random)) if random else None
    for label, level in {"random actions": mean, "solved": found[0].solved}.items():
        if level is not None:
            axes.axhline(level, color="0.5", linestyle=":", linewidth=1, label=label)


def draw_published(
    axes: Any,
    name: str,
    points: Sequence[np.ndarray],
    limit: float,
    marker: str = "D",
    color: str = "k",
) -> None:
    """Published points (steps, mean, low, high) up to `limit` steps as markers with error bars.
    Where all values lie beyond the limit, only the legend mentions them.
    """
    steps, mean, low, high = (np.asarray(x, float) for x in points)
    keep = steps <= limit
    label = f"published: {name}"
    if not keep.any():
        label += f" (from {steps.min():,.0f} steps on)"
    errors = np.maximum(np.stack([mean - low, high - mean])[:, keep], 0.0)
    style = dict(fmt=marker, color=color, markersize=4, elinewidth=1, capsize=2)
    axes.errorbar(steps[keep], mean[keep], yerr=errors, label=label, **style)


def draw_runs(
    run_dirs: Sequence[str],
    axes: Any = None,
    *,
    metric: str = "eval/return_mean",
    labels: Sequence[str] | None = None,
    references: Sequence[str] = (),
    title: str = "",
) -> Any:
    """Draw runs, one curve with its seeds per group, and return the axes.

    Args:
        run_dirs: directories of runs, of several seeds, or folders of runs.
        axes: matplotlib's, to draw on; None: a new figure's.
        metric: KIND/NAME of the rows.
        labels: one per directory; equal labels make one curve. None: runs are grouped by task and
            by the settings in which they differ.
        references: files of published values.

    Raises:
        ValueError: when no run has the metric or the number of labels differs.
        FileNotFoundError: when there is no run.
    """
    curves: dict[str, list[Curve]] = {}
    for name, paths in _named(run_dirs, labels).items():
        own = [curve for curve in (load_curve(path, metric) for path in paths) if curve.steps.size]
        if own:
            curves[name] = own
    if not curves:
        raise ValueError(f"none of {list(run_dirs)} has the metric {metric!r}")
    wrapped = {name: textwrap.fill(name, _WIDEST) for name in curves}
    lines = sum(1 + name.count("\n") for name in wrapped.values())
    below = lines > 8 or any(len(name) > 40 for name in curves)
    if axes is None:
        import matplotlib.pyplot as plt

        height = 4.2 + 0.17 * lines * below
        axes = plt.subplots(figsize=(7, height), constrained_layout=True)[1]
    for i, (name, own) in enumerate(curves.items()):
        draw_seeds(axes, wrapped[name], own, f"C{i % 10}")
    if metric == "eval/return_mean":
        draw_levels(axes, runs.find_runs(run_dirs))
    limit = max(c.steps[-1] for own in curves.values() for c in own)
    for path, marker in zip(references, itertools.cycle(MARKERS), strict=False):
        source = os.path.basename(os.path.dirname(os.path.abspath(path)))
        draw_published(axes, source, load_reference(path), 1.05 * limit, marker)
    axes.set(title=title, xlabel="environment steps (action repeat included)", ylabel=metric)
    axes.grid(alpha=0.3)
    if below:  # long names would leave no room for the curves
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.16), borderaxespad=0.0)
    else:
        axes.legend(fontsize=8)
    return axes


def plot_runs(run_dirs: Sequence[str], out: str, **options: Any) -> None:
    """Draw runs, as `draw_runs`, into a picture; its ending (.png, .pdf, .svg) is the format."""
    import matplotlib
    import matplotlib.pyplot as plt

    matplotlib.use("Agg")
    figure, picture = draw_runs(run_dirs, **options).figure, io.BytesIO()
    prepare_output(out)
    try:
        figure.savefig(picture, format=os.path.splitext(out)[1][1:] or "png", dpi=130)
    finally:
        plt.close(figure)
    atomic_write(out, picture.getvalue())


def _named(paths: Sequence[str], labels: Sequence[str] | None) -> dict[str, list[str]]:
    """Runs by the name of their curve."""
    named: dict[str, list[str]] = {}
    found = runs.group(paths, labels)
    several_tasks = len({one.task for one in found}) > 1
    for one in found:
        name = one.settings
        if labels is None:
            parts = [one.task] * several_tasks + [one.settings] * bool(one.settings)
            name = ", ".join(parts) or f"{load_config(one.runs[0])['agent']} {one.task}"
            name = name.replace("$", r"\$")  # a dollar sign would begin a formula
        named.setdefault(name, []).extend(one.runs)
    return named
