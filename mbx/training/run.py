"""A whole run: train, evaluate, log, checkpoint, plot; resumable bit for bit.

    from mbx.training import run
    result = run.train(config, "runs/pendulum")

A run directory holds config.json, run.json, spec.json, metrics.jsonl, metrics.csv, episodes.csv,
training_episodes.csv, tb/, checkpoints/, best/ (wandb.json with wandb/ where `log.wandb` asks for
that, and inputs/ with the user's own files that the environment is made from). That of several
seeds holds one such directory a seed (`seed-0`, …; each reads as a run of its own) and the common
checkpoint that a resumed run continues from.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from mbx import replay
from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings, Train
from mbx.envs.base import JaxEnvironment
from mbx.fast import allocator
from mbx.settings import flatten, to_dict
from mbx.training import build, evaluation, hub, logging, loop, rundir, transfer
from mbx.training.build import evaluation_environment, make_environment, opened
from mbx.training.checkpoint import Checkpointer
from mbx.training.devices import ONE_DEVICE, num_shards, require_float32
from mbx.training.devices import matmul_precision as matmul_precision
from mbx.training.evaluation import evaluation_key
from mbx.training.files import atomic_write, sole_writer
from mbx.training.job import Job, abstract_state, begin, host_snapshots, prepare
from mbx.training.levels import Levels, of_run
from mbx.training.logging import NoLogger, RunLogger, read_rows
from mbx.training.rundir import load_settings
from mbx.training.state import LoopState, init_state, replay_rows
from mbx.world_model import count_parameters


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
        levels: returns to compare with.
    """

    workdir: str
    steps: int
    evaluations: list[tuple[int, float]]
    seconds: float
    planned: int
    signal: int | None = None
    seeds: int = 1
    levels: Levels = Levels()

    def __str__(self) -> str:
        if self.signal is not None:
            return (
                f"stopped at {self.steps:,} of {self.planned:,} steps, saved; continue with the "
                f"same command and --workdir={self.workdir} --config.resume=True"
            )
        last = f"{self.evaluations[-1][1]:.4g}" if self.evaluations else "none"
        of = f"mean of {self.seeds} seeds" if self.seeds > 1 else ""
        known = "; ".join(filter(None, (of, str(self.levels))))
        return (
            f"{self.steps} environment steps in {self.seconds:.0f} s, last evaluation {last}"
            f"{f' ({known})' if known else ''}; everything is in {self.workdir}"
        )


@dataclasses.dataclass
class SeedRun:
    """One seed's log, best checkpoint, and how many episodes it has had, how many with a fault."""

    logger: RunLogger | NoLogger
    best: Checkpointer
    faults: float = 0.0
    episodes: float = 0.0


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


def set_up_jax(path: str | None = None) -> None:
    """Keep compiled programs in the user's cache directory, so that the next start is quick.

    In a command, also have a CPU's programs run inline (`allocator.dispatch_inline`).
    """
    allocator.dispatch_inline()
    if path is None:
        root = os.environ.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
        path = os.path.join(root, "mbx", "xla")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Python's collector of garbage looks through new objects after 100,000 of them, not 700.

    Tracing makes millions that live on: looking through them all the time finds nothing and takes
    a tenth of the processor time to a run's first updates. Higher thresholds, and a collector that
    is off, are left alone; afterwards all is as before.
    """
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], 100_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def train(
    config: Any,
    workdir: str,
    *,
    interrupt: Interrupt | None = None,
    at_end: Callable[[str], None] | None = None,
) -> Result:
    """Train as `config` says, in `workdir`; with `resume` continue what is there.

    Args:
        config: what `mbx.config.load` takes: the settings of an agent, the name of a configuration,
            or nested mappings as a configuration file makes them.
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
    set_up_jax()
    workdir = os.path.abspath(workdir)  # an environment may go to another directory
    interrupt = interrupt or Interrupt()
    with contextlib.closing(prepare(config)) as job:
        log_dirs = [workdir]
        if len(job.seeds) > 1:
            log_dirs = [os.path.join(workdir, f"seed-{seed}") for seed in job.seeds]
        check_before(job, workdir, log_dirs[0])
        job.partition.wait_for_all("checked")
        with (
            rare_collections(),
            matmul_precision(job.settings.matmul_precision),
            interrupt,
            contextlib.ExitStack() as stack,
        ):
            result = _train(job, workdir, log_dirs, stack, interrupt, at_end, started)
    known = Levels() if jax.process_index() else of_run(workdir)
    return result._replace(levels=known)


def _train(
    job: Job,
    workdir: str,
    log_dirs: list[str],
    stack: contextlib.ExitStack,
    interrupt: Interrupt,
    at_end: Callable[[str], None] | None,
    started: float,
) -> Result:
    """`train` once everything is checked; what it opens is closed with the stack."""
    settings, spec, talk = job.settings, job.environment.spec, job.partition.is_main_process
    if talk:
        stack.enter_context(sole_writer(workdir))
        if settings.resume and not Checkpointer.saved_steps(workdir):
            first = min(job.intervals.checkpoint_every, job.intervals.number)
            rundir.set_aside(log_dirs, first * job.intervals.steps, job.intervals.planned)
    job.partition.wait_for_all("ready")
    checkpointer = stack.enter_context(Checkpointer(workdir, keep=settings.checkpoint.keep))
    state, made = begin(job, checkpointer)
    check_steps(settings.train, made, job.intervals.steps)
    planned = max(made, job.intervals.planned)
    going: dict[str, Any] = {}
    before, changed = [], []
    if made:
        before = rundir.evaluations_before(log_dirs, made)
        changed = rundir.changes(settings, log_dirs[0], spec)
        interrupt.farewell = f"stopped at {made:,} steps, as saved before"
    if talk:
        if at_end is not None:
            stack.callback(at_end, workdir)
        going = stack.enter_context(rundir.attempt(workdir, made))
    seed_runs = open_seed_runs(stack, job, log_dirs, checkpointer, made)
    if talk:
        if made:
            logging.say(f"resuming {workdir} from step {made:,} of {planned:,}")
            logging.say("changed: " + "; ".join(changed) if changed else "no setting changed")
        logging.print_devices()
        logging.print_task_settings(settings, job.chosen, spec)
    if not made:
        describe(job, state, seed_runs)
    state, after = _drive(job, state, made, checkpointer, seed_runs, started, interrupt)
    for i, log_dir in enumerate(log_dirs if settings.replay.save else ()):
        path = os.path.join(log_dir, "dataset.npz")
        transfer.save_dataset(path, job.share(state.replay, i), task=spec.name)
    going["to_step"] = steps = int(np.max(state.steps)) * spec.action_repeat
    stopped = interrupt.number if steps < planned else None
    going["outcome"] = "complete" if stopped is None else f"stopped by signal {stopped}"
    seconds = time.time() - started
    return Result(workdir, steps, before + after, seconds, planned, stopped, len(job.seeds))


def check_before(job: Job, workdir: str, log_dir: str) -> None:
    """Raise where a run cannot do what it is to do; nothing has been written then.

    Raises:
        ValueError: for what its directory, its files, memory or disk do not allow.
        ImportError: for a package that it needs.
    """
    settings, rows = job.settings, job.intervals.planned
    for service in logging.TRACKERS:
        logging.require_tracker(service, settings.log)
    config = to_dict(settings)
    rundir.check(config, workdir, log_dir)
    rundir.check_inputs(settings.files(), log_dir)
    if settings.replay.save and job.partition.processes > 1:
        raise ValueError(
            f"replay.save=True with {job.partition.processes} processes: rows are saved by runs of "
            "a single process, leave it False"
        )
    if settings.train.dataset:
        rows = settings.replay.capacity
    rundir.check_room(config, workdir, abstract_state(job), rows, devices=job.partition.size)


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


def open_seed_runs(
    stack: contextlib.ExitStack,
    job: Job,
    log_dirs: list[str],
    checkpointer: Checkpointer,
    made: int,
) -> list[SeedRun]:
    """Logs and best checkpoints of the run's seeds, closed with the stack."""
    settings, seed_runs = job.settings, []
    for i, (seed, path) in enumerate(zip(job.seeds, log_dirs, strict=True)):
        logger: RunLogger | NoLogger = NoLogger(path)
        if job.partition.is_main_process:
            rundir.keep_inputs(settings.files(), path)
            rundir.remember_trusted(settings.env.name)
            rundir.save_spec(job.environment.spec, path)
            logger = RunLogger(
                path,
                config=to_dict(dataclasses.replace(settings, seed=seed, num_seeds=1)),
                log=settings.log,
                resume_step=made or None,
                progress_total=max(made, job.intervals.planned),
                quiet=i > 0,
                label=f"seed {seed}" if len(job.seeds) > 1 else "",
            )
        stack.callback(logger.close)
        best = checkpointer
        if len(job.seeds) > 1:
            best = stack.enter_context(Checkpointer(path, keep=settings.checkpoint.keep))
        if made:
            rows = read_rows(os.path.join(path, "metrics.jsonl"))
            scores = [row["return_mean"] for row in rows if row.get("return_mean") is not None]
            best.resume_at(made, max(scores, default=None))
        seed_runs.append(SeedRun(logger, best))
    return seed_runs


def describe(job: Job, state: LoopState, seed_runs: list[SeedRun]) -> None:
    """Log a run's sizes: parameters, environments, bytes a row."""
    shapes = jax.eval_shape(lambda state: job.share(state, 0), state)
    sizes = replay.bytes_per_transition(shapes.replay)
    values = {f"replay/bytes_{name}": value for name, value in sizes.items()}
    values["parameters"] = float(count_parameters(shapes.train.params))
    values["num_envs"] = float(shapes.is_first.shape[0])
    for one in seed_runs:
        one.logger.log("setup", 0, values)


def _drive(
    job: Job,
    state: LoopState,
    made: int,
    checkpointer: Checkpointer,
    seed_runs: list[SeedRun],
    started: float,
    interrupt: Interrupt,
) -> tuple[LoopState, list[tuple[int, float]]]:
    """All intervals that are left, with their logs, evaluations and checkpoints."""
    intervals, repeat = job.intervals, job.environment.spec.action_repeat
    evaluations: list[tuple[int, float]] = []
    learned, saved, steps = made > 0, time.monotonic(), made
    minutes, talk = job.settings.checkpoint.minutes, job.partition.is_main_process
    compiling = contextlib.ExitStack()  # until the first call of the program returns
    kept = not job.partition.pieces
    compiling.enter_context(logging.printed_compilation("the train step", talk, kept))

    def interval(state: LoopState, until: int) -> tuple[LoopState, dict[str, Any]]:
        with compiling.pop_all():
            return job.interval(state, until)

    def save(number: int) -> None:
        meta = {"interval": number, "host": host_snapshots(job)}
        checkpointer.save(steps, state, meta)

    def go_on(found: dict[str, Any], left: int) -> bool:
        """Show how far the pretraining is; whether it goes on. After a run's last steps it does: a
        resumed run would have no interval left to make the rest in."""
        interrupt.unsaved = True
        of = job.schedule.pretrain_updates
        for index, one in enumerate(seed_runs if left < of else ()):
            one.logger.show_pretraining(loop.summarise(job.share(found, index)), of - left, of)
        return final or not job.partition.agreed(interrupt.requested)

    for i in range(made // intervals.steps, intervals.number):
        began, before, final = time.time(), steps, i + 1 == intervals.number
        until = (i + 1) * intervals.steps
        state, sums = job._replace(interval=interval).advance(state, until // repeat, go_on)
        interrupt.unsaved = True
        steps = int(np.max(state.steps)) * repeat
        if steps < until:  # stopped in a pretraining within the interval
            save(i)
            break
        seconds = dict(seconds=time.time() - started)
        seconds["steps_per_second"] = (steps - before) / (time.time() - began)
        for index, one in enumerate(seed_runs):
            log_interval(job, one, job.share(sums, index), steps, seconds)
        if job.evaluate and (final or (i + 1) % intervals.eval_every == 0):
            first = talk and not evaluations
            with logging.printed_compilation("the evaluation", first):
                means = evaluate_seeds(job, state, i, steps, seed_runs, started)
            evaluations.append((steps, float(np.mean(means))))
        stop = final or job.partition.agreed(interrupt.requested)
        first = not learned and bool(np.any(sums["updates"]))  # pretraining may have been long
        learned = learned or first
        late = first or time.monotonic() - saved > 60 * minutes
        due = stop or (i + 1) % intervals.checkpoint_every == 0
        if due or (minutes and job.partition.agreed(late)):
            save(i + 1)
            saved = time.monotonic()
        if stop:
            break
    return state, evaluations


def log_interval(
    job: Job, one: SeedRun, sums: Mapping[str, Any], steps: int, times: Mapping[str, float]
) -> None:
    """Log what one seed came to in the interval before `steps`.

    Raises FloatingPointError for a loss or an environment that is not finite any more.
    """
    metrics = loop.summarise(sums) | dict(times)
    metrics["agent_steps"] = steps // job.environment.spec.action_repeat
    one.logger.log("train", steps, metrics)
    log_ended(one.logger, job, sums, steps)
    check_finite(metrics, steps, job.settings)
    if job.agent.check is not None:
        job.agent.check(metrics)
    count_faults(one, metrics, steps, job.environment.spec.name)


def log_ended(logger: RunLogger | NoLogger, job: Job, sums: Mapping[str, Any], steps: int) -> None:
    """Write down the training episodes that ended in the interval before `steps`."""
    if "ended" not in sums:  # learning from recorded rows plays none
        return
    spec, (length, total) = job.environment.spec, (np.asarray(x) for x in sums["ended"])
    when, env = np.nonzero(length)
    at = steps - (len(length) - 1 - when) * length.shape[1] * spec.action_repeat
    found, tasks = (total[when, env], length[when, env]), evaluation.task_names(spec)
    logger.log_episodes("train", at, env, *found, tasks, length.shape[1])


def evaluate_seeds(
    job: Job, state: LoopState, interval: int, steps: int, seed_runs: list[SeedRun], started: float
) -> list[float]:
    """Evaluate every seed, log that with its diagnostics and keep its best: the mean returns."""
    keys = [evaluation_key(jax.random.key(seed), interval) for seed in job.seeds]
    if job.partition.is_main_process:
        logging.say(f"evaluating at step {steps:,}")
    means = []
    for i, result in enumerate(job.evaluate(state.train, keys)):
        one, train, found = seed_runs[i], job.share(state.train, i), []
        here, rows = job.partition.copy_here(train), job.share(state.replay, i)
        if job.agent.diagnostics is not None and job.partition.is_main_process:
            found.append(job.agent.diagnostics(here, job.partition.own_replay(rows), keys[i]))
        if job.agent.review is not None and job.partition.processes == 1:  # it has all episodes
            found.append(job.agent.review(train, rows, result.episodes, keys[i]))
        row = result.summary()
        for diagnostics in found:
            row |= diagnostics.metrics
            for name, content in diagnostics.files.items():
                atomic_write(os.path.join(one.logger.workdir, name), content)
                one.logger.log_picture(name, steps, content)
        one.logger.log("eval", steps, row | {"seconds": time.time() - started})
        played, number = (result.returns, result.lengths, result.tasks), len(result.returns)
        one.logger.log_episodes("eval", [steps] * number, range(number), *played, number)
        one.best.save_best(steps, train, row["return_mean"])
        means.append(row["return_mean"])
    return means


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
    workdir = os.path.abspath(hub.local(workdir))  # an environment may go to another directory
    try:
        settings = load_settings(workdir)
        rundir.check_trusted(settings.env.name, workdir, trusted)
        with opened(evaluation_environment(settings, 1, seed=0)) as environment:
            agent = build.build_agent(settings, environment.spec)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(
            f"{os.path.join(workdir, 'config.json')} cannot be followed: {kind}{error}"
        ) from error
    with Checkpointer(workdir) as checkpointer:
        if which == "best":
            example = jax.eval_shape(agent.init, jax.random.key(0))
            return agent, checkpointer.restore_best(example)[0], settings
        # Made here: what checks an environment runs it, which it cannot inside of a trace.
        with opened(make_environment(settings, settings.env.num_envs, seed=0)) as environment:
            obs = () if isinstance(environment, JaxEnvironment) else (environment.reset(0),)
            sizes = dict(capacity=replay_rows(settings), shards=num_shards(settings, ONE_DEVICE))
            make = functools.partial(init_state, agent, environment, **sizes)
            full = jax.eval_shape(make, jax.random.key(0), *obs)
        step = None if which == "latest" else int(which)
        return agent, checkpointer.restore(full, step=step)[0].train, settings


def check_finite(metrics: Mapping[str, float], steps: int, settings: RunSettings) -> None:
    """Raises FloatingPointError for a metric that is not finite; the environment's are its own."""
    bad = [n for n, x in metrics.items() if not np.isfinite(x) and not n.startswith("episode/")]
    if bad:
        names = [name for name, _ in flatten(to_dict(settings))]
        rate = next((n for n in names if n.rpartition(".")[2].startswith("learning_rate")), "")
        raise FloatingPointError(
            f"{bad[0]} is not finite at step {steps}: lower {rate or 'the learning rate'}, or "
            "resume from the last checkpoint with other settings"
        )


def count_faults(one: SeedRun, metrics: Mapping[str, float], steps: int, task: str) -> None:
    """Count the episodes of one seed that a fault ended in an interval; warn of the first fault.

    Args:
        metrics: of the interval, which ended at `steps`.
        task: `EnvSpec.name`.

    Raises:
        FloatingPointError: where all episodes so far, at least ten, ended in a fault.
    """
    faults = metrics.get("faults", 0)
    if faults and not one.faults:
        warnings.warn(
            f"{faults:.0f} environment steps up to step {steps} were not finite: their "
            "episodes were cut off and they are not learned from (later ones are only "
            "counted, as `faults`)",
            stacklevel=3,
        )
    one.faults += faults
    one.episodes += metrics.get("episodes", 0)
    if 10 <= one.episodes <= one.faults:
        raise FloatingPointError(
            f"each of the {one.episodes:.0f} episodes up to step {steps} ended in an "
            f"observation or a reward that is not finite: fix env.name={task!r}, there "
            "is nothing to learn from"
        )


class Interrupt:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a request that is read between intervals.

    The second signal ends at once: the process where `ends_process`, which a command asks for,
    otherwise with a KeyboardInterrupt as soon as Python runs. A SIGHUP that is ignored when this
    begins (nohup) stays ignored. Outside of the main thread signals are left alone.

    Attributes:
        number: the signal that asked for an end, None while there was none.
        unsaved: whether the run has something to save. Until then a command ends at the first
            signal, with `farewell`: a program may be compiling, which can take minutes.
        farewell: what is said then.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.number: int | None = None
        self.unsaved = False
        self.farewell = "stopped before the first step: nothing is lost"
        self._ends_process = ends_process
        self._stack, self._depth = contextlib.ExitStack(), 0

    @property
    def requested(self) -> bool:
        """Whether the run is to end."""
        return self.number is not None

    def __enter__(self) -> Interrupt:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            watched = []
            for number in [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]:
                old = signal.getsignal(number)
                if number is not getattr(signal, "SIGHUP", None) or old is not signal.SIG_IGN:
                    self._stack.callback(signal.signal, number, old)
                    signal.signal(number, self._handle)
                    watched.append(number)
            if self._ends_process:
                self._watch(watched)
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._stack.close()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ends_process:
            return  # the watching thread has it
        if self.requested:
            raise KeyboardInterrupt
        self._request(number)

    def _watch(self, watched: list[int]) -> None:
        """See signals in a thread: Python's own handlers wait until compiled code returns."""
        receiver, sender = os.pipe()
        os.set_blocking(sender, False)
        self._stack.callback(os.close, sender)
        before = signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
        self._stack.callback(signal.set_wakeup_fd, before)

        def watch() -> None:
            while numbers := os.read(receiver, 64):
                for number in [number for number in numbers if number in watched]:
                    if self.requested or not self.unsaved:
                        if not self.requested:
                            say(self.farewell)
                        os._exit(128 + number)
                    self._request(number)
            os.close(receiver)

        threading.Thread(target=watch, daemon=True).start()

    def _request(self, number: int) -> None:
        self.number = number
        say("stopping: saving after what is computed now (again to stop at once)")


def say(text: str) -> None:
    """Print a line, if anybody reads it."""
    with contextlib.suppress(OSError):
        print(f"\n{text}", flush=True)
