"""run.json: what code ran where and when. Written for people and tables; no run depends on it.

    {"attempts": [{"started": "2026-11-22T20:00:00Z", "from_step": 0, "ended": "…", "to_step": 4000,
                   "outcome": "complete", "commit": "1a2b3c4", "changed_files": 0,
                   "versions": {"mbx": "…", "jax": "…"}, "machine": "…", "devices": "1 cpu"}, …]}

Every start of a run, also a resumed one, is an attempt; one without `ended` was killed.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import warnings
from collections.abc import Iterator
from typing import Any

import jax

import mbx
from mbx.training.files import atomic_write, read_json

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_AT_THE_END = ("ended", "to_step", "outcome")  # None of an attempt that goes on


class Attempt:
    """The attempt that goes on. Set `to_step` and `outcome` before it ends."""

    def __init__(self) -> None:
        self.to_step: int | None = None
        self.outcome = "complete"


@contextlib.contextmanager
def attempt(workdir: str, from_step: int) -> Iterator[Attempt]:
    """Record a start in WORKDIR/run.json, and how it ended.

    A file that cannot be read is written again, with a warning. Raises OSError where it cannot be
    written.
    """
    path, going = os.path.join(workdir, "run.json"), Attempt()
    earlier = _earlier(path)
    now = {"started": _clock(), "from_step": from_step, **dict.fromkeys(_AT_THE_END)}
    now |= provenance()
    now["devices"] = f"{jax.device_count()} {jax.devices()[0].device_kind}"
    _write(path, [*earlier, now])
    try:
        yield going
    except BaseException as error:
        now |= {"ended": _clock(), "to_step": going.to_step, "outcome": type(error).__name__}
        with contextlib.suppress(OSError):  # the error itself is what has to be told
            _write(path, [*earlier, now])
        raise
    now |= {"ended": _clock(), "to_step": going.to_step, "outcome": going.outcome}
    _write(path, [*earlier, now])


def load(workdir: str) -> list[dict[str, Any]]:
    """The attempts of a run, oldest first; [] where there is no run.json.

    Raises ValueError, naming the file, where it holds anything else.
    """
    path = os.path.join(workdir, "run.json")
    if not os.path.lexists(path):
        return []
    found = read_json(path).get("attempts")
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise ValueError(f"{path}: field 'attempts' is missing or no list of objects")
    return found


def provenance() -> dict[str, Any]:
    """Commit, versions and machine of what runs now: fields of an attempt.

    The commit is that of the checkout that mbx lies in ("unknown" for an installed wheel).
    """
    root = pathlib.Path(mbx.__file__).resolve().parents[1]
    top = _git(root, "rev-parse", "--show-toplevel")
    own = bool(top) and pathlib.Path(top).resolve() == root
    changed = _git(root, "status", "--porcelain", "--untracked-files=no") if own else ""
    return {
        "commit": (_git(root, "rev-parse", "--short", "HEAD") if own else "") or "unknown",
        "changed_files": len(changed.splitlines()),
        "versions": {"mbx": mbx.__version__, "python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _PACKAGES},
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
    }


def _git(root: pathlib.Path, *arguments: str) -> str:
    """What git says, '' where it is not there or does not answer."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _earlier(path: str) -> list[dict[str, Any]]:
    try:
        return load(os.path.dirname(path))
    except (ValueError, OSError) as error:
        warnings.warn(f"{error}: written again", stacklevel=4)
        return []


def _write(path: str, attempts: list[dict[str, Any]]) -> None:
    atomic_write(path, (json.dumps({"attempts": attempts}, indent=1) + "\n").encode())


def _clock() -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")
