"""The command `mbx`: `mbx train --config=tdmpc` is `python -m experiments.train --config=tdmpc`.

The commands are the modules of `experiments`: in a checkout that of the checkout, in an installed
package its copy inside `mbx`.
"""

from __future__ import annotations

import ast
import importlib
import pathlib
import runpy
import sys

_HERE = pathlib.Path(__file__).resolve().parent


def home(name: str) -> tuple[str, pathlib.Path]:
    """The package `name` (experiments, configs) that belongs to this installation.

    Returns:
        Its dotted name and its folder: `mbx.NAME` from a wheel, `NAME` beside mbx in a checkout.

    Raises:
        ImportError: where neither is there.
    """
    for package, folder in ((f"mbx.{name}", _HERE / name), (name, _HERE.parent / name)):
        if (folder / "__init__.py").is_file():
            return package, folder
    raise ImportError(f"mbx is installed without {name}: install the wheel or the checkout again")


def commands() -> dict[str, str]:
    """Every command with the first sentence of its module's docstring."""
    found = {}
    for path in sorted(home("experiments")[1].glob("*.py")):
        source = path.read_text()
        if "\nif __name__ ==" in source:
            words = ast.get_docstring(ast.parse(source)) or ""
            found[path.stem] = words.partition("\n")[0]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the first argument names with the arguments that follow."""
    arguments = sys.argv[1:] if arguments is None else arguments
    known = commands()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: mbx COMMAND [ARGUMENTS]\n\nCommands (each has --help):")
        print("\n".join(f"  {name:18}{words}" for name, words in known.items()))
        return
    if arguments[0] == "--version":
        print(importlib.import_module("mbx").__version__)
        return
    name = arguments[0].replace("-", "_")
    if name not in known:
        sys.exit(f"error: mbx {arguments[0]}: unknown, choose one of {', '.join(known)}")
    package, folder = home("experiments")
    if package == "experiments":  # of the checkout, whatever else is called so
        sys.path.insert(0, str(folder.parent))
    sys.argv = [f"mbx {name}", *arguments[1:]]
    runpy.run_module(f"{package}.{name}", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
