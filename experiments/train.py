"""Train an agent.

    python -m experiments.train --config=configs/tdmpc.py
    python -m experiments.train --config=configs/tdmpc.py --config.env.name=brax:inverted_pendulum
    python -m experiments.train --config=configs/tdmpc.py --workdir=runs/mine --config.resume=True
    python -m experiments.train --help                                # configuration files, tasks
    python -m experiments.train --config=configs/tdmpc.py --help      # every setting of that file

Every setting of the configuration file is a flag; an unknown one is an error.
"""

from __future__ import annotations

import difflib
import os
import sys
import time
import traceback

from absl import app, flags, logging
from ml_collections import config_flags

from experiments import usage

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory (default: runs/TASK-sSEED-TIME).")
flags.mark_flag_as_required("config")


def default_workdir(config: dict) -> str:
    """runs/ENVIRONMENT-sSEED-TIME."""
    task = config["env"]["name"].replace(":", "-")
    return os.path.join("runs", f"{task}-s{config['seed']}-{time.strftime('%Y%m%d-%H%M%S')}")


def main(_: list[str]) -> None:
    from mbx.training import run, seeds, sharding

    logging.set_verbosity(logging.WARNING)
    config = CONFIG.value.to_dict()
    if config["resume"] and WORKDIR.value is None:
        sys.exit(
            "error: --config.resume=True needs --workdir, the directory of the run to continue"
        )
    if config.get("num_seeds", 1) > 1:
        seeds.use_all_cores(config["num_seeds"])
    try:
        sharding.initialize(config)
        result = run.train(config, WORKDIR.value or default_workdir(config))
    except Exception as error:
        mistake = isinstance(error, ValueError | FloatingPointError | OSError | ImportError)
        print(f"error: {error}" if mistake else traceback.format_exc(), file=sys.stderr)
        sharding.abandon()
        sys.exit(1)
    print(result)


def unknown_flag(arguments: list[str]) -> str | None:
    """A `--config.…` flag that the configuration does not have, as a message with near matches."""
    path = usage.config_argument(arguments)
    if path is None or not os.path.exists(path):
        return None
    known = list(usage.settings(path))
    for argument in arguments:
        name = argument.split("=", 1)[0]
        if name.startswith("--config.") and name.removeprefix("--config.") not in known:
            name = name.removeprefix("--config.")
            close = difflib.get_close_matches(name, known, n=3)
            return f"--config.{name} is not a setting of {path}: did you mean one of {close}?"
    return None


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
    problem = unknown_flag(sys.argv[1:])
    if problem:
        sys.exit(f"error: {problem}")
    app.run(main)
