"""Where a train step's time goes: the hottest operations of its program, with their floors.

    python -m experiments.hotspots --config=configs/tdmpc.py
    python -m experiments.hotspots --config=configs/dreamer.py --config.model.size=12m --top=30

Trains a few intervals, records one of them with the profiler and adds up the time of every
operation. Its floor is the greater of two times: that of its multiplications at the rate of large
matrix products, and that of its bytes at the rate of a large copy, both measured in the same run.
An operation may use several cores, and several may run at once, so busy time is not wall time.
"""

from __future__ import annotations

import collections
import glob
import os
import re
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging
from ml_collections import config_flags

from experiments import hlo, hlo_costs
from mbx.training import job as jobs
from mbx.training import run
from mbx.training.metrics import atomic_write

from .timing import gemm_rate, median_time

_MOVES = ("copy", "transpose", "bitcast", "concatenate")
_LOOPS = ("while", "conditional", "call")  # whose time is that of what they run


class Op(NamedTuple):
    """An operation of a program: FLOPs and bytes of one call, the scope that its source gave it."""

    name: str
    kind: str
    shape: str
    flops: float
    bytes: float
    scope: str


# -------------------------------------------------------------------------------------------------
# The compiled program


def operations(text: str) -> dict[str, Op]:
    """Every instruction that runs by itself, by name, of a module's text."""
    computations = hlo.parse(text).computations
    result = {}
    for lines in computations.values():
        own = {line.name: line for line in lines}
        for line in lines:
            result[line.name] = Op(
                line.name,
                line.kind,
                line.shape.split("{")[0],
                hlo_costs.whole_flops(line, own, computations),
                hlo_costs.line_bytes(line, own, computations),
                hlo.scope(line),
            )
    return result


# -------------------------------------------------------------------------------------------------
# Measuring


def copy_rate() -> float:
    """Bytes a second that a large copy reads and writes."""
    x = jnp.zeros(2**25, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    jax.block_until_ready(copy(x))
    return 2.0 * x.nbytes / median_time(lambda: copy(x), 9)


def recorded(call: Any) -> tuple[collections.Counter, collections.Counter, float]:
    """Busy nanoseconds and calls by operation, and wall seconds, of one `call()`."""
    busy, calls = collections.Counter(), collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            start = time.perf_counter()
            jax.block_until_ready(call())
            wall = time.perf_counter() - start
        paths = glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True)
        profile = jax.profiler.ProfileData.from_file(paths[0])
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                name = dict(event.stats).get("hlo_op")
                if name:
                    busy[name] += event.duration_ns
                    calls[name] += 1
    return busy, calls, wall


def report(config: dict[str, Any], steps: int, top: int, hlo: str | None = None) -> str:
    """Markdown of one interval's operations; with `hlo` the program's text is written there.

    Raises ValueError for impossible settings, and for an environment that the host steps.
    """
    config["train"]["log_interval"] = steps * config["env"]["num_envs"]
    config["train"]["seed_steps"] = min(config["train"]["seed_steps"], 400)
    run.set_up_jax()
    job = jobs.prepare(config)
    if not hasattr(job.interval, "lower"):
        raise ValueError(
            f"env.name={config['env']['name']!r} is stepped by the host, so that there is no one "
            "program to take apart: choose an environment written in JAX"
        )
    state = jobs.fresh_state(job.agent, job.environment, config, jax.random.key(0), job.partition)
    program = job.interval.lower(state).compile()
    warm = 2 + -(-config["train"]["seed_steps"] // config["train"]["log_interval"])
    for _ in range(warm):
        state, _ = program(state)
    jax.block_until_ready(state)
    text = program.as_text()
    if hlo:
        atomic_write(hlo, text.encode())
    busy, calls, wall = recorded(lambda: program(state))
    rates = gemm_rate(config["model"].get("dtype", "float32")), copy_rate()
    title = (
        f"{config['agent']}, {config['env']['name']}, {steps} steps of "
        f"{config['env']['num_envs']} environments on {jax.devices()[0]}: {1e3 * wall:.0f} ms; "
        f"{rates[0] / 1e9:.0f} GFLOP/s, {rates[1] / 1e9:.0f} GB/s"
    )
    return title + "\n\n" + table(operations(text), busy, calls, rates, top)


def table(
    ops: dict[str, Op],
    busy: collections.Counter,
    calls: collections.Counter,
    rates: tuple[float, float],
    top: int,
) -> str:
    """The hottest operations, and the shares of products, of moving data and of the rest."""
    own = {name: ns for name, ns in busy.items() if name in ops and ops[name].kind not in _LOOPS}
    total = sum(own.values()) or 1
    lines = [
        "| operation | result | calls | busy ms | share | MFLOP a call | MB a call | times floor |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in sorted(own, key=own.get, reverse=True)[:top]:
        op = ops[name]
        floor = calls[name] * max(op.flops / rates[0], op.bytes / rates[1])
        ratio = f"{own[name] / 1e9 / floor:.1f}" if floor else ""
        lines.append(
            f"| `{name}` {hlo.short(op.scope)} | {op.shape} | {calls[name]} | "
            f"{own[name] / 1e6:.2f} | {own[name] / total:.1%} | {op.flops / 1e6:.2f} | "
            f"{op.bytes / 1e6:.3f} | {ratio} |"
        )
    shares = collections.Counter()
    for name, ns in own.items():
        shares[sort_of(ops[name])] += ns / total
    lines.append("")
    lines.append("; ".join(f"{kind} {share:.0%}" for kind, share in shares.most_common()))
    return "\n".join(lines)


def sort_of(op: Op) -> str:
    """What an operation is for: matrix products, moving data, or the rest."""
    if op.flops:
        return "matrix products"
    words = set(re.split(r"[_.]", op.name)) - {"fusion", "wrapped", "clone"}
    moving = all(word.startswith(_MOVES) or word.isdigit() for word in words)
    return "moving data" if moving else "everything else"


def define_flags() -> None:
    """The command's flags; whoever imports this module has flags of their own."""
    config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
    flags.DEFINE_integer("top", 20, "Operations to list.", lower_bound=1)
    flags.DEFINE_integer("steps", 20, "Vector steps of the recorded interval.", lower_bound=1)
    flags.DEFINE_string("hlo", None, "Also write the compiled program's text here.")
    flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    given = flags.FLAGS
    config = given.config.to_dict()
    try:
        with run.matmul_precision(config["matmul_precision"]):
            print(report(config, given.steps, given.top, given.hlo))
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
