"""One learner update, or a run, on the devices of one or several processes, given as JSON.

    python -m tests.training.divided '{"agent": "tdmpc", "devices": 8}'
    python -m tests.training.divided '{"agent": "tdmpc", "devices": 8, "run": ["runs/a", 320]}'
    python -m tests.training.divided '{"agent": "tdmpc", "devices": 8, "each": [{}, {"cores": 2}]}'

The replay holds rows of random acting, in eight shards whatever the number of devices, and the
parameters are moved off their start, where zero heads make everything a tie.
"""

from __future__ import annotations

import json
import os
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from mbx.fast import collectives
from mbx.training import build, devices, job, loop, run

NUM_ENVS = 8


def config_of(agent: str) -> dict:
    """A tiny configuration that acts at random for as long as a test runs."""
    if agent == "tdmpc":
        from tests.helpers import tiny_config

        config = tiny_config(loss=dict(batch_size=16), reanalyze=dict(batch_size=16))
    elif agent == "dreamer":
        from configs import dreamer

        config = dreamer.get_config().to_dict()
        config["env"].update(name="gymnax:CartPole-v1", episode_length=8)
        config["model"].update(num_bins=21)
        config["loss"].update(batch_size=16, batch_length=4)
        config["imagination"].update(horizon=3, rows=0)
        config["eval"]["report"] = True
    else:
        from configs import empo

        config = empo.get_config().to_dict()
        config["env"].update(name="empo:grid_rock_1h1r", episode_length=5)
        config["model"].update(hidden=8, dropout=0.5)
        config["loss"]["batch_size"] = 16
    config["env"]["num_envs"] = NUM_ENVS
    config["replay"].update(capacity=400, shards=8)
    config["train"].update(steps=10_000, seed_steps=10_000, log_interval=20 * NUM_ENVS)
    config["eval"].update(episodes=NUM_ENVS, exploring=False)
    return config


def update_once(config: dict) -> dict[str, float]:
    """Metrics of an update, the norm of the parameters after it, and one evaluation (not on cores,
    where `test_cores` has one)."""
    work = job.prepare(config)
    partition, agent = work.partition, work.agent
    state, _ = job.begin(work, None)
    rng = np.random.default_rng(7)
    noisy = lambda x: np.asarray(x + 0.05 * rng.normal(size=x.shape), x.dtype)  # noqa: E731
    params = jax.tree.map(noisy, jax.device_get(state.train.params))
    state = partition.place(state.replace(train=state.train.replace(params=params)))
    # The run's own interval holds an update too, which would be compiled to be left out.
    still = agent._replace(update=lambda train, buffer, key: (train, buffer, {}))
    length = work.intervals.length
    parts = still, work.environment, work.schedule
    act = loop.make_interval(*parts, length=length, partition=partition)
    state, _ = act(state)
    if partition.mesh is not None:
        obs = state.replay.data["is_first"]
        assert obs.sharding.spec == jax.P("data"), obs.sharding
        assert obs.addressable_shards[0].data.shape[0] == NUM_ENVS // partition.size

    def update(state):
        key = jax.random.key(3)
        train, _, metrics = agent.update(state.train, state.replay, key)
        squares = [jnp.sum(jnp.square(x)) for x in jax.tree.leaves(train.params)]
        change = jax.tree.map(
            lambda a, b: jnp.sum(jnp.abs(a - b)), train.params, state.train.params
        )
        return metrics | {"params": sum(squares), "change": sum(jax.tree.leaves(change))}

    program = partition.compile(update).lower(state).compile()  # once: processes end together
    told = {name: float(x) for name, x in jax.device_get(program(state)).items()}
    if partition.mesh is not None:
        leaves = jax.tree.leaves(state.train)
        told["divided"] = sum(not x.sharding.is_fully_replicated for x in leaves)
        told["collective_bytes"] = largest_collective(program.as_text())
    told["rows"] = float(jnp.sum(state.replay.size))
    if not partition.cores:
        told["return"] = float(work.evaluate(state.train, [jax.random.key(5)])[0].returns.mean())
    return told


def on_host(name: str, phase: int, seconds: float) -> dict:
    """A configuration whose environments this process steps, one of them, with an update a step."""
    from tests.helpers import tiny_config

    config = tiny_config(
        env=dict(name=name, num_envs=2, kwargs=dict(seconds=seconds, phase=phase)),
        train=dict(steps=10_000, seed_steps=16, pretrain_updates=1, utd_ratio=0.5, log_interval=40),
        loss=dict(batch_size=16),
        reanalyze=dict(batch_size=16),
    )
    config["replay"].update(capacity=400, shards=2)
    return config


def intervals(config: dict, num: int) -> dict[str, list[float]]:
    """Seconds that each of the first train intervals takes."""
    work, seconds = job.prepare(config), []
    state, _ = job.begin(work, None)
    for _ in range(num):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(work.advance(state))
        seconds.append(time.perf_counter() - began)
    return {"seconds": seconds, "updates": int(state.updates)}


def train(config: dict, workdir: str, steps: int) -> dict:
    """Train to `steps`, from a checkpoint if there is one."""
    config["train"].update(steps=steps, seed_steps=80, log_interval=80)
    config["eval"]["interval"] = config["checkpoint"]["interval"] = 160
    result = run.train({**config, "resume": os.path.isdir(workdir)}, workdir)
    return {"steps": result.steps, "evaluations": result.evaluations}


def largest_collective(text: str) -> float:
    """Bytes of the largest array that an all-gather or an all-to-all of a program makes."""
    import re

    largest = 0
    for shape in re.findall(r"= \w+\[([\d,]*)\][^=]* (?:all-gather|all-to-all)\(", text):
        size = 4
        for n in shape.split(","):
            size *= int(n or 1)
        largest = max(largest, size)
    return float(largest)


def main() -> None:
    told = json.loads(sys.argv[1])
    jax.config.update("jax_num_cpu_devices", told["devices"])
    config = on_host(*told["host"]) if "host" in told else config_of(told["agent"])
    if "each" in told:
        found = [
            update_once({**config, "distributed": config["distributed"] | on})
            for on in told["each"]
        ]
        print("RESULT " + json.dumps(found), flush=True)
        return
    processes = told.get("processes", 1)
    if told.get("cores"):
        config["distributed"]["cores"] = told["devices"]
    elif processes * told["devices"] > 1:
        config["distributed"].update(
            enabled=True,
            num_processes=processes,
            coordinator=told.get("coordinator", ""),
            process_id=told.get("process", 0),
            fsdp=told.get("fsdp", False),
            heartbeat_timeout=20,
        )
    if told.get("fsdp"):
        collectives._LARGE = 2**10  # so that this small model is divided as a large one
    devices.initialize(build.read(config).distributed)
    jax.devices()  # here processes wait for one another; then one of them may fall behind
    time.sleep(told.get("late", 0))
    if "host" in told:
        told = intervals(config, 6)
    else:
        told = train(config, *told["run"]) if "run" in told else update_once(config)
    print("RESULT " + json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
