"""Runs grouped by what they are runs of: task, and the settings in which they differ.

groups = group(find_runs(["runs/sweep"]))
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mbx.settings import flatten
from mbx.training.checkpoint import load_config

# What changes nothing that is learned, or is what the runs of one group differ in.
_IGNORED = ("seed", "num_seeds", "resume", "imports", "log", "checkpoint", "distributed", "eval")
_TASK, _KWARGS = "env.name", "env.kwargs"


class Group(NamedTuple):
    """Runs of one task and one set of settings, which differ in their seeds alone.

    Attributes:
        task: its name.
        settings: what differs from the other groups, "NAME=VALUE, …"; "" where nothing does.
        runs: their directories.
    """

    task: str
    settings: str
    runs: tuple[str, ...]


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


def group(run_dirs: Sequence[str]) -> list[Group]:
    """Runs by task and settings, in the order of the first of each.

    Seeds, logs, checkpoints and devices make no groups. A setting that a run lacks, which an older
    version may have written, makes none either. Raises FileNotFoundError or ValueError for a
    directory that holds no run.
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
    """The runs at `paths`, one label each, by task and label instead.

    Raises ValueError for another number of labels, FileNotFoundError where a path holds no run.
    """
    if len(labels) != len(paths):
        raise ValueError(f"{len(labels)} labels for {len(paths)} runs: give one label a run")
    found: dict[tuple[str, str], list[str]] = {}
    for path, label in zip(paths, labels, strict=True):
        for run in find_runs([path]):
            found.setdefault((load_config(run)["env"]["name"], label), []).append(run)
    return [Group(task, label, tuple(runs)) for (task, label), runs in found.items()]


def agents(run_dirs: Sequence[str]) -> list[str]:
    """The agents of runs, each once."""
    return list(dict.fromkeys(load_config(path)["agent"] for path in run_dirs))


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


def _is_run(path: str) -> bool:
    return os.path.exists(os.path.join(path, "config.json"))


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Numbers by their size: seed-2 before seed-10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in parts if p]
