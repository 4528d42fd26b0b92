"""What is read from a compiled program: FLOPs, bytes, and what the profiler timed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from experiments import hotspots


def compiled_operations(function, *args):
    return hotspots.operations(jax.jit(function).lower(*args).compile().as_text())


def test_flops_of_products_in_fusions_and_loops():
    def chain(x, w):
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w + 1.0), None), x, length=3)[0]

    ops = compiled_operations(chain, jnp.ones((8, 16)), jnp.ones((16, 16)))
    assert {op.flops for op in ops.values() if op.flops and op.kind != "while"} == {2.0 * 8 * 16**2}


def test_only_the_slices_of_a_large_array_count():
    def read(table, i):
        return jax.lax.dynamic_slice(table, (i, 0), (2, 64)) * 3.0

    ops = compiled_operations(read, jnp.ones((10_000, 64)), 5)
    (hot,) = [op for op in ops.values() if op.kind == "fusion" and op.shape == "f32[2,64]"]
    assert 2 * 2 * 64 * 4 <= hot.bytes < 3 * 2 * 64 * 4  # read and written once, and an index


def test_the_profiler_times_the_operations_of_the_program():
    x = jnp.ones((512, 512))
    program = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(x).compile()
    jax.block_until_ready(program(x))
    busy, calls, wall = hotspots.recorded(lambda: program(x))
    ops = hotspots.operations(program.as_text())
    timed = [name for name in busy if name in ops and ops[name].flops]
    assert sum(ops[name].flops * calls[name] for name in timed) == pytest.approx(4.0 * 512**3)
    assert 0.0 < sum(busy[name] for name in timed) / 1e9 < 16 * wall
    text = hotspots.table(ops, busy, calls, (1e11, 1e10), top=3)  # whichever took longest
    assert "matrix products" in text and "| 268.44 |" in text
