"""A run's train step, compiled for accelerators that are not there: memory, work, exchanges.

    pip install -e '.[tpu-compile,cuda-compile]'    # the compilers, in an environment of their own
    python -m benchmarks.aot --topology=v5e:4x4 --config=tdmpc --config.env.num_envs=16
    python -m benchmarks.aot --topology=h100:2x8 --config=dreamer --config.env.num_envs=16
    python -m benchmarks.aot --topology=cpu:8 --config=empo      # needs no other compiler

Compiles the train interval for all chips of a topology, one environment or more per chip. Nothing
runs. The numbers are XLA's own
(`memory_analysis`, `cost_analysis`) per chip, and collectives are counted in the compiled text. A
loop counts once in FLOPs, bytes and collectives, whatever its length.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import os
import pathlib
import re
import sys
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from mbx import config
from mbx.training import job, run
from mbx.training.files import atomic_write

HELD = ("argument", "alias", "output", "temp")
COLLECTIVES = "all-reduce all-gather reduce-scatter all-to-all collective-permute".split()
# Bytes of a chip's memory, as published: cloud.google.com/tpu/docs, NVIDIA's data sheets.
MEMORY = {"v4": 32e9, "v5e": 16e9, "v5p": 95e9, "v6e": 32e9, "h100": 80e9, "h200": 141e9}
# What XLA asks of a GPU that is not there (compute capability 9.0).
_HOPPER = pathlib.Path(__file__).with_name("hopper.txt").read_text()
_BANDWIDTH = {"h100": 3350000000000, "h200": 4800000000000}  # bytes a second
# libtpu looks for its machine's description unless it is told; the values name no machine. The
# plugin for GPUs compiles without a driver, which it would otherwise refuse to load without.
_COMPILERS = dict(
    JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
    TPU_SKIP_MDS_QUERY="1",
    TPU_ACCELERATOR_TYPE="v5litepod-16",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_LOG_DIR="disabled",
)


_REMEDY = (
    "Lower replay.capacity, loss.batch_size, planner.num_samples or env.num_envs, choose a smaller "
    "model or more chips, or set distributed.fsdp=True."
)


class Topology(NamedTuple):
    """The devices of all hosts, the number of hosts, a chip's memory in bytes (None: a CPU)."""

    name: str
    devices: list[Any]
    hosts: int
    memory: float | None


def find_topology(name: str) -> Topology:
    """The devices of "v5e:4x4" (a TPU and its chips), "h100:2x8" (hosts, GPUs of one) or "cpu:8".

    Raises:
        ValueError: for an unknown kind or shape.
        ImportError: without libtpu, or without jax's plugin for GPUs.
    """
    kind, _, shape = name.partition(":")
    if kind == "cpu" and shape.isdigit() and int(shape):
        devices = jax.devices("cpu")
        if len(devices) < int(shape):
            raise ValueError(f"--topology={name}: JAX has started with {len(devices)} CPU devices")
        return Topology(name, devices[: int(shape)], 1, None)
    gpu, sizes = kind in _BANDWIDTH, shape.split("x")
    known = kind in MEMORY and len(sizes) <= (2 if gpu else 3)
    if not known or not all(x.isdigit() and int(x) for x in sizes):
        raise ValueError(
            f"--topology={name}: give a kind and a shape, v5e:4x4, h100:2x8 or cpu:8 say; kinds "
            f"are {', '.join(MEMORY)} and cpu"
        )
    package = "jax_cuda12_plugin" if gpu else "libtpu"
    if importlib.util.find_spec(package) is None:
        wanted = "cuda-compile" if gpu else "tpu-compile"
        raise ImportError(
            f"--topology={name} needs the compiler of those chips, the package {package}: pip "
            f"install -e '.[{wanted}]' into an environment of its own"
        )
    given: dict[str, Any] = {}
    if gpu:
        hosts, each = ["1", *sizes][-2:]
        told = _HOPPER.format(name=kind.upper(), bandwidth=_BANDWIDTH[kind], memory=MEMORY[kind])
        given = dict(target_config=told, topology=f"1x{hosts}x{each}")
    try:
        found = topologies.get_topology_desc(name, "cuda" if gpu else "tpu", **given)
    except Exception as error:  # the compilers' own, of several types
        raise ValueError(f"--topology={name}: {str(error).splitlines()[0]}") from error
    devices = list(found.devices)
    cores = 1 if gpu else len(devices) // len({tuple(d.coords) for d in devices})
    hosts = len({d.process_index for d in devices})
    return Topology(name, devices, hosts, MEMORY[kind] / cores)


def compile_for(settings: Any, topology: Topology) -> Any:
    """A run's train interval, compiled for a topology.

    Raises ValueError for settings that no run can have, for an environment that the host steps, and
    where a chip's memory does not suffice.
    """
    with run.matmul_precision(settings.matmul_precision):
        work = job.prepare(settings, topology.devices)
        if not hasattr(work.interval, "lower"):
            raise ValueError(
                f"env.name={settings.env.name!r} is stepped by the host, so that there is no one "
                "program to compile: choose an environment written in JAX"
            )
        make = work.initial_state
        state = jax.eval_shape(lambda: make(jax.random.key(0)))
        lowered = work.interval.lower(work.partition.shapes(state))
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(f"{topology.name}: {str(error).splitlines()[0]} {_REMEDY}") from error


def study(compiled: Any, topology: Topology) -> dict[str, Any]:
    """Bytes that a program holds on a chip, its work, and its collectives by kind.

    Raises ValueError where it does not fit into a chip's memory.
    """
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis() or {}
    held = {name: getattr(memory, f"{name}_size_in_bytes") for name in HELD}
    total = held["argument"] + held["output"] + held["temp"] - held["alias"]
    if topology.memory is not None and total > topology.memory:
        raise ValueError(
            f"the train interval needs {total / 1e9:.2f} GB on every chip of {topology.name}, "
            f"which has {topology.memory / 1e9:.0f} GB. {_REMEDY}"
        )
    found = re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", compiled.as_text())
    work = {"flops": cost.get("flops", 0.0), "bytes": cost.get("bytes accessed", 0.0)}
    return held | work | {"collectives": dict(collections.Counter(found))}


def in_words(told: dict[str, Any]) -> str:
    """What is printed."""
    counted = ", ".join(f"{n} {kind}" for kind, n in told["collectives"].items()) or "none"
    sizes = ", ".join(f"{name} {told[name] / 1e6:.1f} MB" for name in HELD)
    return (
        f"{told['config']} for {told['topology']}: {told['devices']} devices of {told['hosts']} "
        f"hosts, {told['envs']} environments\nper chip: {sizes}; {told['flops'] / 1e9:.3f} "
        f"GFLOP, {told['bytes'] / 1e6:.1f} MB read and written\ncollectives: {counted}"
    )


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:4x4", help="v5e:4x4, h100:2x8 or cpu:8, say.")
    parser.add_argument("--json", help="Also write the numbers here.")
    given, rest = parser.parse_known_args(arguments)
    os.environ.update({k: os.environ.get(k, v) for k, v in _COMPILERS.items()})
    jax.config.update("jax_platforms", "cpu")
    kind, _, number = given.topology.partition(":")
    if kind == "cpu" and number.isdigit():
        jax.config.update("jax_num_cpu_devices", int(number))
    divided = ("--config.distributed.enabled=True", "--config.distributed.num_processes=1")
    try:
        topology, settings = find_topology(given.topology), config.load([*rest, *divided])
        found = study(compile_for(settings, topology), topology)
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")
    told = dict(config=f"{settings.agent}, {settings.env.name}", topology=topology.name, **found)
    told |= dict(devices=len(topology.devices), hosts=topology.hosts, envs=settings.env.num_envs)
    print(in_words(told))
    if given.json:
        atomic_write(given.json, json.dumps(told, indent=1).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
