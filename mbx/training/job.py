"""What a run is made of, before any step: environment, agent, intervals, compiled programs.

`prepare` chooses among the loop's programs (fused, around a host environment, from recorded rows,
several seeds at once); `mbx.training.run` then drives any of them alike.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.agents.base import Agent, Ahead, Episodes
from mbx.agents.settings import RunSettings
from mbx.envs.base import HostEnvironment, JaxEnvironment
from mbx.settings import inactive
from mbx.training import build, datasets, evaluation, learning, loop, seeds, transfer
from mbx.training.checkpoint import Checkpointer
from mbx.training.environments import (
    evaluation_environment,
    make_environment,
    on_host,
    opened,
)
from mbx.training.sharding import ONE_DEVICE, Partition, make_partition, num_shards
from mbx.training.state import (
    LoopState,
    Schedule,
    in_shares,
    init_state,
    make_schedule,
    seed_steps,
    updates_left,
)

Config = build.Config


@dataclasses.dataclass(frozen=True)
class Intervals:
    """How a run is divided; between two intervals it is logged, evaluated and saved.

    Attributes:
        number: intervals of the run.
        length: steps of all environments in one.
        steps: environment steps in one, action repeat included.
        eval_every: intervals between evaluations.
        checkpoint_every: intervals between checkpoints.
        start: environment steps before interval 0: what intervals of another length, before a
            resume, leave over.
        first: number of the interval to begin with, others lying behind the run.
    """

    number: int
    length: int
    steps: int
    eval_every: int
    checkpoint_every: int
    start: int = 0
    first: int = 0

    def at(self, number: int) -> int:
        """Environment steps of the run when so many intervals lie behind it.

        Examples:
            >>> Intervals(number=60, length=5, steps=500, eval_every=6, checkpoint_every=6).at(2)
            1000
        """
        return self.start + number * self.steps

    @property
    def planned(self) -> int:
        """Environment steps of the whole run."""
        return self.at(self.number)

    @property
    def behind(self) -> int:
        """Environment steps that lie behind the run when it begins; 0 where it is a new one."""
        return self.at(self.first)

    def going_on(self, made: int, wanted: int) -> Intervals:
        """These behind a run's first steps, whose own intervals may have been of another length.

        Args:
            made: environment steps that lie behind the run.
            wanted: environment steps that it is to make in all, at least.

        Examples:
            >>> plan = Intervals(number=5, length=50, steps=200, eval_every=1, checkpoint_every=1)
            >>> plan = plan.going_on(496, 1_000)
            >>> plan.first, plan.behind, plan.at(plan.first + 1), plan.planned
            (2, 496, 696, 1096)
        """
        first, start = divmod(made, self.steps)
        number = max(-((start - wanted) // self.steps), first)
        return dataclasses.replace(self, start=start, number=number, first=first)


class Job(NamedTuple):
    """A run's parts.

    Attributes:
        environment: to train in.
        agent: what is trained.
        intervals: how the run is divided.
        seeds: that it trains. With more than one, leaves of its states and metrics lead with `[S]`;
            `share` gives one seed's.
        interval: state -> (state, summed metrics), in one call, or where the schedule divides the
            pretraining in several (`whole_interval`).
        evaluate: (train states, keys) -> an evaluation a seed; None where there is none.
        schedule: what happens when.
        initial_state: makes its first state, of `make_state`.
        partition: the devices that hold its arrays.
        close: frees what its environments hold.
    """

    environment: JaxEnvironment | HostEnvironment
    agent: Agent
    intervals: Intervals
    seeds: tuple[int, ...]
    interval: Callable[[LoopState], tuple[LoopState, dict[str, Any]]]
    evaluate: Callable[[Any, list[jax.Array]], list[evaluation.Evaluation]] | None
    schedule: Schedule
    initial_state: Callable[..., LoopState]
    partition: Partition = ONE_DEVICE
    close: Callable[[], None] = lambda: None

    def share(self, tree: Any, index: int) -> Any:
        """The part of a state, or of metrics, that belongs to one of the seeds."""
        return seeds.pick(tree, index) if len(self.seeds) > 1 else tree


def whole_interval(
    job: Job,
    state: LoopState,
    go_on: Callable[[dict[str, Any], int], bool],
    first: contextlib.AbstractContextManager = contextlib.nullcontext(),  # noqa: B008
) -> tuple[LoopState, dict[str, Any]]:
    """An interval of the run, with what is left of the pretraining: `(state, summed metrics)`.

    Args:
        job: the run's parts.
        state: where it begins.
        go_on: asked after every call of the program but the last, with its metrics and how many
            updates of the pretraining are left; where it says no they stay for the next interval.
        first: a context for the first call.
    """
    goal = int(np.max(state.steps)) + job.intervals.length * state.is_first.shape[-1]
    sums: dict[str, Any] = {}
    while True:
        with first:
            state, found = job.interval(state)
            found = jax.device_get(found)
        first = contextlib.nullcontext()
        sums |= {n: jax.tree.map(np.add, sums[n], x) if n in sums else x for n, x in found.items()}
        left = int(np.max(updates_left(np.asarray(state.update_debt), job.schedule)))
        acted = int(np.max(state.steps)) == goal
        if (acted and not left) or (left and not go_on(found, left)):
            return state, sums


def matmul_precision(precision: str) -> contextlib.AbstractContextManager:
    """The context in which a run's programs are traced: how exact float32 products are.

    "default" leaves that to the device: a GPU may use tf32 and a TPU bfloat16, a CPU is exact.
    """
    if precision == "default":
        return contextlib.nullcontext()
    return jax.default_matmul_precision(precision)


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


def make_intervals(settings: RunSettings, action_repeat: int) -> Intervals:
    """The intervals of a run; evaluations and checkpoints fall on their ends."""
    train = settings.train
    per_step = settings.env.num_envs * action_repeat
    length = max(1, round(train.log_interval / per_step))
    steps = length * per_step
    number = -(-train.steps // steps)

    def every(interval: int) -> int:
        return max(1, round(interval / steps)) if interval else number

    return Intervals(
        number=number,
        length=length,
        steps=steps,
        eval_every=every(settings.eval.interval),
        checkpoint_every=every(settings.checkpoint.interval),
    )


def replay_rows(settings: RunSettings) -> int:
    """Replay rows an environment: its share of the capacity."""
    return max(2, -(-settings.replay.capacity // settings.env.num_envs))


def prepare(config: Config, devices: Sequence[jax.Device] | None = None) -> Job:
    """Environment, agent and programs of a run; `Job.close` it. Raises ValueError for impossible
    settings, with nothing left open.

    Args:
        config: of the run.
        devices: that its arrays are divided among, where they are not those of this machine.
    """
    with contextlib.ExitStack() as stack:
        job = _prepare(build.read(config), devices, stack)
        return job._replace(close=stack.pop_all().close)


def _prepare(
    settings: RunSettings, devices: Sequence[jax.Device] | None, stack: contextlib.ExitStack
) -> Job:
    num_envs, num_seeds = settings.env.num_envs, settings.num_seeds
    seed_steps(settings)  # thousands of environments take a minute to make
    partition = make_partition(settings, devices)
    # Every process steps its own share of host environments.
    share = partition.processes if partition.processes > 1 and on_host(settings) else 1
    seed, episodes = partition.own_seed(settings.seed), -(-settings.eval.episodes // share)
    own = num_envs // share
    offset = own * jax.process_index() if share > 1 else 0
    environment = stack.enter_context(
        opened(make_environment(settings, own, seed=seed, first=offset))
    )
    fused = isinstance(environment, JaxEnvironment)
    if num_seeds > 1 and not fused:
        raise ValueError(
            f"num_seeds={num_seeds}: {environment.spec.name} runs on the host, one seed a program; "
            "start one run a seed, or choose an environment written in JAX"
        )
    agent = build.build_agent(settings, environment.spec)
    transfer.check(settings, agent)
    schedule = in_shares(make_schedule(settings, environment.spec))
    intervals = make_intervals(settings, environment.spec.action_repeat)
    first = initial_state(agent, environment, settings, partition)
    eval_env = None
    if episodes:
        eval_env = stack.enter_context(
            opened(evaluation_environment(settings, episodes, seed=seed + 1))
        )
    if num_seeds > 1:
        mesh = seeds.device_mesh(num_seeds)
        interval = seeds.make_seeds_interval(
            agent,
            environment,
            schedule,
            mesh=mesh,
            length=intervals.length,
            quick=partition.quick,
        )
        numbers = tuple(range(settings.seed, settings.seed + num_seeds))
        evaluate = make_evaluation(settings, agent, eval_env, mesh=mesh)
        return Job(environment, agent, intervals, numbers, interval, evaluate, schedule, first)
    if settings.train.dataset:
        at_once = dataclasses.replace(schedule, seed_steps=num_envs, reanalyze_min_step=0)
        interval = learning.make_offline_interval(
            agent, at_once, length=intervals.length, partition=partition
        )
    elif fused:
        interval = loop.make_interval(
            agent, environment, schedule, length=intervals.length, partition=partition
        )
    else:
        interval = loop.make_host_interval(
            agent, environment, schedule, length=intervals.length, partition=partition
        )
    evaluate = make_evaluation(settings, agent, eval_env, partition)
    alone = (settings.seed,)
    return Job(environment, agent, intervals, alone, interval, evaluate, schedule, first, partition)


def make_evaluation(
    settings: RunSettings,
    agent: Agent,
    eval_env: JaxEnvironment | HostEnvironment | None,
    partition: Partition = ONE_DEVICE,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[Any, list[jax.Array]], list[evaluation.Evaluation]] | None:
    """`Job.evaluate` on `eval_env`; with `eval.exploring` also acting as in training."""
    if eval_env is None:
        return None

    def make(
        act: Callable, record: bool = False
    ) -> Callable[[Any, list[jax.Array]], list[evaluation.Evaluation]]:
        given = act, agent.init_actor, eval_env
        if settings.num_seeds > 1:
            several = seeds.make_seeds_evaluate(*given, mesh=mesh, record=record)
            return lambda train, keys: several(train, jnp.stack(keys))
        single = evaluation.make_evaluate(*given, partition, record=record)
        return Ahead(
            lambda train, keys: [single(train, keys[0])],
            lambda train, keys: single.compile(train, keys[0]),
        )

    # A review reads rows of the whole replay, which one process has only alone.
    without = make(agent.act, record=agent.review is not None and partition.processes == 1)
    if not settings.eval.exploring or "eval.exploring" in inactive(settings):
        return without
    within = make(lambda *args: agent.act(*args[:-1], False))

    def both(train: Any, keys: list[jax.Array]) -> list[evaluation.Evaluation]:
        pairs = zip(without(train, keys), within(train, keys), strict=True)
        return [best._replace(exploring=noisy.returns) for best, noisy in pairs]

    if not (isinstance(without, Ahead) and isinstance(within, Ahead)):
        return both

    def ahead(train: Any, keys: Any) -> Episodes | None:
        within.compile(train, keys)
        return without.compile(train, keys)

    return Ahead(both, ahead)


def fresh_state(
    agent: Agent,
    environment: JaxEnvironment | HostEnvironment,
    config: Config,
    key: jax.Array,
    partition: Partition = ONE_DEVICE,
) -> LoopState:
    """The state of a run before its first step, from its key; of several seeds from keys `[S]`."""
    settings = build.read(config)
    make = initial_state(agent, environment, settings, partition)
    return make_state(make, environment, settings.seed, key, partition)


def make_state(
    make: Callable[..., LoopState],
    environment: JaxEnvironment | HostEnvironment,
    seed: int,
    key: jax.Array,
    partition: Partition = ONE_DEVICE,
) -> LoopState:
    """What `initial_state` made, compiled, of a key or of keys `[S]`.

    The same function twice, for shapes and then for arrays, is traced once.
    """
    if isinstance(environment, JaxEnvironment):
        return partition.build(jax.vmap(make) if jnp.ndim(key) else make, key)
    obs = environment.reset(partition.own_seed(seed))
    return partition.build(make, key, partition.joined(obs))


def initial_state(
    agent: Agent,
    environment: JaxEnvironment | HostEnvironment,
    config: Config,
    partition: Partition = ONE_DEVICE,
) -> Callable[..., LoopState]:
    """`initial_state(key) -> state`, pure: what `make_state` compiles. A host environment's first
    observations are its second argument."""
    settings = build.read(config)
    sizes = dict(capacity=replay_rows(settings), shards=num_shards(settings, partition))

    def initial_state(key: jax.Array, obs: jax.Array | None = None) -> LoopState:
        return init_state(agent, environment, key=key, host_obs=obs, **sizes)

    return initial_state


def begin(config: Config, job: Job, checkpointer: Checkpointer) -> tuple[LoopState, int]:
    """The state to go on from, and how many environment steps lie behind it.

    That is the newest checkpoint where the run is to be resumed and has one; else a fresh state,
    with the rows of `train.dataset` and the parameters of `train.init_from`.

    Raises ValueError where one of them does not fit.
    """
    settings, environment, agent = build.read(config), job.environment, job.agent
    keys = [jax.random.key(seed) for seed in job.seeds]
    key = jnp.stack(keys) if len(keys) > 1 else keys[0]
    state = make_state(job.initial_state, environment, settings.seed, key, job.partition)
    if settings.resume and checkpointer.latest_step() is not None:
        state, meta = checkpointer.restore(state)
        made = int(np.max(state.steps)) * environment.spec.action_repeat
        return resume_episodes(settings, job, state, meta, made), made
    if settings.train.dataset:
        rows = datasets.load(settings.train.dataset, agent, task=environment.spec.name)
        state = state.replace(replay=rows.replace(shards=state.replay.shards))
    if settings.train.init_from:
        chosen = settings.for_task(environment.spec)
        started = transfer.start_from(settings.train.init_from, chosen, agent, state.train)
        state = state.replace(train=started)
    return job.partition.place(state), 0


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


def resume_episodes(
    settings: RunSettings, job: Job, state: LoopState, meta: Mapping[str, Any], made: int
) -> LoopState:
    """The state to go on from, with a host environment as it was at the checkpoint.

    Where that is not possible, new episodes begin, with a warning: what the checkpoint's state
    holds of the old ones (observation, reward) then does not belong to them. Their seed is the
    run's and the steps `made`: they are others after every resume.
    """
    environment, partition = job.environment, job.partition
    if isinstance(environment, JaxEnvironment):
        return state
    problem = _continue_from(environment, partition, meta.get("host"))
    if not partition.agreed(problem is not None):
        return state
    warnings.warn(
        f"{environment.spec.name} cannot continue its episodes ({problem or 'another process'}): "
        "the resumed run begins new ones",
        stacklevel=2,
    )
    seed = np.random.SeedSequence([partition.own_seed(settings.seed), made])
    obs = environment.reset(int(seed.generate_state(1)[0] >> 1))
    state = state.replace(
        obs=partition.joined(obs),
        reward=jnp.zeros_like(state.reward),
        is_first=jnp.ones_like(state.is_first),
    )
    return partition.place(state)


def _continue_from(environment: HostEnvironment, partition: Partition, saved: Any) -> str | None:
    """Put this process's environment into its saved state; what is against it, or None."""
    if saved is None:
        return "it cannot save its state"
    if not isinstance(saved, list):
        return "saved by an older version, in a format that is not read any more"
    if len(saved) != partition.processes:
        return f"saved by {len(saved)} processes, resumed by {partition.processes}"
    try:
        environment.set_state(bytes.fromhex(saved[jax.process_index() if len(saved) > 1 else 0]))
    except ValueError as error:
        return str(error)
    return None
