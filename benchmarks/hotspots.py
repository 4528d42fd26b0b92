"""Where a train step's time goes: its program's operations by the time that they are busy.

    python -m benchmarks.hotspots --config=tdmpc
    python -m benchmarks.hotspots --config=configs/dreamer.py --config.model.size=12m --top=30

Trains until learning has begun, records one interval with the profiler, and adds up the time of
every operation. An operation may use several cores, and several may run at once, so busy time is
not wall time.
"""

from __future__ import annotations

import argparse
import collections
import glob
import os
import re
import sys
import tempfile
import time
from typing import Any

import jax

from mbx import config
from mbx.settings import to_dict
from mbx.training import job as jobs
from mbx.training import run

_LINE = re.compile(
    r"^ *(?:ROOT )?%?([\w.\-]+) = (\(?[\w\[\],{} ]+?\)?(?:\{[\d,]*\})?) ([\w\-]+)\((.*)", re.M
)
_MOVES = ("copy", "transpose", "bitcast", "concatenate")
_LOOPS = ("while", "conditional", "call")  # whose time is that of what they run


def operations(text: str) -> dict[str, tuple[str, str, str]]:
    """Kind, shape of the result and scope in the source of every operation of a program, by name.

    A fusion's kind is "product" where it holds a product.
    """
    products = {
        name
        for name, body in re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
        if re.search(r" (dot|convolution)\(", body)
    }
    found = {}
    for name, shape, kind, rest in _LINE.findall(text):
        called = re.search(r"calls=%?([\w.\-]+)", rest)
        product = kind in ("dot", "convolution") or (called and called[1] in products)
        product = product or "__onednn$matmul" in rest or "__cublas" in rest
        scope = re.search(r'op_name="([^"]*)"', rest)
        found[name] = ("product" if product else kind, shape, scope[1] if scope else "")
    return found


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


def report(values: dict[str, Any], steps: int, top: int) -> str:
    """Markdown of the operations of an interval of `steps` vector steps that act and learn.

    Raises ValueError for impossible settings, and for an environment that the host steps.
    """
    train, num_envs = values["train"], values["env"]["num_envs"]
    train.update(log_interval=steps * num_envs, seed_steps=min(train["seed_steps"], 400))
    if "pretrain_updates" in train:
        train["pretrain_updates"] = 0  # its intervals act in no environment
    run.set_up_jax()
    settings = config.load(values)
    job = jobs.prepare(settings)
    if not hasattr(job.interval, "lower"):
        raise ValueError(
            f"env.name={settings.env.name!r} is stepped by the host, so that there is no one "
            "program to profile: choose an environment written in JAX"
        )
    state = jobs.fresh_state(job, jax.random.key(0))
    program = job.interval.lower(state).compile()
    for _ in range(2 + -(-train["seed_steps"] // train["log_interval"])):
        state, _ = program(state)
    jax.block_until_ready(state)
    began, text = int(state.steps), program.as_text()
    busy, calls, wall = recorded(lambda: program(state))
    title = (
        f"{settings.agent}, {settings.env.name}, {steps} steps of {num_envs} environments from "
        f"step {began:,} on {jax.devices()[0]}: {1e3 * wall:.0f} ms"
    )
    return title + "\n\n" + table(operations(text), busy, calls, top)


def table(
    ops: dict[str, tuple[str, str, str]],
    busy: collections.Counter,
    calls: collections.Counter,
    top: int,
) -> str:
    """The hottest operations, and the shares of products, of moving data and of the rest."""
    own = {name: ns for name, ns in busy.items() if name in ops and ops[name][0] not in _LOOPS}
    total = sum(own.values()) or 1
    lines = ["| operation | result | calls | busy ms | share |", "|---|---|---|---|---|"]
    for name in sorted(own, key=own.get, reverse=True)[:top]:
        _, shape, scope = ops[name]
        short = "/".join(scope.split("/")[-2:])
        lines.append(
            f"| `{name}` {short} | {shape} | {calls[name]} | {own[name] / 1e6:.2f} | "
            f"{own[name] / total:.1%} |"
        )
    shares = collections.Counter()
    for name, ns in own.items():
        shares[sort_of(name, ops[name][0])] += ns / total
    lines += ["", "; ".join(f"{kind} {share:.0%}" for kind, share in shares.most_common())]
    return "\n".join(lines)


def sort_of(name: str, kind: str) -> str:
    """What an operation is for: matrix products, moving data, or the rest."""
    if kind == "product":
        return "matrix products"
    words = set(re.split(r"[_.]", name)) - {"fusion", "wrapped", "clone"}
    moving = all(word.startswith(_MOVES) or word.isdigit() for word in words)
    return "moving data" if moving else "everything else"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--top", type=int, default=20, help="Operations to list.")
    parser.add_argument("--steps", type=int, default=20, help="Vector steps that are recorded.")
    given, rest = parser.parse_known_args(arguments)
    try:
        settings = config.load(rest)
        with run.matmul_precision(settings.matmul_precision):
            print(report(to_dict(settings), given.steps, given.top))
    except (ValueError, ImportError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
