"""Atari, Crafter and bsuite with their published protocols: atari:Pong, crafter:reward.

`env.kwargs` are further arguments of the functions below; presets: mbx/config/presets/suites.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.wrappers import AtariPreprocessing

from mbx.envs import custom
from mbx.envs.base import Suite, unknown_task
from mbx.envs.gymnasium import Task
from mbx.envs.images import Images


def atari(task: str, *, noops: int = 30, **kwargs: Any) -> gymnasium.Env:
    """ALE/`task`-v5: a step is four frames, and shows the brighter pixels of the last two.
    An episode begins with 1 to `noops` frames without an action, and ends with the last life.
    kwargs are ALE's; repeat_action_probability, of sticky actions, is 0.25.
    """
    import ale_py
    import cv2  # noqa: F401  the wrapper needs it

    gymnasium.register_envs(ale_py)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    kwargs |= dict(frameskip=1, render_mode="rgb_array")
    env = custom.make_registered(f"atari:{task}", f"ALE/{task}-v5", kwargs)
    # Size and colours are left to `env.image_size` and `env.grey`.
    return AtariPreprocessing(env, noops, screen_size=(160, 210), grayscale_obs=False)


class Crafter(gymnasium.Env):
    """crafter:reward or :noreward; death terminates. `info` has the achievements and their sum."""

    def __init__(self, task: str, **kwargs: Any) -> None:
        import crafter

        if task not in ("reward", "noreward"):
            raise ValueError(
                f"env.name='crafter:{task}': choose crafter:reward or crafter:noreward"
            )
        self._env = crafter.Env(reward=task == "reward", **kwargs)
        self.observation_space = Box(0, 255, self._env.observation_space.shape, np.uint8)
        self.action_space = Discrete(self._env.action_space.n)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict]:
        if seed is not None:
            self._env._seed, self._env._episode = seed, 0
        return self._env.reset(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict]:
        obs, reward, done, info = self._env.step(action)
        dead, got = info["discount"] == 0, {k: n > 0 for k, n in info["achievements"].items()}
        return obs, reward, dead, done and not dead, got | {"achievements": sum(got.values())}

    def render(self) -> np.ndarray:
        return self._env.render((512, 512))


def bsuite(task: str) -> gymnasium.Env:
    """bsuite:catch/0: an experiment and the number of its setting."""
    import bsuite as package
    from shimmy.bsuite_compatibility import BSuiteCompatibilityV0

    if task not in package.sweep.SWEEP:
        raise unknown_task("bsuite", task, package.sweep.SWEEP)
    return BSuiteCompatibilityV0(package.load_from_id(task))


def _suite(name: str, make: Callable, limit: int, *metrics: str, **fields: Any) -> Suite:
    def host(
        task: str, seed: int, /, *, images: Images | None = None, film: bool = False, **kwargs: Any
    ) -> Task:
        if images and (images.pixels or not images.shadows):
            given = f"env.pixels={images.pixels}, env.shadows={images.shadows}"
            raise ValueError(f"{given}: {name}:{task} observes its own images: leave them out")
        with custom.own_code(f"{name}:{task}", "making it", passed=(ImportError, ValueError)):
            return Task(make(task, **kwargs), f"{name}:{task}", lambda: limit, metrics)

    return Suite(host=host, extra=name, gives_info=True, **fields)


ATARI = _suite("atari", atari, 27_000, draws=True, takes_kwargs=True)
CRAFTER = _suite("crafter", Crafter, 10_000, "achievements", draws=True, takes_kwargs=True)
BSUITE = _suite("bsuite", bsuite, 1_001)
