"""Configuration files by name or path: `load("tdmpc2")` is what `configs/tdmpc2.py` returns.

In a checkout the configurations lie beside mbx, in an installed package inside it; commands and
files that change another configuration find them here either way. Nothing here loads JAX.
"""

from __future__ import annotations

import importlib.util
import pathlib
from typing import Any

_HERE = pathlib.Path(__file__).resolve().parent


def home(part: str) -> tuple[str, pathlib.Path]:
    """Where `experiments` or `configs` of this installation is.

    Returns:
        Its dotted name and its folder: `mbx.PART` in an installed wheel, `PART` in a checkout.

    Raises:
        ImportError: where neither is there.

    Examples:
        >>> presets.home("configs")[0]
        'configs'
    """
    for package, folder in ((f"mbx.{part}", _HERE / part), (part, _HERE.parent / part)):
        if (folder / "__init__.py").is_file():
            return package, folder
    raise ImportError(f"mbx is installed without {part}: install the wheel or the checkout again")


def names() -> list[str]:
    """The configurations that come with mbx.

    Examples:
        >>> "tdmpc" in presets.names()
        True
    """
    paths = sorted(home("configs")[1].glob("*.py"))
    return [path.stem for path in paths if "def get_config(" in path.read_text()]


def find(name: str) -> pathlib.Path:
    """The configuration file that `name` means.

    Args:
        name: a path, or the name of a configuration that comes with mbx (`tdmpc`, also as
            `configs/tdmpc.py`).

    Raises:
        ValueError: where there is no such file.

    Examples:
        >>> presets.find("tdmpc").name
        'tdmpc.py'
    """
    path = pathlib.Path(name)
    if path.is_file():
        return path
    if path.parent in (pathlib.Path("."), pathlib.Path("configs")) and path.suffix in ("", ".py"):
        if path.stem in names():
            return home("configs")[1] / f"{path.stem}.py"
    raise ValueError(f"--config={name} does not exist: choose one of {names()} or a file")


def load(name: str) -> Any:
    """The `ConfigDict` of a configuration, by name or path, FILE:ARGUMENT where it takes one.

    Raises ValueError as `find` does.

    Examples:
        >>> presets.load("tdmpc").env.name
        'gymnax:Pendulum-v1'
    """
    name, colon, argument = name.partition(":")
    path = find(name)
    spec = importlib.util.spec_from_file_location(f"mbx_configuration_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(argument) if colon else module.get_config()
