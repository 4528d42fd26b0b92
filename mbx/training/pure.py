"""A whole run as a pure function of its seed and of numeric settings: no files, no log.

    run = mbx.train_fn("gymnax:Pendulum-v1", "tdmpc", steps=5_000)
    rates = jnp.array([3e-4, 1e-3])
    many = jax.jit(jax.vmap(jax.vmap(run, in_axes=(None, 0)), in_axes=(0, None)))
    trained = many(jnp.arange(4), {"optimizer.learning_rate": rates})     # leaves [4, 2, ...]

It makes the steps, updates and keys that `mbx.training.run` makes with that seed. Under `vmap` an
accelerator makes the runs together; a processor, which has nothing left over for a batch, makes
them one after another inside the same program, each bit for bit as it is alone.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx.agents.base import Mean
from mbx.agents.settings import RunSettings
from mbx.envs.base import JaxEnvironment
from mbx.settings import flatten, from_dict, inactive, to_dict
from mbx.training import build, learning, loop
from mbx.training.environments import evaluation_environment, make_environment
from mbx.training.evaluation import make_episodes
from mbx.training.job import make_intervals, replay_rows
from mbx.training.run import evaluation_key, matmul_precision, require_float32
from mbx.training.state import Ended, init_state, make_schedule
from mbx.types import Array

_SEED = ""  # beside the names of settings
# What tells that Python looked at a number that is traced; a check of ours names the tracer.
_LOOKED_AT = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, ValueError)


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
    config: build.Config, axis_name: str | None = None, batched: bool | None = None
) -> TrainFunction:
    """`run(seed, settings={}) -> Trained`, pure; seed and settings may be traced.

    Args:
        config: of the run; its environment has to be written in JAX.
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
        batched = axis_name is not None or jax.default_backend() != "cpu"
    elif axis_name is not None and not batched:
        raise ValueError(
            f"batched=False with axis_name={axis_name!r}: runs made one after another cannot make "
            "anything in step; leave one of them out"
        )
    base = build.read(config)
    several = base.num_seeds > 1 or base.distributed.enabled or base.distributed.cores > 1
    if several or base.train.dataset or base.train.init_from:
        raise ValueError(
            "num_seeds, distributed, train.dataset and train.init_from are for runs with a "
            "directory: leave them out, seeds go along a vmap here"
        )
    if base.gpu_compiler != "auto":
        raise ValueError(
            f"gpu_compiler={base.gpu_compiler!r} is for runs that mbx compiles: leave it out, and "
            "give your own jax.jit compiler_options=mbx.fast.compiler.for_training(platform, quick)"
        )
    environment = make_environment(base, base.env.num_envs, seed=0)
    if not isinstance(environment, JaxEnvironment):
        raise ValueError(
            f"env.name={base.env.name!r} is stepped in Python: only with an environment written in "
            "JAX is a run one pure function; use mbx.train"
        )
    trials = evaluation_environment(base, base.eval.episodes, seed=0)
    build.build_agent(base, environment.spec)  # what does not fit is told now

    def whole(seed: Any, settings: RunSettings) -> Trained:
        agent = build.build_agent(settings, environment.spec)
        intervals = make_intervals(settings, environment.spec.action_repeat)
        step = loop.make_step(
            agent, environment, make_schedule(settings, environment.spec), axis_name
        )
        interval = learning.repeated(step, intervals.length)

        def logged(state: Any, _: None) -> tuple[Any, dict[str, Array]]:
            state, sums = interval(state)
            return state, averaged(sums)

        key = jax.random.key(seed)
        state = init_state(agent, environment, key=key, capacity=replay_rows(settings))
        state, metrics = jax.lax.scan(logged, state, None, length=intervals.number)
        episodes = make_episodes(agent.act, agent.init_actor, trials)
        returns, lengths, *_ = episodes(state.train, evaluation_key(key, intervals.number - 1))
        return Trained(state.train, metrics, returns, lengths)

    def run(seed: Any, settings: Mapping[str, Any] | None = None) -> Trained:
        given = dict(settings or {})
        traced = {n: x for n, x in given.items() if isinstance(x, jax.core.Tracer)}
        if isinstance(seed, jax.core.Tracer):
            traced[_SEED] = seed

        def one(traced: Mapping[str, Any]) -> Trained:
            now = {_SEED: seed} | given | dict(traced)
            return whole(now.pop(_SEED), with_numbers(base, now))

        if traced and not batched:
            one = jax.custom_batching.sequential_vmap(one)
        with matmul_precision(base.matmul_precision):
            try:
                return one(traced)
            except _LOOKED_AT as error:
                if isinstance(error, ValueError) and "Tracer" not in str(error):
                    raise
                if not (found := _constants(whole, base, given)):
                    raise
                raise ValueError(
                    f"{found[0]} is traced, but its value decides what the program holds: give it "
                    "to train_fn, and make one function a value"
                ) from error

    return run


def with_numbers(base: RunSettings, given: Mapping[str, Any]) -> RunSettings:
    """The settings with other numbers, which may be traced.

    Raises:
        ValueError: for what is no number of the agent's own sections, or has no effect; for one out
            of range where it is not traced.
    """
    values, idle = dict(flatten(to_dict(base))), inactive(base)
    common = {field.name for field in dataclasses.fields(RunSettings)}
    for name in given:
        if name not in values:
            close = difflib.get_close_matches(name, values, n=3)
            raise ValueError(f"{name} is not a setting: did you mean one of {close}?")
        if name.partition(".")[0] in common or not _is_number(values[name]):
            raise ValueError(
                f"{name} is fixed where the function is made: give it to train_fn; only numbers of "
                "the agent's own sections that are no counts may follow"
            )
        if name in idle:
            raise ValueError(f"{name} has no effect here: it needs {idle[name]}; leave it out")
    fixed = {name: x for name, x in given.items() if not isinstance(x, jax.Array)}
    nested: dict[str, Any] = {}
    for name, x in fixed.items():
        *path, last = name.split(".")
        inside = nested
        for part in path:
            inside = inside.setdefault(part, {})
        inside[last] = x
    settings = from_dict(base, nested, check_effects=False) if nested else base
    for name, x in given.items():
        if name not in fixed:
            several = isinstance(values[name], tuple)
            settings = _replaced(settings, name.split("."), tuple(x) if several else x)
    return settings


def _is_number(value: Any) -> bool:
    """Whether a setting is a real number, or several."""
    several = value if isinstance(value, tuple) else (value,)
    return bool(several) and all(isinstance(one, float) for one in several)


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
        except _LOOKED_AT:
            found.append(name)
    return found


def averaged(sums: Mapping[str, Any]) -> dict[str, Array]:
    """`loop.summarise` as arrays: means over updates, passes and episodes, NaN over none."""
    counts = {"update/": "updates", "pass/": "passes", "episode/": "episodes"}
    result = {}
    for name, value in sums.items():
        prefix = name.partition("/")[0] + "/"
        if isinstance(value, Ended):
            continue
        if isinstance(value, Mean):
            total, count = value.total, value.count
        elif "/" in name and prefix in counts:
            total, count = value, sums[counts[prefix]]
        else:
            result[name] = jnp.asarray(value, jnp.float32)
            continue
        short = name if prefix == "episode/" else name.removeprefix(prefix)
        result[short] = jnp.where(count > 0, total / jnp.maximum(count, 1), jnp.nan)
    return result
