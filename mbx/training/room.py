"""Whether a run fits: its memory and its disk space, estimated before anything is written.

Both are what a run needs at least: what a program computes in between comes on top.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping
from typing import Any

import jax

from mbx.training.state import LoopState

Config = Mapping[str, Any]

_LOG = 50e6  # bytes of rows, events and figures


def check(config: Config, workdir: str, state: LoopState, steps: int, *, devices: int = 1) -> None:
    """Raise ValueError, with the numbers and what to do, where a run cannot fit.

    Args:
        config: its configuration.
        workdir: where it will write.
        state: its state, abstract or not.
        steps: rows that it will make in all.
        devices: devices that it is divided among.
    """
    sizes = parts(state)
    _check_memory(config, sizes, devices)
    capacity = max(1, config["replay"]["capacity"])
    filled = sizes["replay"] * min(1.0, steps / capacity)  # what is empty compresses to nothing
    checkpoints = 1 if config["resume"] else 2
    needed = checkpoints * (sizes["train state"] + filled) + _LOG
    free = free_disk(workdir)
    if needed > free:
        raise ValueError(
            f"workdir={workdir} has {_gb(free)} free, the run needs {_gb(needed)} for "
            f"{checkpoints} checkpoints and its log: free space there, choose another directory, "
            "or lower replay.capacity"
        )


def parts(state: LoopState) -> dict[str, int]:
    """Bytes of the parts of a state that grow with settings."""
    return {
        "replay": _bytes(state.replay),
        "train state": _bytes(state.train),
        "parameters": _bytes(state.train.params),
    }


def _check_memory(config: Config, sizes: Mapping[str, int], devices: int) -> None:
    # Gradients and what the optimiser makes of them.
    held = sizes["train state"] + 2 * sizes["parameters"] + sizes["replay"] / devices
    copied = sizes["train state"] + sizes["replay"] / devices  # a checkpoint, while it is written
    limit, on_device = _device_memory()
    if limit is None:
        needed, free, where = (held + copied) * devices, free_memory(), "memory"
    else:
        needed, free, where = held, limit - on_device, f"memory of {jax.local_devices()[0]}"
        if copied > free_memory():
            needed, free, where = copied, free_memory(), "memory for a checkpoint's copy"
    if needed > free:
        raise ValueError(
            f"replay.capacity={config['replay']['capacity']} and the model need at least "
            f"{_gb(needed)} of {where} (replay {_gb(sizes['replay'])}, train state "
            f"{_gb(sizes['train state'])}), {_gb(free)} is free: lower replay.capacity, or choose "
            "a smaller model"
        )


def _device_memory() -> tuple[float | None, float]:
    """Limit and use of the first device's own memory; None where it uses the host's."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (None, 0.0) if not stats else (stats.get("bytes_limit"), stats.get("bytes_in_use", 0))


def free_memory() -> float:
    """Bytes that this process may still allocate; infinite where the system does not say."""
    limits = [math.inf]
    with contextlib.suppress(OSError, ValueError, StopIteration), open("/proc/meminfo") as file:
        line = next(line for line in file if line.startswith("MemAvailable:"))
        limits.append(float(line.split()[1]) * 1024)
    limits += _process_limits()
    # Of a container, by either version of control groups.
    for most, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            with open(most) as file, open(used) as other:
                limits.append(float(file.read()) - float(other.read()))
    return max(0.0, min(limits))


def _process_limits() -> list[float]:
    """Bytes that this process may have at all (`ulimit -v`, `ulimit -d`).

    What it has of them already is not taken off: much of that is room that its allocator reserved.
    """
    try:
        import resource
    except ImportError:  # not on Windows
        return []
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA)]
    return [float(limit) for limit in limits if limit != resource.RLIM_INFINITY]


def free_disk(path: str) -> float:
    """Bytes free where `path` is, or will be made."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return shutil.disk_usage(path).free


def _bytes(tree: Any) -> int:
    leaves = jax.tree.leaves(jax.eval_shape(_without_keys, tree))
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def _without_keys(tree: Any) -> Any:
    def one(x: Any) -> Any:
        return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return jax.tree.map(one, tree)


def _gb(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e8 else f"{number / 1e6:.3g} MB"
