"""Several seeds of one configuration in one compiled program: `--config.num_seeds=8`.

Every seed is the run that it would be alone, with the same keys: what differs are parameters,
environments and replays, stacked along a leading axis, stepped together under `vmap` and divided
among the devices there are (the command makes every processor core one).

The run directory holds one directory a seed (`seed-0`, …: logs, curve, best checkpoint; each reads
as a run of its own), and the common checkpoint that a resumed run continues from.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.agents.base import Agent
from mbx.envs.base import JaxEnvironment
from mbx.training import build, evaluation, loop, run
from mbx.training.checkpoint import Checkpointer
from mbx.training.curves import plot_runs
from mbx.training.metrics import RunLogger

Config = Mapping[str, Any]


class Seed(NamedTuple):
    """One seed's log and its best checkpoint."""

    workdir: str
    logger: RunLogger
    best: Checkpointer


def fresh_state(
    agent: Agent, environment: JaxEnvironment, config: Config, keys: jax.Array
) -> loop.LoopState:
    """The states of all seeds, `[S, ...]` each, from their runs' keys `[S]`."""
    capacity = run.replay_rows(config, environment.num_envs)

    def one(key: jax.Array) -> loop.LoopState:
        return loop.init_state(agent, environment, key=key, capacity=capacity)

    return jax.jit(jax.vmap(one, out_axes=loop.SEEDS))(keys)


def seed_metrics(sums: dict[str, Any], index: int) -> dict[str, float]:
    """One seed's share of the metrics of an interval."""
    return loop.summarise({n: x[index] if np.ndim(x) else x for n, x in sums.items()})


def open_seeds(
    stack: contextlib.ExitStack, config: Config, workdir: str, resume_step: int | None, total: int
) -> list[Seed]:
    """Loggers and best checkpoints of all seeds, closed with the stack."""
    opened = []
    for i in range(config["num_seeds"]):
        path = os.path.join(workdir, f"seed-{config['seed'] + i}")
        own = {**config, "seed": config["seed"] + i, "num_seeds": 1}
        logger = RunLogger(
            path, config=own, resume_step=resume_step, progress_total=total, quiet=i > 0
        )
        best = Checkpointer(path, keep=config["checkpoint"]["keep"])
        stack.callback(best.close)
        stack.callback(logger.close)
        opened.append(Seed(path, logger, best))
    return opened


def shares(num_seeds: int, available: int) -> int:
    """The largest number of devices, at most `available`, that divides the seeds evenly."""
    return max(n for n in range(1, max(available, 1) + 1) if num_seeds % n == 0)


def use_all_cores(num_seeds: int) -> None:
    """Make every processor core a device, as far as the seeds can be divided among them.

    Small models keep one core busy and no more. Only before anything has run on a device, and only
    of use without an accelerator.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    jax.config.update("jax_num_cpu_devices", shares(num_seeds, cores or 1))


def device_mesh(num_seeds: int) -> jax.sharding.Mesh | None:
    """The devices that the seeds are divided among; None for a single one."""
    devices = jax.local_devices()
    num = shares(num_seeds, len(devices))
    return jax.sharding.Mesh(np.array(devices[:num]), ("devices",)) if num > 1 else None


def prepare(config: Config) -> run.Job:
    """`run.prepare` for all seeds in one program. Raises ValueError for host environments."""
    num = config["num_seeds"]
    environment = run.make_environment(config, config["env"]["num_envs"], seed=config["seed"])
    if not isinstance(environment, JaxEnvironment):
        raise ValueError(
            f"num_seeds={num}: {environment.spec.name} runs on the host, one seed a program; start "
            "one run a seed, or choose an environment written in JAX"
        )
    agent = build.build_agent(config, environment.spec)
    schedule = build.build_schedule(config, environment.spec, environment.num_envs)
    plan = run.make_plan(config, environment.num_envs, environment.spec.action_repeat)
    interval = loop.make_seeds_interval(
        agent, environment, schedule, capacity=run.replay_rows(config, environment.num_envs),
        length=plan.length, mesh=device_mesh(num),
    )  # fmt: skip
    eval_environment = run.evaluation_environment(
        config, config["eval"]["episodes"], seed=config["seed"] + 1
    )
    evaluate = evaluation.make_evaluate_seeds(agent.act, agent.init_actor, eval_environment)
    return run.Job(environment, agent, plan, interval, evaluate)


def train(config: Config, workdir: str) -> run.Result:
    """`run.train` for `config["num_seeds"]` seeds, counted from `config["seed"]`.

    Raises ValueError for host environments, and what `run.train` raises.
    """
    started = time.time()
    run.enable_compilation_cache()
    workdir = os.path.abspath(workdir)
    job = prepare(config)
    run.check_workdir(config, os.path.join(workdir, f"seed-{config['seed']}"))
    keys = jnp.stack([jax.random.key(config["seed"] + i) for i in range(config["num_seeds"])])
    state = fresh_state(job.agent, job.environment, config, keys)
    with contextlib.ExitStack() as stack:
        checkpointer = Checkpointer(workdir, keep=config["checkpoint"]["keep"])
        stack.callback(checkpointer.close)
        done = 0
        if config["resume"] and checkpointer.latest_step() is not None:
            state, meta = checkpointer.restore(state)
            done = meta["interval"]
        state = loop.place_seeds(state, device_mesh(config["num_seeds"]))
        resumed = done * job.plan.steps_per_interval if done else None
        total = job.plan.intervals * job.plan.steps_per_interval
        seeds = open_seeds(stack, config, workdir, resumed, total)
        state, evaluations = _run(config, job, state, done, keys, checkpointer, seeds, started)
    if evaluations:
        plot_runs([seed.workdir for seed in seeds], os.path.join(workdir, "curve.png"))
    steps = int(state.steps) * job.environment.spec.action_repeat
    return run.Result(workdir, steps, evaluations, time.time() - started)


def _run(
    config: Config,
    job: run.Job,
    state: loop.LoopState,
    done: int,
    keys: jax.Array,
    checkpointer: Checkpointer,
    seeds: list[Seed],
    started: float,
) -> tuple[loop.LoopState, list[tuple[int, float]]]:
    """All intervals from number `done` on; evaluations are means over the seeds."""
    plan, repeat = job.plan, job.environment.spec.action_repeat
    evaluations: list[tuple[int, float]] = []
    with run.Interrupt() as interrupt:
        for i in range(done, plan.intervals):
            began = time.time()
            state, sums = job.interval(state)
            sums = jax.device_get(sums)
            steps = (i + 1) * plan.steps_per_interval
            speed = dict(
                steps_per_second=plan.steps_per_interval / (time.time() - began),
                agent_steps=steps // repeat, seconds=time.time() - started,
            )  # fmt: skip
            for index, seed in enumerate(seeds):
                metrics = seed_metrics(sums, index) | speed
                seed.logger.log("train", steps, metrics)
                run.check_finite(config, metrics, steps)
            final = i + 1 == plan.intervals
            if final or (i + 1) % plan.eval_every == 0:
                folded = [run.evaluation_key(key, i) for key in keys]
                results = job.evaluate(state.train, jnp.stack(folded))
                record(job.agent, seeds, state, results, folded, steps, time.time() - started)
                means = [result.summary()["return_mean"] for result in results]
                evaluations.append((steps, float(np.mean(means))))
            stop = final or interrupt.requested
            if stop or (i + 1) % plan.checkpoint_every == 0:
                checkpointer.save(steps, state, {"interval": i + 1, "host": None})
            if stop:
                break
    return state, evaluations


def record(
    agent: Agent,
    seeds: list[Seed],
    state: loop.LoopState,
    results: list[evaluation.Evaluation],
    keys: list[jax.Array],
    steps: int,
    seconds: float,
) -> None:
    """Write every seed's evaluation and review, and its checkpoint where that is its best."""
    for index, (seed, result) in enumerate(zip(seeds, results, strict=True)):
        own = loop.one_seed(state, index)
        summary = result.summary() | run.review(agent, seed.workdir, own, keys[index])
        seed.logger.log("eval", steps, {**summary, "seconds": seconds})
        seed.best.save_best(steps, own.train, summary["return_mean"])
