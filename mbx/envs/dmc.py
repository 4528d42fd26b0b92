"""Tasks of dm_control on the host: dmc:cartpole-swingup, dmc:cup-catch (extra `dmc`).

The default action repeat is 2, as in published TD-MPC2 and DreamerV3 results. A last discount of 0
is a termination, otherwise the episode is truncated. `env.pixels` observes the camera's image.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mbx.envs import snapshot as snapshots
from mbx.envs.base import Suite, unknown_task
from mbx.envs.images import Images
from mbx.envs.render import MujocoPictures

# What MuJoCo writes for an actuator without limits.
_UNLIMITED = 1e10

_FILM = (240, 320)  # height, width
_CAMERAS = {"quadruped": 2}  # where published results do not take the first
_ALIASES = {"cup": "ball_in_cup", "pointmass": "point_mass"}


def load(task: str, seed: int, *, images: Images | None = None, film: bool = False) -> _Task:
    """The dm_control task; MuJoCo draws it, as dm_control's renderer needs a window.
    Raises ValueError for an unknown task, NoRenderer where this machine cannot draw.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without a display its renderer complains on import
        from dm_control import suite

    domain, _, name = task.partition("-")
    domain, name = _ALIASES.get(domain, domain), name.replace("-", "_")
    if (domain, name) not in suite.ALL_TASKS:
        raise unknown_task("dmc", task, [f"{d}-{t}" for d, t in suite.ALL_TASKS])
    return _Task(suite.load(domain, name, task_kwargs={"random": seed}), task, images, film)


class _Task:
    """One dm_control environment as a `Task` of `SteppedEnvironment`."""

    can_terminate = False
    reward_range = (0.0, 1.0)  # but of lqr's costs, whose actions are refused below

    def __init__(self, env: Any, task: str, images: Images | None, film: bool) -> None:
        self._env = env
        spec = env.action_spec()
        if (np.maximum(-spec.minimum, spec.maximum) >= _UNLIMITED).any():
            raise ValueError(f"env.name='dmc:{task}' has unbounded actions: bounds are needed")
        self.num_actions = 0
        self.action_low = np.broadcast_to(spec.minimum, spec.shape).astype(np.float32)
        self.action_high = np.broadcast_to(spec.maximum, spec.shape).astype(np.float32)
        self.time_limit = self.ends_at = int(env._step_limit)
        self.obs_shape = self._begin().shape
        self.obs_dtype = np.float32
        self.seconds = float(env.control_timestep())
        if images and images.pixels:  # what is observed, uint8 `[H, W, 3]`
            side = images.drawn_size
            self.picture = _pictures(task, side, side, not images.shadows, env)
        if film:  # a frame for a video, uint8 `[height, width, 3]`
            self.render = _pictures(task, *_FILM, False, env)

    def reset(self, seed: int | None) -> np.ndarray:
        if seed is not None:
            self._env.task.random.seed(seed)
        return self._begin()

    def _begin(self) -> np.ndarray:
        # A reset also draws what is no part of the physics state, such as where a target is:
        # with the generator as it was, a snapshot can repeat it.
        self._random_at_reset = self._env.task.random.get_state(legacy=False)
        return _flatten(self._env.reset().observation)

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool]:
        _, reward, discount, obs = timestep = self._env.step(action)
        last, terminated = timestep.last(), timestep.last() and discount == 0.0
        return _flatten(obs), float(reward), bool(terminated), bool(last and not terminated)

    def get_state(self) -> bytes | None:
        env, physics = self._env, self._env.physics
        state = {
            "mujoco": snapshots.get_mujoco(physics.model.ptr, physics.data.ptr),
            "steps": int(env._step_count),
            "reset_next": bool(env._reset_next_step),
            "random_at_reset": self._random_at_reset,
            "random": env.task.random.get_state(legacy=False),
        }
        return snapshots.encode(state)

    def set_state(self, snapshot: bytes) -> None:
        env, saved = self._env, snapshots.decode(snapshot)
        env.task.random.set_state(saved["random_at_reset"])
        self._begin()
        snapshots.put_mujoco(env.physics.model.ptr, env.physics.data.ptr, saved["mujoco"])
        env._step_count, env._reset_next_step = saved["steps"], saved["reset_next"]
        env.task.random.set_state(saved["random"])

    def close(self) -> None:
        self._env.close()


def _flatten(observation: Any) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float32).ravel() for x in observation.values()])


_SHARED: dict[tuple, MujocoPictures] = {}  # contexts are large: one for all copies of a task


def _pictures(task: str, height: int, width: int, plain: bool, env: Any) -> Callable:
    """A function that draws the environment as it is."""
    key, physics = (task, height, width, plain), env.physics
    if key not in _SHARED:
        camera = _CAMERAS.get(task.partition("-")[0], 0)
        _SHARED[key] = MujocoPictures(physics.model.ptr, *key[1:3], camera=camera, plain=plain)
    return lambda: _SHARED[key](physics.model.ptr, physics.data.ptr)


SUITE = Suite(host=load, default_repeat=2, extra="dmc", draws=True)
