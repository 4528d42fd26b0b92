"""Checks of a run directory before a run starts or resumes in it.

Existing files are not overwritten: a run is resumed or left unchanged, and only what a resumed run
regenerates is moved.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any

from mbx.agents.settings import RunSettings
from mbx.envs import custom
from mbx.training.files import read_json
from mbx.training.metrics import read_rows

Config = Mapping[str, Any]

# What a run keeps from beginning to end; everything else may change when it is resumed.
_FIXED = ("agent", "seed", "num_seeds", "env", "model")
_MADE = (
    "metrics.jsonl",
    "metrics.csv",
    "episodes.csv",
    "training_episodes.csv",
    "best",
    "tb",
    "curve.png",
    "report.html",
    "config.json",
)


def default(settings: RunSettings) -> str:
    """A directory for a new run, runs/TASK-sSEED-TIME."""
    when = time.strftime("%Y%m%d-%H%M%S")
    return os.path.join("runs", f"{custom.label(settings.env.name)}-s{settings.seed}-{when}")


def check(config: Config, workdir: str, log_dir: str) -> None:
    """Raise ValueError where a run of `config` cannot start or resume in `workdir`.
    log_dir: the directory of its rows; `workdir`, or that of the first of several seeds.
    """
    if os.path.exists(workdir) and not os.path.isdir(workdir):
        raise ValueError(f"workdir={workdir} is a file: choose another directory")
    names = ("metrics.jsonl", "best")
    holds = [name for name in names if _holds(log_dir, name) or _holds(workdir, name)]
    holds += ["checkpoints"] if _holds(workdir, "checkpoints") else []
    if not config["resume"]:
        if holds:
            raise ValueError(
                f"workdir={workdir} already holds a run ({', '.join(holds)}): continue it with "
                "--config.resume=True or choose another directory"
            )
        return
    begun = [os.path.join(log_dir, "config.json"), os.path.join(workdir, ".lock")]
    if not holds and not any(os.path.exists(path) for path in begun):
        raise ValueError(
            f"workdir={workdir} holds no run to resume: mend the path, or begin one there without "
            "--config.resume=True"
        )
    _check_same(config, begun[0])


def check_rows(log_dir: str, first_checkpoint: int, steps: int) -> None:
    """Raise ValueError where the checkpoints of rows in `log_dir` have been lost.
    first_checkpoint: environment steps at which the first was due; its write may last until the
    second. steps: environment steps of the whole run.
    """
    rows = read_rows(os.path.join(log_dir, "metrics.jsonl"))
    last = max((row["step"] for row in rows), default=0)
    if last > 2 * first_checkpoint or last >= steps:
        raise ValueError(
            f"{log_dir} has rows up to step {last:,} and no checkpoint: put checkpoints/ back, or "
            "begin again in another directory (resuming here would write over those rows)"
        )


def set_aside(log_dir: str) -> None:
    """Move files from before the first checkpoint into a separate directory."""
    made = [name for name in _MADE if os.path.lexists(os.path.join(log_dir, name))]
    if "metrics.jsonl" not in made:
        return
    number = 1
    while os.path.lexists(aside := os.path.join(log_dir, f"before-{number}")):
        number += 1
    os.makedirs(aside)
    for name in made:
        os.rename(os.path.join(log_dir, name), os.path.join(aside, name))
    warnings.warn(
        f"{log_dir} has no checkpoint yet: the run begins again, what was there is in {aside}",
        stacklevel=3,
    )


def _holds(directory: str, name: str) -> bool:
    """Whether a file or a non-empty directory exists."""
    path = os.path.join(directory, name)
    return bool(os.listdir(path)) if os.path.isdir(path) else os.path.lexists(path)


def _check_same(config: Config, path: str) -> None:
    """Raise ValueError where `config` describes another run than the one at `path`."""
    if not os.path.exists(path):
        return
    try:
        saved = read_json(path)
    except ValueError as error:
        warnings.warn(f"{error}: written again", stacklevel=4)
        return
    # As it comes back from JSON; each of several seeds keeps its own configuration.
    given = json.loads(json.dumps({**config, "num_seeds": 1}))
    pairs = {name: (saved.get(name), given.get(name)) for name in _FIXED}
    different = []
    for name, (old, new) in pairs.items():
        if isinstance(old, dict) and isinstance(new, dict):
            # What only one of them has came, or went, with a version.
            inner = sorted(k for k in old.keys() & new.keys() if old[k] != new[k])
            different += [f"{name}.{k}={new[k]!r} (there {old[k]!r})" for k in inner]
        elif None not in (old, new) and old != new:
            different.append(f"{name}={new!r} (there {old!r})")
    if different:
        raise ValueError(
            f"{path} is of another run: {'; '.join(different[:4])}: give the settings it was "
            "started with, or choose another directory"
        )
