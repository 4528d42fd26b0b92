"""What a run is made of, before any step: environment, agent, intervals, compiled programs.

`prepare` is where a configuration becomes settings, and settings become those of a task. It chooses
among the loop's programs (fused, around a host environment, from recorded rows, several seeds at
once), all of which `mbx.training.run` calls in the same way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.config import load
from mbx.envs.base import HostEnvironment, JaxEnvironment
from mbx.settings import inactive
from mbx.training import build, evaluation, loop, seeds, transfer
from mbx.training.build import evaluation_environment, make_environment, on_host, opened
from mbx.training.checkpoint import Checkpointer
from mbx.training.devices import Partition, make_partition, num_shards
from mbx.training.state import (
    Intervals,
    LoopState,
    Schedule,
    init_state,
    make_intervals,
    make_schedule,
    replay_rows,
    seed_steps,
    step_keys,
)

Environment = JaxEnvironment | HostEnvironment
Evaluate = Callable[[Any, list[jax.Array]], list[evaluation.Evaluation]]


class Job(NamedTuple):
    """A run's parts.

    Attributes:
        settings: as configured, checked.
        chosen: the same with what is left to the task filled in.
        environment: to train in.
        tests: to evaluate in; None where nothing is evaluated.
        agent: what is trained.
        intervals: how the run is divided.
        schedule: what happens when.
        seeds: that it trains. With more than one, leaves of its states and metrics lead with `[S]`;
            `share` gives one seed's.
        partition: the devices that hold its arrays.
        mesh: the devices that several seeds are divided among.
        initial_state: (key) -> its first state, pure, which `fresh_state` compiles; a host
            environment's first observations are its second argument.
        interval: (state, until) -> (state, summed metrics), a call of the program (`advance`).
        evaluate: (train states, keys) -> an evaluation a seed; None where there is none.
        close: frees what its environments hold.
    """

    settings: RunSettings
    chosen: RunSettings
    environment: Environment
    tests: Environment | None
    agent: Agent
    intervals: Intervals
    schedule: Schedule
    seeds: tuple[int, ...]
    partition: Partition
    mesh: jax.sharding.Mesh | None
    initial_state: Callable[..., LoopState] | None = None
    interval: loop.Interval | None = None
    evaluate: Evaluate | None = None
    close: Callable[[], None] = lambda: None

    def advance(
        self, state: LoopState, until: int | None = None, go_on: Callable[..., bool] | None = None
    ) -> tuple[LoopState, dict[str, Any]]:
        """The run from `state` to `until` agent steps (None: an interval more), as `loop.advance`
        says: `(state, summed metrics)`."""
        if until is None:
            steps = int(np.max(np.asarray(state.steps)))
            until = steps + self.intervals.length * state.is_first.shape[-1]
        return loop.advance(self.interval, state, until, self.schedule, go_on)

    def share(self, tree: Any, index: int) -> Any:
        """The part of a state, or of metrics, that belongs to one of the seeds."""
        return seeds.pick(tree, index) if len(self.seeds) > 1 else tree


def prepare(config: Any, devices: Sequence[jax.Device] | None = None) -> Job:
    """Environment, agent and programs of a run, to be closed (`Job.close`).

    Args:
        config: what `mbx.config.load` takes: settings, or nested mappings of their names.
        devices: that its arrays are divided among, where they are not those of this machine.

    Raises:
        ValueError: for impossible settings, with nothing left open.
    """
    settings = transfer.resolve(load(config))
    seed_steps(settings)  # thousands of environments take a minute to make
    partition = make_partition(settings, devices)
    with contextlib.ExitStack() as stack:
        job = make_parts(settings, partition, stack)
        sizes = dict(capacity=replay_rows(job.chosen), shards=num_shards(job.chosen, partition))
        first = functools.partial(init_state, job.agent, job.environment, **sizes)
        job = job._replace(
            initial_state=first, interval=make_interval(job), evaluate=make_evaluate(job)
        )
        return job._replace(close=stack.pop_all().close)


def make_parts(settings: RunSettings, partition: Partition, stack: contextlib.ExitStack) -> Job:
    """A job without its programs; what it opens is closed with the stack."""
    # Every process steps its own share of host environments.
    share = partition.processes if partition.processes > 1 and on_host(settings) else 1
    seed, own = partition.own_seed(settings.seed), settings.env.num_envs // share
    offset = own * jax.process_index() if share > 1 else 0
    made = make_environment(settings, own, seed=seed, first=offset)
    environment = stack.enter_context(opened(made))
    spec = environment.spec
    if settings.num_seeds > 1 and not isinstance(environment, JaxEnvironment):
        raise ValueError(
            f"num_seeds={settings.num_seeds}: {spec.name} runs on the host, one seed a program; "
            "start one run a seed, or choose an environment written in JAX"
        )
    chosen, agent = settings.for_task(spec), build.build_agent(settings, spec)
    transfer.check(chosen, agent)
    schedule, intervals = make_schedule(chosen, spec), make_intervals(chosen, spec.action_repeat)
    if settings.train.dataset:  # there is something to learn from: no seed phase
        schedule = dataclasses.replace(schedule, seed_steps=0, reanalyze_min_step=0)
    tests = None
    if episodes := -(-settings.eval.episodes // share):
        made = evaluation_environment(settings, episodes, seed=seed + 1)
        tests = stack.enter_context(opened(made))
    return Job(
        settings=settings,
        chosen=chosen,
        environment=environment,
        tests=tests,
        agent=agent,
        intervals=intervals,
        schedule=schedule,
        seeds=tuple(range(settings.seed, settings.seed + settings.num_seeds)),
        partition=partition,
        mesh=seeds.device_mesh(settings.num_seeds) if settings.num_seeds > 1 else None,
    )


def make_interval(job: Job) -> loop.Interval:
    """The program that trains: fused, around a host environment, from rows, or of several seeds."""
    environment, sizes = job.environment, dict(length=job.intervals.length)
    if len(job.seeds) > 1:
        sizes |= dict(mesh=job.mesh, quick=job.partition.quick)
        return seeds.make_seeds_interval(job.agent, environment, job.schedule, **sizes)
    make = loop.make_interval
    if job.settings.train.offline:
        environment = None
    elif isinstance(environment, HostEnvironment):
        make = loop.make_host_interval
    return make(job.agent, environment, job.schedule, partition=job.partition, **sizes)


def make_evaluate(job: Job) -> Evaluate | None:
    """The programs that evaluate, None where nothing is evaluated."""
    if job.tests is None:
        return None
    act = job.agent.act

    def make(act: Callable) -> Evaluate:
        given = act, job.agent.init_actor, job.tests
        if len(job.seeds) > 1:
            return seeds.make_seeds_evaluate(*given, mesh=job.mesh)
        single = evaluation.make_evaluate(*given, job.partition)
        return lambda train, keys: [single(train, keys[0])]

    without = make(act)
    if not job.settings.eval.exploring or "eval.exploring" in inactive(job.settings):
        return without
    within = make(lambda *args: act(*args[:-1], False))

    def both(train: Any, keys: list[jax.Array]) -> list[evaluation.Evaluation]:
        pairs = zip(without(train, keys), within(train, keys), strict=True)
        return [best._replace(exploring=noisy.returns) for best, noisy in pairs]

    return both


def fresh_state(job: Job, key: jax.Array) -> LoopState:
    """The state of a run before its first step, from its key; of several seeds from keys `[S]`."""
    make, partition = job.initial_state, job.partition
    if isinstance(job.environment, JaxEnvironment):
        return partition.build(jax.vmap(make) if jnp.ndim(key) else make, key)
    obs = job.environment.reset(partition.own_seed(job.settings.seed))
    return partition.build(make, key, partition.joined(obs))


def abstract_state(job: Job) -> LoopState:
    """Shapes of a run's state; nothing is made."""
    key = jax.eval_shape(lambda: _key(job))
    return jax.eval_shape(functools.partial(fresh_state, job), key)


def _key(job: Job) -> jax.Array:
    """The run's key; of several seeds one each, `[S]`."""
    keys = [jax.random.key(seed) for seed in job.seeds]
    return jnp.stack(keys) if len(keys) > 1 else keys[0]


def begin(job: Job, checkpointer: Checkpointer) -> tuple[LoopState, int]:
    """The state to go on from, and how many environment steps it has made.

    That is the newest checkpoint where the run is to be resumed and has one; else a fresh state,
    with the rows of `train.dataset` and the parameters of `train.init_from`.

    Raises ValueError where one of them does not fit.
    """
    train, spec = job.settings.train, job.environment.spec
    state = fresh_state(job, _key(job))
    if job.settings.resume and checkpointer.latest_step() is not None:
        state, meta = checkpointer.restore(state)
        made = int(np.max(state.steps)) * spec.action_repeat
        return seeds.place(resume_episodes(job, state, meta, made), job.mesh), made
    if train.init_from:
        started = transfer.start_from(train.init_from, job.chosen, job.agent, state.train)
        state = state.replace(train=started)
    if train.dataset:
        rows = transfer.load_dataset(
            train.dataset, job.agent, spec, job.chosen.env, replay_rows(job.chosen)
        )
        state = state.replace(replay=rows.replace(shards=state.replay.shards))
        return with_targets(job, job.partition.place(state)), 0
    return seeds.place(job.partition.place(state), job.mesh), 0


def with_targets(job: Job, state: LoopState) -> LoopState:
    """The state with planner targets of all rows: those of a dataset have none.

    Updates read them; pretraining on rows without targets would leave the values where they are
    and teach the policy from them.
    """
    if job.agent.store is None:
        return state
    reanalyze = loop.make_reanalyze(job.agent, job.schedule, None)

    def train_targets(state: LoopState) -> tuple[LoopState, dict[str, Any]]:
        key = step_keys(state.replace(steps=jnp.int32(-1)))[2]  # of no step that is to come
        return reanalyze(state, key, state.updates, jnp.bool_(True))

    return job.partition.compile(train_targets, donate=True)(state)[0]


def host_snapshots(job: Job) -> list[str] | None:
    """The state of every process's host environment as text for a checkpoint; None for JAX ones,
    and where one of them cannot be saved."""
    if isinstance(job.environment, JaxEnvironment):
        return None
    own = job.environment.get_state()
    if job.partition.agreed(own is None):
        return None
    sizes = job.partition.gathered(np.array([len(own)]))
    padded = np.zeros((1, max(sizes)), np.uint8)
    padded[0, : len(own)] = np.frombuffer(own, np.uint8)
    rows = job.partition.gathered(padded)
    return [row[:size].tobytes().hex() for row, size in zip(rows, sizes, strict=True)]


def resume_episodes(job: Job, state: LoopState, meta: Mapping[str, Any], made: int) -> LoopState:
    """The state to go on from, with a host environment as it was at the checkpoint.

    Where that is not possible, new episodes begin, with a warning: what the checkpoint's state
    holds of the old ones (observation, reward) then does not belong to them. Their seed is the
    run's and the steps `made`: they are others after every resume.
    """
    environment, partition, saved = job.environment, job.partition, meta.get("host")
    if isinstance(environment, JaxEnvironment):
        return state
    problem = ""
    if not isinstance(saved, list):
        problem = "it cannot save its state"
    elif len(saved) != partition.processes:
        problem = f"saved by {len(saved)} processes, resumed by {partition.processes}"
    else:
        own = saved[jax.process_index() if len(saved) > 1 else 0]
        try:
            environment.set_state(bytes.fromhex(own))
        except ValueError as error:
            problem = str(error) or type(error).__name__
    if not partition.agreed(bool(problem)):
        return state
    warnings.warn(
        f"{environment.spec.name} cannot continue its episodes ({problem or 'another process'}): "
        "the resumed run begins new ones",
        stacklevel=2,
    )
    seed = np.random.SeedSequence([partition.own_seed(job.settings.seed), made])
    obs = environment.reset(int(seed.generate_state(1)[0] >> 1))
    return partition.place(
        state.replace(
            obs=partition.joined(obs),
            reward=jnp.zeros_like(state.reward),
            is_first=jnp.ones_like(state.is_first),
        )
    )
