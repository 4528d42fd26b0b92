"""The rows of a run's log in Weights & Biases, too: `log.wandb=PROJECT` (extra `wandb`).

The run's id is kept in wandb.json of its directory, so that a resumed run goes on in the same
curves. Rows carry `environment_steps`, which all curves are drawn over: wandb's own step counter
can not be set back, as a resumed run sets back its log. Where no network is, WANDB_MODE=offline
keeps the rows in the run directory for `wandb sync`.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from mbx.agents.settings import Log
from mbx.files import atomic_write

STEPS = "environment_steps"


class WandbSink:
    """A run of Weights & Biases that mirrors the rows of one run directory.

    Args:
        resume: go on in the run that the directory names, if it names one.

    Raises:
        ImportError: the package is missing.
        ValueError: wandb does not open the run (no key, no network).
    """

    def __init__(self, workdir: str, log: Log, *, config: Mapping[str, Any], resume: bool) -> None:
        wandb = require(log)
        path = os.path.join(workdir, "wandb.json")
        known = _read(path) if resume else {}
        run_id = known.get("id") or secrets.token_hex(8)
        try:
            # Several seeds are several runs in one process.
            self._run = wandb.init(
                project=log.wandb,
                entity=log.wandb_entity or None,
                id=run_id,
                resume="allow",
                reinit="create_new",
                dir=workdir,
                name=_name(workdir),
                config=dict(config),
            )
        except wandb.Error as error:
            raise ValueError(
                f"log.wandb={log.wandb!r}: {error}: run `wandb login`, set WANDB_MODE=offline "
                "to upload later, or leave log.wandb empty"
            ) from error
        self._run.define_metric(STEPS)
        self._run.define_metric("*", step_metric=STEPS)
        atomic_write(path, json.dumps({"id": run_id, "project": log.wandb}).encode())

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Mirror one row; names are KIND/NAME, as in TensorBoard."""
        self._run.log({STEPS: step, **{f"{kind}/{name}": v for name, v in values.items()}})

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


def open_sink(
    workdir: str, log: Log, *, config: Mapping[str, Any], resume: bool
) -> WandbSink | None:
    """The sink that a run asks for, None where it asks for none."""
    return WandbSink(workdir, log, config=config, resume=resume) if log.wandb else None


def require(log: Log) -> ModuleType | None:
    """The package wandb, if a run asks for it. Raises ImportError if it is missing."""
    if not log.wandb:
        return None
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            f"log.wandb={log.wandb!r} needs the package wandb: pip install -e '.[wandb]', or "
            "leave log.wandb empty"
        ) from error
    return wandb


def _read(path: str) -> dict[str, Any]:
    if not os.path.exists(path):
        return {}
    with open(path) as file:
        return json.load(file)


def _name(workdir: str) -> str:
    """The run directory's own name; that of a seed among several with the run's before it."""
    above, name = os.path.split(os.path.abspath(workdir))
    return f"{os.path.basename(above)}/{name}" if name.startswith("seed-") else name
