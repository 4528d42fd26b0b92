"""Programs compiled for devices that are not there: what is asked, refused, read and shown."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest

from experiments import compile_for
from experiments.chips import CHIPS, Chip
from mbx.training import build, sharding
from mbx.training.state import LoopState
from tests.helpers import tiny_config


@pytest.mark.parametrize(
    "name", ["v5e", "v9:4x4", "v5e:four", "cpu:0", "h100:2x2x2", "v5e:4x4x4x4", "v5e:0x4"]
)
def test_topologies_that_there_are_not(name):
    with pytest.raises(ValueError, match=f"--topology={name}: give a kind and a shape, v5e:4x4"):
        compile_for.find_topology(name)


@pytest.mark.parametrize("name", ["v5e:4x4", "h100:8"])
def test_a_compiler_that_is_not_installed_is_named(name, monkeypatch):
    monkeypatch.setattr(compile_for.importlib.util, "find_spec", lambda package: None)
    package = "libtpu" if name.startswith("v") else "jax_cuda12_plugin"
    with pytest.raises(ImportError, match=f"{name} needs the compiler .* {package}: pip install"):
        compile_for.find_topology(name)


def test_more_cpu_devices_than_jax_has():
    with pytest.raises(ValueError, match="JAX has started with 1 CPU devices"):
        compile_for.find_topology("cpu:4096")


def test_libtpu_is_told_only_what_the_reader_has_not(monkeypatch):
    environment = {"TPU_SKIP_MDS_QUERY": "0"}
    monkeypatch.setattr(compile_for.os, "environ", environment)
    compile_for.set_environment("cpu:8")
    assert environment == {"TPU_SKIP_MDS_QUERY": "0", "JAX_PLATFORMS": "cpu"}
    compile_for.set_environment("v5e:4x4")
    assert environment["TPU_SKIP_MDS_QUERY"] == "0"
    assert environment["TPU_WORKER_HOSTNAMES"] == "localhost"


def placed(shape, *axes):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    at = jax.NamedSharding(mesh, jax.P(*axes))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=at)


def test_a_state_that_is_too_large_is_refused_before_compiling():
    state = types.SimpleNamespace(replay=placed((1000, 3), "data"), train=placed((500,)))
    settings = build.read(tiny_config())
    chip = Chip(1.0, 1.0, memory=14_000.0, exchange=1.0)
    fits = compile_for.Topology("v5e:1x1", [], 1, chip)
    compile_for.check_memory(settings, state, fits)  # 12,000 and 2,000 bytes
    small = fits._replace(chip=chip._replace(memory=13_999.0))
    with pytest.raises(ValueError, match=r"replay.capacity=400 .* need .* on every chip"):
        compile_for.check_memory(settings, state, small)
    compile_for.check_memory(settings, state, fits._replace(chip=None))


def test_a_run_is_divided_among_other_devices_than_this_machines():
    settings = build.read(tiny_config(env=dict(num_envs=3), distributed=dict(enabled=True)))
    with pytest.raises(ValueError, match="env.num_envs=3 cannot be divided among 2 devices"):
        sharding.make_partition(settings, jax.devices() * 2)
    assert sharding.make_partition(settings, jax.devices()[:1]).size == 1


def test_abstract_states_know_where_they_belong():
    shape = jax.ShapeDtypeStruct((4, 2), jnp.float32)
    state = LoopState(*[shape] * len(LoopState.__dataclass_fields__))
    assert sharding.ONE_DEVICE.shapes(state) is state
    settings = build.read(tiny_config(env=dict(num_envs=4), distributed=dict(enabled=True)))
    found = sharding.make_partition(settings, jax.devices()[:1]).shapes(state)
    assert found.replay.sharding.spec == jax.P("data") and found.key.sharding.spec == jax.P()
    assert (found.obs.shape, found.obs.dtype) == (shape.shape, shape.dtype)


@pytest.fixture(scope="module")
def told():
    """A program whose state is half donated, as a command tells it."""

    def program(state, x):
        return dict(replay=state["replay"] + 1.0, train=state["train"] @ x)

    def of(*donated):
        state = dict(replay=jnp.zeros((8, 8)), train=jnp.ones((4, 8)))
        compiled = jax.jit(program, donate_argnums=donated).lower(state, jnp.ones((8, 8))).compile()
        topology = compile_for.Topology("v5e:2x2", [None] * 4, 1, CHIPS["v5e"])
        return compile_for.study(compiled, topology, steps=2)

    rest = dict(config="toy", topology="v5e:2x2", devices=4, hosts=1, num_envs=4)
    return dict(**rest, programs=dict(interval=of(), init=of(0)))


def test_what_is_read_of_a_program(told):
    kept, donated = told["programs"]["interval"], told["programs"]["init"]
    assert kept["memory"]["arguments"] == 4 * (64 + 32 + 64)
    assert (kept["memory"]["aliased"], donated["memory"]["aliased"]) == (0, 4 * (64 + 32))
    assert kept["flops"] == 2 * 4 * 8 * 8
    assert kept["floor"]["compute"] == kept["flops"] / 197e12 / 2
    assert kept["collectives"] == [] and kept["floor"]["exchange"] == 0.0


def test_what_is_shown_of_it(told):
    one = dict(
        kind="all-gather",
        shape="f32[8]",
        bytes=32.0,
        times=4.0,
        loops=("mbx/a.py:3",),
        branch=True,
        scope="top_k",
        source="mbx/mppi.py:1",
        devices=4,
    )
    program = told["programs"]["interval"] | dict(
        collectives=[one, one, one | dict(kind="all-reduce", bytes=8.0, times=2.0)],
        replay_not_aliased=["state.replay.size"],
    )
    text = compile_for.table({**told, "programs": dict(interval=program)})
    assert "| 4 all-gather, 1 all-reduce |" in text  # a step, of two
    assert "| all-gather f32[8] | 4 | 32 | mbx/a.py:3, a branch | mbx/mppi.py:1 `top_k` |" in text
    assert "interval: copied, not aliased: state.replay.size" in text
    assert "toy for v5e:2x2: 4 devices of 1 hosts, 4 environments" in text
