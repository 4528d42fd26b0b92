"""Arguments shared by several commands."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any, NoReturn

from mbx.settings import parse
from mbx.training import hub


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; see {self.prog} --help")


def make_parser(module: str, words: str | None) -> argparse.ArgumentParser:
    """Argument parser of a command module with help text `words`; raises ValueError on errors."""
    return _Parser(
        f"mbx {module.rpartition('.')[2]}",
        description=words,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_run(parser: argparse.ArgumentParser, *, trust: bool = True) -> None:
    """Add the arguments of a command that opens one run."""
    parser.add_argument("run", nargs="?", help="Directory of the run, or hf://USER/NAME.")
    parser.add_argument("--workdir", help="Run directory, instead of the argument.")
    parser.add_argument(
        "--checkpoint", default="best", help="Checkpoint to load: best, latest, or a step."
    )
    if trust:
        words = "Run the environment's file of somebody else's run."
        parser.add_argument("--trust", action="store_true", help=words)


def run_directory(options: argparse.Namespace) -> str:
    """Absolute run directory, since making an environment may change the working directory.
    Raises ValueError where it is given twice or not at all.
    """
    given = [path for path in (options.run, options.workdir) if path is not None]
    if len(given) != 1:
        raise ValueError(f"give one run directory, as argument or --workdir, not {len(given)}")
    return os.path.abspath(hub.local(given[0]))


def at_least(least: int) -> Callable[[str], int]:
    """Argument type: a whole number of at least `least`."""

    def whole(text: str) -> int:
        number = parse(text, 0)
        if not isinstance(number, int | float) or number != int(number) or number < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number, at least {least}")
        return int(number)

    return whole


def import_torch() -> Any:
    """PyTorch, which reads and writes .pt files. Raises ImportError with the remedy without it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("PyTorch reads and writes .pt: pip install 'mbx-rl[torch]'") from error
    return torch
