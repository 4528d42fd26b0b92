"""A whole run: build, train, evaluate, log, checkpoint, plot; resumable bit for bit.

    from mbx.training import run
    result = run.train(config, "runs/pendulum")

A run directory holds config.json, metrics.jsonl, metrics.csv, tb/, checkpoints/, best/, curve.png.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import warnings
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from mbx import envs, replay
from mbx.agents.base import Agent
from mbx.envs.base import HostEnvironment, JaxEnvironment
from mbx.training import build, datasets, evaluation, loop, transfer
from mbx.training.checkpoint import Checkpointer, load_config
from mbx.training.curves import plot_runs
from mbx.training.metrics import RunLogger, atomic_write
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


@dataclasses.dataclass(frozen=True)
class Plan:
    """Counts of a run in units of its interval (`length` steps of all environments)."""

    length: int
    intervals: int
    eval_every: int
    checkpoint_every: int
    steps_per_interval: int


def enable_compilation_cache(path: str | None = None) -> None:
    """Keep compiled programs in the user's cache directory, so that the next start is quick."""
    if path is None:
        root = os.environ.get("XDG_CACHE_HOME", os.path.join(os.path.expanduser("~"), ".cache"))
        path = os.path.join(root, "mbx", "xla")
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", path)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def make_environment(
    config: Config, num_envs: int, *, seed: int
) -> JaxEnvironment | HostEnvironment:
    """The configuration's environment, `num_envs` times."""
    env = config["env"]
    several = env["name"].startswith("multi:")
    extra = {"min_sizes": tuple(env["pad_to"])} if several else {}
    return envs.make(
        env["name"], num_envs, action_repeat=env["action_repeat"] or None,
        episode_length=env["episode_length"] or None, seed=seed, **extra,
    )  # fmt: skip


def evaluation_environment(
    config: Config, episodes: int, *, seed: int
) -> JaxEnvironment | HostEnvironment:
    """Environments for an evaluation of `episodes` episodes of every task."""
    return make_environment(config, episodes * envs.num_tasks(config["env"]["name"]), seed=seed)


def evaluation_key(key: jax.Array, interval: int) -> jax.Array:
    """The key of the evaluation after an interval, from the run's key."""
    return jax.random.fold_in(jax.random.fold_in(key, _EVALUATION), interval)


def make_plan(config: Config, num_envs: int, action_repeat: int) -> Plan:
    """Intervals of the run; evaluation and checkpoints fall on interval ends."""
    train = config["train"]
    if train["steps"] < 1 or train["log_interval"] < 1:
        raise ValueError(
            f"train.steps={train['steps']}, train.log_interval={train['log_interval']}: "
            "both must be at least 1"
        )
    per_step = num_envs * action_repeat
    length = max(1, round(train["log_interval"] / per_step))
    steps = length * per_step
    intervals = -(-train["steps"] // steps)

    def every(interval: int) -> int:
        return max(1, round(interval / steps)) if interval else intervals

    return Plan(
        length=length,
        intervals=intervals,
        eval_every=every(config["eval"]["interval"]),
        checkpoint_every=every(config["checkpoint"]["interval"]),
        steps_per_interval=steps,
    )


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag that is read between intervals; twice stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: leave signals alone
                break
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping: saving after this interval (again to stop at once)", flush=True)

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


class Job(NamedTuple):
    """What a run is made of, before any step: see `prepare`."""

    environment: JaxEnvironment | HostEnvironment
    agent: Agent
    plan: Plan
    interval: Callable[[loop.LoopState], tuple[loop.LoopState, dict[str, Any]]]
    evaluate: Callable[[Any, jax.Array], evaluation.Evaluation]


def prepare(config: Config) -> Job:
    """Environment, agent and the programs of a run. Raises ValueError for impossible settings."""
    seed, num_envs = config["seed"], config["env"]["num_envs"]
    environment = make_environment(config, num_envs, seed=seed)
    agent = build.build_agent(config, environment.spec)
    schedule = build.build_schedule(config, environment.spec, num_envs)
    plan = make_plan(config, num_envs, environment.spec.action_repeat)
    sizes = dict(capacity=replay_rows(config, num_envs), length=plan.length)
    if config["train"].get("dataset"):
        at_once = dataclasses.replace(schedule, seed_steps=num_envs, reanalyze_min_step=0)
        interval = loop.make_offline_interval(agent, at_once, **sizes)
    elif isinstance(environment, JaxEnvironment):
        interval = loop.make_interval(agent, environment, schedule, **sizes)
    else:
        interval = loop.make_host_interval(agent, environment, schedule, **sizes)
    eval_environment = evaluation_environment(config, config["eval"]["episodes"], seed=seed + 1)
    evaluate = evaluation.make_evaluate(agent.act, agent.init_actor, eval_environment)
    return Job(environment, agent, plan, interval, evaluate)


def begin(config: Config, job: Job, checkpointer: Checkpointer) -> tuple[loop.LoopState, int]:
    """The state to go on from, and how many intervals are done: fresh, or a checkpoint's."""
    environment, agent = job.environment, job.agent
    state = fresh_state(agent, environment, config, jax.random.key(config["seed"]))
    dataset = config["train"].get("dataset")
    if dataset:
        rows = datasets.load(dataset, agent, task=environment.spec.name)
        state = state.replace(replay=rows)
    if config["resume"] and checkpointer.latest_step() is not None:
        state, meta = checkpointer.restore(state)
        _restore_host(environment, meta)
        return state, meta["interval"]
    if config["train"].get("init_from"):
        started = transfer.start_from(config, environment.spec, state.train, build.build_agent)
        state = state.replace(train=started)
    return state, 0


def train(config: Config, workdir: str) -> Result:
    """Train as `config` says, in `workdir`; with `config["resume"]` continue what is there.

    Raises ValueError for impossible settings (before any compile) and FloatingPointError when a
    loss stops being finite (the last checkpoint stays).
    """
    config = transfer.resolve(config)
    if config.get("num_seeds", 1) > 1:
        from mbx.training import seeds

        return seeds.train(config, workdir)
    started = time.time()
    enable_compilation_cache()
    workdir = os.path.abspath(workdir)
    job = prepare(config)
    check_workdir(config, workdir)
    checkpointer = Checkpointer(workdir, keep=config["checkpoint"]["keep"])
    state, done = begin(config, job, checkpointer)
    plan = job.plan
    logger = RunLogger(
        workdir, config=dict(config), resume_step=done * plan.steps_per_interval if done else None,
        progress_total=plan.intervals * plan.steps_per_interval,
    )  # fmt: skip
    if not done:
        describe(logger, state, job.environment)
    try:
        state, evaluations = _run(config, job, state, done, checkpointer, logger, started)
        if config["replay"].get("save"):
            path = os.path.join(workdir, "dataset.npz")
            datasets.save(path, state.replay, task=job.environment.spec.name)
    finally:
        checkpointer.close()
        logger.close()
    if evaluations:
        plot_runs([workdir], os.path.join(workdir, "curve.png"))
    steps = int(state.steps) * job.environment.spec.action_repeat
    return Result(workdir, steps, evaluations, time.time() - started)


def _run(
    config: Config,
    job: Job,
    state: loop.LoopState,
    done: int,
    checkpointer: Checkpointer,
    logger: RunLogger,
    started: float,
) -> tuple[loop.LoopState, list[tuple[int, float]]]:
    """All intervals from number `done` on, with their logs, evaluations and checkpoints."""
    plan, repeat = job.plan, job.environment.spec.action_repeat
    key = jax.random.key(config["seed"])
    evaluations: list[tuple[int, float]] = []
    with Interrupt() as interrupt:
        for i in range(done, plan.intervals):
            began = time.time()
            state, sums = job.interval(state)
            metrics = loop.summarise(sums)
            steps = (i + 1) * plan.steps_per_interval
            metrics["steps_per_second"] = plan.steps_per_interval / (time.time() - began)
            metrics["agent_steps"] = steps // repeat
            metrics["seconds"] = time.time() - started
            logger.log("train", steps, metrics)
            check_finite(config, metrics, steps)
            final = i + 1 == plan.intervals
            if final or (i + 1) % plan.eval_every == 0:
                summary = job.evaluate(state.train, evaluation_key(key, i)).summary()
                summary |= review(job.agent, logger.workdir, state, evaluation_key(key, i))
                summary["seconds"] = time.time() - started
                logger.log("eval", steps, summary)
                evaluations.append((steps, summary["return_mean"]))
                checkpointer.save_best(steps, state.train, summary["return_mean"])
            stop = final or interrupt.requested
            if stop or (i + 1) % plan.checkpoint_every == 0:
                meta = {"interval": i + 1, "host": _host_snapshot(job.environment)}
                checkpointer.save(steps, state, meta)
            if stop:
                break
    return state, evaluations


def review(agent: Agent, workdir: str, state: loop.LoopState, key: jax.Array) -> dict[str, float]:
    """Write the files of the agent's review, if it makes one, and return its numbers."""
    if agent.review is None:
        return {}
    told = agent.review(state.train, state.replay, key)
    for name, content in told.files.items():
        atomic_write(os.path.join(workdir, name), content)
    return told.metrics


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
                agent, make_environment(config, config["env"]["num_envs"], seed=0), config,
                jax.random.key(0),
            )
        )  # fmt: skip
        step = None if which == "latest" else int(which)
        train_state = checkpointer.restore(full, step=step)[0].train
    checkpointer.close()
    return agent, train_state, config


def replay_rows(config: Config, num_envs: int) -> int:
    """Replay rows an environment: its share of the capacity."""
    return max(2, -(-config["replay"]["capacity"] // num_envs))


def fresh_state(
    agent: Agent, environment: JaxEnvironment | HostEnvironment, config: Config, key: jax.Array
) -> loop.LoopState:
    capacity = replay_rows(config, environment.num_envs)
    if isinstance(environment, JaxEnvironment):
        build_state = jax.jit(
            lambda k: loop.init_state(agent, environment, key=k, capacity=capacity)
        )
        return build_state(key)
    obs = environment.reset(config["seed"])
    return loop.init_state(agent, environment, key=key, capacity=capacity, host_obs=obs)


def check_workdir(config: Config, workdir: str) -> None:
    taken = os.path.exists(os.path.join(workdir, "metrics.jsonl"))
    if taken and not config["resume"]:
        raise ValueError(
            f"workdir={workdir} already holds a run: continue it with --config.resume=True or "
            "choose another directory"
        )


def _host_snapshot(environment: JaxEnvironment | HostEnvironment) -> str | None:
    if isinstance(environment, JaxEnvironment):
        return None
    snapshot = environment.get_state()
    return None if snapshot is None else snapshot.hex()


def _restore_host(environment: JaxEnvironment | HostEnvironment, meta: Mapping[str, Any]) -> None:
    if isinstance(environment, JaxEnvironment):
        return
    if meta.get("host") is None:
        warnings.warn(
            f"{environment.spec.name} cannot save its state: the resumed run starts new episodes",
            stacklevel=2,
        )
    else:
        environment.set_state(bytes.fromhex(meta["host"]))


def check_finite(config: Config, metrics: Mapping[str, float], steps: int) -> None:
    if not config["train"]["check_finite"]:
        return
    bad = [name for name, value in metrics.items() if not np.isfinite(value)]
    if bad:
        raise FloatingPointError(
            f"{bad[0]} is not finite at step {steps}: lower optimizer.learning_rate, or resume "
            "from the last checkpoint with other settings "
            "(train.check_finite=False goes on regardless)"
        )


def describe(logger: RunLogger, state: loop.LoopState, environment: Any) -> None:
    sizes = replay.bytes_per_transition(state.replay)
    values = {f"replay/bytes_{name}": value for name, value in sizes.items()}
    values["parameters"] = float(count_parameters(state.train.params))
    values["num_envs"] = float(environment.num_envs)
    logger.log("setup", 0, values)
