"""Train an agent.

    python -m experiments.train --config=configs/tdmpc.py
    python -m experiments.train --config=configs/tdmpc.py --config.env.name=brax:inverted_pendulum
    python -m experiments.train --workdir=runs/mine --config.resume=True   # as it was configured
    python -m experiments.train --help                                # configuration files, tasks
    python -m experiments.train --config=configs/tdmpc.py --help      # every setting of that file

Every setting of the configuration file is a flag; an unknown one is an error.
"""

from __future__ import annotations

import sys
import traceback
from typing import Any

from absl import app, flags, logging
from ml_collections import config_flags

from mbx.agents.settings import Distributed
from mbx.config import extensions
from mbx.config import help as usage

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory (default: runs/TASK-sSEED-TIME).")
flags.mark_flag_as_required("config")
_KWARGS: dict[str, Any] = {}  # of the environment, from the command line


def main(_: list[str]) -> None:
    config = CONFIG.value.to_dict()
    config["imports"] = tuple(dict.fromkeys((*config["imports"], *extensions.loaded())))
    config["env"].setdefault("kwargs", {}).update(_KWARGS)
    if config["resume"] and WORKDIR.value is None:
        sys.exit("error: --config.resume=True needs --workdir, the run to continue")
    if WORKDIR.value:
        train(config, WORKDIR.value)
        return
    from mbx.api import default_workdir

    train(config, default_workdir(config))


def train(config: dict[str, Any], workdir: str) -> None:
    """Train and print what came of it; ends the process with a status where that is not well.

    1: an error, in words. 128 + N: stopped by signal N (130: Ctrl-C), and saved.
    """
    from mbx import files
    from mbx.analysis import report
    from mbx.training import build, interrupt, notices, run, seeds, sharding

    files.tolerate_closed_output()
    logging.set_verbosity(logging.FATAL)  # libraries' traces of errors that are reported below
    try:
        with (
            notices.without_foreign_deprecations(),
            interrupt.Interrupt(ends_process=True) as signals,
        ):
            # First: if this process fails later, those that have met it notice and end as well.
            sharding.initialize(Distributed(**config.get("distributed", {})))
            settings = build.read(config)
            if settings.num_seeds > 1:
                seeds.use_all_cores(settings.num_seeds)
            settings = sharding.use_cores(settings, workdir)
            result = run.train(settings, workdir, interrupt=signals, at_end=report.at_end)
    except Exception as error:
        print(in_words(error), file=sys.stderr)
        sharding.abandon()
        sys.exit(1)
    print(result, flush=True)
    if result.signal is not None:
        sys.exit(128 + result.signal)


def in_words(error: Exception) -> str:
    """What is printed of an error: a line for a mistake, its traceback for anything else.

    An error in an environment's own code comes with that code's traceback.
    """
    from mbx.envs.custom import EnvironmentFailure

    if isinstance(error, EnvironmentFailure):
        return "".join(traceback.format_exception(error.__cause__)) + f"error: {error}"
    mistake = isinstance(error, ValueError | FloatingPointError | OSError | ImportError)
    return f"error: {error}" if mistake else "".join(traceback.format_exception(error))


def show_help(arguments: list[str]) -> None:
    """Print the help that a command line asks for."""
    try:
        print(usage.help_text(arguments))
    except ValueError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    if usage.wants_help(sys.argv[1:]):
        show_help(sys.argv[1:])
        sys.exit()
    try:
        sys.argv[1:] = usage.with_run_config(sys.argv[1:])
        problem = usage.unknown_flag(sys.argv[1:])
        sys.argv[1:] = usage.with_whole_numbers(sys.argv[1:])
        sys.argv[1:], _KWARGS = usage.with_kwargs(usage.with_found_config(sys.argv[1:]))
    except (ValueError, OSError) as error:
        problem = str(error)
    if problem:
        sys.exit(f"error: {problem}")
    app.run(main)
