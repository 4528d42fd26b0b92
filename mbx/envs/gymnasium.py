"""Gymnasium tasks on the host: gym:HalfCheetah-v5, gym:Pendulum-v1.

The environments are stepped one after the other in this process and reset by us, so that nothing
hangs on Gymnasium's own vector API and its autoreset modes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mbx.envs import gymnasium_state
from mbx.envs.base import Suite, unknown_task
from mbx.envs.host import Task

# Tasks that only ever end by their time limit.
_ENDLESS = ("Pendulum-v1", "HalfCheetah", "Swimmer-v")


def load(task: str, seed: int) -> Task:
    """The Gymnasium task, seeded at its first reset. Raises ValueError for an unknown one."""
    import gymnasium

    registry = gymnasium.registry
    if task not in registry:
        raise unknown_task("gym", task, registry)
    limit = registry[task].max_episode_steps
    return _Task(gymnasium.make(task, max_episode_steps=-1), task, limit)


class _Task:
    """One Gymnasium environment in the form `SteppedEnvironment` takes."""

    ends_at = None  # its own time limit is taken off

    def __init__(self, env: Any, task: str, time_limit: int | None) -> None:
        from gymnasium.spaces import Box, Discrete

        self.time_limit = time_limit
        self.can_terminate = not task.startswith(_ENDLESS)
        space = env.action_space
        self.num_actions = int(space.n) if isinstance(space, Discrete) else 0
        bounded = isinstance(space, Box) and np.isfinite([space.low, space.high]).all()
        if not (bounded or self.num_actions):
            raise ValueError(
                f"env.name='gym:{task}' has the action space {space}: a bounded Box or a Discrete "
                "one is needed"
            )
        if not isinstance(env.observation_space, Box):
            raise ValueError(f"env.name='gym:{task}' must have a Box of observations")
        self._env = env
        if bounded:
            self.action_low = space.low.reshape(-1).astype(np.float32)
            self.action_high = space.high.reshape(-1).astype(np.float32)
        self._first_action = 0 if bounded else int(space.start)
        shape = env.observation_space.shape
        pixels = len(shape) == 3 and env.observation_space.dtype == np.uint8
        self.obs_shape = shape or (1,)
        self.obs_dtype = np.uint8 if pixels else np.float32

    def reset(self, seed: int | None) -> np.ndarray:
        return self._observe(self._env.reset(seed=seed)[0])

    def step(self, action: np.ndarray | int) -> tuple[np.ndarray, float, bool, bool]:
        if self.num_actions:
            action = self._first_action + int(action)
        else:
            action = action.reshape(self._env.action_space.shape)
        obs, reward, terminated, truncated, _ = self._env.step(action)
        return self._observe(obs), float(reward), bool(terminated), bool(truncated)

    def get_state(self) -> bytes | None:
        return gymnasium_state.get(self._env)

    def set_state(self, snapshot: bytes) -> None:
        gymnasium_state.put(self._env, snapshot)

    def close(self) -> None:
        self._env.close()

    def _observe(self, obs: Any) -> np.ndarray:
        return np.asarray(obs, self.obs_dtype).reshape(self.obs_shape)


SUITE = Suite(host=load)
