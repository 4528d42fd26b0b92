"""Which files a run directory may execute: other users' runs execute no code without `--trust`.

`config.json` may name a file with a custom environment. Files that this user has trained with are
listed in `$XDG_DATA_HOME/mbx/environments`, one name a line.
"""

from __future__ import annotations

import contextlib
import os

from mbx.envs import custom


def remember(name: str) -> None:
    """Note that this user trains with a custom environment."""
    new = set(custom.own_names(name)) - _known()
    if not new:
        return
    with contextlib.suppress(OSError):  # a read-only home: `check` says what to do
        os.makedirs(os.path.dirname(_path()), exist_ok=True)
        with open(_path(), "a") as file:
            file.writelines(f"{one}\n" for one in sorted(new))


def check(name: str, workdir: str, trusted: bool) -> None:
    """Raise ValueError where the run in `workdir` names code that this user never trained with.
    trusted: `--trust` was given.
    """
    foreign = [] if trusted else sorted(set(custom.own_names(name)) - _known())
    if foreign:
        raise ValueError(
            f"the run in {workdir} executes {foreign[0].partition(':')[2]}, which no run of yours "
            "was made with: look at it, then ask for it with --trust (run.load: trusted=True)"
        )


def _path() -> str:
    root = os.environ.get("XDG_DATA_HOME") or os.path.expanduser("~/.local/share")
    return os.path.join(root, "mbx", "environments")


def _known() -> set[str]:
    try:
        with open(_path()) as file:
            return set(file.read().splitlines())
    except OSError:
        return set()
