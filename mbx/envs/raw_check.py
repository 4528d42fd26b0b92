"""A `RawEnvironment` of one's own, looked at before a run compiles anything.

Shapes and types are those that tracing says; numbers come from a reset and some steps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.envs.base import RawEnvironment

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
    for what, value in jax.device_get(values):
        if not np.isfinite(np.asarray(value, float)).all():
            refuse(what, np.asarray(value).tolist(), "finite numbers")


def _check_observation(refuse: Any, raw: RawEnvironment, obs: Any, what: str) -> None:
    if not hasattr(obs, "shape"):
        refuse(what, f"a {type(obs).__name__}", f"one array of shape {tuple(raw.obs_shape)}")
    if tuple(obs.shape) != tuple(raw.obs_shape):
        refuse(what, f"of shape {obs.shape}", f"{tuple(raw.obs_shape)} (obs_shape)")
    if jnp.dtype(obs.dtype) != jnp.dtype(raw.obs_dtype):
        refuse(what, f"of type {obs.dtype}", f"{jnp.dtype(raw.obs_dtype)} (obs_dtype)")


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"
