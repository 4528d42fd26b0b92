"""Train an agent.

    python -m experiments.train --config=configs/tdmpc.py
    python -m experiments.train --config=configs/tdmpc.py --config.env.name=brax:inverted_pendulum
    python -m experiments.train --config=configs/tdmpc.py --workdir=runs/mine --config.resume=True

Every setting of the configuration file is a flag; an unknown one is an error.
"""

from __future__ import annotations

import os
import sys
import time

from absl import app, flags, logging
from ml_collections import config_flags

CONFIG = config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
WORKDIR = flags.DEFINE_string("workdir", None, "Run directory (default: runs/TASK-sSEED-TIME).")
flags.mark_flag_as_required("config")


def default_workdir(config: dict) -> str:
    """runs/ENVIRONMENT-sSEED-TIME."""
    task = config["env"]["name"].replace(":", "-")
    return os.path.join("runs", f"{task}-s{config['seed']}-{time.strftime('%Y%m%d-%H%M%S')}")


def main(_: list[str]) -> None:
    from mbx.training import run

    logging.set_verbosity(logging.WARNING)
    config = CONFIG.value.to_dict()
    if config["resume"] and WORKDIR.value is None:
        sys.exit(
            "error: --config.resume=True needs --workdir, the directory of the run to continue"
        )
    try:
        result = run.train(config, WORKDIR.value or default_workdir(config))
    except (ValueError, FloatingPointError, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
    print(result)


if __name__ == "__main__":
    app.run(main)
