"""Gymnasium tasks on the host: gym:HalfCheetah-v5, gym:path/to/file.py:Class.

The environments are stepped one after the other in this process and reset by us, so that nothing
hangs on Gymnasium's own vector API and its autoreset modes. Observations of a choice (Discrete,
MultiDiscrete, MultiBinary) become vectors, one-hot; Dict and Tuple have named parts
(`mbx.observations`), those of nested ones arm/angle.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mbx import observations
from mbx.envs import gymnasium_state, own
from mbx.envs.base import Suite, unknown_task
from mbx.envs.gymnasium_check import (
    check_api,
    check_spaces,
    check_steps,
    has_numbers,
    time_limit,
)
from mbx.envs.host import Task
from mbx.envs.images import Images
from mbx.envs.render import NoRenderer

# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "HalfCheetah", "Swimmer-v")
_PACE = 0.05  # seconds a step, where it has no clock
_CHECKED: set[str] = set()  # environments of one's own, once a process


def load(task: str, seed: int, **kwargs: Any) -> Task:
    """The Gymnasium task, seeded at its first reset.

    One of one's own is looked at first: another copy is reset and stepped (`gymnasium_check`).

    Raises:
        ValueError: for an unknown task, one that no agent can be trained in, or arguments that it
            does not take.
        FileNotFoundError: where the file or module of one's own has gone.
        EnvironmentFailure: where its own code fails.
    """
    import gymnasium

    name = f"gym:{task}"
    if own.is_own(name):
        key = f"{name} {kwargs}"
        if key not in _CHECKED:
            other = own.make(name, kwargs)
            check_api(name, other)
            check_spaces(name, other)
            check_steps(name, other)
            other.close()
            _CHECKED.add(key)
        env = own.make(name, kwargs)
        return _Task(env, task, time_limit(env))
    registry = gymnasium.registry
    if task not in registry:
        raise unknown_task("gym", task, registry)
    limit = registry[task].max_episode_steps
    env = gymnasium.make(task, max_episode_steps=-1, **kwargs)
    check_spaces(name, env)
    return _Task(env, task, limit)


class _Task:
    """One Gymnasium environment in the form `SteppedEnvironment` takes."""

    ends_at = None  # its own time limit is taken off, or is a cut like any other

    def __init__(self, env: Any, task: str, time_limit: int | None) -> None:
        from gymnasium.spaces import Discrete

        self.time_limit = time_limit
        self.can_terminate = not task.startswith(_ENDLESS)
        self._name = f"gym:{task}"
        self._env = env
        space = env.action_space
        self.num_actions = int(space.n) if isinstance(space, Discrete) else 0
        if self.num_actions:
            self.action_low = np.array([space.start])
        else:
            self.action_low = space.low.reshape(-1).astype(np.float32)
            self.action_high = space.high.reshape(-1).astype(np.float32)
        self._first_action = int(space.start) if self.num_actions else 0
        self._space = env.observation_space
        shape, dtype = _declared(self._space)
        self.obs_shape, self.obs_dtype = shape, dtype
        if isinstance(shape, dict):
            self.obs_shape, self.obs_dtype = observations.flat(shape), observations.flat(dtype)

    def reset(self, seed: int | None) -> Any:
        try:
            return self._observe(self._env.reset(seed=seed)[0])
        except Exception as error:
            raise own.failure(self._name, "reset()", error) from error

    def step(self, action: np.ndarray | int) -> tuple[Any, float, bool, bool]:
        if self.num_actions:
            action = self._first_action + int(action)
        else:
            action = action.reshape(self._env.action_space.shape)
        try:
            obs, reward, terminated, truncated, self.info = self._env.step(action)
            return self._observe(obs), float(reward), bool(terminated), bool(truncated)
        except Exception as error:
            raise own.failure(self._name, "step()", error) from error

    def get_state(self) -> bytes | None:
        return gymnasium_state.get(self._env)

    def set_state(self, snapshot: bytes) -> None:
        gymnasium_state.put(self._env, snapshot)

    def close(self) -> None:
        self._env.close()

    def _observe(self, obs: Any) -> Any:
        found = _observed(self._space, obs)
        if isinstance(found, dict):
            return observations.flat(found)
        return found.reshape(self.obs_shape)


def _declared(space: Any, alone: bool = True) -> tuple[Any, Any]:
    """Shape and type of what is seen of a space, in dictionaries for a Dict and a Tuple."""
    from gymnasium.spaces import Box, Text, utils

    if parts := _parts(space):
        found = {name: _declared(one, alone=False) for name, one in parts.items()}
        return {n: x for n, (x, _) in found.items()}, {n: x for n, (_, x) in found.items()}
    if not has_numbers(space):
        return (), np.str_ if isinstance(space, Text) else np.object_
    shape = space.shape if isinstance(space, Box) else utils.flatten_space(space).shape
    if len(shape) == 3 and (not alone or space.dtype == np.uint8):
        return shape, space.dtype.type
    return shape or (1,), np.float32


def _observed(space: Any, obs: Any) -> Any:
    """An observation as `_declared` says. Raises ValueError where a Box has another shape."""
    from gymnasium.spaces import Box, utils

    if parts := _parts(space):
        keys = obs if isinstance(obs, dict) else range(len(parts))
        pairs = {str(key): obs[key] for key in keys}
        return {name: _observed(one, pairs[name]) for name, one in parts.items()}
    if not has_numbers(space):
        return obs
    dtype = _declared(space)[1]
    if not isinstance(space, Box):
        return np.asarray(utils.flatten(space, obs), np.float32)
    found = np.asarray(obs, dtype)
    if found.shape != space.shape:
        raise ValueError(
            f"an observation of shape {found.shape}, observation_space says {space.shape}"
        )
    return found.reshape(space.shape or (1,))


def _parts(space: Any) -> dict[str, Any]:
    """The spaces that a Dict or a Tuple holds, by name; none of any other."""
    from gymnasium.spaces import Dict, Tuple

    if isinstance(space, Dict):
        return {str(name): one for name, one in space.items()}
    return {str(i): one for i, one in enumerate(space)} if isinstance(space, Tuple) else {}


class _Drawn(_Task):
    """The same, drawn by its own `render()`."""

    def __init__(self, env: Any, task: str, time_limit: int | None) -> None:
        super().__init__(env, task, time_limit)
        own_step = getattr(env.unwrapped, "dt", None)
        fps = (env.metadata or {}).get("render_fps")
        self.seconds = 1.0 / fps if fps else float(own_step or _PACE)

    def render(self) -> np.ndarray:
        return np.asarray(self._env.render())

    picture = render


def film(task: str, seed: int, **kwargs: Any) -> Task:
    """The task with `render_mode="rgb_array"`. Raises NoRenderer where it has no such mode."""
    return _drawn(task, seed, **kwargs)


def pixels(task: str, seed: int, *, images: Images, film: bool = False, **kwargs: Any) -> Task:
    """The task, observed by the pictures of its own `render()`.

    Raises:
        NoRenderer: where it has none.
        ValueError: for settings of drawing that are not this suite's.
    """
    if not images.shadows:
        raise ValueError(
            f"env.shadows=False: gym:{task} draws itself, tasks of dmc: alone are drawn without: "
            "leave it out"
        )
    return _drawn(task, seed, **kwargs)


def _drawn(task: str, seed: int, **kwargs: Any) -> _Drawn:
    name = f"gym:{task}"
    try:
        plain = load(task, seed, **(kwargs | {"render_mode": "rgb_array"}))
    except (ValueError, TypeError, own.EnvironmentFailure) as error:
        raise NoRenderer(
            f"{name} is not made with render_mode='rgb_array' ({error}): let it take that argument "
            "and give uint8 [height, width, 3] from render()"
        ) from error
    return _Drawn(plain._env, task, plain.time_limit)


SUITE = Suite(host=load, takes_kwargs=True, gives_info=True, film=film, pixels=pixels)
