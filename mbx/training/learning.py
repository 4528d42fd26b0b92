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

from mbx import replay
from mbx.agents.base import Agent
from mbx.envs.base import strongly_typed
from mbx.fast import collectives
from mbx.training.sharding import ONE_DEVICE, Partition
from mbx.training.state import Ended, LoopState, Schedule, Turn, step_keys, updates_left

Array = jax.Array
Metrics = dict[str, Array]


def make_learn(agent: Agent) -> Callable:
    """`learn(state, key, num, first) -> (state, summed metrics)`: `num` learner updates.

    Their keys are those of the updates from `first` on that `key` is for.
    """

    def learn(state: LoopState, key: Array, num: Array, first: Array) -> tuple[LoopState, Metrics]:
        update, (_, _, metrics), kept = traced(agent.update, state.train, state.replay, key)
        writes = not kept(1)

        # What no update writes must stay out of the loop's carry, where it would be copied.
        def body(i: Array, carry: tuple[Any, Any, Metrics]) -> tuple[Any, Any, Metrics]:
            train, buffer, sums = carry
            now = buffer if writes else state.replay
            train, new, metrics = update(train, now, jax.random.fold_in(key, first + i))
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


def once_if(
    condition: Array, function: Callable[..., tuple[Any, Metrics]], state: Any, *args: Any
) -> tuple[Any, Metrics]:
    """`function(state, *args)`, or the state as it is and metrics of zeros.

    As a loop of one turn or none: a branch would copy what it passes on, the whole replay too.
    """
    run, (_, shapes), _ = traced(function, state, *args)
    num = condition.astype(jnp.int32)
    carry = (state, _zeros_like(shapes))
    return jax.lax.fori_loop(0, num, lambda _, carry: run(carry[0], *args), carry)


def make_reanalyze(agent: Agent, schedule: Schedule, seeds_axis: str | None) -> Callable:
    """`reanalyze(state, key, before, pretraining, complete)`: the passes that are due.

    What it returns gives (state, metrics). It takes the updates made when the step began
    (`before`), whether those of this step are of the pretraining, and whether that is complete with
    them: then all targets of the seed phase, which an untrained model made, are made again.
    """
    every = schedule.reanalyze_interval

    def passes_due(state: LoopState, before: Array, pretraining: Array, complete: Array) -> Array:
        regular = state.updates // every - before // every if every else 0
        regular = jnp.where(state.steps >= schedule.reanalyze_min_step, regular, 0)
        regular = jnp.where(pretraining, 0, regular)
        if seeds_axis is None:  # of several devices each knows its own rows: ask once a run
            return jax.lax.cond(complete, sweep, lambda _: jnp.int32(regular), state.replay)
        # Batched seeds make the same number of passes: the fullest's.
        return jnp.where(complete, jax.lax.pmax(sweep(state.replay), seeds_axis), regular)

    def sweep(buffer: Any) -> Array:
        return replay.sweep_length(buffer, agent.store.batch_size)

    def reanalyze(
        state: LoopState, key: Array, before: Array, pretraining: Array, complete: Array
    ) -> tuple[LoopState, Metrics]:
        train = collectives.replicate(state.train)

        def pass_of(i: Array, buffer: Any) -> tuple[Any, Metrics]:
            chunk = jnp.where(complete, i, -1)
            return agent.store.reanalyze(train, buffer, jax.random.fold_in(key, i), chunk)

        one_pass, (_, shapes), _ = traced(pass_of, jnp.int32(0), state.replay)

        def body(i: Array, carry: tuple[Any, Metrics]) -> tuple[Any, Metrics]:
            buffer, metrics = one_pass(i, carry[0])
            return buffer, jax.tree.map(jnp.add, carry[1], metrics)

        zeros = _zeros_like(shapes)
        passes = passes_due(state, before, pretraining, complete)
        buffer, sums = jax.lax.fori_loop(0, passes, body, (state.replay, zeros))
        metrics = {f"pass/{name}": value for name, value in sums.items()}
        metrics["passes"] = passes
        return state.replace(replay=buffer), metrics

    return reanalyze


def make_learn_if_due(agent: Agent, schedule: Schedule, seeds_axis: str | None = None) -> Callable:
    """`learn_if_due(state, key, turn=None) -> (state, metrics)`: what is due after a step.

    Makes updates and reanalyze passes. Metrics are sums: `updates`, `update/...`, `pass/...`.
    Without a turn the pretraining is made at once. Seeds batched by `vmap` are along `seeds_axis`,
    see `mbx.training.seeds`.
    """
    ratio = schedule.ratio
    learn = make_learn(agent)
    reanalyze = make_reanalyze(agent, schedule, seeds_axis) if agent.store else None

    def due_now(state: LoopState, turn: Turn | None) -> tuple[Array, Array, Array, Array]:
        """Updates of the step and what it owes after them; whether they are of the pretraining, and
        how many of that were made before."""
        num_envs, left = state.is_first.shape[0], updates_left(state.update_debt, schedule)
        made = num_envs if turn is None else jnp.where(turn.acts, num_envs, 0)
        started = state.steps >= schedule.seed_steps
        starting = started & (state.steps - made < schedule.seed_steps)
        debt = state.update_debt + jnp.where(started & ~starting, made * ratio.numerator, 0)
        due = debt // ratio.denominator + jnp.where(starting, schedule.pretrain_updates, 0)
        rest = debt % ratio.denominator
        if turn is None or not schedule.pretrain_share:
            return due, rest, starting, jnp.int32(0)
        waiting = ~turn.acts
        now = jnp.where(
            turn.last & (starting | waiting),
            jnp.minimum(due, schedule.pretrain_share),
            jnp.where(waiting, 0, due),
        )
        done = jnp.where(waiting, schedule.pretrain_updates - left, 0)
        return now, rest + (due - now) * ratio.denominator, starting | waiting, done

    def learn_if_due(
        state: LoopState, key: Array, turn: Turn | None = None
    ) -> tuple[LoopState, Metrics]:
        update_key, reanalyze_key = jax.random.split(key)
        updates_before = state.updates
        updates, debt, pretraining, done = due_now(state, turn)
        state, sums = learn(state.replace(update_debt=debt), update_key, updates, done)
        metrics = {f"update/{name}": value for name, value in sums.items()}
        metrics["updates"] = updates
        if reanalyze is not None:
            complete = pretraining & (updates_left(state.update_debt, schedule) == 0)
            state, extra = reanalyze(state, reanalyze_key, updates_before, pretraining, complete)
            metrics |= extra
        return strongly_typed(state), metrics  # as it came: one program for all of a run's states

    return learn_if_due


def repeated(
    step: Callable[..., tuple[LoopState, Metrics]], length: int, schedule: Schedule | None = None
) -> Callable[[LoopState], tuple[LoopState, Metrics]]:
    """`length` steps as one scan; metrics are summed over them (but for `Ended`).

    Args:
        step: of a state, and of its turn where the schedule divides the pretraining among calls.
        length: how many.
        schedule: of the run; None: its pretraining is made at once.
    """

    def summed(found: Any) -> Any:
        if isinstance(found, Ended):
            return found
        return jnp.sum(found, axis=0)

    def train_interval(state: LoopState) -> tuple[LoopState, Metrics]:
        if schedule is None or not schedule.pretrain_share:
            state, metrics = jax.lax.scan(lambda s, _: step(s), state, None, length=length)
        else:
            acts = updates_left(state.update_debt, schedule) == 0
            state, metrics = jax.lax.scan(
                lambda s, i: step(s, Turn(acts, i == length - 1)), state, jnp.arange(length)
            )
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
        key = step_keys(state)[2]
        return learn_if_due(state.replace(steps=state.steps + state.is_first.shape[0]), key)

    return partition.compile(repeated(partition.keep(step), length), donate=True)


def _zeros_like(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
