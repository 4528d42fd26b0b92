"""The optimizers of evosax as planners, with the signature of `mppi.plan`.

    plan = evosax.planner("CMA_ES")
    plan(key, score, mean, std, config=mppi.MPPIConfig(num_samples=32))

Each state has its own optimizer, whose solutions are whole action sequences. In settings the names
are `evosax:CMA_ES`, `evosax:SNES`, … (`mbx.planners`). Needs the extra `evosax`.

Axes: B states planned for at once, N candidates, P proposals, T horizon, A action dims.
Source: Lange 2022, arXiv 2212.04180 (evosax).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mbx import mppi
from mbx.mppi import Array, MPPIConfig, Plan, Refit, ScoreFn


def planner(name: str) -> Any:
    """The planner of an algorithm: a class in `evosax.algorithms` with its default settings.
    The algorithm sees the scores of its own candidates, clipped to [-1, 1]; proposals compete in
    the final choice. An algorithm with a distribution starts at the mean, with the average
    deviation where it has its own (`std_init`), and its mean is the plan's. One with a population
    starts with Gaussian samples, and the plan's mean is the best of all rounds. `temperature`,
    `min_std` and `max_std` of `config` apply to the elites (choice and resulting deviation), not to
    the search.
    Raises ValueError without evosax or for an unknown algorithm; while planning, for a number of
    candidates that the algorithm cannot have, or `initial` for one without a population.
    """
    population = holds_population(name)

    def plan(
        key: Array, score_fn: ScoreFn, mean: Array, std: Array, *, config: MPPIConfig, **given: Any
    ) -> Plan:
        if given.get("initial") is not None and not population:
            raise ValueError(
                f"planner 'evosax:{name}' makes candidates of its own and cannot begin with those "
                "of a policy: set training_planner.search='acting', or choose another planner"
            )
        draw_key, *keys = jax.random.split(key, 4)
        method = functools.partial(_rounds, name, keys)
        return mppi.plan(draw_key, score_fn, mean, std, method=method, config=config, **given)

    return plan


def _rounds(name: str, keys: list[Array], frame: mppi.Frame) -> mppi.Rounds:
    init_key, ask_key, tell_key = keys
    batch, horizon, action_dim = frame.mean.shape
    with jax.ensure_compile_time_eval():
        search = _made(name, frame.num, jnp.zeros((horizon, action_dim), jnp.float32))
    population = holds_population(name)

    def each(function: Callable[..., Any], key: Array, i: Array, *args: Any) -> Any:
        """A function of the algorithm for every state, with a key and parameters of its own."""

        def one(key: Array, spread: Array, *args: Any) -> Any:
            params = search.default_params
            if hasattr(params, "std_init"):
                params = params.replace(std_init=jnp.mean(spread))
            return function(key, *args, params)

        keys = jax.random.split(jax.random.fold_in(key, i), batch)
        return jax.vmap(one)(keys, frame.std, *args)

    def sample(i: Array, last: Refit, memory: Any) -> tuple[Array, Any]:
        actions, memory = each(search.ask, ask_key, i, memory)
        if population:  # nothing to ask before there is one
            first = last.mean[:, None] + frame.std[:, None] * frame.draws.candidate(i)
            actions = jnp.where(i == 0, first, actions)
        return actions, memory

    def tell(i: Array, memory: Any, actions: Array, values: Array) -> tuple[Any, Array]:
        costs = _costs(values)
        new = each(search.tell, tell_key, i, actions, costs, memory)[0]
        if not population:
            return new, jax.vmap(search.get_mean)(new)
        started = each(search.init, init_key, i, actions, costs)
        new = jax.tree.map(lambda a, b: jnp.where(i == 0, a, b), started, new)
        return new, new.best_solution.reshape(frame.mean.shape)

    starts: tuple[Any, ...] = (frame.mean,)
    if population:
        starts = jnp.zeros((batch, frame.num, horizon, action_dim)), jnp.zeros((batch, frame.num))
    memory = each(search.init, init_key, jnp.int32(0), *starts)
    return mppi.Rounds(sample, memory=memory, tell=tell)


def holds_population(name: str) -> bool:
    """Whether an algorithm holds a population, and so can begin with one; else a distribution."""
    return not hasattr(_algorithm(name), "get_mean")


def _algorithm(name: str) -> Any:
    try:
        from evosax import algorithms
    except ImportError as error:
        raise ValueError(
            f"planner 'evosax:{name}' needs evosax: pip install 'mbx-rl[evosax]'"
        ) from error
    if name not in algorithms.algorithms:
        raise ValueError(f"evosax has no {name!r}: choose one of {tuple(algorithms.algorithms)}")
    return algorithms.algorithms[name]


def _made(name: str, num: int, solution: Array) -> Any:
    try:
        return _algorithm(name)(population_size=num, solution=solution)
    except AssertionError as error:
        raise ValueError(
            f"planner 'evosax:{name}' cannot have {num} candidates of its own (num_samples less "
            f"the proposals): {error}"
        ) from error


def _costs(values: Array) -> Array:
    """Costs to minimize, `[B, N]`; the worst finite one in place of those that are not finite."""
    finite = jnp.isfinite(values)
    worst = jnp.max(jnp.where(finite, -values, -jnp.inf), axis=1, keepdims=True)
    return jnp.where(finite, -values, jnp.where(jnp.isfinite(worst), worst, 0.0))
