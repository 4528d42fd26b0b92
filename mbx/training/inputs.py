"""The user's own files that a run's environment is made from, kept in the run directory.

A path on the command line is the user's. The same path in a `config.json` may be a stranger's, or
of a file that has changed or gone since. So a run keeps copies of what it began with, and whoever
reads a run directory is led to these.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping

from mbx import envs
from mbx.agents.settings import RunSettings
from mbx.training.files import atomic_write

FOLDER = "inputs"


def check(files: Mapping[str, str], log_dir: str) -> None:
    """Raise ValueError where the run in `log_dir` began with other files than these, by setting."""
    for name, path in files.items():
        copy = _copy(log_dir, name, path)
        if os.path.exists(copy) and _content(copy) != _content(path):
            raise ValueError(
                f"{name}={path} is not what the run in {log_dir} began with, which is {copy}: give "
                "that file, or choose another directory"
            )


def keep(files: Mapping[str, str], log_dir: str) -> None:
    """Copy the files that settings name into a run directory."""
    for name, path in files.items():
        copy = _copy(log_dir, name, path)
        if not os.path.exists(copy):
            os.makedirs(os.path.dirname(copy), exist_ok=True)
            atomic_write(copy, _content(path))


def kept(settings: RunSettings, log_dir: str) -> RunSettings:
    """`settings` from a run directory, with its copies in place of the files they name.

    Raises ValueError where there is none, or it is a link that leads out of the directory.
    """
    copies = {}
    for name, path in settings.files().items():
        copy = _copy(log_dir, name, path)
        inside = os.path.realpath(copy).startswith(os.path.realpath(log_dir) + os.sep)
        if not inside or not os.path.isfile(copy):
            raise ValueError(
                f"{name}={path} lies outside of the run and is not opened: if you trust that file, "
                f"copy it to {copy}"
            )
        copies[name] = copy
    settings = settings.with_files(copies)
    if "env.name" in copies and (other := envs.reads(settings.env.name)):
        warnings.warn(f"{copies['env.name']} reads {os.path.abspath(other)}", stacklevel=3)
    return settings


def _copy(log_dir: str, name: str, path: str) -> str:
    return os.path.join(log_dir, FOLDER, name + (os.path.splitext(path)[1] or ".yaml"))


def _content(path: str) -> bytes:
    """Of a file; of a folder that of its YAML files as one, a line `---` before each."""
    if os.path.isdir(path):
        files = sorted(name for name in os.listdir(path) if name.endswith(".yaml"))
        return b"".join(b"---\n" + _content(os.path.join(path, name)) + b"\n" for name in files)
    with open(path, "rb") as file:
        return file.read()
