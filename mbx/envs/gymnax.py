"""Tasks of gymnax (gymnax:Pendulum-v1) and custom JAX environments (jax:path/to/file.py:make).

gymnax's `step` resets by itself; its form without resets is used, which keeps the final observation
and our time limit. `adapt` also takes other packages' environments with gymnax's interface
(Craftax: jax:craftax.craftax_env:make_craftax_env_from_name).
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations
from mbx.envs import custom, pictures
from mbx.envs.base import RawEnvironment, Suite, unknown_task
from mbx.envs.images import form

Array = jax.Array


# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "Reacher-misc", "Swimmer-misc")
# What the time limit is called, of parameters or environment: gymnax's name, Craftax's.
_LIMITS = ("max_steps_in_episode", "max_timesteps")
_NEVER = 2**30  # steps


def raw(task: str, /, **kwargs: Any) -> RawEnvironment:
    """The gymnax task. Raises ValueError for an unknown task."""
    gymnax = _gymnax()
    if task not in gymnax.registered_envs:
        raise unknown_task("gymnax", task, gymnax.registered_envs)
    env, params = gymnax.make(task, **kwargs)
    return adapt(f"gymnax:{task}", env, params, can_terminate=task not in _ENDLESS)


def adapt(name: str, env: Any, params: Any, *, can_terminate: bool = True) -> RawEnvironment:
    """An object of gymnax's interface as a raw environment named SUITE:TASK.
    `env` has `reset_env`, `step_env`, `action_space` and `observation_space`; spaces are recognized
    by attributes (`n`; `low`, `high` and `shape`; `spaces`), not by class.
    The time limit is `max_steps_in_episode` or `max_timesteps` of `env` (POPGym Arcade), else of
    `params`. A termination is what `is_terminated` says (without the limit); else, with a limit of
    `env`, an end without `truncated` in `step_env`'s dictionary; else what `is_terminal` says (with
    the limit of `params`), or the end of `step_env`.
    Raises ValueError for other actions than a bounded Box or Discrete, and without a time limit.
    """
    limited = env if any(hasattr(env, one) for one in _LIMITS) else params
    limit = next((one for one in _LIMITS if hasattr(limited, one)), None)
    if limit is None:
        raise ValueError(
            f"env.name={name!r}: its parameters, {type(params).__name__}, have no time limit: give "
            f"(environment, parameters) with {' or '.join(_LIMITS)}"
        )
    fields, convert = _actions(name, env.action_space(params))
    parts = observations.flat(_leaves(env.observation_space(params)))
    shapes, dtypes = ({n: form(one, "" in parts)[i] for n, one in parts.items()} for i in (0, 1))

    def ends(state: Any, done: Any, info: dict[str, Any]) -> Any:
        """Terminations without the time limit, which the wrapper handles."""
        if hasattr(env, "is_terminated"):
            return env.is_terminated(state, params)
        if limited is env:
            return done & ~jnp.asarray(info.get("truncated", False))
        if hasattr(env, "is_terminal") and dataclasses.is_dataclass(params):
            return env.is_terminal(state, dataclasses.replace(params, **{limit: _NEVER}))
        return done

    def observe(obs: Any) -> Any:
        found = {"": obs} if "" in parts else observations.flat(obs)
        found = {n: jnp.asarray(x, dtypes[n]) for n, x in found.items()}
        # A part of another shape is refused where parts are joined.
        found = {n: x if n and x.ndim else x.reshape(shapes[n]) for n, x in found.items()}
        return found.get("", found)

    def reset(key: Array) -> tuple:
        obs, state = env.reset_env(key, params)
        return state, observe(obs)

    def step(key: Array, state: object, action: Array) -> tuple:
        obs, new, reward, done, info = env.step_env(key, state, convert(action), params)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype).reshape(b.shape), new, state)
        terminated = jnp.asarray(ends(new, done, info), bool).reshape(())
        return new, observe(obs), jnp.asarray(reward, jnp.float32).reshape(()), terminated

    observed = shapes.get("", shapes), dtypes.get("", dtypes)
    fields |= dict(time_limit=int(getattr(limited, limit)), can_terminate=can_terminate)
    return RawEnvironment(name, *observed, reset=reset, step=step, **fields)


def _actions(name: str, space: Any) -> tuple[dict[str, Any], Callable[[Array], Array]]:
    """Fields of `RawEnvironment` for an action space, and a function from mbx's actions to it."""
    if hasattr(space, "n"):
        return dict(action_dim=int(space.n), discrete=True), jnp.argmax
    if not all(hasattr(space, field) for field in ("low", "high", "shape")):
        raise ValueError(f"env.name={name!r} has the action space {space}: not supported")
    low, high = (
        jnp.broadcast_to(jnp.asarray(x, jnp.float32), space.shape).reshape(-1)
        for x in (space.low, space.high)
    )
    if not np.isfinite([low, high]).all():
        raise ValueError(f"env.name={name!r} has unbounded actions, {space}: bounds are needed")
    rounded = bool((low + (high - low) != high).any())  # beyond a bound, maybe
    whole = np.dtype(getattr(space, "dtype", None) or np.float32).kind in "iu"

    def convert(action: Array) -> Array:
        real = low + 0.5 * (action + 1.0) * (high - low)
        real = jnp.clip(real, low, high) if rounded else real
        return (jnp.rint(real).astype(jnp.int32) if whole else real).reshape(space.shape)

    bounds = dict(action_low=tuple(map(float, low)), action_high=tuple(map(float, high)))
    return dict(action_dim=low.size, **bounds), convert


def load_custom(task: str, /, **kwargs: Any) -> RawEnvironment:
    """A custom JAX environment, by its name.
    The name is of a `RawEnvironment`, of an object of gymnax's interface with or without its
    parameters, or of a function that makes one of these from `kwargs`.
    Raises ValueError for other objects and unknown arguments, FileNotFoundError for a missing file,
    EnvironmentFailure for errors in its own code.
    """
    name = f"jax:{task}"
    if not custom.is_own(name):
        raise ValueError(
            f"env.name={name!r}: say where it is, jax:path/to/file.py:make or jax:module:make"
        )
    made = custom.make(name, kwargs)
    if not isinstance(made, RawEnvironment):
        env, params = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        interface = ("reset_env", "step_env", "action_space", "observation_space")
        if lacking := [field for field in interface if not hasattr(env, field)]:
            raise ValueError(
                f"env.name={name!r} is a {type(env).__name__} without {lacking[0]}: give a "
                "mbx.envs.RawEnvironment, or an object of gymnax's interface"
            )
        with custom.own_code(name, "its spaces"):
            made = adapt(name, env, env.default_params if params is None else params)

    # Errors name the environment; they are raised while tracing.
    reset, step = (
        custom.own_code(name, f"{what}()")(getattr(made, what)) for what in ("reset", "step")
    )
    return made._replace(name=name, reset=reset, step=step)


class _WhenUsed(types.ModuleType):
    """Placeholder of a module that is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


def _gymnax() -> types.ModuleType:
    """The package, without what it draws with until it draws: 0.9 s."""
    names = {"matplotlib.pyplot", "seaborn"} - sys.modules.keys()
    sys.modules.update({name: _WhenUsed(name) for name in names})
    try:
        return importlib.import_module("gymnax")
    finally:
        for name in names:
            del sys.modules[name]


def _leaves(space: Any) -> Any:
    """A space, or dictionaries of the spaces in a Dict."""
    inner = getattr(space, "spaces", None)
    return {k: _leaves(one) for k, one in inner.items()} if isinstance(inner, dict) else space


SUITE = Suite(raw=raw, make_renderer=pictures.of_gymnax, takes_kwargs=True)
CUSTOM = Suite(raw=load_custom, takes_kwargs=True)
