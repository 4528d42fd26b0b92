"""What a run is while it runs: its state, and the schedule that says what happens when.

Everything that depends on progress (random seed phase, pretraining, update-to-data ratio,
reanalyze interval) is arithmetic on counters in the state, so that a resumed run continues bit for
bit and nothing recompiles. Steps here are agent steps: one action of one environment.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import Agent
from mbx.fast import rng
from mbx.types import EnvSpec, Record, strongly_typed

if TYPE_CHECKING:
    from mbx.agents.settings import RunSettings
    from mbx.envs.base import HostEnvironment, JaxEnvironment

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens when, in agent steps over all environments and in learner updates.

    Attributes:
        seed_steps: random actions before learning starts.
        pretrain_updates: updates made when they are over, before anything else, after which every
            stored target is refreshed.
        utd_ratio: updates per agent step from then on, below or above 1.
        reanalyze_interval: learner updates between two reanalyze passes (0: never), which is
            interval / utd_ratio agent steps.
        reanalyze_min_step: agent steps before the first pass.
        seed_hold: steps of every environment that a random action is held.
    """

    seed_steps: int
    pretrain_updates: int
    utd_ratio: float
    reanalyze_interval: int
    reanalyze_min_step: int
    seed_hold: int = 1

    @property
    def ratio(self) -> Fraction:
        """The update-to-data ratio as a fraction, to 1e-4 of itself; counted without drift."""
        exact, largest = Fraction(self.utd_ratio), 1_000
        near = exact.limit_denominator(largest)
        while abs(near - exact) * 10_000 > exact and largest < 1_000_000_000:
            largest *= 10
            near = exact.limit_denominator(largest)
        return near

    @property
    def pretrain_share(self) -> int:
        """Updates of the pretraining in one call of a run's program: a tenth, or ten."""
        return max(10, -(-self.pretrain_updates // 10))

    def seeded(self, num_envs: int) -> int:
        """Agent steps when the seed phase is over: whole steps of all environments."""
        return -(-self.seed_steps // num_envs) * num_envs

    def stop(self, steps: Any, until: Any, num_envs: int) -> Any:
        """Agent steps up to which a run at `steps` acts: `until`, or first a pretraining."""
        if not self.pretrain_updates:
            return until
        end = self.seeded(num_envs)
        return until - (steps < end) * (until > end) * (until - end)

    def updates_left(self, steps: Any, updates: Any, num_envs: int) -> Any:
        """Updates of the pretraining that a run has to make before it acts again."""
        rest = self.pretrain_updates - updates
        return (steps == self.seeded(num_envs)) * (rest > 0) * rest


@dataclasses.dataclass(frozen=True)
class Intervals:
    """How a run is divided; between two intervals it is logged, evaluated and saved.

    Attributes:
        number: intervals of the run.
        length: steps of all environments in one.
        steps: environment steps in one, action repeat included.
        eval_every: intervals between evaluations.
        checkpoint_every: intervals between checkpoints.
    """

    number: int
    length: int
    steps: int
    eval_every: int
    checkpoint_every: int

    @property
    def planned(self) -> int:
        """Environment steps of the whole run."""
        return self.number * self.steps


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


def seed_steps(settings: RunSettings) -> int:
    """Agent steps of random actions, at most where the action repeat is left to the suite.

    Raises ValueError where they are too few to sample from, before any environment is made.
    """
    steps = settings.train.seed_steps // max(settings.env.action_repeat, 1)
    needed = settings.rows_before_learning()
    if steps < needed:
        raise ValueError(
            f"train.seed_steps={settings.train.seed_steps} gives {steps} agent steps, but with "
            f"env.num_envs={settings.env.num_envs} updates need {needed}: raise it"
        )
    return steps


def make_schedule(settings: RunSettings, spec: EnvSpec) -> Schedule:
    """The schedule of a run: environment steps of its settings, `for_task`, as agent steps.

    Raises ValueError where the seed phase is too short to sample from.
    """
    train = settings.train
    return Schedule(
        seed_steps=seed_steps(settings),
        pretrain_updates=train.pretrain_updates,
        utd_ratio=settings.updates_per_step(),
        reanalyze_interval=settings.reanalyze_interval(),
        reanalyze_min_step=settings.reanalyze_min_step() // spec.action_repeat,
        seed_hold=train.seed_hold,
    )


@flax.struct.dataclass
class LoopState(Record):
    """All of a run: what a checkpoint holds.

    Every leaf of the state of several seeds leads with `[S]` (`mbx.training.seeds`).

    Attributes:
        train: the agent's train state.
        actor: its actor state.
        env: the environment's state, None for a host environment.
        obs: `[E, ...]` of the row that is being acted on, as are the next two.
        reward: `[E]`.
        is_first: `[E]`.
        replay: the rows before it.
        key: the run's base key; a step's keys are folded from it and `steps`.
        steps: agent steps so far.
        update_debt: updates that are due, in units of 1/denominator of the update-to-data ratio;
            between two steps less than one.
        updates: learner updates made.
    """

    train: Any
    actor: Any
    env: Any
    obs: Array
    reward: Array
    is_first: Array
    replay: replay.ReplayState
    key: Array
    steps: Array
    update_debt: Array
    updates: Array


class Ended(NamedTuple):
    """The training episodes that ended, among the metrics of a step, which are summed over steps:
    these are kept, `[E]` of a step and `[T, E]` of T steps.

    Attributes:
        length: agent steps, 0 where no episode ended.
        total: its return.
    """

    length: Array
    total: Array


def replay_rows(settings: RunSettings) -> int:
    """Replay rows an environment: its share of the capacity."""
    return max(2, -(-settings.replay.capacity // settings.env.num_envs))


def init_state(
    agent: Agent,
    environment: JaxEnvironment | HostEnvironment,
    key: Array,
    host_obs: Array | None = None,
    *,
    capacity: int,
    shards: int = 1,
) -> LoopState:
    """The state of a run before its first step.

    Args:
        host_obs: first observations `[E, ...]` of a host environment (of all processes).
        capacity: replay rows an environment.
        shards: of the replay.
    """
    init_key, env_key, base_key = jax.random.split(key, 3)
    if host_obs is None:
        env_state, obs = environment.reset(env_key)
    else:
        env_state, obs = None, jnp.asarray(host_obs)
    num_envs = obs.shape[0]
    state = LoopState(
        train=agent.init(rng.unrolled(init_key)),
        actor=agent.init_actor(num_envs),
        env=env_state,
        obs=jnp.copy(obs),
        reward=jnp.zeros(num_envs),
        is_first=jnp.ones(num_envs, bool),
        replay=replay.init(
            agent.example_row(),
            num_envs=num_envs,
            capacity=capacity,
            target_spec=agent.store.spec if agent.store else None,
            shards=shards,
        ),
        key=base_key,
        steps=jnp.int32(0),
        update_debt=jnp.int32(0),
        updates=jnp.int32(0),
    )
    return strongly_typed(state)


def step_keys(state: LoopState) -> tuple[Array, Array, Array]:
    """The keys of the step that comes next: for acting, the environment and learning."""
    keys = jax.random.split(rng.unrolled(jax.random.fold_in(state.key, state.steps)), 3)
    # Environments may keep their key in their state, whose type must not change.
    plain = jax.random.wrap_key_data(
        jax.random.key_data(keys[1]), impl=jax.random.key_impl(state.key)
    )
    return keys[0], plain, keys[2]
