"""Runs of `tests.faults.small` as processes that can be stopped, starved and cut off."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time

from mbx.training.logging import read_rows

ROOT = pathlib.Path(__file__).parents[2]

# nohup, under which these tests may run, would make them deaf to it.
HEAR = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"

# Root may write anywhere; without this capability it is held to permissions as others are.
OBEY = """
import ctypes, os
if os.geteuid() == 0:
    library = ctypes.CDLL(None)
    header, data = (ctypes.c_uint32 * 2)(0x20080522), (ctypes.c_uint32 * 6)()
    assert library.capget(header, data) == 0
    data[0] &= ~(1 << 1)  # effective: CAP_DAC_OVERRIDE
    assert library.capset(header, data) == 0
"""


def start(workdir, *, steps: int, stdout=subprocess.PIPE, before: str = "", **options):
    """A run that goes on where `workdir` exists. before: Python that the process runs first."""
    environment = dict(os.environ, JAX_PLATFORMS="cpu", PYTHONPATH=str(ROOT), PYTHONUNBUFFERED="1")
    arguments = [str(workdir), f"--steps={steps}", *["--resume"] * os.path.isdir(workdir)]
    code = f"import sys; sys.argv[1:] = {arguments!r}\n{HEAR}\n{before}\n"
    return subprocess.Popen(
        [sys.executable, "-c", f"{code}from tests.faults import small\nsmall.main()"],
        cwd=ROOT,
        env=environment,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        **options,
    )


def finish(workdir, *, steps: int, timeout: float = 600, **options) -> tuple[int, str]:
    """Exit status and output of a run that nobody stops."""
    process = start(workdir, steps=steps, **options)
    output = process.communicate(timeout=timeout)[0]
    return process.returncode, output


def wait_for_step(workdir, step: int, process: subprocess.Popen) -> None:
    """Return when the run has logged a row of `step` or later."""
    path = os.path.join(workdir, "metrics.jsonl")
    for _ in range(6000):
        if any(row["step"] >= step for row in read_rows(path)):
            return
        assert process.poll() is None, "the run ended before"
        time.sleep(0.02)
    raise AssertionError("the run did not get anywhere")


def rows_of(workdir) -> list[dict]:
    """Rows without what a clock says."""
    rows = read_rows(os.path.join(workdir, "metrics.jsonl"))
    times = ("time", "seconds", "steps_per_second")
    return [{k: v for k, v in row.items() if k not in times} for row in rows]
