"""The training loop: act, step, store, learn and reanalyze as one compiled program.

`make_step` joins an agent and a JAX environment into one pure function of a `LoopState`;
`make_interval` scans it for a whole logging interval with the state donated. A host environment
runs the same parts (`select_action`, `store_step`, `learn_if_due`) around its Python call:
`make_host_interval`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from mbx.training.learning import make_learn_if_due, once_if, repeated
from mbx.training.sharding import ONE_DEVICE, Partition
from mbx.training.state import Ended, LoopState, Schedule, Turn, step_keys, updates_left

Array = jax.Array
Metrics = dict[str, Array]


def make_select_action(agent: Agent, schedule: Schedule, num_envs: int, spec: EnvSpec) -> Callable:
    """`select_action(state, key) -> (action [E, A], actor, targets)`: random in the seed phase."""

    def select_action(state: LoopState, key: Array) -> tuple[Array, Any, Any]:
        act_key, target_key = jax.random.split(key)
        # Where parameters are divided: once, not in every step that a planner looks ahead.
        train = collectives.replicate(state.train)

        def explore(_: None) -> tuple[Array, Any]:
            latent_key, random_key = act_key, act_key
            if agent.after_action is not None:
                random_key, latent_key = jax.random.split(act_key)
            action = seed_actions(schedule, spec, num_envs, state, random_key)
            if agent.after_action is None:
                return action, state.actor
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
    schedule: Schedule, spec: EnvSpec, num_envs: int, state: LoopState, key: Array
) -> Array:
    """Random actions `[E, A]` of the seed phase, drawn with the key or held.

    White noise hardly moves a body: what one step does the next undoes. Held for a few steps and
    at the bounds more often than not, the same noise finds rewards that it else misses
    (docs/results/learning_history.md).
    """
    if schedule.seed_hold == 1:
        return random_actions(spec, key, num_envs)
    held = state.steps % (schedule.seed_hold * num_envs)
    # Those of the step at which they were first taken, so that no state need remember them.
    first = step_keys(state.replace(steps=state.steps - held))[0]
    return wide_actions(spec, first, num_envs)


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
            not speak to each other before the interval's end.
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
        metrics = {
            "faults": total(timestep.fault),
            "episodes": total(done),
            "episode/return": total(jnp.where(done, timestep.episode_return, 0.0)),
            "episode/length": total(jnp.where(done, timestep.episode_length, 0)),
            "ended": Ended(
                jnp.where(done, timestep.episode_length, 0),
                jnp.where(done, timestep.episode_return, 0.0),
            ),
        }
        for name, value in timestep.metrics.items():
            there = done & ~jnp.isnan(value)  # an episode may end without it
            metrics[f"episode/{name}"] = Mean(total(jnp.where(there, value, 0.0)), total(there))
        return strongly_typed(state), metrics

    return store_step


def make_step(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    seeds_axis: str | None = None,
    *,
    apart: bool = False,
) -> Callable[..., tuple[LoopState, Metrics]]:
    """One fused train step of all environments: `(state, turn=None) -> (state, metrics)`.

    Without a turn it makes all updates of the pretraining where they are due.

    Args:
        agent, environment, schedule: of a run.
        seeds_axis: along which seeds are batched (`mbx.training.seeds`).
        apart: see `make_store_step`.
    """
    num_envs = environment.num_envs
    select_action = make_select_action(agent, schedule, num_envs, environment.spec)
    store_step = make_store_step(agent, apart=apart)
    learn_if_due = make_learn_if_due(agent, schedule, seeds_axis)

    def act(state: LoopState, act_key: Array, env_key: Array) -> tuple[LoopState, Metrics]:
        action, actor, targets = select_action(state, act_key)
        env_state, timestep = environment.step(state.env, action, env_key)
        return store_step(state.replace(env=env_state), action, actor, targets, timestep)

    def step(state: LoopState, turn: Turn | None = None) -> tuple[LoopState, Metrics]:
        if turn is None:
            act_key, env_key, learn_key = step_keys(state)
            state, metrics = act(state, act_key, env_key)
        else:
            act_key, env_key, learn_key = step_keys(_under_way(state, turn))
            state, metrics = once_if(turn.acts, act, state, act_key, env_key)
        state, learned = learn_if_due(state, learn_key, turn)
        return state, metrics | learned

    return step


def _under_way(state: LoopState, turn: Turn) -> LoopState:
    """Where updates are left, the state that the step which they belong to began with: by its
    steps alone."""
    return state.replace(steps=state.steps - jnp.where(turn.acts, 0, state.is_first.shape[0]))


def make_interval(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    *,
    length: int,
    partition: Partition = ONE_DEVICE,
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`length` fused steps in one compiled, donated scan; metrics are summed over them.

    Where the schedule divides the pretraining (`Turn`), calls that act are followed by some that
    make what is left of it (`updates_left`).
    """
    apart = partition.mesh is not None
    step = partition.keep(make_step(agent, environment, schedule, apart=apart))
    interval = repeated(step, length, schedule)

    @functools.wraps(interval)
    def summed(state: LoopState) -> tuple[LoopState, Metrics]:
        state, metrics = interval(state)
        own = {name: x for name, x in metrics.items() if _of_environments(name)}
        return state, metrics | jax.tree.map(jnp.sum, own)

    return partition.compile(summed if apart else interval, donate=True)


def _of_environments(name: str) -> bool:
    """Whether `make_store_and_learn` makes a metric of each environment's number."""
    return name in ("faults", "episodes") or name.startswith("episode/")


def make_host_interval(
    agent: Agent,
    environment: HostEnvironment,
    schedule: Schedule,
    *,
    length: int,
    partition: Partition = ONE_DEVICE,
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """The same `length` steps around a host environment's Python call.

    Args:
        environment: of this process; those of all processes are one batch to the agent.
    """
    num_envs = environment.num_envs * partition.processes
    select_action = make_select_action(agent, schedule, num_envs, environment.spec)
    store_step, learn_if_due = make_store_step(agent), make_learn_if_due(agent, schedule)

    @functools.partial(jax.jit, compiler_options=partition.training)
    @partition.traced
    def train_act(state: LoopState) -> tuple[Array, Any, Any]:
        return partition.divided(select_action(state, step_keys(state)[0]))

    def train_store(state: LoopState, *step: Any) -> tuple[LoopState, Metrics]:
        return store_step(state, *step)

    def train_learn(state: LoopState, turn: Turn) -> tuple[LoopState, Metrics]:
        began = state.replace(steps=state.steps - num_envs)
        return learn_if_due(state, step_keys(began)[2], turn)

    store_now = partition.compile(train_store, donate=True)
    learn_now = partition.compile(train_learn, donate=True)

    def interval(state: LoopState) -> tuple[LoopState, Metrics]:
        total, ended = {}, []
        acts = not np.any(updates_left(np.asarray(state.update_debt), schedule))
        for i in range(length) if acts else [length - 1]:
            found = {}
            if acts:
                action, actor, targets = train_act(state)
                timestep = partition.joined(environment.step(partition.local(action)))
                state, found = store_now(state, action, actor, targets, timestep)
                ended.append(found.pop("ended"))
            state, learned = learn_now(state, Turn(np.bool_(acts), np.bool_(i == length - 1)))
            found |= learned
            total = jax.tree.map(jnp.add, total, found) if total else found
        if ended:
            total["ended"] = jax.tree.map(lambda *each: np.stack(each), *ended)
        return state, total

    return interval


def summarise(sums: dict[str, Any]) -> dict[str, float]:
    """Means over updates, reanalyze passes and episodes of an interval's summed metrics."""
    sums = {name: value for name, value in sums.items() if not isinstance(value, Ended)}
    sums = jax.device_get(sums)
    rare = {name: value for name, value in sums.items() if isinstance(value, Mean)}
    sums = {name: float(value) for name, value in sums.items() if name not in rare}
    counts = {"update/": "updates", "pass/": "passes", "episode/": "episodes"}
    result = {name: value for name, value in sums.items() if "/" not in name}
    for prefix, counter in counts.items():
        count = sums.get(counter, 0.0)
        for name, value in sums.items():
            if name.startswith(prefix) and count:
                short = name if prefix == "episode/" else name.removeprefix(prefix)
                result[short] = value / count
    for name, value in rare.items():
        if value.count:
            result[name.removeprefix("update/")] = float(value.total) / float(value.count)
    return result
