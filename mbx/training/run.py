"""A whole run: train, evaluate, log, checkpoint, plot; resumable bit for bit.

    from mbx.training import run
    result = run.train(config, "runs/pendulum")

A run directory holds config.json, metrics.jsonl, metrics.csv, tb/, checkpoints/, best/, curve.png
(and wandb.json with wandb/ where `log.wandb` asks for that).
That of several seeds holds one such directory a seed (`seed-0`, …; each reads as a run of its own)
and the common checkpoint that a resumed run continues from.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from mbx import replay
from mbx.agents.base import Agent
from mbx.files import sole_writer
from mbx.training import build, datasets, loop, seeds, transfer, wandb_sink
from mbx.training.checkpoint import Checkpointer, load_config
from mbx.training.curves import plot_runs
from mbx.training.environments import evaluation_environment, make_environment
from mbx.training.interrupt import Interrupt
from mbx.training.job import Job, begin, fresh_state, host_snapshots, prepare
from mbx.training.metrics import NoLogger, RunLogger, atomic_write
from mbx.training.state import LoopState
from mbx.world_model import count_parameters

Config = Mapping[str, Any]

# Folded into the run's key for evaluations, whose random stream is not training's.
_EVALUATION = 0xE7A1


class Result(NamedTuple):
    """Outcome of a run: where it lies, environment steps made, and every evaluation.

    evaluations: (environment steps, mean return) pairs, oldest first.
    """

    workdir: str
    steps: int
    evaluations: list[tuple[int, float]]
    seconds: float

    def __str__(self) -> str:
        last = f"{self.evaluations[-1][1]:.1f}" if self.evaluations else "none"
        return (
            f"{self.steps} environment steps in {self.seconds:.0f} s, "
            f"last evaluation {last}; everything is in {self.workdir}"
        )


class Member(NamedTuple):
    """One seed's directory, log and best checkpoint."""

    workdir: str
    logger: RunLogger | NoLogger
    best: Checkpointer


def enable_compilation_cache(path: str | None = None) -> None:
    """Keep compiled programs in the user's cache directory, so that the next start is quick."""
    if path is None:
        root = os.environ.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
        path = os.path.join(root, "mbx", "xla")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def evaluation_key(key: jax.Array, interval: int) -> jax.Array:
    """The key of the evaluation after an interval, from the run's key."""
    return jax.random.fold_in(jax.random.fold_in(key, _EVALUATION), interval)


def matmul_precision(config: Config) -> contextlib.AbstractContextManager:
    """The context in which a configuration's programs are traced: how exact float32 products are.

    "default" leaves that to the device: a GPU may use tf32 and a TPU bfloat16, a CPU is exact.
    """
    precision = config.get("matmul_precision", "default")
    if precision == "default":
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)


def train(config: Config, workdir: str) -> Result:
    """Train as `config` says, in `workdir`; with `config["resume"]` continue what is there.

    Raises ValueError for impossible settings and ImportError for a package that one of them needs
    (both before any compile), and FloatingPointError when a loss stops being finite (the last
    checkpoint stays).
    """
    started = time.time()
    config = transfer.resolve(config)
    wandb_sink.require(config)
    enable_compilation_cache()
    workdir = os.path.abspath(workdir)
    job = prepare(config)
    check_workdir(config, member_workdir(job, workdir, 0))
    if config["replay"].get("save") and job.layout.processes > 1:
        raise ValueError(
            f"replay.save=True with {job.layout.processes} processes: rows are saved by runs of a "
            "single process, leave it False"
        )
    job.layout.wait_for_all("checked")
    with matmul_precision(config), contextlib.ExitStack() as stack:
        if job.layout.leads:
            stack.enter_context(sole_writer(workdir))
        checkpointer = Checkpointer(workdir, keep=config["checkpoint"]["keep"])
        stack.callback(checkpointer.close)
        state, done = begin(config, job, checkpointer)
        if len(job.seeds) > 1:
            state = seeds.place(state, seeds.device_mesh(len(job.seeds)))
        members = open_members(stack, config, job, workdir, checkpointer, done)
        shapes = jax.eval_shape(lambda state: job.share(state, 0), state)
        for member in members if not done else ():
            describe(member.logger, shapes)
        state, evaluations = _drive(config, job, state, done, checkpointer, members, started)
        if config["replay"].get("save"):
            for i, member in enumerate(members):
                path = os.path.join(member.workdir, "dataset.npz")
                rows = job.share(state.replay, i)
                datasets.save(path, rows, task=job.environment.spec.name)
    if evaluations and job.layout.leads:
        plot_runs([member.workdir for member in members], os.path.join(workdir, "curve.png"))
    steps = int(np.max(state.steps)) * job.environment.spec.action_repeat
    return Result(workdir, steps, evaluations, time.time() - started)


def member_workdir(job: Job, workdir: str, index: int) -> str:
    """Where the log of one of the run's seeds lies."""
    return workdir if len(job.seeds) == 1 else os.path.join(workdir, f"seed-{job.seeds[index]}")


def open_members(
    stack: contextlib.ExitStack,
    config: Config,
    job: Job,
    workdir: str,
    checkpointer: Checkpointer,
    done: int,
) -> list[Member]:
    """Logs and best checkpoints of the run's seeds, closed with the stack."""
    plan, members = job.plan, []
    for i, seed in enumerate(job.seeds):
        path = member_workdir(job, workdir, i)
        logger = NoLogger(path)
        if job.layout.leads:
            logger = RunLogger(
                path,
                config={**config, "seed": seed, "num_seeds": 1},
                resume_step=done * plan.steps_per_interval if done else None,
                progress_total=plan.intervals * plan.steps_per_interval,
                quiet=i > 0,
            )
        stack.callback(logger.close)
        best = checkpointer
        if path != workdir:
            best = Checkpointer(path, keep=config["checkpoint"]["keep"])
            stack.callback(best.close)
        members.append(Member(path, logger, best))
    return members


def _drive(
    config: Config,
    job: Job,
    state: LoopState,
    done: int,
    checkpointer: Checkpointer,
    members: list[Member],
    started: float,
) -> tuple[LoopState, list[tuple[int, float]]]:
    """All intervals from number `done` on, with their logs, evaluations and checkpoints."""
    plan, repeat = job.plan, job.environment.spec.action_repeat
    evaluations: list[tuple[int, float]] = []
    warned = False
    with Interrupt() as interrupt:
        for i in range(done, plan.intervals):
            began = time.time()
            state, sums = job.interval(state)
            sums = jax.device_get(sums)
            steps = (i + 1) * plan.steps_per_interval
            for index, member in enumerate(members):
                metrics = loop.summarise(job.share(sums, index))
                metrics["steps_per_second"] = plan.steps_per_interval / (time.time() - began)
                metrics["agent_steps"] = steps // repeat
                metrics["seconds"] = time.time() - started
                member.logger.log("train", steps, metrics)
                check_finite(config, metrics, steps)
                if job.agent.check is not None:
                    job.agent.check(metrics)
                warned = warned or warn_of_faults(metrics, steps)
            final = i + 1 == plan.intervals
            if final or (i + 1) % plan.eval_every == 0:
                means = evaluate_members(job, state, i, steps, members, started)
                evaluations.append((steps, float(np.mean(means))))
            stop = final or job.layout.agreed(interrupt.requested)
            if stop or (i + 1) % plan.checkpoint_every == 0:
                meta = {"interval": i + 1, "host": host_snapshots(job)}
                checkpointer.save(steps, state, meta)
            if stop:
                break
    return state, evaluations


def evaluate_members(
    job: Job, state: LoopState, interval: int, steps: int, members: list[Member], started: float
) -> list[float]:
    """Evaluate every seed, log that with its diagnostics and keep its best: the mean returns."""
    keys = [evaluation_key(jax.random.key(seed), interval) for seed in job.seeds]
    means = []
    for i, result in enumerate(job.evaluate(state.train, keys)):
        member, train = members[i], job.share(state.train, i)
        summary = result.summary()
        # Diagnostics read rows of the whole replay, which one process has only alone.
        if job.agent.diagnostics is not None and job.layout.processes == 1:
            rows = job.share(state.replay, i)
            summary |= write_diagnostics(job.agent, member.workdir, train, rows, keys[i])
        member.logger.log("eval", steps, {**summary, "seconds": time.time() - started})
        member.best.save_best(steps, train, summary["return_mean"])
        means.append(summary["return_mean"])
    return means


def write_diagnostics(
    agent: Agent, workdir: str, train: Any, rows: replay.ReplayState, key: jax.Array
) -> dict[str, float]:
    """Write the files of the agent's diagnostics and return their numbers."""
    found = agent.diagnostics(train, rows, key)
    for name, content in found.files.items():
        atomic_write(os.path.join(workdir, name), content)
    return found.metrics


def load(workdir: str, *, which: str | int = "best") -> tuple[Agent, Any, dict[str, Any]]:
    """A trained agent: `(agent, train state, config)` from a run directory.

    which: "best" (by evaluation return), "latest", or the step of a checkpoint.
    """
    config = load_config(workdir)
    environment = evaluation_environment(config, 1, seed=0)
    agent = build.build_agent(config, environment.spec)
    example = jax.eval_shape(agent.init, jax.random.key(0))
    checkpointer = Checkpointer(workdir)
    if which == "best":
        train_state, _ = checkpointer.restore_best(example)
    else:
        full = jax.eval_shape(
            lambda: fresh_state(
                agent,
                make_environment(config, config["env"]["num_envs"], seed=0),
                config,
                jax.random.key(0),
            )
        )
        step = None if which == "latest" else int(which)
        train_state = checkpointer.restore(full, step=step)[0].train
    checkpointer.close()
    return agent, train_state, config


def check_workdir(config: Config, workdir: str) -> None:
    """Raises ValueError where a run would be written over that is not to be continued."""
    taken = os.path.exists(os.path.join(workdir, "metrics.jsonl"))
    if taken and not config["resume"]:
        raise ValueError(
            f"workdir={workdir} already holds a run: continue it with --config.resume=True or "
            "choose another directory"
        )


def check_finite(config: Config, metrics: Mapping[str, float], steps: int) -> None:
    """Raises FloatingPointError for a metric that is not finite, if the configuration says so."""
    if not config["train"]["check_finite"]:
        return
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"{bad[0]} is not finite at step {steps}: lower optimizer.learning_rate, or resume "
            "from the last checkpoint with other settings "
            "(train.check_finite=False goes on regardless)"
        )


def warn_of_faults(metrics: Mapping[str, float], steps: int) -> bool:
    """Warn where the environment gave something that is not finite; returns whether it did."""
    faults = metrics.get("faults", 0)
    if faults:
        warnings.warn(
            f"{faults:.0f} environment steps up to step {steps} were not finite: their episodes "
            "were cut off and they are not learned from (later ones are only counted, as `faults`)",
            stacklevel=2,
        )
    return bool(faults)


def describe(logger: RunLogger | NoLogger, state: LoopState) -> None:
    """Log a run's sizes, given its abstract state: parameters, environments, bytes a row."""
    sizes = replay.bytes_per_transition(state.replay)
    values = {f"replay/bytes_{name}": value for name, value in sizes.items()}
    values["parameters"] = float(count_parameters(state.train.params))
    values["num_envs"] = float(state.is_first.shape[0])
    logger.log("setup", 0, values)
