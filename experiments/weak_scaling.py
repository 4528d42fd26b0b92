"""The same training in one process on all cores and in several on a share of the cores each.

    python -m experiments.weak_scaling                          # configs/tdmpc.py, two processes
    python -m experiments.weak_scaling --processes=2 --size=5 --batch=256

Prints environment steps a second of the whole run (acting, learning, reanalyze; without compiling)
for each, their ratio, and the share of a step that the gradients' all-reduce would take by itself.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

from absl import app, flags

PROCESSES = flags.DEFINE_integer("processes", 2, "Processes.", lower_bound=2)
SIZE = flags.DEFINE_string("size", "tiny", "Model size.")
BATCH = flags.DEFINE_integer("batch", 128, "Batch size, of all processes together.")
ENVS = flags.DEFINE_integer("envs", 8, "Environments, of all processes together.")
INTERVALS = flags.DEFINE_integer("intervals", 7, "Timed intervals of 20 vector steps each.")
CHILD = flags.DEFINE_string("child", None, "Internal: what one process is told.")

_LENGTH = 20


def make_config(told: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one process."""
    from configs import tdmpc

    config = tdmpc.get_config()
    config.model.size = told["size"]
    config.env.num_envs = told["envs"]
    config.loss.batch_size = told["batch"]
    config.replay.capacity = 10_000
    config.train.update(seed_steps=20 * told["envs"], pretrain_updates=1,
                        log_interval=_LENGTH * told["envs"])  # fmt: skip
    config.reanalyze.min_step = 0
    config.distributed.update(
        enabled=told["processes"] > 1, num_processes=told["processes"],
        coordinator=told["coordinator"], process_id=told["process"],
    )  # fmt: skip
    return config.to_dict()


def measure(told: dict[str, Any]) -> dict[str, float]:
    """Seconds of an interval and of an all-reduce of the gradients, in this process."""
    import jax
    import jax.numpy as jnp

    from mbx.training import job, sharding
    from mbx.world_model import count_parameters

    config = make_config(told)
    sharding.initialize(config)
    work = job.prepare(config)
    layout = work.layout
    state, _ = job.begin(config, work, None)
    times = []
    for i in range(3 + INTERVALS.value):  # seed phase, first updates, warm-up
        began = time.perf_counter()
        state, _ = jax.block_until_ready(work.interval(state))
        times += [time.perf_counter() - began] if i > 2 else []
    size = count_parameters(state.train.params)
    grads = jax.jit(
        lambda: jnp.ones((layout.size, size)), out_shardings=layout.of_environments(
            jax.ShapeDtypeStruct((layout.size, size), jnp.float32)
        ),
    )()  # fmt: skip
    reduce = layout.compile(lambda x: jnp.sum(x, axis=0))
    reduced = []
    for _ in range(20):
        began = time.perf_counter()
        jax.block_until_ready(reduce(grads))
        reduced.append(time.perf_counter() - began)
    updates = config["train"]["utd_ratio"] * _LENGTH * told["envs"]
    return dict(
        interval=statistics.median(times), reduce=statistics.median(reduced) * updates,
        parameters=float(size),
    )  # fmt: skip


def run(processes: int) -> dict[str, float]:
    """The slowest process's numbers, each process on its share of the cores."""
    cores = sorted(os.sched_getaffinity(0))
    share = max(1, len(cores) // processes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    children = []
    for process in range(processes):
        own = cores[process * share % len(cores) :][:share]
        told = dict(size=SIZE.value, envs=ENVS.value, batch=BATCH.value, processes=processes,
                    process=process, coordinator=coordinator, cores=own)  # fmt: skip
        children.append(subprocess.Popen(
            [sys.executable, "-m", "experiments.weak_scaling", f"--child={json.dumps(told)}",
             f"--intervals={INTERVALS.value}"],
            stdout=subprocess.PIPE, text=True,
        ))  # fmt: skip
    results = []
    for child in children:
        output = child.communicate()[0]
        if child.returncode:
            sys.exit(f"error: a process ended with {child.returncode}")
        results.append(json.loads(output.strip().splitlines()[-1]))
    return {name: max(result[name] for result in results) for name in results[0]}


def main(_: list[str]) -> None:
    if CHILD.value:
        told = json.loads(CHILD.value)
        os.sched_setaffinity(0, told["cores"])
        print(json.dumps(measure(told)))
        return
    alone, together = run(1), run(PROCESSES.value)
    steps = _LENGTH * ENVS.value
    print(
        f"size {SIZE.value} ({alone['parameters'] / 1e6:.2f}M parameters), batch {BATCH.value}, "
        f"{ENVS.value} environments\n"
        f"1 process:   {steps / alone['interval']:.1f} environment steps/s\n"
        f"{PROCESSES.value} processes: {steps / together['interval']:.1f} environment steps/s, "
        f"{alone['interval'] / together['interval']:.2f} of one process; all-reduces of the "
        f"gradients alone {100 * together['reduce'] / together['interval']:.1f} % of the time"
    )


if __name__ == "__main__":
    app.run(main)
