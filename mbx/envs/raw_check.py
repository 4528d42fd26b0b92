"""A `RawEnvironment` of one's own, looked at before a run compiles anything.

Shapes and types are those that tracing says; numbers come from a reset and some steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations
from mbx.envs.base import RawEnvironment
from mbx.envs.checks import warn_of_sizes

_STEPS = 3


def check_raw(raw: RawEnvironment) -> None:
    """Raise ValueError where an environment does not do what it declares.

    The message names the environment, the field, what it is and what is wanted.
    """

    def refuse(what: str, got: Any, wanted: Any) -> None:
        raise ValueError(
            f"env.name={raw.name!r}: {what} is {got}, wanted {wanted}: change its code or what its "
            "RawEnvironment declares"
        )

    key, action = jax.random.key(0), jnp.zeros(raw.action_dim).at[0].set(1.0)
    begun = jax.eval_shape(raw.reset, key)
    if not isinstance(begun, tuple) or len(begun) != 2:
        refuse("the result of reset()", _kind(begun), "(state, observation)")
    state, obs = begun
    _check_observation(refuse, raw, obs, "the observation of reset()")
    done = jax.eval_shape(raw.step, key, state, action)
    wanted = "(state, observation, reward, terminated" + (", metrics)" if raw.metrics else ")")
    if isinstance(done, tuple) and len(done) == 5 and not raw.metrics:
        names = tuple(done[4]) if isinstance(done[4], dict) else ("name",)
        wanted += f", or five with RawEnvironment(metrics={names}), which declares the fifth"
    if not isinstance(done, tuple) or len(done) != 4 + bool(raw.metrics):
        refuse("the result of step()", _kind(done), wanted)
    new, obs, reward, terminated, *rest = done
    if rest and (not isinstance(rest[0], dict) or set(rest[0]) != set(raw.metrics)):
        got = list(rest[0]) if isinstance(rest[0], dict) else _kind(rest[0])
        refuse("the metrics of step()", got, f"a dictionary of {list(raw.metrics)}")
    for name in raw.metrics:
        if np.shape(rest[0][name]) != ():
            refuse(f"{name} of step()", f"of shape {np.shape(rest[0][name])}", "a single number")
    _check_observation(refuse, raw, obs, "the observation of step()")
    for field, value in (("reward", reward), ("terminated", terminated)):
        if np.shape(value) != ():
            refuse(f"{field} of step()", f"of shape {np.shape(value)}", "a single number, shape ()")
    before, after = jax.tree.structure(state), jax.tree.structure(new)
    if before != after:
        refuse("the state of step()", after, f"the structure that reset() gives, {before}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True)
    for (path, old), now in pairs:
        if (np.shape(old), jnp.result_type(old)) != (np.shape(now), jnp.result_type(now)):
            refuse(
                f"the state{jax.tree_util.keystr(path)} of step()",
                f"{jnp.result_type(now)}{list(np.shape(now))}",
                f"what reset() gives, {jnp.result_type(old)}{list(np.shape(old))}",
            )
    _check_numbers(refuse, raw, key, action)


def _check_numbers(refuse: Any, raw: RawEnvironment, key: jax.Array, action: jax.Array) -> None:
    """Run it: observations and rewards are finite."""
    state, obs = jax.jit(raw.reset)(key)
    values, step = [("the observation of reset()", obs)], jax.jit(raw.step)
    for i in range(1, _STEPS + 1):
        state, obs, reward, terminated, *_ = step(jax.random.fold_in(key, i), state, action)
        values += [
            (f"the observation of step() number {i}", obs),
            (f"reward of step() {i}", reward),
        ]
        if terminated:
            break
    rewards, seen = [], []
    for what, value in jax.device_get(values):
        for name, x in observations.flat(value).items():
            if not np.isfinite(np.asarray(x, float)).all():
                which = f"{name!r} of {what}" if name else what
                refuse(which, np.asarray(x).tolist(), "finite numbers")
            if what.startswith("reward"):
                rewards.append(x)
            elif np.asarray(x).dtype.kind == "f":
                seen.append(np.asarray(x))
    warn_of_sizes(raw.name, rewards, seen)
    if any(x.ndim == 3 and not 0 <= x.min() <= x.max() <= 1 for x in seen):
        warnings.warn(
            f"env.name={raw.name!r}: its observation has three axes, an image from 0 to 1 to "
            "Dreamer, and other numbers: flatten it to a vector",
            stacklevel=2,
        )


def _check_observation(refuse: Any, raw: RawEnvironment, obs: Any, what: str) -> None:
    shapes, dtypes = raw.obs_shape, raw.obs_dtype
    if isinstance(shapes, Mapping) != isinstance(dtypes, Mapping):
        refuse("obs_dtype", dtypes, "a dictionary where obs_shape is one, else none")
    if not isinstance(shapes, Mapping):
        shapes, dtypes, found = {"": shapes}, {"": dtypes}, {"": obs}
        if not hasattr(obs, "shape"):
            refuse(what, f"a {type(obs).__name__}", f"one array of shape {tuple(raw.obs_shape)}")
    else:
        found = observations.flat(obs)
        if not isinstance(obs, Mapping) or set(found) != set(shapes) or set(found) != set(dtypes):
            got = f"of {list(found)}" if isinstance(obs, Mapping) else _kind(obs)
            refuse(what, got, f"a dictionary of {list(shapes)} (obs_shape, obs_dtype)")
    for name, x in found.items():
        which = f"{name!r} of {what}" if name else what
        if not hasattr(x, "shape"):
            refuse(which, f"a {type(x).__name__}", f"an array of shape {tuple(shapes[name])}")
        if tuple(x.shape) != tuple(shapes[name]):
            refuse(which, f"of shape {x.shape}", f"{tuple(shapes[name])} (obs_shape)")
        if jnp.dtype(x.dtype) != jnp.dtype(dtypes[name]):
            refuse(which, f"of type {x.dtype}", f"{jnp.dtype(dtypes[name])} (obs_dtype)")


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"
