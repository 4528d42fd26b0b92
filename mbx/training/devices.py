"""Where a run's arrays lie: on one device, or divided among the devices of a mesh.

All devices of all processes form one mesh with the axis "data". Whatever leads with the
environments (their states, the acting state, the replay) is divided along it; parameters and
optimisers are copies, or divided as well where they are large (`distributed.fsdp`). The programs
stay those of one device: the compiler divides them, so that losses, gradients and percentiles are
those of the whole batch. The replay draws its batches in as many shards as there are devices
(`mbx.replay_storage`), so that rows never travel.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from mbx.fast import allocator, collectives, compiler
from mbx.training.files import read_json
from mbx.training.state import LoopState

if TYPE_CHECKING:
    from mbx.agents.settings import Distributed, RunSettings
    from mbx.replay import ReplayState

Array = jax.Array

AXIS = "data"
# What leads with the environments.
_DIVIDED = ("actor", "env", "obs", "reward", "is_first", "replay")


@dataclasses.dataclass(frozen=True)
class Partition:
    """Placement of the arrays of a run: on one device (mesh None), or on a mesh's devices."""

    mesh: jax.sharding.Mesh | None = None
    fsdp: bool = False
    quick: bool = False  # about compiling what trains, on GPUs
    cores: bool = False  # whether its devices are the cores of a CPU
    replicated: bool = False  # whether every core holds all environments: they do not divide
    pieces: bool = False  # whether its programs ask for memory in pieces (`mbx.fast.allocator`)

    @property
    def size(self) -> int:
        """Number of devices."""
        return 1 if self.mesh is None else self.mesh.size

    @property
    def platform(self) -> str:
        """What the devices are: "cpu", "gpu" or "tpu"."""
        return jax.default_backend() if self.mesh is None else self.mesh.devices.flat[0].platform

    @property
    def training(self) -> compiler.Options | None:
        """`compiler_options` of programs that train."""
        return compiler.for_training(self.platform, self.quick, self.pieces)

    @property
    def once(self) -> compiler.Options | None:
        """`compiler_options` of programs that run once in a while."""
        return compiler.for_once(self.platform)

    @property
    def processes(self) -> int:
        """Processes that run together."""
        return 1 if self.mesh is None else jax.process_count()

    @property
    def is_main_process(self) -> bool:
        """Whether this process is the one that writes logs and figures."""
        return self.processes == 1 or jax.process_index() == 0

    def own_seed(self, seed: int) -> int:
        """A seed for what every process draws by itself: host environments."""
        return seed + (1000 * jax.process_index() if self.processes > 1 else 0)

    def _named(self, *axes: str | None) -> jax.sharding.NamedSharding | None:
        if self.mesh is None:
            return None
        return jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec(*axes))

    def of_environments(self, tree: Any) -> Any:
        """Shardings of a tree whose leaves lead with the environments; others are copied."""

        def one(x: Any) -> Any:
            divides = x.ndim and x.shape[0] and x.shape[0] % self.size == 0
            return self._named(AXIS) if divides else self._named()

        return jax.tree.map(one, tree)

    def of_parameters(self, tree: Any) -> Any:
        """Shardings of a train state: copies, or along the longest axis that can be divided."""

        def one(x: Any) -> Any:
            axis = collectives.sharded_axis(x.shape, self.size) if self.fsdp else None
            if axis is None:
                return self._named()
            return self._named(*[AXIS if i == axis else None for i in range(x.ndim)])

        return jax.tree.map(one, tree)

    def of_state(self, state: LoopState) -> LoopState:
        """Shardings of a run's state, given abstractly or as arrays."""

        def places(name: str, part: Any) -> Any:
            if name == "train":
                return self.of_parameters(part)
            if name in _DIVIDED:
                return self.of_environments(part)
            return jax.tree.map(lambda _: self._named(), part)

        names = [field.name for field in dataclasses.fields(state)]
        return LoopState(**{name: places(name, getattr(state, name)) for name in names})

    def build(self, make: Callable[..., LoopState], *args: Any) -> LoopState:
        """`make(*args)`, compiled, with its arrays where they belong."""
        return self.builder(make, *args)(*args)

    def builder(self, make: Callable[..., LoopState], *args: Any) -> Callable[..., LoopState]:
        """The program that `build` runs, for arguments like these.

        Where only shapes are asked for it is traced into another program, which leaves it none of
        the compiler's options.
        """
        tracing = isinstance(jax.device_put(np.int32(0)), jax.core.Tracer)
        options = None if tracing else self.once
        if self.mesh is None:
            return jax.jit(make, compiler_options=options)
        places = self.of_state(jax.eval_shape(make, *args))
        return jax.jit(make, out_shardings=places, compiler_options=options)

    def shapes(self, state: LoopState) -> LoopState:
        """A state given abstractly, with where its arrays belong."""
        if self.mesh is None:
            return state
        return jax.tree.map(lambda x, at: x.update(sharding=at), state, self.of_state(state))

    def place(self, state: LoopState) -> LoopState:
        """The state with its arrays where they belong."""
        if self.mesh is None:
            # Bound to the device where it lies, as a restored state is: a state half bound (with
            # loaded parameters, say) would be another program's than what that program gives back.
            return jax.device_put(state, state.key.sharding)
        return jax.device_put(state, self.of_state(state))

    def keep(self, step: Callable[..., tuple[LoopState, Any]]) -> Callable:
        """`step` whose state stays where it belongs."""
        if self.mesh is None:
            return step

        def kept(state: LoopState, *args: Any) -> tuple[LoopState, Any]:
            state, metrics = step(state, *args)
            return jax.lax.with_sharding_constraint(state, self.of_state(state)), metrics

        return kept

    def compile(self, function: Callable, *, donate: bool = False) -> Callable:
        """`jit`; on a mesh everything but the state a function gives back is copied everywhere.

        The function is traced with that mesh set, for `gradients.matmul` and `fast.collectives`,
        which divides batches unless parameters are divided as well.

        Args:
            donate: reuse the first argument's memory for the result, as programs that train do;
                those have compiler options of their own.
        """
        options = self.training if donate else self.once
        donated = (0,) if donate else ()
        if self.mesh is None:
            return jax.jit(function, donate_argnums=donated, compiler_options=options)

        @functools.wraps(function)
        def constrained(*args: Any) -> Any:
            def place(x: Any) -> Any:
                where = self.of_state(x) if isinstance(x, LoopState) else self._named()
                return jax.lax.with_sharding_constraint(x, where)

            result = self.traced(function)(*args)
            return jax.tree.map(place, result, is_leaf=lambda x: isinstance(x, LoopState))

        return jax.jit(constrained, donate_argnums=donated, compiler_options=options)

    def traced(self, function: Callable) -> Callable:
        """A function as it is to be traced for the mesh's devices: with that mesh set."""
        if self.mesh is None:
            return function
        abstract = self.mesh.abstract_mesh

        @functools.wraps(function)
        def inside(*args: Any) -> Any:
            with (
                jax.sharding.use_abstract_mesh(abstract),
                collectives.data_parallel(not self.fsdp),
                collectives.sharded_parameters(self.size if self.fsdp else 1),
                collectives.replicated_states(self.replicated),
            ):
                return function(*args)

        return inside

    def divided(self, tree: Any) -> Any:
        """Inside a program: a tree whose leaves lead with the environments, divided."""
        if self.mesh is None:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.of_environments(tree))

    def local(self, tree: Any) -> Any:
        """A process's own rows of arrays `[E, ...]`, as numpy."""
        if self.processes == 1:
            return jax.tree.map(np.asarray, tree)

        def rows(x: Array) -> np.ndarray:
            parts = {s.index[0].start or 0: s.data for s in x.addressable_shards}
            return np.concatenate([np.asarray(parts[i]) for i in sorted(parts)])

        return jax.tree.map(rows, tree)

    def joined(self, tree: Any) -> Any:
        """Arrays `[E, ...]` of all processes' rows."""
        if self.processes == 1:
            return jax.tree.map(jax.numpy.asarray, tree)
        return jax.tree.map(
            lambda x: jax.make_array_from_process_local_data(self._named(AXIS), np.asarray(x)),
            tree,
        )

    def copy_here(self, tree: Any) -> Any:
        """Whole arrays on this process's first device, for work it does alone."""
        if self.processes == 1:
            return tree
        whole = jax.jit(_same, out_shardings=self._named())(tree)
        return jax.tree.map(lambda x: x.addressable_data(0), whole)

    def own_replay(self, state: ReplayState) -> ReplayState:
        """The replay as this process's first device has it; of one process all of it."""
        if self.processes == 1:
            return state
        return jax.tree.map(lambda x: x.addressable_data(0), state).replace(shards=1)

    def gathered(self, values: np.ndarray) -> np.ndarray:
        """The rows of all processes, concatenated."""
        if self.processes == 1:
            return values
        return np.asarray(multihost_utils.process_allgather(values, tiled=True))

    def agreed(self, flag: bool) -> bool:
        """Whether any process says so."""
        return bool(np.any(self.gathered(np.array([flag]))))

    def wait_for_all(self, what: str) -> None:
        """Return when every process has come here."""
        if self.processes > 1:
            multihost_utils.sync_global_devices(what)


def _same(tree: Any) -> Any:
    return tree  # one function, so that it is compiled once


ONE_DEVICE = Partition()


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

    Only before anything has run on a device. Several seeds are divided among the cores; nothing
    changes for several processes or an accelerator. A run that is resumed keeps what it had.

    Raises ValueError for a number of cores where the run is an accelerator's.
    """
    asked = settings.distributed.cores
    if settings.num_seeds > 1:  # small models keep one core busy and no more
        count = even_count(settings.num_seeds, available_cores())
        jax.config.update("jax_num_cpu_devices", count)
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
    most = even_count(settings.env.num_envs, available)
    return most if most > 1 else min(available, 2)


def even_count(number: int, available: int) -> int:
    """The largest number of devices, at most `available`, that divides `number` evenly."""
    return max(n for n in range(1, max(available, 1) + 1) if number % n == 0)


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
        replicated = settings.env.num_envs % cores > 0
        return Partition(mesh, cores=True, replicated=replicated, pieces=pieces)
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
