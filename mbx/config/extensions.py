"""Modules of one's own that a command imports first, so that what they register has a name.

    python -m experiments.train --import=my_agents --config=tdmpc --config.planner.name=mine
    python -m experiments.evaluate runs/mine --import=path/to/my_agents.py

A run records them (`imports` in its configuration), and whoever opens it gives them again: nothing
that a run directory names is imported by itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence

_FLAG = "--import"
_LOADED: dict[str, str] = {}


def load(arguments: Sequence[str]) -> list[str]:
    """Import what `--import=NAME`, also several of them, names; returns the other arguments.

    Args:
        arguments: of a command. NAME is a module, or a file ending in .py.

    Raises:
        SystemExit: with a message, where there is no such module or file. What importing it raises
            comes as it is.
    """
    rest = []
    for argument in arguments:
        name, given, value = argument.partition("=")
        if name != _FLAG:
            rest.append(argument)
        elif not given or not value:
            sys.exit(f"error: {argument}: give a module or a file, {_FLAG}=my_module")
        else:
            _import(value)
    return rest


def loaded() -> tuple[str, ...]:
    """What was imported so far: modules by name, files by absolute path."""
    return tuple(_LOADED.values())


def flags() -> tuple[str, ...]:
    """The arguments that make a further command import the same."""
    return tuple(f"{_FLAG}={name}" for name in loaded())


def require(names: Sequence[str], source: str) -> None:
    """Raise ValueError, with the flags to give, where modules of a run are not imported yet.

    Raises it as well where `names` is no list of names.

    Args:
        names: the run's `imports`.
        source: where they are named, for the message.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"{source}: imports={names!r}: give a list of modules")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ValueError(f"{source}: imports={names!r}: {wrong[0]!r} is no module's name")
    missing = [name for name in names if _short(name) not in _LOADED]
    if missing:
        raise ValueError(
            f"{source} needs modules of its own: give "
            + " ".join(f"{_FLAG}={name}" for name in missing)
            + " again, if you trust them"
        )


def _import(name: str) -> None:
    """Import a module by name or file, once."""
    short = _short(name)
    if short in _LOADED:
        return
    if name.endswith(".py"):
        path = os.path.abspath(name)
        if not os.path.isfile(path):
            sys.exit(f"error: {_FLAG}={name}: {path} does not exist")
        spec = importlib.util.spec_from_file_location(short, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[short] = module
        spec.loader.exec_module(module)
        name = path
    else:
        sys.path.insert(0, os.getcwd())  # as for `python -m`, whatever the command is called by
        try:
            if importlib.util.find_spec(name.partition(".")[0]) is None:
                sys.exit(f"error: {_FLAG}={name}: no such module here or installed")
            importlib.import_module(name)
        finally:
            sys.path.remove(os.getcwd())
    _LOADED[short] = name


def _short(name: str) -> str:
    """A module's name; of a file the name without folder and .py."""
    return os.path.basename(name).removesuffix(".py") if name.endswith(".py") else name
