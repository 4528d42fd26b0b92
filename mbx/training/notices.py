"""What a run says on stderr while there is nothing to log yet: its device, and that it compiles.

And what it keeps from there.
"""

from __future__ import annotations

import contextlib
import glob
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_NVIDIA = "/dev/nvidia[0-9]*"


def starting() -> None:
    """Say where the run computes, and what it is busy with until its first row."""
    device, remark = jax.devices()[0], missed_gpu(jax.config.jax_platforms)
    kind = f", {device.device_kind}" if device.platform != "cpu" else ""
    _say(f"on {jax.device_count()} {device.platform} device(s){kind}{remark}")
    _say("compiling the train step (20 s or more the first time, kept for the next)")


def going_on(workdir: str, step: int, planned: int, changed: Sequence[str]) -> None:
    """Say where a resumed run goes on, and which of its settings are new."""
    _say(f"resuming {workdir} from step {step:,} of {planned:,}")
    _say(f"changed: {'; '.join(changed)}" if changed else "no setting has changed")


def missed_gpu(chosen: str | None) -> str:
    """A remark where this machine has a GPU that the installed jaxlib cannot use; else nothing.

    Args:
        chosen: the platforms that the user asked for (`JAX_PLATFORMS`), if any.
    """
    if jax.default_backend() != "cpu" or chosen or not glob.glob(_NVIDIA):
        return ""
    return (
        "; there is an NVIDIA GPU, but jaxlib is the build for processors: "
        "pip install -U 'jax[cuda12]'"
    )


@contextlib.contextmanager
def without_closed_loops() -> Iterator[None]:
    """Leave out the traces of writes that end after their checkpoint was given up.

    Where one of a checkpoint's files cannot be written, the storage library closes the loop that
    the others report to, and each of them prints a trace; the error itself is raised.
    """
    shown = sys.unraisablehook

    def show(found: Any) -> None:
        error = found.exc_value
        if not (type(error) is RuntimeError and str(error) == "Event loop is closed"):
            shown(found)

    sys.unraisablehook = show
    try:
        yield
    finally:
        sys.unraisablehook = shown


def _say(text: str) -> None:
    print(f"mbx: {text}", file=sys.stderr, flush=True)
