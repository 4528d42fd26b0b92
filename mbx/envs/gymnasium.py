"""Gymnasium tasks on the host: gym:HalfCheetah-v5, gym:path/to/file.py:Class.

Environments are stepped in this process (or in workers, `mbx.envs.vector`) and reset by us, so that
nothing depends on autoreset modes. Discrete, MultiDiscrete and MultiBinary observations become
one-hot vectors; Dict and Tuple become named parts (`mbx.observations`), nested ones as arm/angle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, Space, Text, utils

from mbx.envs import checks, custom, snapshot
from mbx.envs.base import Suite
from mbx.envs.checks import NUMBERS, check_first, check_spaces, leaves, time_limit, tried_limit
from mbx.envs.images import Images, form
from mbx.envs.render import NoRenderer

# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "HalfCheetah", "Swimmer-v")
_PACE = 0.05  # seconds a step, where it has no clock
_SMALLEST_PICTURE = 16  # pixels a side
_CHECKED: dict[str, Any] = {}  # custom environments, once a process


def load(
    task: str, seed: int, /, *, images: Images | None = None, film: bool = False, **kwargs: Any
) -> Task:
    """The Gymnasium task, seeded at its first reset; `render_mode="rgb_array"` where it is drawn.
    Raises ValueError for an unknown task, spaces that no agent can be trained on, and arguments or
    image settings that it does not take; FileNotFoundError for a missing file or module;
    EnvironmentFailure for errors in its own code; NoRenderer where it has no such render mode.
    """
    if images and not images.shadows:
        raise ValueError(
            f"env.shadows=False: gym:{task} draws itself, tasks of dmc: alone are drawn without: "
            "leave it out"
        )
    drawn = images is not None and images.pixels
    pictures = images is not None and not drawn
    if not drawn and not film:
        return _load(task, kwargs, pictures)
    try:
        return _load(task, kwargs | {"render_mode": "rgb_array"}, pictures)
    except (ValueError, TypeError, custom.EnvironmentFailure) as error:
        raise NoRenderer(
            f"gym:{task} is not made with render_mode='rgb_array' ({error}): let it take that "
            "argument and give uint8 [height, width, 3] from render()"
        ) from error


def _load(task: str, kwargs: dict[str, Any], pictures: bool) -> Task:
    """Load the task, after validating another copy of a custom one (`mbx.envs.checks`).
    pictures: its pictures are of any size, since settings change them.
    """
    name = f"gym:{task}"
    if custom.is_own(name):
        key, found = f"{name} {kwargs}", custom.find(name)
        if _CHECKED.get(key, ())[:1] != (found,):
            tried = functools.cache(functools.partial(tried_limit, name, kwargs))
            _CHECKED[key] = found, check_first(name, kwargs), tried
        env, (_, metrics, tried) = custom.make(name, kwargs), _CHECKED[key]
        return Task(env, name, lambda: time_limit(env) or tried(), metrics, pictures)
    env = custom.make_registered(name, task, kwargs | {"max_episode_steps": -1})
    check_spaces(name, env)
    limit = gymnasium.registry[env.spec.id].max_episode_steps or time_limit(env)
    limit = kwargs.get("max_episode_steps", limit)
    return Task(env, name, lambda: None if limit == -1 else limit, (), pictures)


class Task:
    """One Gymnasium environment as a `Task` of `SteppedEnvironment`."""

    ends_at = None  # its own time limit is taken off, or is a cut like any other

    def __init__(
        self,
        env: Any,
        name: str,
        limit: Callable[[], int | None],
        metrics: tuple[str, ...] = (),
        pictures: bool = False,
    ) -> None:
        self._env, self._name, self._limit, self.metrics = env, name, limit, metrics
        self.can_terminate = not name.removeprefix("gym:").startswith(_ENDLESS)
        space, parts = env.action_space, checks.action_parts(env.action_space)
        self.num_actions = checks.combinations(parts)
        if not isinstance(space, Box | Discrete):
            self.action_parts = parts
        elif not self.num_actions:
            self.action_shape, self.action_dtype = space.shape, space.dtype.name
        if self.num_actions:
            self.action_low = np.array([space.start if isinstance(space, Discrete) else 0])
        else:
            boxes = utils.flatten_space(space)
            self.action_low, self.action_high = boxes.low, boxes.high
        self._space = env.observation_space
        parts = {name: one for name, one, _ in leaves(self._space, self._space)}
        self._alone = "" in parts
        self._forms = {name: _form(one, self._alone, pictures) for name, one in parts.items()}
        shapes, dtypes = ({n: x[i] for n, x in self._forms.items()} for i in (0, 1))
        self.obs_shape, self.obs_dtype = self._forms[""] if self._alone else (shapes, dtypes)
        chosen = {name: checks.choices(one) for name, one in parts.items()}
        self.choices = tuple((name, found) for name, found in chosen.items() if found)
        fps = (env.metadata or {}).get("render_fps")
        self.seconds = 1.0 / fps if fps else float(getattr(env.unwrapped, "dt", None) or _PACE)

    @property
    def time_limit(self) -> int | None:
        return self._limit()

    def reset(self, seed: int | None) -> Any:
        with custom.own_code(self._name, "reset()"):
            # Simulators in C take 31 bits.
            return self._observe(self._env.reset(seed=seed and seed % 2**31)[0])

    def step(self, action: Any) -> tuple[Any, float, bool, bool]:
        with custom.own_code(self._name, "step()"):
            obs, reward, terminated, truncated, self.info = self._env.step(action)
            return self._observe(obs), float(reward), bool(terminated), bool(truncated)

    def get_state(self) -> bytes | None:
        return snapshot.get(self._env)

    def set_state(self, saved: bytes) -> None:
        snapshot.put(self._env, saved)

    def close(self) -> None:
        self._env.close()

    def render(self) -> np.ndarray:
        return np.asarray(self._env.render())

    picture = render

    def _observe(self, obs: Any) -> Any:
        found = {}
        for name, space, x in leaves(self._space, obs):
            shape, dtype = self._forms[name]
            if isinstance(space, Box):
                x = np.asarray(x, dtype)
                if x.shape != space.shape:
                    raise ValueError(
                        f"an observation of shape {x.shape}, observation_space says {space.shape}"
                    )
                x = x.reshape(shape)
            elif isinstance(space, NUMBERS):
                x = np.asarray(utils.flatten(space, x), dtype)
            found[name] = x
        return found[""] if self._alone else found


def _form(space: Space, alone: bool, pictures: bool) -> tuple[tuple[int, ...], Any]:
    """Shape and type of what is observed of a space without parts."""
    if isinstance(space, Box):
        shape, dtype = form(space, alone)
        # Pictures that are too small for an encoder are symbols, such as MiniGrid's 7x7, unless
        # they are resized or stacked.
        symbols = not pictures and dtype == np.uint8 and max(shape) < _SMALLEST_PICTURE
        return ((math.prod(shape),), np.float32) if symbols else (shape, dtype)
    if isinstance(space, NUMBERS):
        return utils.flatten_space(space).shape, np.float32
    return (), np.str_ if isinstance(space, Text) else np.object_


SUITE = Suite(host=load, takes_kwargs=True, gives_info=True, draws=True)
