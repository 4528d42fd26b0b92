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
import math
import os
import re
import sys
import tempfile
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags
from ml_collections import config_flags

from mbx.training import job as jobs
from mbx.training import run
from mbx.training.metrics import atomic_write

from .timing import gemm_rate, median_time

_SIZES = {"pred": 1, "bf16": 2, "f16": 2}  # others end in their bits: f32, s8, u64
_LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*?)\)(.*)$")
_SLICES = ("dynamic-slice", "gather", "slice")
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


class _Line(NamedTuple):
    """An instruction as written: result shape, what it does, operands' names, the rest."""

    name: str
    shape: str
    kind: str
    operands: list[str]
    rest: str


# -------------------------------------------------------------------------------------------------
# The compiled program


def num_bytes(shape: str) -> float:
    """Bytes of an HLO shape, `f32[4,8]{1,0}` or a tuple of such."""
    total = 0.0
    for kind, dims in re.findall(r"([a-z]+\d*)\[([\d,]*)\]", shape):
        digits = re.sub(r"\D", "", kind)
        size = _SIZES.get(kind, int(digits) / 8 if digits else 0)
        total += size * math.prod(int(d) for d in dims.split(",") if d)
    return total


def _dims(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(d) for d in found.group(1).split(",") if d] if found else []


def parse(text: str) -> dict[str, list[_Line]]:
    """Instructions of every computation of an HLO module, by the computation's name."""
    computations: dict[str, list[_Line]] = {}
    current: list[_Line] = []
    for line in text.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head:
            current = computations.setdefault(head.group(1), [])
            continue
        found = _LINE.match(line)
        if found:
            name, shape, kind, operands, rest = found.groups()
            names = re.findall(r"%([\w.\-]+)", operands)
            index = [operands] if kind == "parameter" else names
            current.append(_Line(name, shape, kind, index, rest))
    return computations


def _flops(line: _Line, own: dict[str, _Line], computations: dict[str, list[_Line]]) -> float:
    """Multiplications and additions of the matrix products of an instruction."""
    if line.kind == "dot":
        contract = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line.rest)
        left = _dims(own[line.operands[0]].shape)
        depth = math.prod(left[int(i)] for i in contract.group(1).split(",") if i)
        return 2.0 * depth * math.prod(_dims(line.shape))
    if line.kind == "convolution":
        labels = re.search(r"dim_labels=\w+_(\w+)->", line.rest).group(1)
        kernel = _dims(own[line.operands[1]].shape)
        return 2.0 * math.prod(_dims(line.shape)) * math.prod(kernel) / kernel[labels.index("o")]
    inner = computations.get(_called(line) or "", [])
    names = {x.name: x for x in inner}
    return sum(_flops(x, names, computations) for x in inner)


def _called(line: _Line) -> str | None:
    found = re.search(r"calls=%?([\w.\-]+)", line.rest)
    return found.group(1) if found else None


def _bytes(line: _Line, own: dict[str, _Line], computations: dict[str, list[_Line]]) -> float:
    """Bytes read and written; of an array that is only sliced the slices count."""
    inner = computations.get(_called(line) or "", [])
    if not inner and line.kind in _SLICES:
        return 2.0 * num_bytes(line.shape)
    total = num_bytes(line.shape)
    for index, operand in enumerate(line.operands):
        whole = num_bytes(own[operand].shape) if operand in own else 0.0
        inside = [x for x in inner if x.kind == "parameter" and x.operands == [str(index)]]
        users = [x for x in inner if inside and inside[0].name in x.operands]
        if users and all(_sliced(x, inside[0].name) for x in users):
            if any(x.kind == "dynamic-update-slice" for x in users):  # in place
                total -= whole
            whole = sum(_slice_bytes(x, inner) for x in users)
        total += whole
    return max(total, 0.0)


def _sliced(user: _Line, name: str) -> bool:
    """Whether an instruction touches only a part of the array `name`."""
    return user.kind in (*_SLICES, "dynamic-update-slice") and user.operands[0] == name


def _slice_bytes(user: _Line, inner: list[_Line]) -> float:
    if user.kind != "dynamic-update-slice":
        return num_bytes(user.shape)
    return 2.0 * sum(num_bytes(x.shape) for x in inner if x.name == user.operands[1])


def operations(text: str) -> dict[str, Op]:
    """Every instruction that runs by itself, by name, of a module's text."""
    computations = parse(text)
    result = {}
    for lines in computations.values():
        own = {line.name: line for line in lines}
        for line in lines:
            scope = re.search(r'op_name="([^"]*)"', line.rest)
            result[line.name] = Op(
                line.name,
                line.kind,
                line.shape.split("{")[0],
                _flops(line, own, computations),
                _bytes(line, own, computations),
                scope.group(1) if scope else "",
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
    run.enable_compilation_cache()
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
            f"| `{name}` {short_scope(op.scope)} | {op.shape} | {calls[name]} | "
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


def short_scope(scope: str) -> str:
    """The last parts of a scope, without the wrappers that every operation has."""
    parts = [p for p in scope.split("/") if p not in ("while", "body", "closed_call", "cond")]
    return "/".join(parts[-3:])


def define_flags() -> None:
    """The command's flags; whoever imports this module has flags of their own."""
    config_flags.DEFINE_config_file("config", None, "Configuration file.", lock_config=True)
    flags.DEFINE_integer("top", 20, "Operations to list.", lower_bound=1)
    flags.DEFINE_integer("steps", 20, "Vector steps of the recorded interval.", lower_bound=1)
    flags.DEFINE_string("hlo", None, "Also write the compiled program's text here.")
    flags.mark_flag_as_required("config")


def main(_: list[str]) -> None:
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
