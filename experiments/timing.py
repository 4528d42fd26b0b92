"""Times and matrix-multiply FLOPs of compiled functions, for the commands that measure."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from mbx.training import build, sharding
from mbx.training.sharding import ONE_DEVICE, Partition


class Row(NamedTuple):
    """One operation: milliseconds, GFLOP, floor in milliseconds, ratio, seconds to compile."""

    name: str
    median_ms: float
    gflop: float
    floor_ms: float
    ratio: float
    compile_s: float


def count_flops(jaxpr: Any) -> float:
    """FLOPs of all matrix multiplications and convolutions in a jaxpr, times their loop counts.

    A loop with a count known only at run time is counted once.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contract, _), _ = params["dimension_numbers"]
            left, out = equation.invars[0].aval, equation.outvars[0].aval
            depth = np.prod([left.shape[i] for i in contract], dtype=float)
            total += 2.0 * depth * np.prod(out.shape, dtype=float)
        elif name == "conv_general_dilated":
            kernel, out = equation.invars[1].aval, equation.outvars[0].aval
            channels = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            total += 2.0 * np.prod(out.shape, dtype=float) * np.prod(kernel.shape) / channels
        inner = [p for p in jax.tree.leaves(params, is_leaf=_is_jaxpr) if _is_jaxpr(p)]
        counts = [count_flops(p.jaxpr if hasattr(p, "jaxpr") else p) for p in inner]
        if name == "cond":
            total += max(counts, default=0.0)
        else:
            total += sum(counts) * (params["length"] if name == "scan" else 1)
    return total


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or (hasattr(x, "jaxpr") and hasattr(x.jaxpr, "eqns"))


def median_time(call: Callable[[], Any], repeats: int) -> float:
    """Median seconds of `call`, which must return arrays to wait for."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def square_sizes(platform: str) -> tuple[int, ...]:
    """Of the products that show a machine's rate: large, and still a matter of milliseconds.

    An accelerator needs larger ones: one of 2048 takes an H200 as long as its launch.
    """
    return (1024, 2048) if platform == "cpu" else (4096, 8192)


def gemm_rate(dtype: str, sizes: tuple[int, ...] | None = None, repeats: int = 9) -> float:
    """The machine's matrix-multiply rate in FLOP/s: the best median over some square sizes.

    Of random numbers: a GPU multiplies ones with less power, so faster.
    """
    best = 0.0
    for n in sizes or square_sizes(jax.default_backend()):
        x = jax.random.normal(jax.random.key(0), (n, n), dtype)
        multiply = jax.jit(jnp.matmul)
        jax.block_until_ready(multiply(x, x))
        seconds = median_time(lambda m=multiply, x=x: m(x, x), repeats)
        best = max(best, 2.0 * n**3 / seconds)
    return best


def on_cores(config: dict[str, Any], cores: int = 0) -> dict[str, Any]:
    """The configuration with as many cores as the command that trains uses; or as are given."""
    if jax.default_backend() == "cpu":
        usual = sharding.cores_for(build.read(config), jax.local_device_count())
        config["distributed"]["cores"] = cores or usual
    return config


def measure(
    name: str,
    function: Callable,
    *args: Any,
    rate: float,
    repeats: int,
    donate: bool = False,
    partition: Partition = ONE_DEVICE,
) -> Row:
    """Compile and time `function(*args)`; with `donate` its result replaces the first argument.

    On a partition's devices, if these are several: the arguments lie there.
    """
    traced = jax.make_jaxpr(function)(*args).jaxpr
    # A product that nothing reads is none: the compiler leaves it out as well.
    flops = count_flops(partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))[0])
    start = time.perf_counter()
    # As it is compiled inside a program that trains.
    asked: dict[str, Any] = dict(compiler_options=partition.training)
    program = jax.jit(partition.traced(function), donate_argnums=0 if donate else (), **asked)
    compiled = program.lower(*args).compile()
    compile_s = time.perf_counter() - start
    carry = [jax.tree.map(jnp.copy, args[0]) if donate else args[0]]

    def call() -> Any:
        out = compiled(carry[0], *args[1:])
        if donate:
            carry[0] = out
        return out

    jax.block_until_ready(call())
    jax.block_until_ready(call())
    seconds = median_time(call, repeats)
    floor = flops / rate
    ratio = seconds / floor if floor else float("nan")
    return Row(name, 1e3 * seconds, flops / 1e9, 1e3 * floor, ratio, compile_s)
