"""The command `mbx`: `mbx train --config=tdmpc` is `python -m experiments.train --config=tdmpc`."""

from __future__ import annotations

import ast
import faulthandler
import importlib
import os
import pathlib
import sys

import mbx
from mbx.config import extensions
from mbx.fast import allocator
from mbx.training import files

_JOBS = {
    "Train": ("train", "sweep"),
    "Look at runs": ("evaluate", "plot", "report", "watch", "play"),
    "Use a policy elsewhere": ("export", "push", "export_data", "export_tdmpc2", "import_tdmpc2"),
    "Worlds": ("convert_map",),
}
COMMANDS = [name for names in _JOBS.values() for name in names]


def main(arguments: list[str] | None = None) -> None:
    """Prepare the process, then `run` its arguments.
    The allocator is configured before jax is imported. Log output of libraries is hidden; errors of
    theirs that end a command are reported by it.
    """
    from absl import logging

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # read when jaxlib is loaded
    allocator.keep_freed_pages()
    faulthandler.enable()
    logging.use_absl_handler()
    logging.set_verbosity(logging.FATAL)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal may have fewer signs than we write
            stream.reconfigure(errors="replace")
    files.tolerate_closed_output()
    run(sys.argv[1:] if arguments is None else arguments)


def run(given: list[str]) -> None:
    """Run the command that the first argument names.
    A user's mistake prints one line and exits with status 1.
    """
    if not given or given[0] in ("-h", "--help", "help"):
        print(usage())
        return
    if given[0] == "--version":
        print(mbx.__version__)
        return
    name = given[0].replace("-", "_")
    if name not in COMMANDS:
        sys.exit(f"error: mbx {given[0]}: unknown, choose one of {', '.join(COMMANDS)}")
    try:
        rest = extensions.load(given[1:])
        importlib.import_module(f"mbx.commands.{name}").main(rest)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")


def usage() -> str:
    """Every command with the first sentence of its module's docstring, by what it is for."""
    lines = ["usage: mbx COMMAND [ARGUMENTS]      (each has --help)"]
    for job, names in _JOBS.items():
        lines += ["", f"{job}:"]
        for name in names:
            source = pathlib.Path(__file__).with_name("commands") / f"{name}.py"
            words = ast.get_docstring(ast.parse(source.read_text())) or ""
            lines.append(f"  {name:16}{words.partition(chr(10))[0]}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
