"""JAX environments of one's own: jax:path/to/file.py:make, jax:package.module:make.

What the name stands for is an object or a function that makes one (`env.kwargs` are its
arguments): a `RawEnvironment`, an object of gymnax's interface, or such a one with its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mbx.envs import custom, gymnax
from mbx.envs.base import RawEnvironment, Suite

_INTERFACE = ("reset_env", "step_env", "action_space", "observation_space")


def raw(task: str, **kwargs: Any) -> RawEnvironment:
    """The environment that a name stands for.

    Raises:
        ValueError: where it is none, or does not take these arguments.
        FileNotFoundError: where its file has gone.
        EnvironmentFailure: where its own code fails.
    """
    name = f"jax:{task}"
    if not custom.is_own(name):
        raise ValueError(
            f"env.name={name!r}: say where it is, jax:path/to/file.py:make or jax:module:make"
        )
    made = custom.make(name, kwargs)
    if not isinstance(made, RawEnvironment):
        env, params = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        lacking = [field for field in _INTERFACE if not hasattr(env, field)]
        if lacking:
            raise ValueError(
                f"env.name={name!r} is a {type(env).__name__} without {lacking[0]}: give a "
                "mbx.envs.RawEnvironment, or an object of gymnax's interface"
            )
        with custom.own_code(name, "its spaces"):
            made = gymnax.adapt(name, env, env.default_params if params is None else params)
    return made._replace(
        name=name,
        reset=_named(name, "reset", made.reset),
        step=_named(name, "step", made.step),
    )


def _named(name: str, what: str, function: Callable) -> Callable:
    """`function`, whose errors name the environment; they are raised while it is traced."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with custom.own_code(name, f"{what}()"):
            return function(*args)

    return wrapped


SUITE = Suite(raw=raw, takes_kwargs=True)
