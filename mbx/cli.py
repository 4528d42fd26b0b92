"""The command `mbx`: `mbx train --config=tdmpc` is `python -m experiments.train --config=tdmpc`.

The commands are the modules of `experiments`: in a checkout that of the checkout, in an installed
package its copy inside `mbx`.
"""

from __future__ import annotations

import ast
import runpy
import sys

import mbx
from mbx.presets import home


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
        print(mbx.__version__)
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
