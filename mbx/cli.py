"""The command `mbx`: `mbx train --config=tdmpc` is `python -m experiments.train --config=tdmpc`."""

from __future__ import annotations

import ast
import pathlib
import runpy
import sys

import mbx
from mbx.config import extensions
from mbx.training import memory

_JOBS = {
    "Train": ("train", "sweep"),
    "See what came of it": ("evaluate", "plot", "report", "watch", "play"),
    "Take a policy along": ("export", "export_tdmpc2", "import_tdmpc2"),
}


def commands() -> dict[str, str]:
    """Every command with the first sentence of its module's docstring, by what they are for."""
    found = {}
    for name in (name for names in _JOBS.values() for name in names):
        source = pathlib.Path(__file__).with_name("commands") / f"{name}.py"
        words = ast.get_docstring(ast.parse(source.read_text())) or ""
        found[name] = words.partition("\n")[0]
    return found


def main(arguments: list[str] | None = None) -> None:
    """Run the command that the first argument names with the arguments that follow."""
    arguments = sys.argv[1:] if arguments is None else arguments
    known = commands()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print("usage: mbx COMMAND [ARGUMENTS]      each has --help")
        for job, names in _JOBS.items():
            print(f"\n{job}:")
            print("\n".join(f"  {name:16}{known[name]}" for name in names))
        return
    if arguments[0] == "--version":
        print(mbx.__version__)
        return
    name = arguments[0].replace("-", "_")
    if name not in known:
        sys.exit(f"error: mbx {arguments[0]}: unknown, choose one of {', '.join(known)}")
    memory.keep_freed_pages()  # before jax loads
    sys.argv = [f"mbx {name}", *extensions.load(arguments[1:])]
    runpy.run_module(f"mbx.commands.{name}", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
