"""The same training in one process and in several that share its cores.

    python -m experiments.weak_scaling                          # configs/tdmpc.py, two processes
    python -m experiments.weak_scaling --processes=2 --batch=1024 --envs=2

Prints environment steps a second of the whole run (acting, learning, reanalyze; without compiling)
for each, and their ratio. In between, one process runs the divided program on as many devices: what
several processes take longer than that is the exchange between them.
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

from absl import app, flags, logging

PROCESSES = flags.DEFINE_integer("processes", 2, "Processes.", lower_bound=2)
SIZE = flags.DEFINE_string("size", "tiny", "Model size.")
BATCH = flags.DEFINE_integer("batch", 128, "Batch size, of all processes together.")
ENVS = flags.DEFINE_integer("envs", 8, "Environments, of all processes together.")
INTERVALS = flags.DEFINE_integer("intervals", 7, "Timed intervals of 20 vector steps each.")
CHILD = flags.DEFINE_string("child", None, "Internal: what one process is told.")

_LENGTH = 20


def make_config(told: dict[str, Any]) -> dict[str, Any]:
    """The configuration of one process."""
    from mbx.config import presets

    config = presets.load("tdmpc")
    config.model.size = told["size"]
    config.env.num_envs = told["envs"]
    config.loss.batch_size = told["batch"]
    config.replay.capacity = 10_000
    config.train.update(
        seed_steps=20 * told["envs"], pretrain_updates=1, log_interval=_LENGTH * told["envs"]
    )
    config.reanalyze.min_step = 0
    if told["devices"] > 1:
        config.distributed.update(
            enabled=True,
            num_processes=told["processes"],
            coordinator=told["coordinator"],
            process_id=told["process"],
        )
    return config.to_dict()


def measure(told: dict[str, Any]) -> dict[str, float]:
    """Seconds of an interval in this process."""
    import jax

    from mbx.training import build, job, sharding
    from mbx.world_model import count_parameters

    config = build.read(make_config(told))
    sharding.initialize(config.distributed)
    work = job.prepare(config)
    state, _ = job.begin(config, work, None)
    times = []
    for i in range(3 + INTERVALS.value):  # seed phase, first updates, warm-up
        began = time.perf_counter()
        state, _ = jax.block_until_ready(work.interval(state))
        times += [time.perf_counter() - began] if i > 2 else []
    return dict(
        interval=statistics.median(times), parameters=float(count_parameters(state.train.params))
    )


def run(processes: int, devices: int) -> dict[str, float]:
    """The slowest process's numbers; all processes share all cores."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    children = []
    for process in range(processes):
        told = dict(
            size=SIZE.value,
            envs=ENVS.value,
            batch=BATCH.value,
            processes=processes,
            process=process,
            devices=devices,
            coordinator=coordinator,
        )
        children.append(
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "experiments.weak_scaling",
                    f"--child={json.dumps(told)}",
                    f"--intervals={INTERVALS.value}",
                ],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "JAX_NUM_CPU_DEVICES": str(devices // processes)},
            )
        )
    results = []
    for child in children:
        output = child.communicate()[0]
        if child.returncode:
            sys.exit(f"error: a process ended with {child.returncode}")
        results.append(json.loads(output.strip().splitlines()[-1]))
    return {name: max(result[name] for result in results) for name in results[0]}


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.WARNING)
    if CHILD.value:
        print(json.dumps(measure(json.loads(CHILD.value))))
        return
    num = PROCESSES.value
    alone, divided, together = run(1, 1), run(1, num), run(num, num)
    exchange = 1 - divided["interval"] / together["interval"]
    print(
        f"size {SIZE.value} ({alone['parameters'] / 1e6:.2f}M parameters), batch {BATCH.value}, "
        f"{ENVS.value} environments"
    )
    for name, result in (
        ("1 process, 1 device", alone),
        (f"1 process, {num} devices", divided),
        (f"{num} processes, 1 device each", together),
    ):
        print(
            f"{name}: {_LENGTH * ENVS.value / result['interval']:.1f} environment steps/s, "
            f"{alone['interval'] / result['interval']:.2f} of the first"
        )
    print(f"exchange between processes: {100 * exchange:.0f} % of their time")


if __name__ == "__main__":
    app.run(main)
