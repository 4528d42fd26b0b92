"""Where a step's time goes: what is read of a program, what is timed, what is recorded."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import hotspots
from examples import own_agent  # noqa: F401  registers "shooting", a small agent
from mbx.settings import to_dict
from mbx.training.build import settings_class


def test_the_profiler_times_the_operations_of_the_program():
    def chain(x):
        return jnp.sin(jax.lax.scan(lambda x, _: (jnp.tanh(x @ x + 1.0), None), x, length=3)[0])

    x = jnp.ones((256, 256))
    program = jax.jit(chain).lower(x).compile()
    jax.block_until_ready(program(x))
    busy, calls, wall = hotspots.recorded(lambda: program(x))
    ops = hotspots.operations(program.as_text())
    products = [name for name in busy if name in ops and ops[name][0] == "product"]
    assert sum(calls[name] for name in products) == 3  # one in every turn of the loop
    assert 0.0 < sum(busy[name] for name in products) / 1e9 < 16 * wall
    text = hotspots.table(ops, busy, calls, top=3)
    assert "matrix products" in text and "| 3 |" in text


def test_what_an_operation_is_for():
    assert hotspots.sort_of("fusion.3", "product") == "matrix products"
    assert hotspots.sort_of("copy_concatenate_fusion.1", "fusion") == "moving data"
    assert hotspots.sort_of("tanh_fusion.1", "fusion") == "everything else"


def test_the_interval_that_is_recorded_acts_and_learns(monkeypatch):
    """Not one of those in which only pretraining is made."""
    config = to_dict(settings_class("shooting")())
    config["train"]["pretrain_updates"] = 500
    seen = {}

    def recorded(call):
        program, before = (cell.cell_contents for cell in call.__closure__)
        began, first = int(before.steps), np.array(before.train.params)
        after, _ = program(before)
        seen.update(steps=int(after.steps) - began, learned=(after.train.params != first).any())
        raise StopIteration

    monkeypatch.setattr(hotspots, "recorded", recorded)
    with pytest.raises(StopIteration):
        hotspots.report(config, 5, 3)
    assert seen["steps"] == 5 * config["env"]["num_envs"] and seen["learned"]
