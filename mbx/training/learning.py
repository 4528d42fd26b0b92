"""What is due after a step: learner updates, and passes that renew stored planner targets.

`make_learn` joins both into one pure function of the state. The loop calls it after every step, and
between two steps for a share of the pretraining.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from mbx import replay
from mbx.agents.base import Agent
from mbx.envs.base import strongly_typed
from mbx.fast import collectives
from mbx.training.state import LoopState, Schedule, step_keys

Array = jax.Array
Metrics = dict[str, Any]


def make_learn(agent: Agent, schedule: Schedule, seeds_axis: str | None = None) -> Callable:
    """`learn(state, acted) -> (state, metrics)`: the updates and passes that are due.

    That is after a step (`acted`), or between two steps: a share of the pretraining.
    Metrics are sums: `updates`, `update/...`, `passes`, `pass/...`. Seeds batched by `vmap` are
    along `seeds_axis` (`mbx.training.seeds`).
    """
    ratio, make_updates = schedule.ratio, make_update_loop(agent)
    reanalyze = make_reanalyze(agent, schedule, seeds_axis) if agent.store else None

    def learn(state: LoopState, acted: Array) -> tuple[LoopState, Metrics]:
        num_envs, before = state.is_first.shape[0], state.updates
        step = state.steps - num_envs  # the number of the step that all this belongs to
        update_key, reanalyze_key = jax.random.split(step_keys(state.replace(steps=step))[2])
        earned = jnp.where(acted & (step >= schedule.seed_steps), num_envs * ratio.numerator, 0)
        debt = state.update_debt + earned
        share = jnp.minimum(schedule.pretrain_share, schedule.pretrain_updates - before)
        due = jnp.where(acted, debt // ratio.denominator, share)
        state = state.replace(update_debt=debt % ratio.denominator)
        state, sums = make_updates(state, update_key, due, jnp.where(acted, 0, before))
        metrics = {f"update/{name}": value for name, value in sums.items()}
        metrics["updates"] = due
        if reanalyze is not None:
            # What an untrained model made in the seed phase is made again at its end.
            seeded = (step < schedule.seed_steps) & (state.steps >= schedule.seed_steps)
            complete = seeded & (state.updates >= schedule.pretrain_updates)
            state, extra = reanalyze(state, reanalyze_key, before, complete)
            metrics |= extra
        return strongly_typed(state), metrics  # as it came: one program for all of a run's states

    return learn


def make_update_loop(agent: Agent) -> Callable:
    """`updates(state, key, num, first) -> (state, summed metrics)`: `num` learner updates.

    Their keys are those of the updates from `first` on that `key` is for.
    """

    def updates(
        state: LoopState, key: Array, num: Array, first: Array
    ) -> tuple[LoopState, Metrics]:
        update, (_, _, metrics), kept = traced(agent.update, state.train, state.replay, key)
        writes = not kept(1)

        # What no update writes must stay out of the loop's carry, where it would be copied.
        def body(i: Array, carry: tuple[Any, Any, Metrics]) -> tuple[Any, Any, Metrics]:
            train, buffer, sums = carry
            now = buffer if writes else state.replay
            train, new, metrics = update(train, now, jax.random.fold_in(key, first + i))
            return train, new if writes else None, add(sums, metrics)

        carry = (state.train, state.replay if writes else None, zeros_like(metrics))
        train, buffer, sums = jax.lax.fori_loop(0, num, body, carry)
        state = state.replace(train=train, updates=state.updates + num)
        return (state.replace(replay=buffer) if writes else state), sums

    return updates


def make_reanalyze(agent: Agent, schedule: Schedule, seeds_axis: str | None) -> Callable:
    """`reanalyze(state, key, before, complete) -> (state, metrics)`: the passes that are due.

    It takes the updates made before those of this step, and whether the seed phase is complete with
    them: then all targets are made again.
    """
    every = schedule.reanalyze_interval

    def passes_due(state: LoopState, before: Array, complete: Array) -> Array:
        regular = state.updates // every - before // every if every else 0
        regular = jnp.where(state.steps >= schedule.reanalyze_min_step, regular, 0)
        regular = jnp.where(before >= schedule.pretrain_updates, regular, 0)
        if seeds_axis is None:  # of several devices each knows its own rows: ask once a run
            return jax.lax.cond(complete, sweep, lambda _: jnp.int32(regular), state.replay)
        # Batched seeds make the same number of passes: the fullest's.
        return jnp.where(complete, jax.lax.pmax(sweep(state.replay), seeds_axis), regular)

    def sweep(buffer: Any) -> Array:
        return replay.sweep_length(buffer, agent.store.batch_size)

    def reanalyze(
        state: LoopState, key: Array, before: Array, complete: Array
    ) -> tuple[LoopState, Metrics]:
        train = collectives.replicate(state.train)

        def pass_of(i: Array, buffer: Any) -> tuple[Any, Metrics]:
            chunk = jnp.where(complete, i, -1)
            return agent.store.reanalyze(train, buffer, jax.random.fold_in(key, i), chunk)

        one_pass, (_, shapes), _ = traced(pass_of, jnp.int32(0), state.replay)

        def body(i: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
            buffer, metrics = one_pass(i, carry[0])
            return buffer, add(carry[1], metrics)

        passes = passes_due(state, before, complete)
        start = (state.replay, zeros_like(shapes))
        buffer, sums = jax.lax.fori_loop(0, passes, body, start)
        metrics = {f"pass/{name}": value for name, value in sums.items()}
        metrics["passes"] = passes
        return state.replace(replay=buffer), metrics

    return reanalyze


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


def zeros_like(shapes: Any) -> Any:
    """Zeros of the shapes and types of a tree."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def add(a: Any, b: Any) -> Any:
    """The sum of two trees, leaf by leaf."""
    return jax.tree.map(lambda x, y: x + y, a, b)
