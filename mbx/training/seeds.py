"""Several runs of one configuration in one program: seeds with a log each, or a pure function.

`--config.num_seeds=8` trains eight seeds side by side, each the run that it would be alone, with
the same keys. `mbx.train_fn` gives a run as a pure function of its seed and of numeric settings:

    run = mbx.train_fn("gymnax:Pendulum-v1", "tdmpc", steps=5_000)
    rates = jnp.array([3e-4, 1e-3])
    many = jax.jit(jax.vmap(jax.vmap(run, in_axes=(None, 0)), in_axes=(0, None)))
    trained = many(jnp.arange(4), {"optimizer.learning_rate": rates})     # leaves [4, 2, ...]

Both are a `vmap`. Under it an accelerator batches its runs. A processor core, which has nothing
left over for a batch, makes them one after another inside the same program (`in_turn`), each bit
for bit as it is alone. Seeds are divided among the devices there are (the command makes every
processor core one).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from mbx.agents.base import Agent
from mbx.agents.settings import RunSettings
from mbx.envs.base import JaxEnvironment
from mbx.fast import compiler
from mbx.settings import flatten, from_dict, full_name, inactive, put, to_dict
from mbx.training import build, loop
from mbx.training.build import evaluation_environment, make_environment
from mbx.training.devices import even_count, matmul_precision, require_float32
from mbx.training.evaluation import Evaluation, evaluation_key, make_episodes, task_names
from mbx.training.state import (
    LoopState,
    Schedule,
    init_state,
    make_intervals,
    make_schedule,
    replay_rows,
)

Array = jax.Array
F = TypeVar("F", bound=Callable[..., Any])

# Progress, which all seeds share: under `vmap` it must not be batched, or every branch that depends
# on it would be taken both ways.
_PROGRESS = ("steps", "update_debt", "updates")
_AXIS = "devices"
_SEED = ""  # beside the names of settings
# Errors of Python code that reads a traced number; our own checks name the tracer.
_CONCRETE = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, ValueError)


def batches() -> bool:
    """Whether the default device gains by a batch of runs."""
    return jax.default_backend() != "cpu"


def in_turn(function: F) -> F:
    """`function`, which `vmap` calls for one after another inside the same program."""
    return jax.custom_batching.sequential_vmap(function)


# -------------------------------------------------------------------------------------------------
# Seeds with a log each


def device_mesh(num_seeds: int) -> jax.sharding.Mesh | None:
    """The devices that the seeds are divided among; None for a single one."""
    devices = jax.local_devices()
    num = even_count(num_seeds, len(devices))
    return jax.sharding.Mesh(np.array(devices[:num]), (_AXIS,)) if num > 1 else None


def place(tree: Any, mesh: jax.sharding.Mesh | None) -> Any:
    """A tree with leaves `[S, ...]`, divided among the devices of `mesh` (None: left alone)."""
    if mesh is None:
        return tree
    return jax.device_put(tree, jax.sharding.NamedSharding(mesh, jax.P(_AXIS)))


def pick(tree: Any, index: int) -> Any:
    """One seed's share of a tree with leaves `[S, ...]`."""
    return jax.tree.map(lambda x: x[index], tree)


def make_seeds_interval(
    agent: Agent,
    environment: JaxEnvironment,
    schedule: Schedule,
    *,
    length: int,
    mesh: jax.sharding.Mesh | None = None,
    batched: bool | None = None,
    quick: bool = False,
) -> loop.Interval:
    """`loop.make_interval` for several seeds: leaves and metrics lead with `[S]`.

    Args:
        mesh: devices among which the seeds are divided evenly.
        batched: whether a device takes its seeds together or one after another (None: together
            unless it is a processor).
        quick: about compiling, on GPUs (`compiler`).
    """
    batched = batches() if batched is None else batched
    axis = "seeds" if batched else None
    step = loop.make_step(agent, environment, schedule, axis)
    interval = loop.repeated(step, length, schedule)
    one = interval if batched else in_turn(interval)

    def together(state: LoopState, until: Array) -> tuple[LoopState, dict[str, Array]]:
        shared = {name: getattr(state, name)[0] for name in _PROGRESS} if batched else {}
        seeds = jax.vmap(lambda state: one(state.replace(**shared), until), axis_name=axis)
        return seeds(state)

    divided = _divided(together, mesh, jax.P())

    def train_interval(state: LoopState, until: Array) -> tuple[LoopState, dict[str, Array]]:
        return divided(state, until)

    options = compiler.for_training(jax.default_backend(), quick)
    return jax.jit(train_interval, donate_argnums=0, compiler_options=options)


def make_seeds_evaluate(
    act: Callable,
    init_actor: Callable,
    environment: JaxEnvironment,
    *,
    mesh: jax.sharding.Mesh | None = None,
) -> Callable[[Any, Sequence[Array]], list[Evaluation]]:
    """`evaluate(train, keys)` of several seeds at once: train states `[S, ...]`, S keys."""
    episodes = make_episodes(act, init_actor, environment)
    seeds = jax.vmap(episodes if batches() else in_turn(episodes))
    divided = _divided(seeds, mesh, jax.P(_AXIS))

    @functools.partial(jax.jit, compiler_options=compiler.for_once(jax.default_backend()))
    def evaluation(train: Any, keys: Array) -> Evaluation:
        return divided(train, keys)

    def evaluate(train: Any, keys: Sequence[Array]) -> list[Evaluation]:
        found, tasks = (
            jax.device_get(evaluation(train, place(jnp.stack(keys), mesh))),
            task_names(environment.spec),
        )
        return [pick(found, i)._replace(tasks=tasks) for i in range(len(keys))]

    return evaluate


def _divided(function: Callable, mesh: jax.sharding.Mesh | None, second: jax.P) -> Callable:
    """`function` of a tree `[S, ...]` and something else, each device of `mesh` with its share."""
    if mesh is None:
        return function
    split = jax.P(_AXIS)
    return jax.shard_map(
        function, mesh=mesh, in_specs=(split, second), out_specs=split, check_vma=False
    )


# -------------------------------------------------------------------------------------------------
# A run as a pure function


class Trained(NamedTuple):
    """What a run came to.

    Attributes:
        state: the train state at its end.
        metrics: means over each of N logging intervals by name, `[N]`; NaN where there was nothing
            to average (no update yet, no episode's end).
        returns, lengths: of the `eval.episodes` episodes of an evaluation at the end, `[E]`.
    """

    state: Any
    metrics: dict[str, Array]
    returns: Array
    lengths: Array


TrainFunction = Callable[..., Trained]


def make_train(
    base: RunSettings, axis_name: str | None = None, batched: bool | None = None
) -> TrainFunction:
    """`run(seed, settings={}) -> Trained`, pure; seed and settings may be traced.

    Args:
        base: settings of the run, whose environment has to be written in JAX.
        axis_name: of a `vmap` that the function will be under, where seeds make their passes over
            stored planner targets in step; else it is slower there, with the same result. Runs
            are made together then.
        batched: whether a `vmap` makes its runs together or one after another (None: together
            unless on a processor). A batch rounds otherwise, and where a planner chooses among
            candidates of equal value that grows: only runs made one after another are those that
            they are alone.

    Returns:
        The function. Its `settings` are numbers (`[n]` where a setting is several) by their full
        names ("optimizer.learning_rate") in the agent's own sections. It raises ValueError for what
        is no such number, and for a traced one that decides what the program holds.

    Raises:
        ValueError: for impossible settings, a host environment, several devices; for batched=False
            with an axis_name.
    """
    require_float32()
    if batched is None:
        batched = axis_name is not None or batches()
    elif axis_name is not None and not batched:
        raise ValueError(
            f"batched=False with axis_name={axis_name!r}: runs made one after another cannot make "
            "anything in step; leave one of them out"
        )
    whole = make_whole(base, axis_name)

    def run(seed: Any, settings: Mapping[str, Any] | None = None) -> Trained:
        given = dict(settings or {})
        traced = {n: x for n, x in given.items() if isinstance(x, jax.core.Tracer)}
        if isinstance(seed, jax.core.Tracer):
            traced[_SEED] = seed

        def one(traced: Mapping[str, Any]) -> Trained:
            now = {_SEED: seed} | given | dict(traced)
            return whole(now.pop(_SEED), with_numbers(base, now))

        if traced and not batched:
            one = in_turn(one)
        with matmul_precision(base.matmul_precision):
            try:
                return one(traced)
            except _CONCRETE as error:
                if isinstance(error, ValueError) and "Tracer" not in str(error):
                    raise
                if not (found := _constants(whole, base, given)):
                    raise
                raise ValueError(
                    f"{found[0]} is traced, but its value decides what the program holds: give it "
                    "to train_fn, and make one function a value"
                ) from error

    return run


def make_whole(base: RunSettings, axis_name: str | None) -> Callable[[Any, RunSettings], Trained]:
    """`whole(seed, settings) -> Trained`: a run of `base` with other numbers, as `make_train`."""
    check_pure(base)
    environment = make_environment(base, base.env.num_envs, seed=0)
    if not isinstance(environment, JaxEnvironment):
        raise ValueError(
            f"env.name={base.env.name!r} is stepped in Python: only with an environment written in "
            "JAX is a run one pure function; use mbx.train"
        )
    trials = evaluation_environment(base, base.eval.episodes, seed=0)
    build.build_agent(base, environment.spec)  # raises here for what does not fit

    def whole(seed: Any, settings: RunSettings) -> Trained:
        agent = build.build_agent(settings, environment.spec)
        settings = settings.for_task(environment.spec)
        schedule = make_schedule(settings, environment.spec)
        intervals = make_intervals(settings, environment.spec.action_repeat)
        step = loop.make_step(agent, environment, schedule, axis_name)
        interval = loop.repeated(step, intervals.length, schedule)
        until = 1 + np.arange(intervals.number, dtype=np.int32)
        until *= intervals.length * environment.num_envs

        key = jax.random.key(seed)
        state = init_state(agent, environment, key=key, capacity=replay_rows(settings))
        state, sums = jax.lax.scan(whole_interval(interval, schedule), state, until)
        sums.pop("ended")
        metrics = averaged(sums)
        episodes = make_episodes(agent.act, agent.init_actor, trials)
        found = episodes(state.train, evaluation_key(key, intervals.number - 1))
        return Trained(state.train, metrics, found.returns, found.lengths)

    return whole


def whole_interval(interval: loop.Interval, schedule: Schedule) -> Callable:
    """`loop.advance` within a program: calls of `interval` until the run is at `until`."""

    def advance(state: LoopState, until: Array) -> tuple[LoopState, dict[str, Any]]:
        one, (_, shapes), _ = loop.traced(lambda state: interval(state, until), state)

        def unfinished(carry: tuple) -> Array:
            state, num_envs = carry[0], carry[0].is_first.shape[0]
            left = schedule.updates_left(state.steps, state.updates, num_envs)
            return (state.steps < until) | (left > 0)

        def again(carry: tuple) -> tuple:
            state, found = one(carry[0])
            return state, loop.add(carry[1], found)

        return jax.lax.while_loop(unfinished, again, (state, loop.zeros_like(shapes)))

    return advance


def check_pure(base: RunSettings) -> None:
    """Raise ValueError for settings that need a run directory, or no evaluation."""
    several = base.num_seeds > 1 or base.distributed.enabled or base.distributed.cores > 1
    if several or base.train.dataset or base.train.init_from:
        raise ValueError(
            "num_seeds, distributed, train.dataset and train.init_from are for runs with a "
            "directory: leave them out, seeds go along a vmap here"
        )
    if not base.eval.episodes:
        raise ValueError("eval.episodes=0: the function ends with an evaluation, give it episodes")
    if base.gpu_compiler != "auto":
        raise ValueError(
            f"gpu_compiler={base.gpu_compiler!r} is for runs that mbx compiles: leave it out, and "
            "give your own jax.jit compiler_options=mbx.fast.compiler.for_training(platform, quick)"
        )


def averaged(sums: Mapping[str, Any]) -> dict[str, Array]:
    """`loop.summarise` as arrays: means over updates, passes and episodes, NaN over none."""

    def mean(total: Array, count: Array | None) -> Array:
        if count is None:
            return jnp.asarray(total, jnp.float32)
        return jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)

    return {name: mean(x, of) for name, x, of in loop.fractions(sums)}


def with_numbers(base: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """The settings with other numbers, which may be traced.

    Raises:
        ValueError: for what is no number of the agent's own sections, or has no effect; for one out
            of range where it is not traced.
    """
    values, idle = dict(flatten(to_dict(base))), inactive(base)
    common = {field.name for field in dataclasses.fields(RunSettings)}
    given = {full_name(name, base): x for name, x in given.items()}
    for name in given:
        several = values[name] if isinstance(values[name], tuple) else (values[name],)
        real = bool(several) and all(isinstance(one, float) for one in several)
        if name.partition(".")[0] in common or not real:
            raise ValueError(
                f"{name} is fixed where the function is made: give it to train_fn; only numbers of "
                "the agent's own sections that are no counts may follow"
            )
        if name in idle:
            raise ValueError(f"{name} has no effect here: it needs {idle[name]}; leave it out")
    traced = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    nested: dict[str, Any] = {}
    for name in given.keys() - traced.keys():
        put(nested, name, given[name])
    settings = from_dict(base, nested, check_effects=False)
    for name, x in traced.items():
        value = tuple(x) if isinstance(values[name], tuple) else x
        settings = _replaced(settings, name.split("."), value)
    return settings


def _replaced(settings: Any, path: list[str], value: Any) -> Any:
    name, *rest = path
    inner = _replaced(getattr(settings, name), rest, value) if rest else value
    return dataclasses.replace(settings, **{name: inner})


def _constants(
    whole: Callable[[Any, RunSettings], Trained], base: RunSettings, given: Mapping[str, Any]
) -> list[str]:
    """The given settings that a program cannot be traced with."""
    found = []
    for name in given:

        def alone(x: Array, name: str = name) -> Trained:
            return whole(0, with_numbers(base, {name: x}))

        try:
            jax.eval_shape(alone, jax.ShapeDtypeStruct(jnp.shape(given[name]), jnp.float32))
        except _CONCRETE:
            found.append(name)
    return found
