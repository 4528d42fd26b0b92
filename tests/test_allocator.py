"""Freed buffers stay with the process, and threads do not wait for each other to allocate."""

from __future__ import annotations

import os
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from mbx.fast import allocator, compiler
from mbx.training import run

PROGRAM = """
import resource
{first}
import jax, jax.numpy as jnp

@jax.jit
def program(x):  # temporary arrays of 48 MB
    for _ in range(4):
        x = jnp.sin(x @ x[:20])
    return x.sum()

x = jnp.ones((600_000, 20))
for _ in range(10):
    program(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    program(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

KEEP = "from mbx.fast import allocator; allocator.keep_freed_pages()"  # as commands begin

DEVICES = f"""
{KEEP}
import functools, resource
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from mbx.training import devices, run
jax.config.update("jax_num_cpu_devices", 2)
run.set_up_jax()
partition = devices.Partition(jax.make_mesh((2,), ("data",)), cores=True, pieces=True)
rows = PartitionSpec("data")
x = jax.device_put(jnp.ones((1_000_000, 20)), NamedSharding(partition.mesh, rows))

def faults(options):
    @functools.partial(jax.jit, compiler_options=options)
    @functools.partial(jax.shard_map, mesh=partition.mesh, in_specs=rows, out_specs=rows)
    def program(x):  # two temporary arrays of 40 MB on each device
        for _ in range(3):
            x = jnp.minimum(x @ x[:20], 1.0)
        return x.sum(keepdims=True)

    found = []
    for calls in (4, 2, 2, 2):  # a thread that is first used later has its own to clear
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(calls):
            program(x).block_until_ready()
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(found[1:])

alone = faults(partition.training)
allocator.keep_pieces()
print(alone, faults(devices.ONE_DEVICE.training), faults(partition.training))
"""

ARENAS = """
import ctypes, threading
{first}
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.malloc.argtypes = (ctypes.c_size_t,)
heap = next(line for line in open("/proc/self/maps") if "[heap]" in line).split()[0]
low, high = (int(end, 16) for end in heap.split("-"))
found, together = [], threading.Barrier(3)

def allocate():
    together.wait()
    found.append(low <= library.malloc(5000) < high)
    together.wait()

threads = [threading.Thread(target=allocate) for _ in range(2)]
for thread in threads:
    thread.start()
together.wait(), together.wait()
print(sum(found))
"""


def numbers(program: str) -> list[int]:
    """What a program in a fresh process prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    out = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return [int(word) for word in out.stdout.split()]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="an allocator of glibc")
def test_programs_use_their_memory_again():
    # Ten calls with at least one array of 48 MB, in pages of 4 kB.
    assert numbers(PROGRAM.format(first=""))[0] > 50_000
    inline = KEEP + "; from mbx.training import run; run.set_up_jax()"
    assert numbers(PROGRAM.format(first=inline))[0] < 1_000


@pytest.mark.skipif(sys.platform != "linux", reason="an allocator of glibc")
def test_programs_on_several_devices_use_their_memory_again():
    """Two calls on two devices: without padding or pieces at least 40 MB each time."""
    without_padding, without_pieces, both = numbers(DEVICES)
    assert both < 500 and without_padding > 10_000 and without_pieces > 10_000


def test_that_programs_in_pieces_are_not_kept_compiled_is_no_warning(monkeypatch):
    name = "jax_persistent_cache_min_compile_time_secs"
    before, options = jax.config.values[name], compiler.for_training("cpu", pieces=True)
    library = types.SimpleNamespace(mallopt=lambda name, value: 1)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(allocator, "_kept", True)

    def compiled(rows):
        jax.jit(lambda x: (jnp.tan(x) @ x.T @ jnp.tan(x)).sum(), compiler_options=options).lower(
            jax.ShapeDtypeStruct((rows, 20), jnp.float32)
        ).compile()

    jax.config.update(name, 0.0)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compiled(6_000)
        if not caught:
            pytest.skip("this XLA keeps such programs")
        assert "Multiple temp buffer" in str(caught[0].message)
        assert allocator.keep_pieces()
        compiled(6_001)
    finally:
        jax.config.update(name, before)


@pytest.mark.parametrize(
    "answer, kept, expected", [(1, True, True), (0, True, False), (1, False, False)]
)
def test_pieces_are_kept_where_pages_are_and_the_allocator_agrees(
    monkeypatch, answer, kept, expected
):
    asked = []
    library = types.SimpleNamespace(mallopt=lambda *option: asked.append(option) or answer)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: library)
    monkeypatch.setattr(allocator, "_kept", kept)
    with warnings.catch_warnings():  # keep_pieces() adds a filter
        assert allocator.keep_pieces() is expected
    assert asked == ([(-2, 2**26)] if kept else [])  # M_TOP_PAD, 64 MB


@pytest.mark.skipif(sys.platform != "linux", reason="an allocator of glibc")
def test_threads_of_a_command_allocate_from_arenas_of_their_own():
    """In one that all share they wait for its lock, which every kernel and every pass needs."""
    assert numbers(ARENAS.format(first=KEEP)) == [0]
    shared = "import os; ctypes.CDLL(None).mallopt(-8, 1)"  # M_ARENA_MAX
    assert numbers(ARENAS.format(first=shared)) == [2]


def test_programs_run_inline_in_commands_alone(monkeypatch):
    name = "jax_cpu_enable_async_dispatch"
    before = jax.config.values[name]  # False where a test before this one imported a command
    try:
        for kept in (False, True):
            jax.config.update(name, True)
            monkeypatch.setattr(allocator, "_kept", kept)
            run.set_up_jax()
            assert jax.config.values[name] is not kept
    finally:
        jax.config.update(name, before)


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert allocator.keep_freed_pages() is False
