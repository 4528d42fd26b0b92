"""What is due after a step: learner updates, and passes that renew stored planner targets.

`make_learn_if_due` joins both into one pure function of the state; the loop calls it after every
step, and learning from recorded rows (`make_offline_interval`) calls nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mbx import exchange, replay
from mbx.agents.base import Agent
from mbx.envs.base import strongly_typed
from mbx.training.sharding import ONE_DEVICE, Partition
from mbx.training.state import Ended, LoopState, Schedule, step_keys

Array = jax.Array
Metrics = dict[str, Array]


def make_learn(agent: Agent) -> Callable:
    """`learn(state, key, num) -> (state, summed metrics)`: `num` learner updates."""

    def learn(state: LoopState, key: Array, num: Array) -> tuple[LoopState, Metrics]:
        update, (_, _, metrics), kept = traced(agent.update, state.train, state.replay, key)
        writes = not kept(1)

        # What no update writes must stay out of the loop's carry, where it would be copied.
        def body(i: Array, carry: tuple[Any, Any, Metrics]) -> tuple[Any, Any, Metrics]:
            train, buffer, sums = carry
            now = buffer if writes else state.replay
            train, new, metrics = update(train, now, jax.random.fold_in(key, i))
            return train, new if writes else None, jax.tree.map(jnp.add, sums, metrics)

        carry = (state.train, state.replay if writes else None, _zeros_like(metrics))
        train, buffer, sums = jax.lax.fori_loop(0, num, body, carry)
        state = state.replace(train=train, updates=state.updates + num)
        return (state.replace(replay=buffer) if writes else state), sums

    return learn


def traced(
    function: Callable[..., tuple], *args: Any
) -> tuple[Callable[..., tuple], Any, Callable[[int], bool]]:
    """A function traced once, for a loop that has to know its result beforehand.

    Returns:
        The function, of arguments of the same shapes and types; its abstract result; and whether
        argument i, an element of the result at the same place, is given back as it came.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    run, tree = jex.jaxpr_as_fun(closed), jax.tree.structure(shapes)

    def again(*args: Any) -> tuple:
        return jax.tree.unflatten(tree, run(*jax.tree.leaves(args)))

    def kept(i: int) -> bool:
        before, after = (
            jax.tree.unflatten(jax.tree.structure(of), variables)[i]
            for of, variables in ((args, closed.jaxpr.invars), (shapes, closed.jaxpr.outvars))
        )
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        return all(old is now for old, now in pairs)

    return again, shapes, kept


def make_reanalyze(agent: Agent, schedule: Schedule, seeds_axis: str | None) -> Callable:
    """`reanalyze(state, key, before, starting) -> (state, metrics)`: the passes that are due.

    What it returns takes the updates made when the step began (`before`), and whether learning
    begins with this step (`starting`): then all targets of the seed phase, which an untrained model
    made, are made again.
    """
    every = schedule.reanalyze_interval

    def passes_due(state: LoopState, before: Array, starting: Array) -> Array:
        regular = state.updates // every - before // every if every else 0
        regular = jnp.where(state.steps >= schedule.reanalyze_min_step, regular, 0)
        if seeds_axis is None:  # of several devices each knows its own rows: ask once a run
            return jax.lax.cond(starting, sweep, lambda _: jnp.int32(regular), state.replay)
        # Batched seeds make the same number of passes: the fullest's.
        return jnp.where(starting, jax.lax.pmax(sweep(state.replay), seeds_axis), regular)

    def sweep(buffer: Any) -> Array:
        return replay.sweep_length(buffer, agent.store.batch_size)

    def reanalyze(
        state: LoopState, key: Array, before: Array, starting: Array
    ) -> tuple[LoopState, Metrics]:
        train = exchange.whole(state.train)

        def pass_of(i: Array, buffer: Any) -> tuple[Any, Metrics]:
            chunk = jnp.where(starting, i, -1)
            return agent.store.reanalyze(train, buffer, jax.random.fold_in(key, i), chunk)

        one_pass, (_, shapes), _ = traced(pass_of, jnp.int32(0), state.replay)

        def body(i: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
            buffer, metrics = one_pass(i, carry[0])
            return buffer, jax.tree.map(jnp.add, carry[1], metrics)

        zeros = _zeros_like(shapes)
        passes = passes_due(state, before, starting)
        buffer, sums = jax.lax.fori_loop(0, passes, body, (state.replay, zeros))
        metrics = {f"pass/{name}": value for name, value in sums.items()}
        metrics["passes"] = passes
        return state.replace(replay=buffer), metrics

    return reanalyze


def make_learn_if_due(agent: Agent, schedule: Schedule, seeds_axis: str | None = None) -> Callable:
    """`learn_if_due(state, before, key) -> (state, metrics)`: what is due since the steps `before`.

    Makes updates and reanalyze passes. Metrics are sums: `updates`, `update/...`, `pass/...`.
    Seeds batched by `vmap` are along `seeds_axis`, see `mbx.training.seeds`.
    """
    ratio = schedule.ratio
    learn = make_learn(agent)
    reanalyze = make_reanalyze(agent, schedule, seeds_axis) if agent.store else None

    def learn_if_due(state: LoopState, before: Array, key: Array) -> tuple[LoopState, Metrics]:
        update_key, reanalyze_key = jax.random.split(key)
        updates_before = state.updates
        started = state.steps >= schedule.seed_steps
        starting = started & (before < schedule.seed_steps)
        earned = (state.steps - before) * ratio.numerator
        update_debt = state.update_debt + jnp.where(started & ~starting, earned, 0)
        due = update_debt // ratio.denominator
        updates = due + jnp.where(starting, schedule.pretrain_updates, 0)
        state = state.replace(update_debt=update_debt - due * ratio.denominator)
        state, sums = learn(state, update_key, updates)
        metrics = {f"update/{name}": value for name, value in sums.items()}
        metrics["updates"] = updates
        if reanalyze is not None:
            state, extra = reanalyze(state, reanalyze_key, updates_before, starting)
            metrics |= extra
        return strongly_typed(state), metrics  # as it came: one program for all of a run's states

    return learn_if_due


def repeated(
    step: Callable[[LoopState], tuple[LoopState, Metrics]], length: int
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`length` steps as one scan; metrics are summed over them (but for `Ended`)."""

    def summed(found: Any) -> Any:
        if isinstance(found, Ended):
            return found
        return jnp.sum(found, axis=0)

    def train_interval(state: LoopState) -> tuple[LoopState, Metrics]:
        state, metrics = jax.lax.scan(lambda s, _: step(s), state, None, length=length)
        return state, jax.tree.map(summed, metrics, is_leaf=lambda x: isinstance(x, Ended))

    return train_interval


def make_offline_interval(
    agent: Agent, schedule: Schedule, *, length: int, partition: Partition = ONE_DEVICE
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`length` steps that learn from the replay as it is, without acting.

    A step counts as one of all environments, so that schedules mean what they mean when acting.
    """
    learn_if_due = make_learn_if_due(agent, schedule)

    def step(state: LoopState) -> tuple[LoopState, Metrics]:
        key, before = step_keys(state)[2], state.steps
        return learn_if_due(state.replace(steps=before + state.is_first.shape[0]), before, key)

    return partition.compile(repeated(partition.keep(step), length), donate=True)


def _zeros_like(shapes: Metrics) -> Metrics:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
