"""Going on with a run: its configuration, what has changed in it, and what was reached before."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from mbx.agents.settings import RunSettings
from mbx.config import settings_class
from mbx.settings import flatten, from_dict, to_dict
from mbx.training import trust
from mbx.training.checkpoint import load_config
from mbx.training.files import read_json
from mbx.training.metrics import read_rows
from mbx.types import EnvSpec


def saved_config(workdir: str) -> dict[str, Any]:
    """The configuration with which the run in `workdir` goes on where nothing else is said.

    Raises:
        FileNotFoundError: where there is no run.
        ValueError: where it is of another version, or its environment is code or a file that has to
            be named again.
    """
    names = os.listdir(workdir) if os.path.isdir(workdir) else []
    seeds = sorted(int(name[5:]) for name in names if re.fullmatch(r"seed-\d+", name))
    several = seeds and "config.json" not in names
    path = os.path.join(workdir, f"seed-{seeds[0]}") if several else workdir
    values = load_config(path)
    if several:
        values["num_seeds"] = len(seeds)
    try:
        settings = from_dict(settings_class(values["agent"])(), values)
    except ValueError as error:
        raise ValueError(
            f"{path}/config.json is of another version ({error}): use the code that wrote it"
        ) from error
    trust.check(settings.env.name, workdir, False)
    for name, file in settings.files().items():
        raise ValueError(
            f"the run in {workdir} was made from the file {name}={file}: name it again, with "
            "--config=… and the settings the run was started with"
        )
    return values


def changes(settings: RunSettings, log_dir: str, spec: EnvSpec) -> list[str]:
    """The settings in which a resumed run differs from its config.json, with both values in force.

    Args:
        settings: of the resumed run.
        log_dir: where its config.json is.
        spec: its task, which fills in what is left to it.
    """
    path = os.path.join(log_dir, "config.json")
    try:
        before = read_json(path)
    except (FileNotFoundError, ValueError):  # damaged: `rundir.check` has said so
        return []
    old, new = dict(flatten(before)), dict(flatten(json.loads(json.dumps(to_dict(settings)))))
    ours = ("resume", "num_seeds", "seed")  # each of several seeds has its own
    changed = [n for n, x in new.items() if n in old and n not in ours and old[n] != x]
    if not changed:
        return []
    try:
        saved = from_dict(type(settings)(), before, check_effects=False)
        in_force = dict(flatten(to_dict(saved.for_task(spec))))
    except ValueError:  # of another version
        in_force = old
    now = dict(flatten(to_dict(settings.for_task(spec))))
    return [f"{name}={now[name]!r} (was {in_force[name]!r})" for name in changed]


def evaluations_before(log_dirs: Sequence[str], step: int) -> list[tuple[int, float]]:
    """Steps and mean returns, over the seeds, of the evaluations up to `step`."""
    each = [
        {
            row["step"]: row["return_mean"]
            for row in read_rows(os.path.join(path, "metrics.jsonl"))
            if row["kind"] == "eval" and row["step"] <= step and "return_mean" in row
        }
        for path in log_dirs
    ]
    common = sorted(set.intersection(*map(set, each))) if each else []
    values = {s: [np.nan if one[s] is None else one[s] for one in each] for s in common}
    return [(s, float(np.mean(returns))) for s, returns in values.items()]
