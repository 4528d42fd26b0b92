"""The training loop: act, step, store, learn and reanalyze as one compiled program.

In: an agent (`mbx.agents.base.Agent`), an environment (`mbx.envs.base`) and a `Schedule`.
Out: `interval(state, until) -> (state, metrics)`, which takes a run's `LoopState` to `until` agent
steps; metrics are sums, of which `summarise` makes means.

A step acts in all environments at once, stores a row each (with the planner's targets) and makes
the updates and reanalyze passes that are due. `make_interval` loops over it in one program whose
state is donated. A host environment runs the same parts around its Python call
(`make_host_interval`); recorded rows are learned from without acting (`make_offline_interval`).

Pretraining, where a run has some, comes between two steps: the program stops where the seed phase
ends, makes a tenth of its updates a call until none is left (so that they can be watched and
interrupted), and acts again. It is the same program: to compile the update once more would double
the time to the first step. Whoever calls it calls until `LoopState.steps` is where it is to be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import replay
from mbx.agents.base import Agent, Mean
from mbx.envs.base import (
    EnvSpec,
    HostEnvironment,
    JaxEnvironment,
    Timestep,
    random_actions,
    strongly_typed,
    wide_actions,
)
from mbx.fast import collectives
from mbx.training.devices import ONE_DEVICE, Partition
from mbx.training.learning import add, make_learn, traced, zeros_like
from mbx.training.state import Ended, LoopState, Schedule, step_keys

Array = jax.Array
Metrics = dict[str, Any]
Interval = Callable[..., tuple[LoopState, Metrics]]


# -------------------------------------------------------------------------------------------------
# Act


def make_select_action(agent: Agent, schedule: Schedule, num_envs: int, spec: EnvSpec) -> Callable:
    """`select_action(state, key) -> (action [E, A], actor, targets)`: random in the seed phase."""

    def random_key(key: Array) -> Array:
        """The stream of random actions, of the key of a step's acting."""
        act_key = jax.random.split(key)[0]
        return act_key if agent.after_action is None else jax.random.split(act_key)[0]

    def select_action(state: LoopState, key: Array) -> tuple[Array, Any, Any]:
        act_key, target_key = jax.random.split(key)
        # Where parameters are divided: once, not in every step that a planner looks ahead.
        train = collectives.replicate(state.train)

        def explore(_: None) -> tuple[Array, Any]:
            action = seed_actions(schedule, spec, num_envs, state, key, random_key)
            if agent.after_action is None:
                return action, state.actor
            latent_key = jax.random.split(act_key)[1]
            _, actor = agent.act(train, state.actor, state.obs, state.is_first, latent_key, False)
            return action, agent.after_action(actor, action)

        def plan(_: None) -> tuple[Array, Any]:
            return agent.act(train, state.actor, state.obs, state.is_first, act_key, False)

        seeding = state.steps < schedule.seed_steps
        action, actor = jax.lax.cond(seeding, explore, plan, None)
        if agent.store is None:
            return action, actor, None
        return action, actor, agent.store.targets(train, actor, state.obs, target_key)

    return select_action


def seed_actions(
    schedule: Schedule, spec: EnvSpec, num_envs: int, state: LoopState, key: Array, stream: Callable
) -> Array:
    """Random actions `[E, A]` of the seed phase, drawn or held.

    White noise hardly moves a body: what one step does the next undoes. Held for a few steps and
    at the bounds more often than not, the same noise finds rewards that it else misses
    (docs/notes/learning_history.md).
    """
    if schedule.seed_hold == 1:
        return random_actions(spec, stream(key), num_envs)
    held = state.steps % (schedule.seed_hold * num_envs)
    # Those of the step at which they were first taken, so that no state need remember them.
    first = step_keys(state.replace(steps=state.steps - held))[0]
    return wide_actions(spec, stream(first), num_envs)


# -------------------------------------------------------------------------------------------------
# Store


def store(
    agent: Agent, state: LoopState, action: Array, actor: Any, targets: Any, timestep: Timestep
) -> LoopState:
    """The state after its row, and where an episode ended that episode's last row, are stored.

    After a fault that last row is left out, and with it the transition to it.
    """
    done = timestep.terminated | timestep.truncated
    row = dict(obs=state.obs, action=action, reward=state.reward, is_first=state.is_first)
    if agent.replay_extras is not None:
        row |= agent.replay_extras(actor)
    final = dict(obs=timestep.final_obs, reward=timestep.reward, terminated=timestep.terminated)
    buffer = replay.insert_step(state.replay, row, final, done & ~timestep.fault, targets)
    return state.replace(
        actor=actor,
        obs=timestep.obs,
        reward=jnp.where(done, 0.0, timestep.reward),
        is_first=done,
        replay=buffer,
        steps=state.steps + done.shape[0],
    )


def make_store_step(agent: Agent, *, apart: bool = False) -> Callable:
    """`store_step(state, action, actor, targets, timestep) -> (state, metrics)`.

    Stores the rows. Metrics: `faults`, `episodes`, `ended` and `episode/...`, sums.

    Args:
        agent: see `make_step`.
        apart: the metrics are left as `[E]`: devices that hold some of the environments each need
            not exchange them before the interval's end.
    """

    def total(x: Array) -> Array:
        if apart:
            return x.astype(jnp.int32) if x.dtype == bool else x  # truth values are counts
        return jnp.sum(x)

    def store_step(
        state: LoopState, action: Array, actor: Any, targets: Any, timestep: Timestep
    ) -> tuple[LoopState, Metrics]:
        state = store(agent, state, action, actor, targets, timestep)
        done = timestep.terminated | timestep.truncated
        length = jnp.where(done, timestep.episode_length, 0)
        returned = jnp.where(done, timestep.episode_return, 0.0)
        metrics = {
            "faults": total(timestep.fault),
            "episodes": total(done),
            "episode/return": total(returned),
            "episode/length": total(length),
            "ended": Ended(length, returned),
        }
        for name, value in timestep.metrics.items():
            there = done & ~jnp.isnan(value)  # an episode may end without it
            metrics[f"episode/{name}"] = Mean(total(jnp.where(there, value, 0.0)), total(there))
        return strongly_typed(state), metrics

    return store_step


# -------------------------------------------------------------------------------------------------
# All of it


def make_step(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    seeds_axis: str | None = None,
    *,
    apart: bool = False,
) -> Callable[..., tuple[LoopState, Metrics]]:
    """One fused train step of all environments: `(state, acts=True) -> (state, metrics)`.

    Where it does not act it makes a share of the pretraining.

    Args:
        agent, environment, schedule: of a run.
        seeds_axis: along which seeds are batched (`mbx.training.seeds`).
        apart: see `make_store_step`.
    """
    select_action = make_select_action(agent, schedule, environment.num_envs, environment.spec)
    store_step = make_store_step(agent, apart=apart)
    learn = make_learn(agent, schedule, seeds_axis)

    def act(state: LoopState) -> tuple[LoopState, Metrics]:
        act_key, env_key, _ = step_keys(state)
        action, actor, targets = select_action(state, act_key)
        env_state, timestep = environment.step(state.env, action, env_key)
        return store_step(state.replace(env=env_state), action, actor, targets, timestep)

    def step(state: LoopState, acts: Array | bool = True) -> tuple[LoopState, Metrics]:
        state, metrics = act(state) if acts is True else once_if(acts, act, state)
        state, learned = learn(state, acts)
        return state, metrics | learned

    return step


def make_interval(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    *,
    length: int,
    partition: Partition = ONE_DEVICE,
) -> Interval:
    """`interval(state, until=None) -> (state, metrics)`, compiled; at most `length` steps.

    until: agent steps; None: `length` steps from here.
    """
    apart = partition.mesh is not None
    step = partition.keep(make_step(agent, environment, schedule, apart=apart))
    interval = repeated(step, length, schedule)

    @functools.wraps(interval)
    def summed(state: LoopState, until: Array | None = None) -> tuple[LoopState, Metrics]:
        state, metrics = interval(state, until)
        own = {name: x for name, x in metrics.items() if _of_environments(name)}
        return state, metrics | jax.tree.map(jnp.sum, own)

    return partition.compile(summed if apart else interval, donate=True)


def make_offline_interval(
    agent: Agent, schedule: Schedule, *, length: int, partition: Partition = ONE_DEVICE
) -> Interval:
    """`make_interval` that learns from the replay as it is, without acting.

    A step counts as one of all environments, so that schedules mean what they mean when acting.
    """
    learn = make_learn(agent, schedule)

    def step(state: LoopState, acts: Array) -> tuple[LoopState, Metrics]:
        steps = jnp.where(acts, state.is_first.shape[0], 0)
        return learn(state.replace(steps=state.steps + steps), acts)

    return partition.compile(repeated(partition.keep(step), length, schedule), donate=True)


def repeated(step: Callable, length: int, schedule: Schedule) -> Interval:
    """`interval(state, until=None)`: steps up to `until`, or to the end of the seed phase where a
    pretraining follows, or one share of that. Metrics are summed over them (but for `Ended`)."""

    def train_interval(state: LoopState, until: Array | None = None) -> tuple[LoopState, Metrics]:
        num_envs = state.is_first.shape[0]
        until = state.steps + length * num_envs if until is None else until
        stop, acts = schedule.stop(state.steps, until, num_envs), True
        num = (stop - state.steps) // num_envs
        if schedule.pretrain_updates:
            acts = schedule.updates_left(state.steps, state.updates, num_envs) == 0
            num = jnp.where(acts, num, 1)
        one, (_, shapes), _ = traced(lambda state: step(state, acts), state)

        def body(_: Array, carry: tuple[LoopState, Metrics]) -> tuple[LoopState, Metrics]:
            state, found = one(carry[0])
            ended = found.pop("ended", None)
            sums = add({n: x for n, x in carry[1].items() if n != "ended"}, found)
            if ended is not None:  # the last row is that of the step to `until`
                row = length - 1 - (until - state.steps) // num_envs
                sums["ended"] = jax.tree.map(
                    lambda a, x: a.at[row].add(x), carry[1]["ended"], ended
                )
            return state, sums

        sums = zeros_like(shapes)
        if "ended" in sums:
            sums["ended"] = jax.tree.map(
                lambda x: jnp.zeros((length, *x.shape), x.dtype), sums["ended"]
            )
        return jax.lax.fori_loop(0, num, body, (state, sums))

    return train_interval


def make_host_interval(
    agent: Agent,
    environment: HostEnvironment,
    schedule: Schedule,
    *,
    length: int,
    partition: Partition = ONE_DEVICE,
) -> Interval:
    """`make_interval` around a host environment's Python call.

    Args:
        environment: of this process; those of all processes are one batch to the agent.
    """
    num_envs = environment.num_envs * partition.processes
    select_action = make_select_action(agent, schedule, num_envs, environment.spec)
    store_step, learn = make_store_step(agent), make_learn(agent, schedule)

    @functools.partial(jax.jit, compiler_options=partition.training)
    @partition.traced
    def train_act(state: LoopState) -> tuple[Array, Any, Any]:
        return partition.divided(select_action(state, step_keys(state)[0]))

    def train_store(state: LoopState, *step: Any) -> tuple[LoopState, Metrics]:
        return store_step(state, *step)

    def train_learn(state: LoopState, acted: Array) -> tuple[LoopState, Metrics]:
        return learn(state, acted)

    store_now = partition.compile(train_store, donate=True)
    learn_now = partition.compile(train_learn, donate=True)

    def interval(state: LoopState, until: int | None = None) -> tuple[LoopState, Metrics]:
        steps, updates = int(state.steps), int(state.updates)
        until = steps + length * num_envs if until is None else int(until)
        if schedule.updates_left(steps, updates, num_envs):
            return learn_now(state, np.bool_(False))
        sums: Metrics = {}
        ended = Ended(np.zeros((length, num_envs), np.int32), np.zeros((length, num_envs)))
        stop = schedule.stop(steps, until, num_envs)
        while steps < stop:
            action, actor, targets = train_act(state)
            timestep = partition.joined(environment.step(partition.local(action)))
            state, found = store_now(state, action, actor, targets, timestep)
            state, learned = learn_now(state, np.bool_(True))
            steps += num_envs
            row = length - 1 - (until - steps) // num_envs
            for all_of, now in zip(ended, found.pop("ended"), strict=True):
                all_of[row] = now
            found |= learned
            sums = add(sums, found) if sums else found
        return state, sums | {"ended": ended}

    return interval


def advance(
    interval: Interval,
    state: LoopState,
    until: int,
    schedule: Schedule,
    go_on: Callable[[Metrics, int], bool] | None = None,
) -> tuple[LoopState, Metrics]:
    """Calls of `interval` until the run is at `until` agent steps: `(state, summed metrics)`.

    Args:
        interval: the run's program; of several seeds too.
        state: where it begins.
        until: agent steps.
        schedule: of the run.
        go_on: asked where updates of the pretraining are left, with a call's metrics and their
            number; where it says no they stay for the next time.
    """
    sums: Metrics = {}
    while True:
        state, found = interval(state, np.int32(until))
        found = jax.device_get(found)
        sums |= {n: add(sums[n], x) if n in sums else x for n, x in found.items()}
        steps, updates = int(np.max(state.steps)), int(np.max(state.updates))
        left = schedule.updates_left(steps, updates, state.is_first.shape[-1])
        if not left and steps >= until:
            return state, sums
        if left and go_on is not None and not go_on(found, left):
            return state, sums


# -------------------------------------------------------------------------------------------------
# Metrics, and programs whose results are known beforehand


def summarise(sums: Mapping[str, Any]) -> dict[str, float]:
    """Means over updates, reanalyze passes and episodes of an interval's summed metrics."""
    found = fractions(jax.device_get(dict(sums)))
    return {
        n: float(x) if of is None else float(x) / float(of)
        for n, x, of in found
        if of is None or of
    }


def fractions(sums: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The name of every summary with its sum and what that is divided by, None for a count."""
    counts = {"update/": "updates", "pass/": "passes", "episode/": "episodes"}
    for name, value in sums.items():
        prefix = name.partition("/")[0] + "/"
        short = name if prefix == "episode/" else name.removeprefix(prefix)
        if isinstance(value, Mean):
            yield short, value.total, value.count
        elif "/" in name and prefix in counts:
            yield short, value, sums.get(counts[prefix], 0.0)
        elif not isinstance(value, Ended):
            yield name, value, None


def once_if(
    condition: Array, function: Callable[[Any], tuple[Any, Metrics]], state: Any
) -> tuple[Any, Metrics]:
    """`function(state)`, or the state as it is and metrics of zeros.

    As a loop of one turn or none: a branch would copy what it passes on, the whole replay too.
    """
    run, (_, shapes), _ = traced(function, state)
    num = condition.astype(jnp.int32)
    return jax.lax.fori_loop(0, num, lambda _, carry: run(carry[0]), (state, zeros_like(shapes)))


def _of_environments(name: str) -> bool:
    """Whether `make_store_step` makes a metric of each environment's number."""
    return name in ("faults", "episodes") or name.startswith("episode/")
