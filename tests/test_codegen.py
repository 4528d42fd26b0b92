"""Programs that train are compiled with options of their own, where the compiler has them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from mbx import codegen
from mbx.training import sharding


def shares(x):
    return x / jnp.sum(jnp.exp(x - jnp.max(x, -1, keepdims=True)), -1, keepdims=True)


def text_of(program) -> str:
    return program.lower(jax.ShapeDtypeStruct((128, 101), jnp.float32)).compile().as_text()


def test_a_training_program_on_a_processor_reduces_by_the_compilers_own_loops():
    if "__ynn_fusion" not in text_of(jax.jit(shares)):
        pytest.skip("this XLA gives no sums to a library")
    train = sharding.ONE_DEVICE.compile(shares, donate=True)
    assert "__ynn_fusion" not in text_of(train)
    # An evaluation runs once in a while: what it would gain is less than what compiling takes.
    assert "__ynn_fusion" in text_of(sharding.ONE_DEVICE.compile(shares))


def test_only_processors_and_only_options_that_the_compiler_knows():
    assert codegen.for_training("gpu") is None
    assert codegen.for_training("tpu") is None
    assert codegen.known(xla_cpu_enable_fast_math=False)
    assert not codegen.known(xla_cpu_no_such_option=False)
