"""Tasks of gymnax (gymnax:Pendulum-v1) and custom JAX environments (jax:path/to/file.py:make).

gymnax's `step` resets by itself; its form without resets is used, which keeps the final observation
and our time limit. `adapt` also takes other packages' environments with gymnax's interface
(Craftax: jax:craftax.craftax_env:make_craftax_env_from_name).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations
from mbx.envs import custom, pictures
from mbx.envs.base import RawEnvironment, Suite, unknown_task

Array = jax.Array


# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "Reacher-misc", "Swimmer-misc")
# What the time limit is called, of parameters or environment: gymnax's name, Craftax's.
_LIMITS = ("max_steps_in_episode", "max_timesteps")
_NEVER = 2**30  # steps


def raw(task: str, **kwargs: Any) -> RawEnvironment:
    """The gymnax task. Raises ValueError for an unknown task."""
    with _imported_when_used("matplotlib.pyplot", "seaborn"):  # for its pictures, and for 0.9 s
        import gymnax

    if task not in gymnax.registered_envs:
        raise unknown_task("gymnax", task, gymnax.registered_envs)
    env, params = gymnax.make(task, **kwargs)
    return adapt(f"gymnax:{task}", env, params, can_terminate=task not in _ENDLESS)


def adapt(name: str, env: Any, params: Any, *, can_terminate: bool = True) -> RawEnvironment:
    """An object of gymnax's interface as a raw environment named SUITE:TASK.
    Spaces are recognized by attributes (`n`; `low`, `high` and `shape`; `spaces`), not by class.
    `env` has `reset_env`, `step_env`, `action_space`, `observation_space`. A termination is what
    `is_terminated` says (without the limit), else `is_terminal` (with the limit of `params`), else
    the end that `step_env` says.
    The time limit is `max_steps_in_episode` or `max_timesteps` of `params`. An `env` with its own
    such attribute (POPGym Arcade) keeps to it: then, without `is_terminated`, an end is a
    termination unless `step_env`'s dictionary says `truncated`.
    Raises ValueError for an action space that is neither a bounded Box nor Discrete, and for
    parameters without a time limit.
    """
    space = env.action_space(params)
    discrete = hasattr(space, "n")
    if not discrete and not all(hasattr(space, field) for field in ("low", "high", "shape")):
        raise ValueError(f"env.name={name!r} has the action space {space}: not supported")
    own = next((one for one in _LIMITS if hasattr(env, one)), None)
    limit = own or next((one for one in _LIMITS if hasattr(params, one)), None)
    if limit is None:
        raise ValueError(
            f"env.name={name!r}: its parameters, {type(params).__name__}, have no time limit: give "
            f"(environment, parameters) with {' or '.join(_LIMITS)}"
        )
    if not discrete:
        low = jnp.broadcast_to(jnp.asarray(space.low, jnp.float32), space.shape).reshape(-1)
        high = jnp.broadcast_to(jnp.asarray(space.high, jnp.float32), space.shape).reshape(-1)
        if not np.isfinite([low, high]).all():
            raise ValueError(f"env.name={name!r} has unbounded actions, {space}: bounds are needed")
        rounded = bool((low + (high - low) != high).any())  # beyond a bound, maybe
        kind = np.dtype(getattr(space, "dtype", None) or np.float32)
        whole = jnp.int32 if kind.kind in "iu" else None
    seen = env.observation_space(params)
    shape: Any
    dtype: Any
    if isinstance(getattr(seen, "spaces", None), dict):  # images as they are, the rest as float32
        parts = observations.flat({k: _leaves(one) for k, one in seen.spaces.items()})
        shape = {name: tuple(one.shape) for name, one in parts.items()}
        dtype = {n: one.dtype if len(one.shape) == 3 else jnp.float32 for n, one in parts.items()}
    else:
        shape = tuple(seen.shape or (1,))
        dtype = jnp.uint8 if len(shape) == 3 and _is_bytes(seen) else jnp.float32
        ends_of = [np.min(getattr(seen, "low", 0)), np.max(getattr(seen, "high", 1))]
        if len(shape) == 3 and dtype != jnp.uint8 and not 0 <= ends_of[0] <= ends_of[1] <= 1:
            shape = (int(np.prod(shape)),)  # no image from 0 to 1: a board of numbers

    def ends(state: Any, done: Any, info: dict[str, Any]) -> Any:
        """Terminations without the time limit, which the wrapper handles."""
        if hasattr(env, "is_terminated"):
            return env.is_terminated(state, params)
        if own is not None:
            return done & ~jnp.asarray(info.get("truncated", False))
        if hasattr(env, "is_terminal") and dataclasses.is_dataclass(params):
            return env.is_terminal(state, dataclasses.replace(params, **{limit: _NEVER}))
        return done

    def observe(obs: Any) -> Any:
        if not isinstance(shape, dict):
            return jnp.asarray(obs, dtype).reshape(shape)
        return {n: jnp.asarray(x, dtype[n]) for n, x in observations.flat(obs).items()}

    def reset(key: Array) -> tuple:
        obs, state = env.reset_env(key, params)
        return state, observe(obs)

    def step(key: Array, state: object, action: Array) -> tuple:
        if discrete:
            real = jnp.argmax(action)
        else:
            real = low + 0.5 * (action + 1.0) * (high - low)
            real = jnp.clip(real, low, high) if rounded else real
            real = (jnp.rint(real).astype(whole) if whole else real).reshape(space.shape)
        obs, new, reward, done, info = env.step_env(key, state, real, params)
        new = jax.tree.map(lambda a, b: jnp.asarray(a, b.dtype).reshape(b.shape), new, state)
        terminated = jnp.asarray(ends(new, done, info), bool).reshape(())
        return new, observe(obs), jnp.asarray(reward, jnp.float32).reshape(()), terminated

    return RawEnvironment(
        name,
        shape,
        dtype,
        int(space.n if discrete else low.size),
        int(getattr(params if own is None else env, limit)),
        reset,
        step,
        discrete,
        can_terminate=can_terminate,
        action_low=() if discrete else tuple(map(float, low)),
        action_high=() if discrete else tuple(map(float, high)),
    )


def load_custom(task: str, **kwargs: Any) -> RawEnvironment:
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

    def naming(what: str, function: Callable) -> Callable:
        """`function` with errors that name the environment; they are raised while tracing."""

        @functools.wraps(function)
        def wrapped(*args: Any) -> Any:
            with custom.own_code(name, what):
                return function(*args)

        return wrapped

    reset, step = naming("reset()", made.reset), naming("step()", made.step)
    return made._replace(name=name, reset=reset, step=step)


class _WhenUsed(types.ModuleType):
    """Placeholder of a module that is imported at its first use."""

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)


@contextlib.contextmanager
def _imported_when_used(*names: str) -> Iterator[None]:
    """Delay the import of these modules, by what is imported in this context, until first use."""
    here = {name: _WhenUsed(name) for name in names if name not in sys.modules}
    sys.modules.update(here)
    try:
        yield
    finally:
        for name, module in here.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]


def _leaves(space: Any) -> Any:
    """A space, or dictionaries of the spaces in a Dict."""
    inner = getattr(space, "spaces", None)
    return {k: _leaves(one) for k, one in inner.items()} if isinstance(inner, dict) else space


def _is_bytes(space: Any) -> bool:
    return np.dtype(getattr(space, "dtype", None) or np.float32) == np.uint8


SUITE = Suite(raw=raw, make_renderer=pictures.of_gymnax, takes_kwargs=True)
CUSTOM = Suite(raw=load_custom, takes_kwargs=True)
