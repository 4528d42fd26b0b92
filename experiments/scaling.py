"""How the program's costs grow: replay with its capacity, plans with their size, rows with options.

    python -m experiments.scaling --out=docs/results/scaling.csv     # two minutes on a laptop

Expected: insert and sample are flat, plans are linear in samples, horizon and rounds. Prints the
numbers as Markdown and writes those that `experiments.figures` draws. Programs are compiled and
divided among the machine's cores as those of a run are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from mbx import envs, exchange, presets, replay
from mbx.commands.results import write_rows
from mbx.training import build, memory, sharding
from mbx.training.sharding import Partition

from .timing import measure, on_cores

OUT = flags.DEFINE_string("out", "scaling.csv", "File to write.")
CALLS = flags.DEFINE_integer("calls", 15, "Timed calls an operation.", lower_bound=3)
CAPACITIES = flags.DEFINE_list("capacities", ["1000", "10000", "100000", "1000000"], "Transitions.")

_IN_ONE_CALL = 100  # insertions or samples: one alone is as short as the call itself
_ENVS, _BATCH, _LENGTH = 4, 128, 3
# Each is varied with the others at the first value that is not the least.
_PLANS = {
    "num_samples": (64, 128, 256, 512, 1024),
    "horizon": (1, 2, 3, 4, 6, 8),
    "iterations": (1, 2, 3, 4, 6, 8),
}
_STORED = {
    "all 32 actions": dict(keep_targets=0),
    "best 8": dict(keep_targets=8),
    "best 8, bfloat16": dict(keep_targets=8, actions_dtype="bfloat16", values_dtype="bfloat16"),
    "best 8, int8 actions": dict(keep_targets=8, actions_dtype="int8", values_dtype="bfloat16"),
}


class Curve(NamedTuple):
    """Milliseconds `y` of `name` at sizes `x`."""

    name: str
    x: list[int]
    y: list[float]


class Setup(NamedTuple):
    """An agent, where the arrays of its run lie, and in how many shards its replay is."""

    agent: Any
    partition: Partition
    shards: int


def make_setup(num_envs: int, **sections: dict[str, Any]) -> Setup:
    """That of configs/tdmpc.py with settings replaced, on as many cores as its run would use."""
    config = presets.load("tdmpc").to_dict()
    for name, values in sections.items():
        config[name].update(values)
    config["env"]["num_envs"] = num_envs
    settings = build.read(on_cores(config))
    partition = sharding.make_partition(settings)
    agent = build.build_agent(settings, envs.make("gymnax:Pendulum-v1", num_envs).spec)
    return Setup(agent, partition, sharding.num_shards(settings, partition))


def empty_replay(setup: Setup, capacity: int) -> replay.ReplayState:
    """A replay of `capacity` transitions over all environments."""
    return replay.init(
        setup.agent.example_row(),
        num_envs=_ENVS,
        capacity=capacity // _ENVS,
        target_spec=setup.agent.store.spec,
        shards=setup.shards,
    )


def milliseconds(
    partition: Partition, function: Callable, *args: Any, donate: bool = False
) -> float:
    """Median of `function(*args)`; with `donate` its result replaces the first argument."""
    asked: dict[str, Any] = dict(repeats=CALLS.value, donate=donate, partition=partition)
    return measure("", function, *args, rate=1.0, **asked).median_ms


def replay_curves(capacities: list[int]) -> list[Curve]:
    """One insertion of a row an environment, and one sampled batch, in full replays."""
    setup = make_setup(_ENVS)
    agent, partition = setup.agent, setup.partition
    key = jax.random.key(0)
    train = jax.jit(agent.init)(key)
    obs = jnp.zeros((_ENVS, 3))
    made = jax.jit(agent.store.targets)(train, None, obs, key)
    row = jax.tree.map(lambda x: jnp.zeros((_ENVS, *x.shape), x.dtype), agent.example_row())

    def insert(state: replay.ReplayState) -> replay.ReplayState:
        return jax.lax.fori_loop(
            0, _IN_ONE_CALL, lambda _, state: replay.insert(state, row, made), state
        )

    def sample(state: replay.ReplayState) -> jax.Array:
        def one(i: jax.Array, total: jax.Array) -> jax.Array:
            drawn = replay.sample(
                state, jax.random.fold_in(key, i), batch_size=_BATCH, length=_LENGTH
            )
            leaves = jax.tree.leaves((drawn.rows, drawn.targets))

            def add(total: jax.Array, leaves: list[jax.Array]) -> jax.Array:
                return total + sum(jnp.sum(x.astype(jnp.float32)) for x in leaves)

            return exchange.apart(add, (0, 1), total, leaves, out=0)  # as an update reads it

        return jax.lax.fori_loop(0, _IN_ONE_CALL, one, jnp.zeros(exchange.devices()))

    times: dict[str, list[float]] = {"insert": [], "sample": []}
    for capacity in capacities:
        state = empty_replay(setup, capacity)
        num = jnp.full((_ENVS,), capacity // _ENVS, jnp.int32)
        full = state.replace(size=num, transitions=num - 1)
        if partition.mesh is not None:
            full = jax.device_put(full, partition.of_environments(full))
        times["insert"].append(milliseconds(partition, insert, full, donate=True) / _IN_ONE_CALL)
        times["sample"].append(milliseconds(partition, sample, full) / _IN_ONE_CALL)
    return [Curve(name, capacities, y) for name, y in times.items()]


def plan_curves() -> list[Curve]:
    """Acting in one environment with plans of different sizes, the others as the benchmark's."""
    base = {"num_samples": 512, "horizon": 3, "iterations": 6, "num_proposals": 24}
    curves = []
    for name, sizes in _PLANS.items():
        times = []
        for size in sizes:
            plan = base | {name: size, "num_elites": 16, "num_proposals": 8, "extra_iterations": 0}
            agent, partition, _ = make_setup(1, planner=plan)
            train = jax.jit(agent.init)(jax.random.key(0))

            def act(train: Any, actor: Any, agent: Any = agent) -> Any:
                first = jnp.zeros(1, bool)
                return agent.act(train, actor, jnp.zeros((1, 3)), first, jax.random.key(1), False)

            args = train, agent.init_actor(1)
            if partition.mesh is not None:
                args = jax.device_put(args, partition.of_parameters(args))
            times.append(milliseconds(partition, act, *args))
        curves.append(Curve(name, list(sizes), times))
    return curves


def stored_bytes() -> dict[str, dict[str, float]]:
    """Bytes of a transition by how targets are stored."""
    result = {}
    for name, settings in _STORED.items():
        setup = make_setup(_ENVS, replay=settings)
        state = jax.eval_shape(lambda setup=setup: empty_replay(setup, 1000))
        result[name] = replay.bytes_per_transition(state)
    return result


def table(curves: list[Curve], plans: list[Curve], sizes: dict[str, dict[str, float]]) -> str:
    """The numbers as Markdown."""
    lines = []
    for curve in curves:
        cells = " | ".join(f"{1e3 * y:.1f}" for y in curve.y)
        ratio = curve.y[-1] / curve.y[0]
        lines.append(f"| {curve.name}, us at {curve.x} | {cells} | last / first {ratio:.2f} |")
    for curve in plans:
        cells = " | ".join(f"{y:.1f}" for y in curve.y)
        lines.append(f"| plan, ms, {curve.name} {curve.x} | {cells} |")
    for name, size in sizes.items():
        lines.append(f"| bytes, {name} | {size['rows']:.0f} row + {size['targets']:.0f} targets |")
    return "\n".join(lines)


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    memory.dispatch_inline()
    jax.config.update("jax_num_cpu_devices", sharding.available_cores())
    measured = replay_curves([int(x) for x in CAPACITIES.value]), plan_curves(), stored_bytes()
    replays, plans, _ = measured
    rows = [
        {"what": curve.name, "size": x, "value": unit * y}  # microseconds, then milliseconds
        for unit, curves in ((1e3, replays), (1.0, plans))
        for curve in curves
        for x, y in zip(curve.x, curve.y, strict=True)
    ]
    write_rows(OUT.value, rows)
    print(table(*measured))


if __name__ == "__main__":
    app.run(main)
