"""A Gymnasium environment of one's own, looked at before anything is compiled.

Every complaint names the environment (and with it its file), the field, what it is and what is
wanted.
"""

from __future__ import annotations

import inspect
import numbers
import warnings
from typing import Any

import numpy as np

from mbx.envs import custom
from mbx.envs.custom import own_code

_STEPS = 5
# TD-MPC's bins end at a reward of symexp(10); what is far from order 1 trains nothing.
_LARGE_REWARD, _LARGE_OBSERVATION = 22_025.0, 10_000.0


def check_first(name: str, kwargs: dict[str, Any]) -> None:
    """Make an environment of one's own, reset and step it; raise ValueError for what is wrong."""
    env = custom.make(name, kwargs)
    try:
        check_api(name, env)
        check_spaces(name, env)
        check_steps(name, env)
    finally:
        custom.close(name, env)


def warn_of_sizes(name: str, rewards: list[Any], observations: list[Any]) -> None:
    """Say that rewards or observations are so large that an agent does not learn from them."""
    for what, values, large, remedy in (
        ("rewards", rewards, _LARGE_REWARD, "what lies beyond 22,025 is cut off: scale them"),
        ("observations", observations, _LARGE_OBSERVATION, "scale them to be of order 1"),
    ):
        largest = max((float(np.max(np.abs(x), initial=0.0)) for x in values), default=0.0)
        if largest > large:
            warnings.warn(f"env.name={name!r}: {what} of {largest:.3g}: {remedy}", stacklevel=2)


def check_api(name: str, env: Any) -> None:
    """Raise ValueError where an object has not Gymnasium's present interface."""
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
            "reset(self, *, seed=None, options=None) -> (observation, info), Gymnasium's interface "
            "since 0.26"
        ) from error


def check_spaces(name: str, env: Any) -> None:
    """Raise ValueError where no agent can be trained on an environment's spaces."""
    from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Space, Tuple

    action, observation = env.action_space, env.observation_space
    for field, space in (("action_space", action), ("observation_space", observation)):
        if not isinstance(space, Space):
            kind = type(space)
            raise ValueError(
                f"env.name={name!r}: {field} is a {kind.__module__}.{kind.__name__}: one of "
                "gymnasium.spaces is needed"
            )
    bounded = isinstance(action, Box) and _is_bounded(action)
    if not bounded and not isinstance(action, Discrete):
        raise ValueError(
            f"env.name={name!r} has the action space {action}: a bounded Box or a Discrete one is "
            "needed"
        )

    # What a Dict holds is looked at where parts of it are chosen (`mbx.observations.choose`).
    if not isinstance(observation, Box | Dict | Discrete | MultiBinary | MultiDiscrete | Tuple):
        raise ValueError(
            f"env.name={name!r}: observation_space is {observation}: numbers are needed (Box, "
            "Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of these)"
        )


def _is_bounded(space: Any) -> bool:
    """Whether float32 numbers, in which an agent acts, reach all of a Box."""
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    largest = 2**24 if space.dtype.kind in "iu" else np.finfo(np.float32).max / 2
    return bool((np.maximum(-low, high) <= largest).all())


def check_steps(name: str, env: Any) -> None:
    """Reset and step an environment with random actions; raise ValueError for what is wrong."""
    with own_code(name, "reset()"):
        result = env.reset(seed=0)
    obs = _reset_observation(name, result)
    rewards, seen = [], _check_observation(name, env.observation_space, obs, "reset()")
    env.action_space.seed(0)
    for i in range(1, _STEPS + 1):
        with own_code(name, f"step() number {i}"):
            result = env.step(env.action_space.sample())
        where = f"step() number {i}"
        if not isinstance(result, tuple) or len(result) != 5:
            got = f"{len(result)} values" if isinstance(result, tuple) else type(result).__name__
            raise ValueError(
                f"env.name={name!r}: step() gave {got}, wanted 5: observation, reward, terminated, "
                "truncated, info (Gymnasium's interface since 0.26)"
            )
        obs, reward, terminated, truncated, info = result
        seen += _check_observation(name, env.observation_space, obs, where)
        if not isinstance(reward, numbers.Real | np.number) and np.shape(reward) != ():
            raise ValueError(
                f"env.name={name!r}: {where} gave the reward {reward!r} of shape "
                f"{np.shape(reward)}, wanted a single number: return float(...)"
            )
        _check_finite(name, where, "reward", reward)
        rewards.append(reward)
        for field, flag in (("terminated", terminated), ("truncated", truncated)):
            if np.shape(flag) != () or np.asarray(flag).dtype.kind not in "biu":
                raise ValueError(
                    f"env.name={name!r}: {where} gave {field}={flag!r}, wanted True or False"
                )
        if not isinstance(info, dict):
            raise ValueError(f"env.name={name!r}: {where} gave info={info!r}, wanted a dictionary")
        if terminated or truncated:
            with own_code(name, "reset()"):
                result = env.reset()
            _reset_observation(name, result)
    warn_of_sizes(name, rewards, seen)


def has_numbers(space: Any) -> bool:
    """Whether what is in a space, no Dict or Tuple, are numbers: neither text nor graphs."""
    from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

    return isinstance(space, Box | Discrete | MultiBinary | MultiDiscrete)


def time_limit(env: Any) -> int | None:
    """Steps after which an environment says that its episodes are cut off, None if it does not."""
    limit = getattr(getattr(env, "spec", None), "max_episode_steps", None)
    while limit is None and env is not None:
        limit = vars(env).get("_max_episode_steps", getattr(type(env), "max_episode_steps", None))
        limit = vars(env).get("max_episode_steps", limit)
        env = vars(env).get("env")
    return int(limit) if isinstance(limit, numbers.Integral) and limit > 0 else None


def limits_found(env: Any) -> str:
    """Of an environment without a time limit, attributes that may be one of its own, in words."""
    base = getattr(env, "unwrapped", env)
    own_limits = dict(getattr(base, "__dict__", {}))
    config = own_limits.get("config")
    own_limits |= config if isinstance(config, dict) else {}
    found = [
        f"{name}={value}"
        for name, value in own_limits.items()
        if isinstance(value, numbers.Real) and value > 1
        if name in ("duration", "horizon") or ("max" in name and ("step" in name or "fram" in name))
    ]
    return f" (its own may be {', '.join(found)})" if found else ""


def _reset_observation(name: str, result: Any) -> Any:
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
        raise ValueError(
            f"env.name={name!r}: reset() gave a {type(result).__name__}, wanted (observation, "
            "info), info a dictionary (Gymnasium's interface since 0.26)"
        )
    return result[0]


def _check_observation(name: str, space: Any, obs: Any, where: str) -> list[np.ndarray]:
    """Compare an observation with what the environment declares; its numbers of Boxes."""
    from gymnasium.spaces import Box, Dict, Tuple

    found = []

    def leaf(space: Any, obs: Any, path: str) -> None:
        if isinstance(space, Dict | Tuple):
            keys = list(space.keys()) if isinstance(space, Dict) else list(range(len(space)))
            many = len(obs) if isinstance(obs, tuple | list | np.ndarray) else 0
            got = list(obs) if isinstance(obs, dict) else list(range(many))
            if sorted(map(str, keys)) != sorted(map(str, got)):
                raise ValueError(
                    f"env.name={name!r}: {where} gave {path} with {got}, wanted {keys}, as "
                    "observation_space declares"
                )
            for key in keys:
                leaf(space[key], obs[key], f"{path}[{key!r}]")
            return
        if not has_numbers(space):
            return
        array = np.asarray(obs)
        if array.dtype.kind not in "biuf":
            raise ValueError(
                f"env.name={name!r}: {where} gave {path} of type {array.dtype}, wanted numbers"
            )
        if array.shape != (space.shape or ()):
            raise ValueError(
                f"env.name={name!r}: {where} gave {path} of shape {array.shape}, wanted "
                f"{space.shape or ()}, as observation_space declares: change one of them"
            )
        whole = np.issubdtype(space.dtype, np.integer)
        if isinstance(space, Box) and whole and array.dtype.kind == "f":
            raise ValueError(
                f"env.name={name!r}: {where} gave {path} of type {array.dtype}, wanted "
                f"{space.dtype}, as observation_space declares: change one of them"
            )
        if not isinstance(space, Box) and not space.contains(obs):
            raise ValueError(
                f"env.name={name!r}: {where} gave {path}={obs!r}, wanted one of {space}"
            )
        _check_finite(name, where, path, array)
        if isinstance(space, Box) and space.dtype != np.uint8:
            found.append(array.astype(np.float64))

    leaf(space, obs, "observation")
    return found


def _check_finite(name: str, where: str, field: str, value: Any) -> None:
    if not np.isfinite(np.asarray(value, float)).all():
        raise ValueError(
            f"env.name={name!r}: {where} gave {field}={value!r}, wanted finite numbers"
        )
