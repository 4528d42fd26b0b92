"""Messages of a run on stderr: devices, compilation, resuming; and filters for foreign ones."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mbx.agents.settings import RunSettings
from mbx.settings import flatten, to_dict

_COMPILING = "/jax/core/compile/"  # tracing, lowering, making machine code
_FOREIGN = (
    *("absl", "brax", "dm_control", "dm_env", "etils", "flax", "gymnasium", "gymnax", "imageio"),
    *("jax", "labmaze", "matplotlib", "ml_collections", "mujoco", "mujoco_playground", "numpy"),
    *("optax", "orbax", "OpenGL", "tensorboardX", "tqdm", "wandb"),
)
_NVIDIA = "/dev/nvidia[0-9]*"


def starting() -> None:
    """Print the devices of the run."""
    device, count = jax.devices()[0], jax.device_count()
    kind = f" ({device.device_kind})" if device.platform != "cpu" else ""
    devices = f"{count} {device.platform.upper()} device{'s' * (count > 1)}{kind}"
    _say(f"running on {devices}, jax {jax.__version__}{missed_gpu(jax.config.jax_platforms)}")


def of_task(settings: RunSettings, chosen: RunSettings) -> None:
    """Print the settings that `RunSettings.for_task` filled in."""
    before, after = (dict(flatten(to_dict(one))) for one in (settings, chosen))
    found = [f"{name}={after[name]}" for name in after if after[name] != before[name]]
    if found:
        _say(f"for {settings.env.name}: {', '.join(found)}")


def evaluating(steps: int) -> None:
    """Print that an evaluation begins."""
    _say(f"evaluating at step {steps:,}")


@contextlib.contextmanager
def compiling(what: str, talk: bool = True, kept: bool = True) -> Iterator[None]:
    """Print, if `talk`, that the first use of a program compiles it, and the time that took.
    kept: whether the program goes to the compilation cache.
    """
    if not talk:
        yield
        return
    seconds: list[float] = []
    began = time.monotonic()

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.startswith(_COMPILING):
            seconds.append(duration)

    takes = "half a minute to some minutes" if jax.default_backend() == "gpu" else "20 s or more"
    when = "the first time, kept for the next" if kept else "at every start"
    _say(f"compiling {what} ({takes} {when})")
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Of programs inside programs the tracing is reported twice.
    took = min(sum(seconds), time.monotonic() - began)
    _say(f"compiled {what} in {took:.0f} s")


@contextlib.contextmanager
def without_foreign_deprecations() -> Iterator[None]:
    """Hide deprecation warnings of other packages, unless warnings were chosen (`python -W`)."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                for package in _FOREIGN:
                    warnings.filterwarnings("ignore", category=kind, module=rf"{package}(\.|$)")
        yield


def resuming(workdir: str, step: int, planned: int, changed: Sequence[str]) -> None:
    """Print from which step a run resumes, and its changed settings."""
    _say(f"resuming {workdir} from step {step:,} of {planned:,}")
    _say(f"changed: {'; '.join(changed)}" if changed else "no setting has changed")


def missed_gpu(chosen: str | None) -> str:
    """A remark where this machine has a GPU that the installed jaxlib cannot use; else "".
    chosen: the requested platforms (`JAX_PLATFORMS`), if any.
    """
    if jax.default_backend() != "cpu" or chosen or not glob.glob(_NVIDIA):
        return ""
    return (
        "; this machine has an NVIDIA GPU, but jaxlib is built for CPUs: "
        "pip install -U 'jax[cuda12]' (in a checkout: pip install -e '.[cuda]')"
    )


def quiet_storage() -> None:
    """Hide the storage library's log of errors that it also raises.
    After one failed file it logs a traceback and closes an event loop, for which every other file
    logs another traceback, possibly much later.
    """
    logging.getLogger("absl").addFilter(_not_of_storage)
    shown = sys.unraisablehook
    if getattr(shown, "quiet_storage", False):
        return

    def show(found: Any) -> None:
        error = found.exc_value
        if not (type(error) is RuntimeError and str(error) == "Event loop is closed"):
            shown(found)

    show.quiet_storage = True  # type: ignore[attr-defined]
    sys.unraisablehook = show


def _not_of_storage(record: logging.LogRecord) -> bool:
    return f"{os.sep}orbax{os.sep}" not in record.pathname


def _say(text: str) -> None:
    print(f"mbx: {text}", file=sys.stderr, flush=True)
