"""Time EMPO's train step: batch, networks or tables, how human actions are averaged.

    python -m experiments.empo_benchmark                      # batch 32, 7x7, 2 humans, 2 robots
    python -m experiments.empo_benchmark --batches=32,4096 --world=multigrid/NAME
    python -m experiments.empo_benchmark --aggregation        # segment sums against a Python loop

A train step is one step of 32 worlds (humans' actions, successors, replay) and one update. Without
--world the world is a synthetic 7x7 room for timing only: two humans and two robots that turn,
walk and stumble, four successor slots a joint action of which one to two are used.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from mbx import envs, successors
from mbx.agents import empo
from mbx.envs import empo as empo_envs
from mbx.power import Curriculum, PowerParams, World, joint_index
from mbx.training import loop

BATCHES = flags.DEFINE_list("batches", ["32"], "Batch sizes.")
WORLD = flags.DEFINE_string("world", "", "World (empty: the synthetic room).")
REPEATS = flags.DEFINE_integer("repeats", 5, "Timed calls.", lower_bound=3)
AGGREGATION = flags.DEFINE_bool("aggregation", False, "Time the aggregation alone.")
JSON = flags.DEFINE_string("json", None, "Also write the results here.")

CASES = (
    ("networks", "fresh"), ("networks", "exact"), ("tables", "fresh"), ("tables", "exact"),
)  # fmt: skip
_ROOM = "timing_room_7x7_2h2r"


def timing_room(size: int = 7, stumble: float = 0.1) -> World:
    """Four agents (x, y, direction) on an open floor; one in ten steps of agent 0 stumbles."""
    moves = jnp.asarray([[1, 0], [0, 1], [-1, 0], [0, -1]], jnp.int32)
    corners = jnp.asarray([[x, y] for x in (0, size - 1) for y in (0, size - 1)], jnp.int32)

    def walk(state: jax.Array, joint: jax.Array, walking: jax.Array) -> jax.Array:
        turn = jnp.where(joint == 1, 1, jnp.where(joint == 2, -1, 0))
        facing = (state[:, 2] + turn) % 4
        ahead = state[:, :2] + jnp.where((joint == 3) & walking, 1, 0)[:, None] * moves[facing]
        return jnp.concatenate([jnp.clip(ahead, 0, size - 1), facing[:, None]], axis=1)

    def successor(state: jax.Array, joint: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        fallen = jnp.arange(4)[None] * jnp.ones((4, 1), int) == 0
        walking = ~(fallen & (jnp.arange(4) == 1)[:, None])
        states = jax.vmap(lambda w: walk(state, joint, w))(walking)
        risky = joint[0] == 3
        first, second = jnp.where(risky, 1.0 - stumble, 1.0), jnp.where(risky, stumble, 0.0)
        return states, jnp.stack([first, second, 0.0, 0.0]), jnp.bool_(False)

    def achieved(state: jax.Array) -> jax.Array:
        return jnp.all(state[:2, None, :2] == corners[None], axis=-1)

    def features(state: jax.Array) -> jax.Array:
        return jnp.concatenate([
            jax.nn.one_hot(state[:, 0], size), jax.nn.one_hot(state[:, 1], size),
            jax.nn.one_hot(state[:, 2], 4),
        ], axis=1).reshape(-1)  # fmt: skip

    def index(state: jax.Array) -> jax.Array:
        cell = joint_index(state[:, :2], size) * 4 + state[:, 2]
        return joint_index(cell, 4 * size * size) % 2**17

    def init(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (4, 3), 0, jnp.asarray([size, size, 4])[None])

    return World(
        num_humans=2, num_robots=2, num_actions=4, num_goals=4, max_successors=4,
        num_states=2**17, example_state=jnp.zeros((4, 3), jnp.int32), init=init,
        successors=successor, terminal=lambda state: jnp.bool_(False), achieved=achieved,
        human_policy=lambda state: jnp.full((2, 4, 4), 0.25), features=features, index=index,
        goal_features=jnp.broadcast_to(corners[None] / size, (2, 4, 2)),
        goal_weight=jnp.full((2, 4), 0.25),
    )  # fmt: skip


def build(name: str, kind: str, expectation: str, batch: int) -> tuple[Any, Callable, int]:
    """A loop state past its seed phase, a compiled interval of one-update steps, its length."""
    length = 20 if batch <= 256 else 2
    config = empo.EmpoConfig(
        PowerParams(), Curriculum(v_h_e_steps=0, x_h_steps=0, q_r_steps=0, ramp_steps=1),
        kind=kind, human_expectation=expectation, batch_size=batch,
        capacity=32 * batch if expectation == "fresh" else 0, table_min_rate=0.02,
        target_interval=1 if kind == "tables" else 100,
    )  # fmt: skip
    agent = empo.make_agent(config, empo_envs.named_world(name).world)
    environment = envs.make(f"empo:{name}", 32)
    schedule = loop.Schedule(
        seed_steps=64, pretrain_updates=0, utd_ratio=1 / 32, reanalyze_interval=0,
        reanalyze_min_step=0,
    )  # fmt: skip
    make = jax.jit(lambda key: loop.init_state(agent, environment, key=key, capacity=512))
    interval = loop.make_interval(agent, environment, schedule, capacity=512, length=length)
    state = make(jax.random.key(0))
    for _ in range(2):
        state, metrics = interval(state)
    return state, interval, length


def train_steps(name: str, batches: list[int]) -> list[dict[str, Any]]:
    """Milliseconds of a train step (median and least), successors an update, for every case."""
    rows = []
    for batch in batches:
        for kind, expectation in CASES:
            if kind == "tables" and empo_envs.named_world(name).world.num_states is None:
                continue  # a world whose states are not numbered
            if batch > 256 and expectation == "exact":
                continue  # 256 successors a state and more: too many for a batch this large
            state, interval, length = build(name, kind, expectation, batch)
            times = []
            for _ in range(REPEATS.value):
                began = time.perf_counter()
                state, metrics = interval(state)
                jax.block_until_ready(state)
                times.append(1e3 * (time.perf_counter() - began) / length)
            metrics = loop.summarise(metrics)
            rows.append({
                "batch": batch, "kind": kind, "human_expectation": expectation,
                "median_ms": round(statistics.median(times), 3), "least_ms": round(min(times), 3),
                "successors": metrics["n_successors"], "fill": round(metrics["fill"], 3),
                "overflow": metrics["overflow"], "mib": round(_mebibytes(state), 1),
            })  # fmt: skip
            print(rows[-1], flush=True)
    return rows


def _mebibytes(state: Any) -> float:
    """Size of a whole run's state: replay, parameters, copies, optimiser."""
    leaves = jax.tree.leaves(state.replace(key=None))
    return sum(leaf.nbytes for leaf in leaves) / 2**20


def aggregation(batches: list[int]) -> list[dict[str, Any]]:
    """Expected values of `batch * 16` pairs of 2-4 successors: segment sum, dense sum, loop."""
    rows, dense_sum = [], jax.jit(successors.dense_expectation)
    for batch in batches:
        rng = np.random.default_rng(0)
        count = rng.integers(2, 5, batch * 16)
        ids = np.repeat(np.arange(batch * 16), count)
        values, probs = rng.normal(size=ids.size), 1.0 / count[ids]
        room = jnp.asarray(np.where(np.arange(4)[None] < count[:, None], 1 / count[:, None], 0))
        dense = jnp.asarray(rng.normal(size=room.shape))
        segment = jax.jit(lambda v, p, i, n=batch * 16: successors.segment_expectation(v, p, i, n))
        arrays = jnp.asarray(values), jnp.asarray(probs), jnp.asarray(ids)

        def loop_sum(values=values, probs=probs, ids=ids, n=batch * 16) -> list[float]:
            total = [0.0] * n
            for value, prob, i in zip(values.tolist(), probs.tolist(), ids.tolist(), strict=True):
                total[i] += prob * value
            return total

        row = {"batch": batch, "successors": int(ids.size)}
        for name, call in (
            ("segment_ms", lambda s=segment, a=arrays: s(*a)),
            ("dense_ms", lambda d=dense, r=room: dense_sum(d, r)),
            ("python_loop_ms", loop_sum),
        ):
            jax.block_until_ready(call())
            times = []
            for _ in range(2 * REPEATS.value):
                began = time.perf_counter()
                jax.block_until_ready(call())
                times.append(1e3 * (time.perf_counter() - began))
            row[name] = round(statistics.median(times), 3)
        rows.append(row)
        print(row, flush=True)
    return rows


def main(_: list[str]) -> None:
    empo_envs.register_world(_ROOM, timing_room)
    batches = [int(x) for x in BATCHES.value]
    rows = aggregation(batches) if AGGREGATION.value else train_steps(WORLD.value or _ROOM, batches)
    if JSON.value:
        with open(JSON.value, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    app.run(main)
