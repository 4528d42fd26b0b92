"""Programs that train are compiled with options of their own, where the compiler has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.agents.dreamer import diagnostics as dreamer_looks
from mbx.agents.dreamer.settings import Settings as Dreamer
from mbx.agents.tdmpc import diagnostics as tdmpc_looks
from mbx.agents.tdmpc.settings import Settings as Tdmpc
from mbx.fast import allocator, compiler
from mbx.settings import describe
from mbx.training import build, devices, job, loop, seeds
from mbx.training.build import make_environment
from mbx.training.state import make_schedule
from tests.faults.small import small_config


def shares(x):
    return x / jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1, keepdims=True)


def text_of(program) -> str:
    return program.lower(jax.ShapeDtypeStruct((128, 101), jnp.float32)).compile().as_text()


def test_a_training_program_on_a_processor_reduces_by_the_compilers_own_loops():
    if "__ynn_fusion" not in text_of(jax.jit(shares)):
        pytest.skip("this XLA gives no sums to a library")
    train = devices.ONE_DEVICE.compile(shares, donate=True)
    assert "__ynn_fusion" not in text_of(train)
    # An evaluation runs once in a while: what it would gain is less than what compiling takes.
    assert "__ynn_fusion" in text_of(devices.ONE_DEVICE.compile(shares))


def test_a_first_state_that_is_traced_has_the_options_of_the_program_it_is_in():
    def first(key):
        return jax.random.normal(key, (3,))

    key = jax.random.key(0)
    for program in (
        jax.jit(lambda key: devices.ONE_DEVICE.build(first, key)),
        jax.jit(lambda _: devices.ONE_DEVICE.build(first, key)),  # its arguments are not traced
    ):
        np.testing.assert_array_equal(program(key), first(key))


QUICK = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
}


def test_a_gpus_programs_are_compiled_quickly_where_they_run_for_little(monkeypatch):
    monkeypatch.delitem(compiler._ONCE, "cpu")  # of all tests: conftest.py
    assert compiler.for_training("gpu") is None
    assert compiler.for_training("gpu", quick=True) == compiler.for_once("gpu") == QUICK
    for platform in ("cpu", "tpu"):
        assert compiler.for_training(platform, quick=True) == compiler.for_training(platform)
        assert compiler.for_once(platform) is None
    assert compiler.for_training("tpu") is None
    for platform in ("gpu", "tpu"):
        assert compiler.for_training(platform, pieces=True) == compiler.for_training(platform)


def test_temporary_memory_in_pieces_that_a_thread_keeps():
    usual, pieces = compiler.for_training("cpu"), compiler.for_training("cpu", pieces=True)
    (limit,) = set(pieces.items()) - set(usual.items())
    assert set(usual.items()) < set(pieces.items())
    assert limit[0] == "xla_multiheap_size_constraint_per_heap"
    assert limit[1] < allocator._PIECE == 64 * 2**20
    mesh = jax.make_mesh((1,), ("data",))
    assert devices.Partition(mesh).training == usual
    assert devices.Partition(mesh, pieces=True).training == pieces


def test_the_compiler_has_the_options_and_a_later_one_is_not_asked(monkeypatch):
    every = compiler._TRAINING_ON_CPU | compiler._PIECES_ON_CPU | QUICK
    jax.jit(lambda: 0, compiler_options=every).lower().compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_cpu_no_such_option"):
        jax.jit(lambda: 0, compiler_options={"xla_cpu_no_such_option": 1}).lower().compile()
    monkeypatch.setattr(compiler, "_UNTRIED", compiler.jaxlib.version.__version_info__)
    assert compiler.for_training("cpu") is None
    assert compiler.for_once("gpu") is None


def test_the_settings_text_says_how_long_a_run_is_compiled_quickly():
    (told,) = (x for x in describe(Tdmpc()) if x.name == "gpu_compiler")
    assert f"up to {compiler.QUICK_STEPS:,} steps" in told.help


@pytest.mark.parametrize(
    "effort, steps, quick",
    [
        ("auto", 200_000, True),
        ("auto", 200_001, False),
        ("quick", 10_000_000, True),
        ("full", 1, False),
    ],
)
@pytest.mark.parametrize("seeds", [1, 2])
def test_gpu_compiler_reaches_the_programs_that_train(monkeypatch, effort, steps, quick, seeds):
    asked = []
    monkeypatch.setattr(compiler, "for_training", lambda *args: asked.append(args))
    config = small_config(gpu_compiler=effort, num_seeds=seeds, train=dict(steps=steps))
    job.prepare(build.read(config))
    assert asked and {args[:2] for args in asked} == {("cpu", quick)}
    on_two = dict(enabled=True, num_processes=1)
    alone = build.read(config | dict(num_seeds=1, distributed=config["distributed"] | on_two))
    assert devices.make_partition(alone).quick is quick


def test_programs_get_the_options_of_their_kind(monkeypatch):
    """On a GPU: what trains those of its run's, what evaluates and looks the quick ones."""
    given, jit = [], jax.jit

    def compile_with(*args, compiler_options=None, **more):
        given.append(compiler_options)
        return jit(*args, **more)

    monkeypatch.setattr(jax, "jit", compile_with)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compiler, "for_training", lambda *args: {"train": args})
    monkeypatch.setattr(compiler, "for_once", lambda *args: {"once": args})
    once, mesh = {"once": ("gpu",)}, jax.make_mesh((1,), ("data",))

    def of(kind):
        return {"train": ("gpu", quick, False)} if kind == "train" else once

    monkeypatch.setattr(devices.Partition, "platform", "gpu")
    for quick in (False, True):
        for on, cores in ((None, False), (mesh, False), (mesh, True)):
            partition = devices.Partition(on, quick=quick, cores=cores)
            partition.compile(shares, donate=True)
            partition.compile(shares)
            assert given == [of("train"), of("once")]
            given.clear()
    devices.Partition(quick=True).builder(shares)
    with monkeypatch.context() as divided:
        divided.setattr(devices.Partition, "of_state", lambda self, state: self._named())
        devices.Partition(mesh).builder(shares, jnp.zeros((2, 3)))
    assert given == 2 * [once]
    given.clear()
    config = build.read(small_config(gpu_compiler="quick"))
    env = make_environment(config, 1, seed=0)
    agent, schedule = build.build_agent(config, env.spec), make_schedule(config, env.spec)
    partition = devices.make_partition(config)
    loop.make_host_interval(agent, env, schedule, length=1, partition=partition)
    assert given == 3 * [of("train")]  # what acts, what stores and what learns
    given.clear()
    seeds.make_seeds_evaluate(None, None, env)
    assert given == [once]
    given.clear()
    dreamer_looks.make_diagnostics(Dreamer())
    assert given == [once]
    given.clear()
    monkeypatch.setattr(tdmpc_looks, "look", lambda *args: pytest.fail("called"))
    with pytest.raises(pytest.fail.Exception):  # as the program begins, which is made first
        tdmpc_looks.make_review(Tdmpc(), None)(None, None, None, None)
    assert given == [once]
