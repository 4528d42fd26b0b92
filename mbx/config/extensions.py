"""Custom modules that a command imports first, so that what they register has a name.

    mbx train --import=my_agents --config=tdmpc --config.planner.name=mine
    mbx evaluate runs/mine --import=path/to/my_agents.py

A run records them (`imports` in its configuration). Commands that read it name them again or have
imported them: nothing that a run directory names is imported by itself.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Sequence

_FLAG = "--import"
_LOADED: dict[str, str] = {}


def load(arguments: Sequence[str]) -> list[str]:
    """Import the modules of `--import=NAME`, which may be repeated; returns the other arguments.
    Raises ValueError where there is no such module or file.
    """
    rest = []
    for argument in arguments:
        name, given, value = argument.partition("=")
        if name != _FLAG:
            rest.append(argument)
        elif not given or not value:
            raise ValueError(f"{argument}: give a module or a file, {_FLAG}=my_module")
        else:
            import_all([value])
    return rest


def import_all(names: str | Iterable[str]) -> None:
    """Import modules, or files ending in .py, once each; their exceptions pass through.
    Raises ValueError where there is no such module or file.
    """
    for name in [names] if isinstance(names, str) else names:
        if _short(name) in _LOADED:
            continue
        _LOADED[_short(name)] = os.path.abspath(name) if name.endswith(".py") else name
        try:
            _import(name)
        except BaseException:
            del _LOADED[_short(name)]
            raise


def loaded() -> tuple[str, ...]:
    """Imported modules by name, and files by absolute path."""
    return tuple(_LOADED.values())


def flags() -> tuple[str, ...]:
    """The arguments that make a further command import the same."""
    return tuple(f"{_FLAG}={name}" for name in loaded())


def require(names: Sequence[str], source: str) -> None:
    """Raise ValueError, with the remedy, where a run's modules are not imported.
    names: the run's `imports`; ValueError unless a list of names. source: their place, for the
    message.
    """
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise ValueError(f"{source}: imports={names!r}: give a list of modules")
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise ValueError(f"{source}: imports={names!r}: {wrong[0]!r} is no module's name")
    missing = [name for name in names if _short(name) not in _LOADED and not _is_imported(name)]
    if missing:
        raise ValueError(
            f"{source} needs custom modules: give "
            + " ".join(f"{_FLAG}={name}" for name in missing)
            + " again (in Python, import them first or give imports=), if you trust them"
        )


def execute(path: str, name: str) -> types.ModuleType:
    """Execute a file as a module with the given name."""
    loader = importlib.machinery.SourceFileLoader(name, path)
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__, module.__loader__ = path, loader
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _is_imported(name: str) -> bool:
    """Whether this process has imported a module, or a file under any name."""
    if not name.endswith(".py"):
        return name in sys.modules
    files = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return os.path.realpath(name) in {os.path.realpath(path) for path in files if path}


def _import(name: str) -> None:
    if _is_imported(name):
        return
    if name.endswith(".py"):
        path = os.path.abspath(name)
        if not os.path.isfile(path):
            raise ValueError(f"{_FLAG}={name}: {path} does not exist")
        execute(path, _short(name))
        return
    sys.path.insert(0, os.getcwd())  # as for `python -m`, whatever the command is called by
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            raise ValueError(f"{_FLAG}={name}: no such module here or installed")
        importlib.import_module(name)
    finally:
        sys.path.remove(os.getcwd())


def _short(name: str) -> str:
    return os.path.basename(name).removesuffix(".py") if name.endswith(".py") else name
