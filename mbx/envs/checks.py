"""Validation of custom environments before anything is compiled.

Every error names the environment, the field, its value and what is expected. In contrast,
`gymnasium.utils.env_checker` rejects environments that train well (float64 in a float32 Box,
simulators that are not deterministic) and does not name the environment.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations
from mbx.envs import custom
from mbx.envs.base import RawEnvironment

_STEPS = 5
# TD-MPC's bins end at a reward of symexp(10); nothing is learned from much larger numbers.
_LARGE = {"rewards": 22_025.0, "observations": 10_000.0}
_REMEDY = {
    "rewards": "what lies beyond 22,025 is cut off: scale them",
    "observations": "scale them to be of order 1",
}
_SINCE = "(Gymnasium's interface since 0.26)"


class _Check:
    """Errors about one environment, and the numbers it returned."""

    def __init__(self, name: str, remedy: str = "") -> None:
        self.name, self._remedy = name, remedy
        self.rewards: list[Any] = []
        self.observations: list[np.ndarray] = []

    def refuse(self, what: str, wanted: str) -> None:
        raise ValueError(f"env.name={self.name!r}: {what}, wanted {wanted}{self._remedy}")

    def warn_of_sizes(self) -> None:
        """Warn of numbers that are too large to learn from."""
        for what, values in (("rewards", self.rewards), ("observations", self.observations)):
            largest = max((float(np.max(np.abs(x), initial=0.0)) for x in values), default=0.0)
            if largest > _LARGE[what]:
                self.warn(f"{what} of {largest:.3g}: {_REMEDY[what]}")

    def warn(self, words: str) -> None:
        warnings.warn(f"env.name={self.name!r}: {words}", stacklevel=3)


# -------------------------------------------------------------------------------------------------
# Gymnasium's interface


def check_first(name: str, kwargs: Mapping[str, Any]) -> None:
    """Make a custom environment, reset and step it. Raises ValueError for defects."""
    env = custom.make(name, kwargs)
    try:
        _check_api(name, env)
        check_spaces(name, env)
        _check_steps(_Check(name), env)
    finally:
        custom.close(name, env)


def _check_api(name: str, env: Any) -> None:
    """Raise ValueError where an object lacks Gymnasium's current interface."""
    import gymnasium

    if isinstance(env, gymnasium.vector.VectorEnv):
        raise ValueError(
            f"env.name={name!r} is a vector environment, {type(env).__name__}: give a single one, "
            "of which env.num_envs makes copies"
        )
    for field in ("reset", "step", "observation_space", "action_space"):
        if not hasattr(env, field):
            raise ValueError(
                f"env.name={name!r} is a {type(env).__name__} without {field}: give a "
                "gymnasium.Env, or a function that makes one"
            )
    try:
        inspect.signature(env.reset).bind(seed=0)
    except TypeError as error:
        raise ValueError(
            f"env.name={name!r}: reset{inspect.signature(env.reset)} takes no seed: write it as "
            f"reset(self, *, seed=None, options=None) -> (observation, info) {_SINCE}"
        ) from error


def check_spaces(name: str, env: Any) -> None:
    """Raise ValueError for spaces on which no agent can be trained."""
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

    action, observation = env.action_space, env.observation_space
    for field, space in (("action_space", action), ("observation_space", observation)):
        if not isinstance(space, Space):
            kind = type(space)
            raise ValueError(
                f"env.name={name!r}: {field} is a {kind.__module__}.{kind.__name__}: one of "
                "gymnasium.spaces is needed"
            )
    if not isinstance(action, Discrete) and not (isinstance(action, Box) and _is_bounded(action)):
        raise ValueError(
            f"env.name={name!r} has the action space {action}: a bounded Box or a Discrete one is "
            "needed"
        )
    # What a Dict holds is checked where parts of it are chosen (`mbx.observations.choose`).
    if not isinstance(observation, Box | Dict | Discrete | MultiBinary | MultiDiscrete | Tuple):
        raise ValueError(
            f"env.name={name!r}: observation_space is {observation}: numbers are needed (Box, "
            "Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these)"
        )


def _is_bounded(space: Any) -> bool:
    """Whether float32 represents all of a Box (whole numbers up to 2**24)."""
    largest = 2**24 if space.dtype.kind in "iu" else np.finfo(np.float32).max / 2
    return bool((np.abs(np.array([space.low, space.high], np.float64)) <= largest).all())


def has_numbers(space: Any) -> bool:
    """Whether a space (not Dict or Tuple) holds numbers, not text or graphs."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    return isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete)


def _check_steps(check: _Check, env: Any) -> None:
    def reset(**seed: int) -> None:
        with custom.own_code(check.name, "reset()"):
            result = env.reset(**seed)
        if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
            kind = type(result).__name__
            check.refuse(
                f"reset() gave a {kind}", f"(observation, info), info a dictionary {_SINCE}"
            )
        _check_observation(check, env.observation_space, result[0], "reset()", "observation")

    reset(seed=0)
    env.action_space.seed(0)
    for i in range(1, _STEPS + 1):
        where = f"step() number {i}"
        with custom.own_code(check.name, where):
            result = env.step(env.action_space.sample())
        if not isinstance(result, tuple) or len(result) != 5:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            wanted = "5: observation, reward, terminated, truncated, info"
            check.refuse(f"step() gave {got}", f"{wanted} {_SINCE}")
        obs, reward, terminated, truncated, info = result
        _check_observation(check, env.observation_space, obs, where, "observation")
        if not isinstance(reward, numbers.Real | np.number) and np.shape(reward) != ():
            got = f"{where} gave the reward {reward!r} of shape {np.shape(reward)}"
            check.refuse(got, "a single number: return float(...)")
        _check_finite(check, f"{where} gave reward", reward)
        check.rewards.append(reward)
        for field, flag in (("terminated", terminated), ("truncated", truncated)):
            if np.shape(flag) != () or np.asarray(flag).dtype.kind not in "biu":
                check.refuse(f"{where} gave {field}={flag!r}", "True or False")
        if not isinstance(info, dict):
            check.refuse(f"{where} gave info={info!r}", "a dictionary")
        if terminated or truncated:
            reset()
    check.warn_of_sizes()


def _check_observation(check: _Check, space: Any, obs: Any, where: str, path: str) -> None:
    """Compare an observation with the declared space."""
    from gymnasium.spaces import Box, Dict, Tuple

    if isinstance(space, Dict | Tuple):
        keys = list(space.keys()) if isinstance(space, Dict) else list(range(len(space)))
        many = len(obs) if isinstance(obs, tuple | list | np.ndarray) else 0
        got = list(obs) if isinstance(obs, dict) else list(range(many))
        if sorted(map(str, keys)) != sorted(map(str, got)):
            check.refuse(
                f"{where} gave {path} with {got}", f"{keys}, as observation_space declares"
            )
        for key in keys:
            _check_observation(check, space[key], obs[key], where, f"{path}[{key!r}]")
        return
    if not has_numbers(space):
        return
    array, declares = np.asarray(obs), "as observation_space declares: change one of them"
    if array.dtype.kind not in "biuf":
        check.refuse(f"{where} gave {path} of type {array.dtype}", "numbers")
    if array.shape != (space.shape or ()):
        got = f"{where} gave {path} of shape {array.shape}"
        check.refuse(got, f"{space.shape or ()}, {declares}")
    if not isinstance(space, Box):
        if not space.contains(obs):
            check.refuse(f"{where} gave {path}={obs!r}", f"one of {space}")
        return
    if space.dtype.kind in "iu" and array.dtype.kind == "f":
        got = f"{where} gave {path} of type {array.dtype}"
        check.refuse(got, f"{space.dtype}, {declares}")
    _check_finite(check, f"{where} gave {path}", array)
    if space.dtype != np.uint8:
        check.observations.append(array.astype(np.float64))


def _check_finite(check: _Check, what: str, value: Any) -> None:
    if not np.isfinite(np.asarray(value, float)).all():
        check.refuse(f"{what}={value!r}", "finite numbers")


def time_limit(env: Any) -> int | None:
    """Steps after which an environment says it truncates episodes, or None."""
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while limit is None and env is not None:
        limit = vars(env).get("_max_episode_steps", getattr(type(env), "max_episode_steps", None))
        limit = vars(env).get("max_episode_steps", limit)
        env = vars(env).get("env")
    return int(limit) if isinstance(limit, numbers.Integral) and limit > 0 else None


def limits_found(env: Any) -> str:
    """Attributes that may be an environment's own time limit, in words."""
    found = dict(vars(getattr(env, "unwrapped", env)))
    found |= config if isinstance(config := found.get("config"), dict) else {}
    told = [
        f"{name}={value}"
        for name, value in found.items()
        if isinstance(value, numbers.Real) and value > 1
        if name in ("duration", "horizon") or ("max" in name and ("step" in name or "fram" in name))
    ]
    return f" (its own may be {', '.join(told)})" if told else ""


# -------------------------------------------------------------------------------------------------
# JAX


def check_raw(raw: RawEnvironment) -> None:
    """Raise ValueError where a JAX environment does not do what it declares.
    Shapes and types are checked by tracing, numbers by a reset and some steps.
    """
    check = _Check(raw.name, ": change its code or what its RawEnvironment declares")
    key, action = jax.random.key(0), jnp.zeros(raw.action_dim).at[0].set(1.0)
    begun = jax.eval_shape(raw.reset, key)
    if not isinstance(begun, tuple) or len(begun) != 2:
        check.refuse(f"the result of reset() is {_kind(begun)}", "(state, observation)")
    state, obs = begun
    _check_declared(check, raw, obs, "the observation of reset()")
    done = jax.eval_shape(raw.step, key, state, action)
    if not isinstance(done, tuple) or len(done) != 4 + bool(raw.metrics):
        wanted = "(state, observation, reward, terminated" + (", metrics)" if raw.metrics else ")")
        if isinstance(done, tuple) and len(done) == 5 and not raw.metrics:
            names = tuple(done[4]) if isinstance(done[4], dict) else ("name",)
            wanted += f", or five with RawEnvironment(metrics={names}), which declares the fifth"
        check.refuse(f"the result of step() is {_kind(done)}", wanted)
    new, obs, reward, terminated, *rest = done
    if rest and (not isinstance(rest[0], dict) or set(rest[0]) != set(raw.metrics)):
        got = list(rest[0]) if isinstance(rest[0], dict) else _kind(rest[0])
        check.refuse(f"the metrics of step() is {got}", f"a dictionary of {list(raw.metrics)}")
    _check_declared(check, raw, obs, "the observation of step()")
    single = {"reward": reward, "terminated": terminated} | (rest[0] if rest else {})
    for field, value in single.items():
        if np.shape(value) != ():
            got = f"{field} of step() is of shape {np.shape(value)}"
            check.refuse(got, "a single number, shape ()")
    before, after = jax.tree.structure(state), jax.tree.structure(new)
    if before != after:
        got = f"the state of step() is {after}"
        check.refuse(got, f"the structure that reset() gives, {before}")
    pairs = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(new), strict=True)
    for (path, old), now in pairs:
        if _type(old) != _type(now):
            what = f"the state{jax.tree_util.keystr(path)} of step() is {_type(now)}"
            check.refuse(what, f"what reset() gives, {_type(old)}")
    _check_numbers(check, raw, key, action)


def _check_numbers(check: _Check, raw: RawEnvironment, key: jax.Array, action: jax.Array) -> None:
    """Check that observations and rewards are finite."""
    state, obs = jax.jit(raw.reset)(key)
    values, step = [("the observation of reset()", obs)], jax.jit(raw.step)
    for i in range(1, 4):
        state, obs, reward, terminated, *_ = step(jax.random.fold_in(key, i), state, action)
        values += [
            (f"the observation of step() number {i}", obs),
            (f"reward of step() {i}", reward),
        ]
        if terminated:
            break
    for what, value in jax.device_get(values):
        for name, x in observations.flat(value).items():
            x = np.asarray(x)
            if not np.isfinite(x.astype(float)).all():
                which = f"{name!r} of {what}" if name else what
                check.refuse(f"{which} is {x.tolist()}", "finite numbers")
            if what.startswith("reward"):
                check.rewards.append(x)
            elif x.dtype.kind == "f":
                check.observations.append(x)
    check.warn_of_sizes()
    if any(x.ndim == 3 and not 0 <= x.min() <= x.max() <= 1 for x in check.observations):
        check.warn(
            "its observation has three axes, an image from 0 to 1 to Dreamer, and other numbers: "
            "flatten it to a vector"
        )


def _check_declared(check: _Check, raw: RawEnvironment, obs: Any, what: str) -> None:
    """Compare a traced observation with `obs_shape` and `obs_dtype`."""
    shapes, dtypes = raw.obs_shape, raw.obs_dtype
    if not isinstance(shapes, Mapping):
        shapes, dtypes, found = {"": shapes}, {"": dtypes}, {"": obs}
    else:
        found, wanted = observations.flat(obs), f"a dictionary of {list(shapes)}"
        if not isinstance(dtypes, Mapping) or set(dtypes) != set(shapes):
            check.refuse(f"obs_dtype is {dtypes}", f"a dictionary where obs_shape is one, {wanted}")
        if set(found) != set(shapes):
            got = f"of {list(found)}" if isinstance(obs, Mapping) else _kind(obs)
            check.refuse(f"{what} is {got}", f"{wanted} (obs_shape, obs_dtype)")
    for name, x in found.items():
        which, shape = f"{name!r} of {what}" if name else what, tuple(shapes[name])
        if not hasattr(x, "shape"):
            check.refuse(f"{which} is a {type(x).__name__}", f"an array of shape {shape}")
        if tuple(x.shape) != shape:
            check.refuse(f"{which} is of shape {x.shape}", f"{shape} (obs_shape)")
        if jnp.dtype(x.dtype) != jnp.dtype(dtypes[name]):
            check.refuse(f"{which} is of type {x.dtype}", f"{jnp.dtype(dtypes[name])} (obs_dtype)")


def _kind(x: Any) -> str:
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else f"a {type(x).__name__}"


def _type(x: Any) -> str:
    return f"{jnp.result_type(x)}{list(np.shape(x))}"
