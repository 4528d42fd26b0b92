"""Run directories read together: rows, attempts, times, warnings, and groups of like runs.

groups = group(find_runs(["runs/sweep"]))
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mbx.settings import flatten, to_dict
from mbx.training import build
from mbx.training.files import read_json
from mbx.training.logging import read_rows
from mbx.training.rundir import load_config

# What changes nothing that is learned, or is what the runs of one group differ in.
_IGNORED = ("seed", "num_seeds", "resume", "imports", "log", "checkpoint", "distributed", "eval")
_TASK, _KWARGS = "env.name", "env.kwargs"


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


class Group(NamedTuple):
    """Directories of runs of one task that differ only in their seeds.
    settings: differences from the other groups, "NAME=VALUE, …"; "" for none.
    """

    task: str
    settings: str
    runs: tuple[str, ...]


def read_run(path: str, name: str) -> Run:
    """Read a run directory. Raises FileNotFoundError or ValueError where there is none."""
    config = load_config(path)
    rows = [r for r in read_rows(os.path.join(path, "metrics.jsonl")) if is_number(r.get("step"))]
    record = os.path.join(path, "run.json")
    if not os.path.exists(record):  # that of a seed's whole run
        record = os.path.join(os.path.dirname(os.path.abspath(path)), "run.json")
    try:
        attempts = read_json(record).get("attempts")
    except (OSError, ValueError):
        attempts = None
    known = [one for one in attempts if isinstance(one, dict)] if isinstance(attempts, list) else []
    return Run(name, path, config, rows, known)


def find_runs(paths: Sequence[str]) -> list[str]:
    """Directories of single runs: those given, the seeds inside one, or the runs in a folder.
    Raises FileNotFoundError where a path holds no run.
    """
    found = []
    for path in paths:
        own = [path] if _is_run(path) else _inside(path, r".*")
        if not own:
            raise FileNotFoundError(f"{path} holds no run: give directories of runs")
        found += own
    return found


def _inside(path: str, names: str) -> list[str]:
    """Runs in a folder whose names match, and the seeds of those that hold several."""
    found = []
    for name in sorted(os.listdir(path), key=_natural) if os.path.isdir(path) else ():
        inner = os.path.join(path, name)
        if re.fullmatch(names, name) and os.path.isdir(inner):
            found += [inner] if _is_run(inner) else _inside(inner, r"seed-\d+")
    return found


def _is_run(path: str) -> bool:
    return os.path.exists(os.path.join(path, "config.json"))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers by their size: seed-2 before seed-10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if p]


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest ends of paths that are all different."""
    parts = [os.path.abspath(path).split(os.sep) for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(part[-count:]) for part in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{'/'.join(part)} ({i})" for i, part in enumerate(parts)]


def is_number(value: Any) -> bool:
    """Whether a value of a row can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def group(run_dirs: Sequence[str]) -> list[Group]:
    """Runs by task and settings, in the order of the first of each.
    Seeds, logs, evaluations, checkpoints, devices and missing settings make no groups. Raises
    FileNotFoundError or ValueError for a directory that holds no run.
    """
    configs = [_compared(load_config(path)) for path in run_dirs]
    several_agents = len({config["agent"] for config in configs}) > 1
    found: dict[tuple[str, str], list[str]] = {}
    for path, config in zip(run_dirs, configs, strict=True):
        kin = [c for c in configs if c["agent"] == config["agent"]]
        parts = [config["agent"]] if several_agents else []
        parts += [_said(name, config) for name in _differing(kin)]
        found.setdefault((config[_TASK], ", ".join(parts)), []).append(path)
    return [Group(task, settings, tuple(runs)) for (task, settings), runs in found.items()]


def labelled(paths: Sequence[str], labels: Sequence[str]) -> list[Group]:
    """The runs at `paths` grouped by task and label, one label per path.
    Raises ValueError for another number of labels, FileNotFoundError where a path holds no run.
    """
    if len(labels) != len(paths):
        raise ValueError(f"{len(labels)} labels for {len(paths)} runs: give one label a run")
    found: dict[tuple[str, str], list[str]] = {}
    for path, label in zip(paths, labels, strict=True):
        for run in find_runs([path]):
            found.setdefault((load_config(run)["env"]["name"], label), []).append(run)
    return [Group(task, label, tuple(runs)) for (task, label), runs in found.items()]


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    values = dict(flatten(config))
    return {n: v for n, v in values.items() if n.partition(".")[0] not in _IGNORED}


def _differing(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that differ, in order; arguments of an environment also by being there or not."""
    found = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config[name] for config in configs if name in config]
        missing = name.startswith(f"{_KWARGS}.") and len(values) < len(configs)
        if name not in (_TASK, _KWARGS) and (missing or any(v != values[0] for v in values)):
            found.append(name)
    return found


def _said(name: str, config: Mapping[str, Any]) -> str:
    if name not in config:
        return f"{name} not given"
    value = config[name]
    return f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"


def complaints(run: Run) -> list[str]:
    """Warnings about a run that limit what its numbers show."""
    found = []
    if not run.rows:
        found.append("metrics.jsonl holds no row")
    planned = run.config["train"].get("steps")
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
    """Rows with a time, by the start of the run that wrote them."""
    found: list[list[dict[str, Any]]] = []
    for row in run.rows:
        if is_number(row.get("seconds")):
            if not found or row["seconds"] < found[-1][-1]["seconds"]:
                found.append([])
            found[-1].append(row)
    return found


def times(run: Run) -> dict[str, float]:
    """Seconds of a run over all its starts: starting and compiling, training, evaluating.
    The first interval of a start includes compilation; its excess over a later interval of the same
    length counts as starting.
    """
    starting = training = evaluation = 0.0
    for rows in starts(run):
        before = [0.0, *(row["seconds"] for row in rows)]
        took = [(row.get("kind"), row["seconds"] - t) for row, t in zip(rows, before, strict=False)]
        trained = [seconds for kind, seconds in took if kind == "train"]
        later = sorted(trained[1:])
        usual = later[len(later) // 2] if later else 0.0
        first = max(trained[0] - usual, 0.0) if trained else 0.0
        starting += first
        training += sum(trained) - first
        evaluation += sum(seconds for kind, seconds in took if kind == "eval")
    if not starts(run):
        return {}
    return {
        "start and compilation": starting,
        "training (with what is saved)": training,
        "evaluation": evaluation,
    }


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flat settings as the agent's class declares them; {} for an agent that is not known here."""
    try:
        return dict(flatten(to_dict(build.settings_class(str(config.get("agent")))())))
    except (ValueError, ImportError, TypeError):
        return {}
