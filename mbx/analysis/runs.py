"""Run directories read together: rows, attempts, times, warnings, and groups of like runs.

groups = group(["runs/sweep"])
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mbx.settings import flatten, to_dict
from mbx.training import build, hub
from mbx.training.files import read_json
from mbx.training.logging import read_rows
from mbx.training.rundir import load_config

# What changes nothing that is learned, or is what the runs of one group differ in.
_IGNORED = ("seed", "num_seeds", "resume", "imports", "log", "checkpoint", "distributed", "eval")


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
    own = os.path.lexists(os.path.join(path, "run.json"))  # a seed's is its whole run's
    attempts: Any = None
    with contextlib.suppress(OSError, ValueError):
        folder = path if own else os.path.dirname(os.path.abspath(path))
        attempts = read_json(os.path.join(folder, "run.json")).get("attempts")
    known = [one for one in attempts if isinstance(one, dict)] if isinstance(attempts, list) else []
    return Run(name, path, config, rows, known)


def find_runs(paths: Sequence[str]) -> list[str]:
    """Directories of single runs: those given, the seeds inside one, or the runs in a folder.
    Raises FileNotFoundError where a path holds no run.
    """
    found = []
    for path in map(hub.local, paths):
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


def group(paths: Sequence[str], labels: Sequence[str] | None = None) -> list[Group]:
    """The runs at `paths` by task and settings, in the order of the first of each.
    labels: one per path, to group by instead of settings. Seeds, logs, evaluations, checkpoints,
    devices and missing settings make no groups. Raises ValueError for another number of labels,
    FileNotFoundError where a path holds no run.
    """
    if labels is not None and len(labels) != len(paths):
        raise ValueError(f"{len(labels)} labels for {len(paths)} runs: give one label a run")
    each = [find_runs([path]) for path in paths]
    runs = [run for own in each for run in own]
    configs = [load_config(run) for run in runs]
    if labels is None:
        names = _differences(configs)
    else:
        names = [label for label, own in zip(labels, each, strict=True) for _ in own]
    found: dict[tuple[str, str], list[str]] = {}
    for run, config, name in zip(runs, configs, names, strict=True):
        found.setdefault((config["env"]["name"], name), []).append(run)
    return [Group(task, name, tuple(own)) for (task, name), own in found.items()]


def _differences(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """In words the agent of each run, if there are several, and the settings that differ among the
    runs of that agent."""
    names = [""] * len(configs)
    agents = dict.fromkeys(config["agent"] for config in configs)
    for agent in agents:
        kin = {i: dict(flatten(c)) for i, c in enumerate(configs) if c["agent"] == agent}
        known = dict.fromkeys(name for one in kin.values() for name in one)
        differing = [name for name in known if _differs(name, list(kin.values()))]
        for i, one in kin.items():
            parts = [f"{n}={shown(one[n])}" if n in one else f"{n} not given" for n in differing]
            names[i] = ", ".join([agent] * (len(agents) > 1) + parts)
    return names


def _differs(name: str, configs: Sequence[Mapping[str, Any]]) -> bool:
    if name.partition(".")[0] in _IGNORED or name in ("env.name", "env.kwargs"):
        return False
    values = [config[name] for config in configs if name in config]
    missing = name.startswith("env.kwargs.") and len(values) < len(configs)
    return missing or any(value != values[0] for value in values)


def shown(value: Any) -> str:
    """A setting's value as it is typed; numbers in their shortest form."""
    return f"{value:g}" if isinstance(value, float) else str(value)


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


def times(run: Run) -> dict[str, float]:
    """Seconds of a run over all its starts; {} where its rows have none.
    The first interval of a start includes compilation; its excess over a later interval counts as
    starting.
    """
    trained: list[list[float]] = []  # of every start the seconds of its intervals
    evaluation, last = 0.0, math.inf
    for row in run.rows:
        if is_number(row.get("seconds")):
            if row["seconds"] < last:
                trained.append([])
                last = 0.0
            took, last = row["seconds"] - last, row["seconds"]
            if row["kind"] == "train":
                trained[-1].append(took)
            elif row["kind"] == "eval":
                evaluation += took
    if not trained:
        return {}
    starting = 0.0
    for first, *later in filter(None, trained):
        starting += max(first - (sorted(later)[len(later) // 2] if later else 0.0), 0.0)
    return {
        "start and compilation": starting,
        "training (with what is saved)": sum(map(sum, trained)) - starting,
        "evaluation": evaluation,
    }


def defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Flat settings as the agent's class declares them; {} for an agent that is not known here."""
    try:
        usual = to_dict(build.settings_class(str(config.get("agent")))())
        return dict(flatten(json.loads(json.dumps(usual))))  # as a config.json gives them
    except (ValueError, ImportError, TypeError):
        return {}
