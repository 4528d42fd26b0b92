"""Programs compiled for devices that are not there: what is asked, refused, read and shown."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from benchmarks import aot
from mbx.training import build, devices
from mbx.training.state import LoopState
from tests.helpers import tiny_config


@pytest.mark.parametrize(
    "name", ["v5e", "v9:4x4", "v5e:four", "cpu:0", "h100:2x2x2", "v5e:4x4x4x4", "v5e:0x4"]
)
def test_topologies_that_there_are_not(name):
    with pytest.raises(ValueError, match=f"--topology={name}: give a kind and a shape, v5e:4x4"):
        aot.find_topology(name)


@pytest.mark.parametrize("name", ["v5e:4x4", "h100:8"])
def test_a_compiler_that_is_not_installed_is_named(name, monkeypatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda package: None)
    package = "libtpu" if name.startswith("v") else "jax_cuda12_plugin"
    with pytest.raises(ImportError, match=f"{name} needs the compiler .* {package}: pip install"):
        aot.find_topology(name)


def test_more_cpu_devices_than_jax_has():
    with pytest.raises(ValueError, match="JAX has started with 1 CPU devices"):
        aot.find_topology("cpu:4096")


def test_a_run_is_divided_among_other_devices_than_this_machines():
    settings = build.read(tiny_config(env=dict(num_envs=3), distributed=dict(enabled=True)))
    with pytest.raises(ValueError, match="env.num_envs=3 cannot be divided among 2 devices"):
        devices.make_partition(settings, jax.devices() * 2)
    assert devices.make_partition(settings, jax.devices()[:1]).size == 1


def test_abstract_states_know_where_they_belong():
    shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    state = LoopState(*[shape] * len(LoopState.__dataclass_fields__))
    assert devices.ONE_DEVICE.shapes(state) is state
    settings = build.read(tiny_config(env=dict(num_envs=4), distributed=dict(enabled=True)))
    found = devices.make_partition(settings, jax.devices()[:1]).shapes(state)
    assert found.replay.sharding.spec == jax.P("data") and found.key.sharding.spec == jax.P()
    assert (found.obs.shape, found.obs.dtype) == (shape.shape, shape.dtype)


def compiled(*donated):
    def program(state, x):
        return dict(replay=state["replay"] + 1.0, train=state["train"] @ x)

    state = dict(replay=jnp.zeros((8, 8)), train=jnp.ones((4, 8)))
    return jax.jit(program, donate_argnums=donated).lower(state, jnp.ones((8, 8))).compile()


def test_what_is_read_of_a_program():
    topology = aot.Topology("v5e:2x2", [None] * 4, 1, 16e9)
    kept, donated = aot.study(compiled(), topology), aot.study(compiled(0), topology)
    assert kept["argument"] == 4 * (64 + 32 + 64)
    assert (kept["alias"], donated["alias"]) == (0, 4 * (64 + 32))
    assert kept["flops"] == pytest.approx(2 * 4 * 8 * 8 + 64)  # and the sums
    assert kept["collectives"] == {}
    told = kept | dict(config="toy", topology="v5e:2x2", devices=4, hosts=1, envs=4)
    text = aot.in_words(told | {"collectives": {"all-reduce": 7}, "argument": 2_000_000})
    assert "toy for v5e:2x2: 4 devices of 1 hosts, 4 environments" in text
    assert "argument 2.0 MB" in text and text.endswith("collectives: 7 all-reduce")


def test_a_program_that_does_not_fit_is_refused_with_the_numbers():
    small = aot.Topology("v5e:1x1", [], 1, 500.0)
    with pytest.raises(ValueError, match=r"needs 0.00 GB on every chip .* Lower replay.capacity"):
        aot.study(compiled(), small)


def test_collectives_are_counted_once_each():
    class Program:
        def memory_analysis(self):
            return type("M", (), {f"{name}_size_in_bytes": 0 for name in aot.HELD})

        def cost_analysis(self):
            return None

        def as_text(self):
            return """
  %all-reduce.1 = f32[8] all-reduce(%a), channel_id=1
  %ag = (f32[1], f32[4]) all-gather-start(%b), dimensions={0}
  %agd = f32[4] all-gather-done(%ag)
  ROOT %x.2 = f32[8] all-reduce(%all-reduce.1), to_apply=%sum
"""

    found = aot.study(Program(), aot.Topology("cpu:2", [], 1, None))
    assert found["collectives"] == {"all-reduce": 2, "all-gather": 1} and found["flops"] == 0.0
