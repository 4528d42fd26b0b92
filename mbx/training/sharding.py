"""The devices and processes of a run: joining them, making cores devices, choosing a partition.

With `mbx.training.devices` and `mbx.training.seeds` the only place that knows of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
from jax.experimental import multihost_utils

from mbx.fast import allocator, compiler
from mbx.training.devices import AXIS, ONE_DEVICE
from mbx.training.devices import Partition as Partition
from mbx.training.files import read_json

if TYPE_CHECKING:
    from mbx.agents.settings import Distributed, RunSettings


def require_float32() -> None:
    """Raise ValueError where JAX makes 64-bit numbers, which the programs are not written for."""
    if jax.config.jax_enable_x64:
        raise ValueError(
            "JAX_ENABLE_X64 is on: runs are in float32; unset it, or set "
            "jax.config.update('jax_enable_x64', False)"
        )


def matmul_precision(precision: str) -> contextlib.AbstractContextManager:
    """The context in which a run's programs are traced: how exact float32 products are.

    "default" leaves that to the device: a GPU may use tf32 and a TPU bfloat16, a CPU is exact.
    """
    if precision == "default":
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)


def initialize(distributed: Distributed) -> None:
    """Join the other processes, before anything runs on a device; nothing for a single process.

    Raises ValueError where the coordinator is neither given nor found out.
    """
    if not distributed.enabled or distributed.num_processes == 1:
        return
    try:
        jax.distributed.initialize(
            distributed.coordinator or None,
            distributed.num_processes or None,
            None if distributed.process_id < 0 else distributed.process_id,
            heartbeat_timeout_seconds=distributed.heartbeat_timeout,
        )
    except ValueError as error:
        raise ValueError(
            f"distributed.coordinator={distributed.coordinator!r}, distributed.num_processes="
            f"{distributed.num_processes}, distributed.process_id={distributed.process_id}: {error}"
            "; give all three, or distributed.num_processes=1 for the devices of this machine"
        ) from error
    # On CPUs the first exchange between processes gives up after 30 seconds, later ones wait: meet
    # here, where all have just come, and not after compiling, when one may be far behind.
    multihost_utils.sync_global_devices("mbx starts")


def use_cores(settings: RunSettings, workdir: str) -> RunSettings:
    """Make cores of this machine's processor a device each; the settings with how many.

    Only before anything has run on a device. Nothing changes for several seeds, processes or an
    accelerator. A run that is resumed keeps what it had.

    Raises ValueError for a number of cores where the run is an accelerator's.
    """
    asked = settings.distributed.cores
    if settings.distributed.enabled or settings.num_seeds > 1:
        return settings
    path = os.path.join(workdir, "config.json")
    if settings.resume and not asked and os.path.exists(path):
        asked = read_json(path).get("distributed", {}).get("cores", 0) or 1
    count = asked or cores_for(settings, available_cores())
    jax.config.update("jax_num_cpu_devices", count)
    if (platform := jax.default_backend()) != "cpu":
        if settings.distributed.cores > 1 and not settings.resume:
            raise ValueError(
                f"distributed.cores={asked} is for a run on a processor, and this one is on a "
                f"{platform}: leave it 0, or set JAX_PLATFORMS=cpu"
            )
        count = 0
    own = dataclasses.replace(settings.distributed, cores=count)
    return dataclasses.replace(settings, distributed=own)


def cores_for(settings: RunSettings, available: int) -> int:
    """Cores that are a device each: the most that the environments divide among evenly.

    Where they do not divide at all two share plans and batches. One for agents that do not gain.
    """
    if not settings.gains_by_cores():
        return 1
    num_envs = settings.env.num_envs
    most = max(n for n in range(1, max(available, 1) + 1) if num_envs % n == 0)
    return most if most > 1 else min(available, 2)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def abandon() -> None:
    """Of several processes, end this one at once, with status 1; alone, do nothing.

    For the end of a process that failed: leaving in order, it would wait minutes for the others,
    which wait for it. They end as when it is killed.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def make_partition(settings: RunSettings, on: Sequence[jax.Device] | None = None) -> Partition:
    """The partition that a run asks for, on the devices there are.

    Args:
        settings: of the run.
        on: other devices, of a topology that is compiled for, say.

    Raises ValueError where the environments cannot be divided among them, or cores are no devices.
    """
    quick = compiler.is_quick(settings.gpu_compiler, settings.train.steps)
    auto = (jax.sharding.AxisType.Auto,)
    cores = settings.distributed.cores
    if not settings.distributed.enabled:
        if cores <= 1:
            return dataclasses.replace(ONE_DEVICE, quick=quick)
        own = jax.devices()[:cores]
        if len(own) < cores or own[0].platform != "cpu":
            raise ValueError(
                f"distributed.cores={cores}: jax has {len(own)} {own[0].platform} device(s) here; "
                f"call jax.config.update('jax_num_cpu_devices', {cores}) before anything runs, or "
                "set distributed.cores=1"
            )
        mesh = jax.make_mesh((cores,), (AXIS,), axis_types=auto, devices=own)
        pieces = settings.large_updates() and allocator.keep_pieces()
        alike = settings.env.num_envs % cores > 0
        return Partition(mesh, cores=True, alike=alike, pieces=pieces)
    devices = jax.device_count() if on is None else len(on)
    num_envs = settings.env.num_envs
    if num_envs % devices:
        raise ValueError(
            f"env.num_envs={num_envs} cannot be divided among {devices} devices: choose a multiple "
            f"of {devices}"
        )
    if settings.num_seeds > 1:
        raise ValueError(
            f"distributed.enabled=True with num_seeds={settings.num_seeds}: seeds are divided "
            "among devices by themselves, leave distributed.enabled=False"
        )
    mesh = jax.make_mesh((devices,), (AXIS,), axis_types=auto, devices=on)
    return Partition(mesh, settings.distributed.fsdp, quick)


def num_shards(settings: RunSettings, partition: Partition) -> int:
    """Shards of the replay: as configured, or one a device.

    Of cores one in all where they cannot share environments and draws evenly: rows then travel.
    """
    num, shared = partition.size, (settings.env.num_envs, *settings.draws())
    if partition.cores and any(n % num for n in shared):
        num = 1
    return settings.replay.shards or num
