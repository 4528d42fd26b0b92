"""Freed buffers stay with the process: the next call of a program asks for no new pages."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mbx.training import memory

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


def page_faults(first: str) -> int:
    """Pages that ten calls ask for in a fresh process."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")}
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(first=first)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return int(out.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="an allocator of glibc")
def test_programs_use_their_memory_again():
    # Ten calls with at least one array of 48 MB, in pages of 4 kB.
    assert page_faults("") > 50_000
    assert page_faults("import experiments") < 1_000


def test_elsewhere_it_does_nothing(monkeypatch):
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.keep_freed_pages() is False
