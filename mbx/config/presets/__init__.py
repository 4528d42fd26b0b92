"""Configurations that come with mbx, one module each, and configuration files of a user.

`load("tdmpc2")` is what `configs/tdmpc2.py` returns: every setting, a `ConfigDict` that a file of
one's own may change further. Nothing here loads JAX.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

from ml_collections import config_dict

from mbx.config import extensions

_HERE = pathlib.Path(__file__).resolve().parent


class Preset(NamedTuple):
    """A configuration: its file's docstring (`words`) and every setting (`values`)."""

    words: str
    values: config_dict.ConfigDict


def names() -> list[str]:
    """The configurations that come with mbx."""
    return sorted(path.stem for path in _HERE.glob("*.py") if path.stem != "__init__")


def find(name: str) -> pathlib.Path:
    """The configuration file of a path or a name (`tdmpc`, also as `configs/tdmpc.py`).
    Raises ValueError where there is no such file.
    """
    path = pathlib.Path(name)
    if path.is_file():
        return path
    if path.parent in (pathlib.Path("."), pathlib.Path("configs")) and path.suffix in ("", ".py"):
        if path.stem in names():
            return _HERE / f"{path.stem}.py"
    raise ValueError(f"--config={name} does not exist: choose one of {names()} or a file")


def read(name: str) -> Preset:
    """A configuration by name or path, FILE:ARGUMENT where its `get_config` takes one.
    Raises ValueError as `find`, and for a file whose `get_config` is missing or returns no
    settings.
    """
    name, colon, argument = name.partition(":")
    path = find(name)
    if path.parent == _HERE:
        module = importlib.import_module(f"{__name__}.{path.stem}")
    else:
        module = extensions.execute(str(path), f"mbx_configuration_{path.stem}")
    get_config = getattr(module, "get_config", None)
    if get_config is None:
        raise ValueError(f"--config={name}: define get_config() there, which returns the settings")
    values = get_config(argument) if colon else get_config()
    if isinstance(values, Mapping):
        values = config_dict.ConfigDict(dict(values))
    if not isinstance(values, config_dict.ConfigDict):
        raise ValueError(
            f"--config={name}: get_config() returned {type(values).__name__}, not the settings: "
            "end it with `return config`"
        )
    origin = sys.modules.get(get_config.__module__, module)  # a file may pass on another's
    return Preset(origin.__doc__ or "", values)


def load(name: str) -> config_dict.ConfigDict:
    """The settings of a configuration, as `read`."""
    return read(name).values
