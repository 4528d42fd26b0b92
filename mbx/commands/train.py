"""Train an agent.

    mbx train --config=configs/tdmpc.py
    mbx train --config=configs/tdmpc.py --config.env.name=brax:inverted_pendulum
    mbx train --workdir=runs/mine --config.resume=True   # with its saved settings
    mbx train --help                                     # configurations, tasks
    mbx train --config=configs/tdmpc.py --help           # every setting of that file

Every setting is a flag; an unknown one is an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from mbx.agents.settings import Distributed, RunSettings
from mbx.config import help, loading
from mbx.settings import from_dict, parse


def main(arguments: list[str]) -> None:
    """Run `mbx train` with its arguments. Exits with a message for invalid settings."""
    try:
        settings, workdir = chosen(arguments) or (None, "")
    except (ValueError, OSError) as error:
        meet_others(arguments, error)
        sys.exit(f"error: {error}")
    if settings is not None:
        train(settings, workdir)


def chosen(arguments: list[str]) -> tuple[RunSettings, str] | None:
    """Settings and run directory of a command line; None after printing help.
    Raises ValueError for invalid settings, FileNotFoundError for no run to resume.
    """
    given = loading.parse_arguments(arguments)
    if given.workdir is not None and given.workdir.startswith("hf://"):
        raise ValueError(
            f"--workdir={given.workdir}: a run is trained in a local directory: give one, and "
            f"--config.train.init_from={given.workdir} to start from those parameters"
        )
    if given.help:
        print(help.of(given.config))
        return None
    resumes = given.value("resume") in ("True", "true", "1")
    if resumes and given.workdir is None:
        raise ValueError("--config.resume=True needs --workdir, the run to continue")
    if given.config is None and not resumes:
        raise ValueError(help.NO_CONFIGURATION)
    if given.config is not None:
        settings = loading.load(given.config, given.changes)
    else:
        from mbx.training import rundir

        settings = loading.load(rundir.saved_config(given.workdir), given.changes)
    if given.workdir is not None:
        return settings, os.path.abspath(given.workdir)
    from mbx.training import rundir

    return settings, os.path.abspath(rundir.default(settings))


def meet_others(arguments: list[str], error: Exception) -> None:
    """Join a run's other processes before this one fails, so that they notice and end."""
    flags = (one.partition("=") for one in arguments if one.startswith("--config.distributed."))
    given = {name.rpartition(".")[2]: parse(text or "True", 0) for name, _, text in flags}
    if given.get("enabled") is not True:
        return
    from mbx.training import devices

    print(f"error: {error}", file=sys.stderr)
    with contextlib.suppress(ValueError):
        devices.initialize(from_dict(Distributed(), given, check_effects=False))
        devices.abandon()


def train(settings: RunSettings, workdir: str) -> None:
    """Train and print the result; exits with a status on failure.
    1: an error, in words. 128 + N: stopped by signal N (130: Ctrl-C), and saved.
    """
    from mbx.analysis import report
    from mbx.training import devices, logging, run

    try:
        with (
            logging.without_foreign_deprecations(),
            run.Interrupt(ends_process=True) as signals,
        ):
            # First: if this process fails later, those that have met it notice and end as well.
            devices.initialize(settings.distributed)
            settings = devices.use_cores(settings, workdir)
            result = run.train(settings, workdir, interrupt=signals, at_end=report.at_end)
    except Exception as error:
        print(in_words(error), file=sys.stderr)
        devices.abandon()
        sys.exit(1)
    print(result, flush=True)
    if result.signal is not None:
        sys.exit(128 + result.signal)


def in_words(error: Exception) -> str:
    """Printed form of an error: one line for a user's mistake, else its traceback.
    Errors in an environment's own code come with that code's traceback.
    """
    from mbx.envs.custom import EnvironmentFailure

    if isinstance(error, EnvironmentFailure):
        return "".join(traceback.format_exception(error.__cause__)) + f"error: {error}"
    mistake = isinstance(error, ValueError | FloatingPointError | OSError | ImportError)
    return f"error: {error}" if mistake else "".join(traceback.format_exception(error))
