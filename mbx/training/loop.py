"""The training loop: act, step, store, learn and reanalyze as one compiled program.

In: an agent (`mbx.agents.base.Agent`), an environment (`mbx.envs.base`) and a `Schedule`.
Out: `interval(state, until) -> (state, metrics)`, which takes a run's `LoopState` to `until` agent
steps; metrics are sums, of which `summarise` makes means.

A step acts in all environments at once, stores a row each (with the planner's targets) and makes
the updates and reanalyze passes that are due. `make_interval` loops over it in one program whose
state is donated; without an environment it learns from recorded rows. A host environment runs the
same parts around its Python call (`make_host_interval`).

Pretraining, where a run has some, comes between two steps: the program stops where the seed phase
ends, makes a tenth of its updates a call (so that they can be watched and interrupted), and acts
again. It is the same program: compiling the update twice would double the time to the first step.
`advance` calls it until the run is where it should be.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from mbx import categorical, observations, replay
from mbx.agents.base import Agent, Mean
from mbx.fast import collectives
from mbx.training.state import Ended, LoopState, Schedule, step_keys
from mbx.types import EnvSpec, strongly_typed

if TYPE_CHECKING:
    from mbx.envs.base import HostEnvironment, JaxEnvironment, Timestep
    from mbx.training.devices import Partition

Array = jax.Array
Metrics = dict[str, Any]
Interval = Callable[..., tuple[LoopState, Metrics]]


# -------------------------------------------------------------------------------------------------
# Act


def make_select_action(agent: Agent, schedule: Schedule, num_envs: int, spec: EnvSpec) -> Callable:
    """`select_action(state, key) -> (action [E, A], actor, targets)`: random in the seed phase."""

    def random_action(state: LoopState, key: Array) -> Array:
        if schedule.seed_hold > 1:
            # That of the step at which it was first taken, so that no state need remember it.
            held = state.steps % (schedule.seed_hold * num_envs)
            key = step_keys(state.replace(steps=state.steps - held))[0]
        key = jax.random.split(key)[0]
        if agent.after_action is not None:
            key = jax.random.split(key)[0]
        held = schedule.seed_hold > 1
        return random_actions(spec, key, num_envs, held=held, obs=state.obs)

    def select_action(state: LoopState, key: Array) -> tuple[Array, Any, Any]:
        act_key, target_key = jax.random.split(key)
        # Where parameters are divided: once, not in every step that a planner looks ahead.
        train = collectives.replicate(state.train)

        def explore(_: None) -> tuple[Array, Any]:
            action = random_action(state, key)
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


def random_actions(
    spec: EnvSpec, key: Array, num_envs: int, *, held: bool = False, obs: Array | None = None
) -> Array:
    """Random actions `[E, A]`, uniform; continuous ones that are held clipped N(0, 2).
    Discrete ones are possible in what is observed, `obs` (`observations.action_mask`).

    White noise hardly moves a body: what one step does the next undoes. Held for a few steps and
    at a bound six times in ten, the same noise finds rewards that it else misses
    (docs/notes/learning_history.md).
    """
    if spec.discrete:
        mask = None if obs is None else observations.action_mask(spec, obs)
        if mask is None:
            chosen = jax.random.randint(key, (num_envs,), 0, spec.action_dim)
        else:
            chosen = jax.random.categorical(key, categorical.masked(jnp.zeros(mask.shape), mask))
        return jax.nn.one_hot(chosen, spec.action_dim)
    shape = (num_envs, spec.action_dim)
    if held:
        return jnp.clip(2.0 * jax.random.normal(key, shape), -1.0, 1.0)
    return jax.random.uniform(key, shape, minval=-1.0, maxval=1.0)


# -------------------------------------------------------------------------------------------------
# Store


def store(
    agent: Agent, state: LoopState, action: Array, actor: Any, targets: Any, timestep: Timestep
) -> tuple[LoopState, Metrics]:
    """The state after its row, and where an episode ended that episode's last row, are stored.

    After a fault that last row is left out, and with it the transition to it. Metrics are `faults`,
    `episodes`, `ended` and `episode/...`, `[E]`: devices that hold some of the environments each
    need not exchange them before the interval's end (`repeated`).
    """
    done = timestep.terminated | timestep.truncated
    row = dict(obs=state.obs, action=action, reward=state.reward, is_first=state.is_first)
    if agent.replay_extras is not None:
        row |= agent.replay_extras(actor)
    final = dict(obs=timestep.final_obs, reward=timestep.reward, terminated=timestep.terminated)
    state = state.replace(
        actor=actor,
        obs=timestep.obs,
        reward=jnp.where(done, 0.0, timestep.reward),
        is_first=done,
        replay=replay.insert_step(state.replay, row, final, done & ~timestep.fault, targets),
        steps=state.steps + done.shape[0],
    )
    length = jnp.where(done, timestep.episode_length, 0)
    returned = jnp.where(done, timestep.episode_return, 0.0)
    metrics = {
        "faults": timestep.fault.astype(jnp.int32),
        "episodes": done.astype(jnp.int32),
        "episode/return": returned,
        "episode/length": length,
        "ended": Ended(length, returned),
    }
    for name, value in timestep.metrics.items():
        there = done & ~jnp.isnan(value)  # an episode may end without it
        metrics[f"episode/{name}"] = Mean(jnp.where(there, value, 0.0), there.astype(jnp.int32))
    return strongly_typed(state), metrics


# -------------------------------------------------------------------------------------------------
# Learn


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
            # Targets that an untrained model made in the seed phase are refreshed at its end.
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
    them: then all targets are refreshed.
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


# -------------------------------------------------------------------------------------------------
# All of it


def make_step(
    agent: Agent,
    environment: JaxEnvironment | None,
    schedule: Schedule,
    seeds_axis: str | None = None,
) -> Callable[..., tuple[LoopState, Metrics]]:
    """One fused train step of all environments: `(state, acts=True) -> (state, metrics)`.

    Where it does not act it makes a share of the pretraining. Without an environment it learns from
    the replay as it is: a step then counts as one of all environments, so that schedules mean what
    they mean when acting.

    Args:
        seeds_axis: along which seeds are batched (`mbx.training.seeds`).
    """
    learn = make_learn(agent, schedule, seeds_axis)
    if environment is not None:
        select_action = make_select_action(agent, schedule, environment.num_envs, environment.spec)

    def act(state: LoopState) -> tuple[LoopState, Metrics]:
        if environment is None:
            return state.replace(steps=state.steps + state.is_first.shape[0]), {}
        act_key, env_key, _ = step_keys(state)
        action, actor, targets = select_action(state, act_key)
        env_state, timestep = environment.step(state.env, action, env_key)
        return store(agent, state.replace(env=env_state), action, actor, targets, timestep)

    def step(state: LoopState, acts: Array | bool = True) -> tuple[LoopState, Metrics]:
        state, metrics = act(state) if acts is True else once_if(acts, act, state)
        state, learned = learn(state, acts)
        return state, metrics | learned

    return step


def make_interval(
    agent: Agent,
    environment: JaxEnvironment | None,
    schedule: Schedule,
    *,
    length: int,
    partition: Partition,
) -> Interval:
    """`interval(state, until=None) -> (state, metrics)`, compiled; at most `length` steps.

    until: agent steps; None: `length` steps from here.
    """
    step = partition.keep(make_step(agent, environment, schedule))
    return partition.compile(repeated(step, length, schedule), donate=True)


def repeated(step: Callable, length: int, schedule: Schedule) -> Interval:
    """`interval(state, until=None)`: steps up to `until`, or to the end of the seed phase where a
    pretraining follows, or one share of that. Metrics are summed over steps and environments;
    `Ended` is kept."""

    def train_interval(state: LoopState, until: Array | None = None) -> tuple[LoopState, Metrics]:
        num_envs = state.is_first.shape[0]
        until = state.steps + length * num_envs if until is None else until
        stop, acts = schedule.stop(state.steps, until, num_envs), True
        num = (stop - state.steps) // num_envs
        if schedule.pretrain_updates:
            acts = schedule.updates_left(state.steps, state.updates, num_envs) == 0
            num = jnp.where(acts, num, 1)
        one, (_, shapes), _ = traced(lambda state: step(state, acts), state)
        ended = jax.tree.map(
            lambda x: jnp.zeros((length, *x.shape), x.dtype), shapes.pop("ended", None)
        )

        def body(_: Array, carry: tuple) -> tuple:
            state, sums, ended = carry
            state, found = one(state)
            row = length - 1 - (until - state.steps) // num_envs  # the last is the step to `until`
            now = found.pop("ended", None)
            ended = jax.tree.map(lambda all_of, x: all_of.at[row].add(x), ended, now)
            return state, add(sums, found), ended

        start = (state, zeros_like(shapes), ended)
        state, sums, ended = jax.lax.fori_loop(0, num, body, start)
        sums = jax.tree.map(jnp.sum, sums)
        return state, sums if ended is None else sums | {"ended": ended}

    return train_interval


def make_host_interval(
    agent: Agent,
    environment: HostEnvironment,
    schedule: Schedule,
    *,
    length: int,
    partition: Partition,
) -> Interval:
    """`make_interval` around a host environment's Python call.

    Args:
        environment: of this process; those of all processes are one batch to the agent.
    """
    num_envs = environment.num_envs * partition.processes
    select_action = make_select_action(agent, schedule, num_envs, environment.spec)
    learn = make_learn(agent, schedule)

    @functools.partial(jax.jit, compiler_options=partition.training)
    @partition.traced
    def train_act(state: LoopState) -> tuple[Array, Any, Any]:
        return partition.divided(select_action(state, step_keys(state)[0]))

    def train_store(state: LoopState, *step: Any) -> tuple[LoopState, Metrics]:
        state, metrics = store(agent, state, *step)
        return state, {
            n: x if n == "ended" else jax.tree.map(jnp.sum, x) for n, x in metrics.items()
        }

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

    go_on: asked while updates of the pretraining are left, with a call's metrics and their number;
    where it says no they are left for the next time.
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
    """The sum of two trees."""
    return jax.tree.map(lambda x, y: x + y, a, b)
