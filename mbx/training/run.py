"""A whole run: train, evaluate, log, checkpoint, plot; resumable bit for bit.

    from mbx.training import run
    result = run.train(config, "runs/pendulum")

A run directory holds config.json, run.json, metrics.jsonl, metrics.csv, episodes.csv,
training_episodes.csv, tb/, checkpoints/, best/ (wandb.json with wandb/
where `log.wandb` asks for that, and inputs/ with the user's own files that the environment is made
from).
That of several seeds holds one such directory a seed (`seed-0`, …; each reads as a run of its own)
and the common checkpoint that a resumed run continues from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import numpy as np

from mbx import replay
from mbx.agents.base import Agent, Diagnostics
from mbx.agents.settings import RunSettings, Train
from mbx.config import load as load_configuration
from mbx.files import sole_writer
from mbx.settings import flatten, to_dict
from mbx.training import (
    ahead,
    build,
    datasets,
    environments,
    evaluation,
    inputs,
    loop,
    memory,
    notices,
    record,
    resume,
    room,
    rundir,
    seeds,
    sinks,
    specs,
    transfer,
    trust,
)
from mbx.training.checkpoint import Checkpointer, load_settings
from mbx.training.environments import evaluation_environment, make_environment, opened
from mbx.training.faults import Faults
from mbx.training.interrupt import Interrupt
from mbx.training.job import (
    Job,
    begin,
    fresh_state,
    host_snapshots,
    make_state,
    prepare,
    rare_collections,
    whole_interval,
)
from mbx.training.job import matmul_precision as matmul_precision
from mbx.training.metrics import NoLogger, RunLogger, atomic_write, read_rows
from mbx.training.state import LoopState
from mbx.world_model import count_parameters

Config = build.Config

# Folded into the run's key for evaluations, whose random stream is not training's.
_EVALUATION = 0xE7A1


class Result(NamedTuple):
    """Outcome of a run.

    Attributes:
        workdir: its directory.
        steps: environment steps made.
        evaluations: (environment steps, mean return) pairs, oldest first, those before a resume
            included.
        seconds: that it took.
        planned: environment steps that it is to make in all.
        signal: what stopped it before, None where nothing did.
        seeds: that the means are over.
    """

    workdir: str
    steps: int
    evaluations: list[tuple[int, float]]
    seconds: float
    planned: int
    signal: int | None = None
    seeds: int = 1

    def __str__(self) -> str:
        if self.signal is not None:
            return (
                f"stopped at {self.steps:,} of {self.planned:,} steps, saved; continue with the "
                f"same command and --workdir={self.workdir} --config.resume=True"
            )
        last = f"{self.evaluations[-1][1]:.1f}" if self.evaluations else "none"
        of = f" (mean of {self.seeds} seeds)" if self.seeds > 1 else ""
        return (
            f"{self.steps} environment steps in {self.seconds:.0f} s, "
            f"last evaluation {last}{of}; everything is in {self.workdir}"
        )


class SeedRun(NamedTuple):
    """One seed's directory, log and best checkpoint."""

    workdir: str
    logger: RunLogger | NoLogger
    best: Checkpointer


def set_up_jax(path: str | None = None) -> None:
    """Keep compiled programs in the user's cache directory, so that the next start is quick.

    In a command, also have a CPU's programs run inline (`memory.dispatch_inline`).
    """
    memory.dispatch_inline()
    if path is None:
        root = os.environ.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
        path = os.path.join(root, "mbx", "xla")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def evaluation_key(key: jax.Array, interval: int) -> jax.Array:
    """The key of the evaluation after an interval, from the run's key."""
    return jax.random.fold_in(jax.random.fold_in(key, _EVALUATION), interval)


def train(
    config: Config,
    workdir: str,
    *,
    interrupt: Interrupt | None = None,
    at_end: Callable[[str], None] | None = None,
) -> Result:
    """Train as `config` says, in `workdir`; with `resume` continue what is there.

    Args:
        config: settings of an agent (`mbx.agents.NAME.settings.Settings`), or nested mappings of
            their names, as a configuration file makes them.
        workdir: the run directory.
        interrupt: what signals do to the run; by default they ask it to save and end.
        at_end: called with `workdir` when the run ends or fails and its logs are closed
            (`mbx.analysis.report.at_end` draws its curve and writes its report).

    Raises:
        ValueError: for impossible settings, before any compile.
        ImportError: for a package that a setting needs, likewise.
        FloatingPointError: when a loss stops being finite; the last checkpoint stays.

    Examples:
        >>> run.train(presets.load("tdmpc"), "runs/a")  # doctest: +SKIP
    """
    started = time.time()
    require_float32()
    settings = load_configuration(config)
    workdir = os.path.abspath(workdir)  # an environment may go to another directory
    settings = transfer.resolve(environments.located(settings))
    sinks.require_wandb(settings.log)
    set_up_jax()
    job = prepare(settings)
    with contextlib.closing(job):
        return _train(settings, job, workdir, interrupt or Interrupt(), at_end, started)


def _train(
    settings: RunSettings,
    job: Job,
    workdir: str,
    interrupt: Interrupt,
    at_end: Callable[[str], None] | None,
    started: float,
) -> Result:
    log_dirs = [seed_workdir(job, workdir, i) for i in range(len(job.seeds))]
    check_before(settings, job, workdir, log_dirs[0])
    job.partition.wait_for_all("checked")
    with (
        rare_collections(),
        matmul_precision(settings.matmul_precision),
        interrupt,
        contextlib.ExitStack() as stack,
    ):
        if job.partition.is_main_process:
            stack.enter_context(sole_writer(workdir))
            if settings.resume:
                set_aside_lost_rows(job, workdir, log_dirs)
        job.partition.wait_for_all("ready")
        checkpointer = Checkpointer(workdir, keep=settings.checkpoint.keep)
        stack.callback(checkpointer.close)
        state, made = begin(settings, job, checkpointer)
        check_steps(settings.train, made, job.intervals.steps)
        job = job._replace(intervals=job.intervals.going_on(made, settings.train.steps))
        going = record.Attempt()
        if job.partition.is_main_process:
            if at_end is not None:
                stack.callback(at_end, workdir)
            going = stack.enter_context(record.attempt(workdir, made))
        if len(job.seeds) > 1:
            state = seeds.place(state, seeds.device_mesh(len(job.seeds)))
        changed = resume.changes(settings, log_dirs[0], job.environment.spec) if made else []
        seed_runs = open_seed_runs(stack, settings, job, workdir, checkpointer)
        shapes = jax.eval_shape(lambda state: job.share(state, 0), state)
        for one in seed_runs if not made else ():
            describe(one.logger, shapes)
        if job.partition.is_main_process:
            if made:
                notices.resuming(workdir, made, job.intervals.planned, changed)
            notices.starting()
            notices.of_task(settings, settings.for_task(job.environment.spec))
        before = resume.evaluations_before(log_dirs, made) if made else []
        if made:
            interrupt.farewell = f"stopped at {made:,} steps, as saved before"
        state, evaluations = _drive(
            settings, job, state, checkpointer, seed_runs, started, interrupt
        )
        if settings.replay.save:
            for i, one in enumerate(seed_runs):
                path = os.path.join(one.workdir, "dataset.npz")
                rows = job.share(state.replay, i)
                datasets.save(path, rows, task=job.environment.spec.name)
        going.to_step = steps = int(np.max(state.steps)) * job.environment.spec.action_repeat
        planned = job.intervals.planned
        stopped = interrupt.number if steps < planned else None
        going.outcome = "complete" if stopped is None else f"stopped by signal {stopped}"
    evaluations = before + evaluations
    return Result(
        workdir, steps, evaluations, time.time() - started, planned, stopped, len(job.seeds)
    )


def check_before(settings: RunSettings, job: Job, workdir: str, log_dir: str) -> None:
    """Raise ValueError where a run cannot do what it is to do; nothing has been written then."""
    rundir.check(to_dict(settings), workdir, log_dir)
    inputs.check(settings, log_dir)
    if settings.replay.save and job.partition.processes > 1:
        raise ValueError(
            f"replay.save=True with {job.partition.processes} processes: rows are saved by runs of "
            "a single process, leave it False"
        )
    rows = job.intervals.planned
    if settings.train.dataset:
        rows = settings.replay.capacity
    room.check(
        to_dict(settings), workdir, abstract_state(settings, job), rows, devices=job.partition.size
    )


def check_steps(train: Train, made: int, interval: int) -> None:
    """Raise ValueError for fewer steps than a resumed run has made; warn where none of them learns.

    Args:
        train: settings of the run.
        made: environment steps that it has made before.
        interval: environment steps of an interval, which a run's steps are rounded up to.
    """
    if train.steps + interval <= made:
        raise ValueError(
            f"train.steps={train.steps}, but the run has made {made} steps already: give at least "
            "as many, or begin another run with fewer"
        )
    if train.seed_steps >= train.steps + bool(train.pretrain_updates) and not train.dataset:
        warnings.warn(
            f"train.seed_steps={train.seed_steps} of train.steps={train.steps}: every action is "
            "random and nothing is learned; lower train.seed_steps, or raise train.steps",
            stacklevel=2,
        )


def abstract_state(settings: RunSettings, job: Job) -> LoopState:
    """Shapes of a run's state; nothing is made."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), len(job.seeds)))
    key = keys if len(job.seeds) > 1 else jax.eval_shape(lambda keys: keys[0], keys)
    parts = job.initial_state, job.environment, settings.seed
    return jax.eval_shape(lambda key: make_state(*parts, key, job.partition), key)


def set_aside_lost_rows(job: Job, workdir: str, log_dirs: list[str]) -> None:
    """Before resuming: where there is no checkpoint, put rows aside that are made again.

    Raises ValueError where there must have been one.
    """
    if Checkpointer.saved_steps(workdir):
        return
    intervals = job.intervals
    first = intervals.at(min(intervals.checkpoint_every, intervals.number))
    for log_dir in log_dirs:
        rundir.check_rows(log_dir, first, intervals.planned)
    for log_dir in log_dirs:
        rundir.set_aside(log_dir)


def seed_workdir(job: Job, workdir: str, index: int) -> str:
    """The directory of one of the run's seeds: the run's own where it has a single one."""
    return workdir if len(job.seeds) == 1 else os.path.join(workdir, f"seed-{job.seeds[index]}")


def open_seed_runs(
    stack: contextlib.ExitStack,
    settings: RunSettings,
    job: Job,
    workdir: str,
    checkpointer: Checkpointer,
) -> list[SeedRun]:
    """Logs and best checkpoints of the run's seeds, closed with the stack."""
    intervals, seed_runs = job.intervals, []
    for i, seed in enumerate(job.seeds):
        path = seed_workdir(job, workdir, i)
        logger = NoLogger(path)
        if job.partition.is_main_process:
            inputs.keep(settings, path)
            trust.remember(settings.env.name)
            specs.save(job.environment.spec, path)
            logger = RunLogger(
                path,
                config=to_dict(dataclasses.replace(settings, seed=seed, num_seeds=1)),
                log=settings.log,
                resume_step=intervals.behind or None,
                progress_total=intervals.planned,
                quiet=i > 0,
                label=f"seed {seed}" if len(job.seeds) > 1 else "",
            )
        stack.callback(logger.close)
        best = checkpointer
        if path != workdir:
            best = Checkpointer(path, keep=settings.checkpoint.keep)
            stack.callback(best.close)
        if intervals.behind:
            rows = read_rows(os.path.join(path, "metrics.jsonl"))
            scores = [row["return_mean"] for row in rows if row.get("return_mean") is not None]
            best.resume_at(intervals.behind, max(scores, default=None))
        seed_runs.append(SeedRun(path, logger, best))
    return seed_runs


def _drive(
    settings: RunSettings,
    job: Job,
    state: LoopState,
    checkpointer: Checkpointer,
    seed_runs: list[SeedRun],
    started: float,
    interrupt: Interrupt,
) -> tuple[LoopState, list[tuple[int, float]]]:
    """All intervals that are left, with their logs, evaluations and checkpoints."""
    intervals, repeat = job.intervals, job.environment.spec.action_repeat
    evaluations: list[tuple[int, float]] = []
    talk = job.partition.is_main_process
    faults = [Faults(job.environment.spec.name) for _ in seed_runs]
    minutes, learned, saved = settings.checkpoint.minutes, intervals.behind > 0, time.monotonic()
    compiling: Future[None] | None = None
    with interrupt:
        for i in range(intervals.first, intervals.number):
            began = time.time()
            final = i + 1 == intervals.number
            compiled = notices.compiling(
                "the train step", talk and i == intervals.first, not job.partition.pieces
            )
            go_on = functools.partial(_pretraining, job, seed_runs, interrupt, final)
            state, sums = whole_interval(job, state, go_on, compiled)
            interrupt.unsaved = True
            steps = int(np.max(state.steps)) * repeat
            if steps < intervals.at(i + 1):  # stopped in what a resumed run had left to make
                checkpointer.save(steps, state, {"interval": i, "host": host_snapshots(job)})
                break
            for index, one in enumerate(seed_runs):
                metrics = loop.summarise(job.share(sums, index))
                metrics["steps_per_second"] = intervals.steps / (time.time() - began)
                metrics["agent_steps"] = steps // repeat
                metrics["seconds"] = time.time() - started
                one.logger.log("train", steps, metrics)
                log_ended(one.logger, job, job.share(sums, index), steps)
                if settings.train.check_finite:
                    check_finite(metrics, steps, settings)
                if job.agent.check is not None:
                    job.agent.check(metrics)
                faults[index].see(metrics, steps)
            if job.evaluate and (final or (i + 1) % intervals.eval_every == 0):
                if compiling is not None:
                    compiling.result()
                new = compiling is None and not evaluations
                with notices.compiling("the evaluation", talk and new):
                    means = evaluate_seeds(job, state, i, steps, seed_runs, started)
                evaluations.append((steps, float(np.mean(means))))
            stop = final or job.partition.agreed(interrupt.requested)
            first = not learned and np.any(sums["updates"])  # pretraining may have been long
            learned = learned or bool(first)
            late = first or time.monotonic() - saved > 60 * minutes
            due = stop or (i + 1) % intervals.checkpoint_every == 0
            if due or (minutes and job.partition.agreed(bool(late))):
                meta = {"interval": i + 1, "host": host_snapshots(job)}
                checkpointer.save(steps, state, meta)
                saved = time.monotonic()
            if stop:
                break
            if learned and compiling is None and not evaluations and ahead.possible(job):
                compiling = ahead.start(job, state, settings.matmul_precision, talk=talk)
    return state, evaluations


def _pretraining(
    job: Job,
    seed_runs: list[SeedRun],
    interrupt: Interrupt,
    final: bool,
    found: dict[str, Any],
    left: int,
) -> bool:
    """Show how far the pretraining is; whether it goes on. After a run's last steps it does: a
    resumed run would have no interval left to make the rest in."""
    interrupt.unsaved = True
    of = job.schedule.pretrain_updates
    for index, one in enumerate(seed_runs):
        one.logger.show_pretraining(loop.summarise(job.share(found, index)), of - left, of)
    return final or not job.partition.agreed(interrupt.requested)


def log_ended(logger: RunLogger | NoLogger, job: Job, sums: Mapping[str, Any], steps: int) -> None:
    """Write down the training episodes that ended in the interval before `steps`."""
    if "ended" not in sums:  # learning from recorded rows plays none
        return
    length, total = (np.asarray(x) for x in sums["ended"])
    when, env = np.nonzero(length)
    each = length.shape[1] * job.environment.spec.action_repeat
    at = steps - (len(length) - 1 - when) * each
    tasks = evaluation.task_names(job.environment)
    block = length.shape[1] // max(len(tasks), 1)
    names = [tasks[i // block] if tasks else "" for i in env]
    logger.log_training(at, env, names, total[when, env], length[when, env])


def evaluate_seeds(
    job: Job, state: LoopState, interval: int, steps: int, seed_runs: list[SeedRun], started: float
) -> list[float]:
    """Evaluate every seed, log that with its diagnostics and keep its best: the mean returns."""
    keys = [evaluation_key(jax.random.key(seed), interval) for seed in job.seeds]
    if job.partition.is_main_process:
        notices.evaluating(steps)
    means = []
    for i, result in enumerate(job.evaluate(state.train, keys)):
        one, train = seed_runs[i], job.share(state.train, i)
        summary = result.summary()
        # Diagnostics read rows of the whole replay, which one process has only alone.
        if job.agent.diagnostics is not None and job.partition.processes == 1:
            rows = job.share(state.replay, i)
            found = job.agent.diagnostics(train, rows, keys[i])
            summary |= write_diagnostics(found, one.logger, steps)
        if job.agent.review is not None and result.episodes is not None:
            rows = job.share(state.replay, i)
            found = job.agent.review(train, rows, result.episodes, keys[i])
            summary |= write_diagnostics(found, one.logger, steps)
        one.logger.log("eval", steps, {**summary, "seconds": time.time() - started})
        one.logger.log_episodes(steps, result.returns, result.lengths, result.tasks)
        one.best.save_best(steps, train, summary["return_mean"])
        means.append(summary["return_mean"])
    return means


def write_diagnostics(
    found: Diagnostics, logger: RunLogger | NoLogger, steps: int
) -> dict[str, float]:
    """Write the files of an agent's diagnostics and return their numbers."""
    for name, content in found.files.items():
        atomic_write(os.path.join(logger.workdir, name), content)
        logger.log_picture(name, steps, content)
    return found.metrics


def load(
    workdir: str, *, which: str | int = "best", trusted: bool = False
) -> tuple[Agent, Any, RunSettings]:
    """A trained agent: `(agent, train state, settings)` from a run directory.

    Args:
        workdir: the run directory.
        which: "best" (by evaluation return), "latest", or the step of a checkpoint.
        trusted: also execute an environment's own file that no run of this user was made with.

    Raises:
        ValueError: naming the file, where its configuration describes no run, or none of this
            version, or names code of somebody else's.
        FileNotFoundError: where the environment's own file has gone.

    Examples:
        >>> agent, state, settings = run.load("runs/a")  # doctest: +SKIP
    """
    require_float32()
    workdir = os.path.abspath(workdir)  # an environment may go to another directory
    try:
        settings = load_settings(workdir)
        trust.check(settings.env.name, workdir, trusted)
        with opened(evaluation_environment(settings, 1, seed=0)) as environment:
            agent = build.build_agent(settings, environment.spec)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{os.path.join(workdir, 'config.json')} cannot be followed: {kind}{error}"
        ) from error
    example = jax.eval_shape(agent.init, jax.random.key(0))
    checkpointer = Checkpointer(workdir)
    if which == "best":
        train_state, _ = checkpointer.restore_best(example)
    else:
        # Made here: what checks an environment runs it, which it cannot inside of a trace.
        with opened(make_environment(settings, settings.env.num_envs, seed=0)) as environment:
            full = jax.eval_shape(
                lambda: fresh_state(agent, environment, settings, jax.random.key(0))
            )
        step = None if which == "latest" else int(which)
        train_state = checkpointer.restore(full, step=step)[0].train
    checkpointer.close()
    return agent, train_state, settings


def require_float32() -> None:
    """Raise ValueError where JAX makes 64-bit numbers, which the programs are not written for."""
    if jax.config.jax_enable_x64:
        raise ValueError(
            "JAX_ENABLE_X64 is on: runs are in float32; unset it, or set "
            "jax.config.update('jax_enable_x64', False)"
        )


def check_finite(metrics: Mapping[str, float], steps: int, settings: RunSettings) -> None:
    """Raises FloatingPointError for a metric that is not finite; the environment's are its own."""
    bad = [n for n, x in metrics.items() if not np.isfinite(x) and not n.startswith("episode/")]
    if bad:
        names = [name for name, _ in flatten(to_dict(settings))]
        rate = next((n for n in names if n.rpartition(".")[2].startswith("learning_rate")), "")
        raise FloatingPointError(
            f"{bad[0]} is not finite at step {steps}: lower {rate or 'the learning rate'}, or "
            "resume from the last checkpoint with other settings "
            "(train.check_finite=False goes on regardless)"
        )


def describe(logger: RunLogger | NoLogger, state: LoopState) -> None:
    """Log a run's sizes, given its abstract state: parameters, environments, bytes a row."""
    sizes = replay.bytes_per_transition(state.replay)
    values = {f"replay/bytes_{name}": value for name, value in sizes.items()}
    values["parameters"] = float(count_parameters(state.train.params))
    values["num_envs"] = float(state.is_first.shape[0])
    logger.log("setup", 0, values)
