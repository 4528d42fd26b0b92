"""EMPO's part of `experiments.benchmark`: train steps, enumeration, aggregation.

    python -m experiments.benchmark --preset=empo
    python -m experiments.benchmark --preset=empo --batch=32 --json=empo.json    # one batch size

A train step is one step of 32 worlds (humans' actions, successors, replay) and one update. Worlds:
`gates` is `multigrid/gates_2h2r`, 7x7 with two humans and two robots; `maps` are 64 generated maps
of that kind, whose grids the replay holds, with the networks of configs/empo_layouts.py; `room` is
a synthetic 7x7 room for timing tables, whose states are numbered: agents turn, walk and stumble,
four successor slots a joint action of which one to two are used. All have 16 joint robot actions.
Wall times are for an idle machine; processor times are less sensitive to what else runs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import envs, presets, successors
from mbx.empo import multigrid
from mbx.empo import suite as empo_envs
from mbx.empo.agent import make_agent
from mbx.empo.agent.settings import Settings
from mbx.power import World, joint_index, profiles
from mbx.settings import from_dict
from mbx.training import loop
from mbx.training.state import Schedule, init_state

GATES, ROOM, MAPS = "multigrid/gates_2h2r", "timing_room_7x7_2h2r", "maps/rocks_2h2r"
# Model, human expectation, world, largest batch: exact expectations have 16 times the successors.
CASES = (
    ("networks", "fresh", GATES, 4096),
    ("networks", "fresh", MAPS, 32),
    ("networks", "fresh", ROOM, 4096),
    ("tables", "fresh", ROOM, 4096),
    ("tables", "exact", ROOM, 32),
    ("networks", "exact", ROOM, 32),
)
SUCCESSORS = 1.5  # a joint action for which there is room


def run(batches: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Every measurement, printed as it comes. Times in milliseconds."""
    empo_envs.register_world(ROOM, timing_room)
    rows = [
        train_step(*case, batch, repeats)
        for *case, most in CASES
        for batch in batches
        if batch <= most
    ]
    return rows + enumeration(repeats) + aggregation(batches, repeats)


def show(row: dict[str, Any]) -> dict[str, Any]:
    """The row, printed."""
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def timed(call: Callable[[], Any], repeats: int, share: int = 1) -> dict[str, float]:
    """Median and least wall time and least processor time of a call, a `share`-th of it."""
    wall, processor = [], []
    for _ in range(repeats):
        began = time.perf_counter(), time.process_time()
        jax.block_until_ready(call())
        wall.append(1e3 * (time.perf_counter() - began[0]) / share)
        processor.append(1e3 * (time.process_time() - began[1]) / share)
    return {
        "median_ms": round(statistics.median(wall), 3),
        "least_ms": round(min(wall), 3),
        "processor_ms": round(min(processor), 3),
    }


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
        return jnp.concatenate(
            [
                jax.nn.one_hot(state[:, 0], size),
                jax.nn.one_hot(state[:, 1], size),
                jax.nn.one_hot(state[:, 2], 4),
            ],
            axis=1,
        ).reshape(-1)

    def index(state: jax.Array) -> jax.Array:
        cell = joint_index(state[:, :2], size) * 4 + state[:, 2]
        return joint_index(cell, 4 * size * size) % 2**17

    def init(key: jax.Array) -> jax.Array:
        return jax.random.randint(key, (4, 3), 0, jnp.asarray([size, size, 4])[None])

    return World(
        num_humans=2,
        num_robots=2,
        num_actions=4,
        num_goals=4,
        max_successors=4,
        num_states=2**17,
        example_state=jnp.zeros((4, 3), jnp.int32),
        init=init,
        successors=successor,
        terminal=lambda state: jnp.bool_(False),
        achieved=achieved,
        human_policy=lambda state: jnp.full((2, 4, 4), 0.25),
        features=features,
        index=index,
        goal_features=jnp.broadcast_to(corners[None] / size, (2, 4, 2)),
        goal_weight=jnp.full((2, 4), 0.25),
    )


def train_step(kind: str, expectation: str, name: str, batch: int, repeats: int) -> dict[str, Any]:
    """One case at one batch size."""
    length = 20 if batch <= 256 else 2
    model: dict[str, Any] = {"kind": "tables"} if kind == "tables" else {"hidden": 256}
    loss: dict[str, Any] = {"target_interval": 1 if kind == "tables" else 100}
    if name == MAPS:
        config = presets.load("empo_layouts").to_dict()
        model = config["model"]
        loss = {name: config["loss"][name] for name in ("advantage_coef", "target_rate")}
    settings = from_dict(
        Settings(),
        {
            "model": model,
            "loss": loss
            | {"human_expectation": expectation, "batch_size": batch, "room": SUCCESSORS},
            "eval": {"review_episodes": 0},
            "curriculum": {"v_h_e_steps": 0, "q_r_steps": 0, "ramp_steps": 1},
        },
    )
    environment = envs.make(f"empo:{name}", 32)
    agent = make_agent(settings, environment.spec)
    schedule = Schedule(
        seed_steps=64,
        pretrain_updates=0,
        utd_ratio=1 / 32,
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
    make = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=512))
    state = [make(jax.random.key(0))]
    interval = loop.make_interval(agent, environment, schedule, length=length)
    compiled = interval.lower(state[0]).compile()
    metrics: dict[str, Any] = {}

    def call() -> Any:
        state[0], sums = compiled(state[0])
        metrics.update(sums)
        return state[0]

    for _ in range(2):
        call()
    times = timed(call, repeats, length)
    numbers = loop.summarise(metrics)
    return show(
        {
            "part": "train step",
            "batch": batch,
            "model": kind,
            "humans": expectation,
            "world": name,
            **times,
            "successors": round(numbers["n_successors"]),
            "fill": round(numbers["fill"], 2),
            "overflow": numbers["overflow"],
            "state_mib": round(_mebibytes(state[0]), 1),
            "scratch_mib": round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
        }
    )


def _mebibytes(state: Any) -> float:
    """Size of a whole run's state: replay, parameters, copies, optimiser."""
    leaves = jax.tree.leaves(state.replace(key=None))
    return sum(leaf.nbytes for leaf in leaves) / 2**20


def enumeration(repeats: int, batch: int = 256) -> list[dict[str, Any]]:
    """Outcomes of states of `gates` for all 16 joint robot actions, in one jitted batch."""
    grid = multigrid.make_grid(multigrid.load_map(GATES.partition("/")[2]))
    layout = grid.layout
    back = jnp.asarray(np.argsort(np.concatenate([layout.humans, layout.robots])))
    robots = jnp.asarray(profiles(2, layout.num_actions), jnp.int32)

    @jax.jit
    def walk(states: Any, key: jax.Array) -> Any:
        action_key, chance_key = jax.random.split(key)
        actions = jax.random.randint(action_key, (batch, 4), 0, layout.num_actions)
        following, prob = jax.vmap(grid.outcomes)(states, actions)
        chosen = jax.random.categorical(chance_key, jnp.log(prob))
        return jax.tree.map(lambda x: x[jnp.arange(batch), chosen], following)

    def of_state(state: Any, humans: jax.Array) -> Any:
        return jax.vmap(lambda r: grid.outcomes(state, jnp.concatenate([humans, r])[back]))(robots)

    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), grid.initial)
    for i in range(20):
        states = walk(states, jax.random.key(i))
    humans = jax.random.randint(jax.random.key(9), (batch, 2), 0, layout.num_actions)
    compiled = jax.jit(jax.vmap(of_state))
    jax.block_until_ready(compiled(states, humans))
    times = timed(lambda: compiled(states, humans), 10 * repeats)
    return [
        show(
            {
                "part": "enumeration",
                "states": batch,
                **times,
                "states_per_second": round(1e3 * batch / times["least_ms"]),
                "states_per_processor_second": round(1e3 * batch / times["processor_ms"]),
            }
        )
    ]


def aggregation(batches: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
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

        row = {"part": "aggregation", "batch": batch, "successors": int(ids.size)}
        for name, call in (
            ("segment_ms", lambda s=segment, a=arrays: s(*a)),
            ("dense_ms", lambda d=dense, r=room: dense_sum(d, r)),
            ("python_loop_ms", loop_sum),
        ):
            jax.block_until_ready(call())
            times = []
            for _ in range(2 * repeats):
                began = time.perf_counter()
                jax.block_until_ready(call())
                times.append(1e3 * (time.perf_counter() - began))
            row[name] = round(statistics.median(times), 3)
        rows.append(row)
        show(row)
    return rows
