"""Your own Gymnasium environment: a class in a file, trained by its place.

    python -m experiments.train --config=configs/tdmpc.py \
        --config.env.name=gym:examples/own_gymnasium.py:Tank --config.env.kwargs.leak=0.1

A heated tank has to be kept at a level and a temperature with two valves. Nothing has to be
registered; docs/custom_environments.md says what becomes of actions, observations and episodes.
"""

from __future__ import annotations

import gymnasium
import numpy as np
from gymnasium.spaces import Box

LEVEL, TEMPERATURE = 1.0, 50.0  # m, degrees Celsius: where to keep it
DT = 1.0  # seconds a step


class Tank(gymnasium.Env):
    """Inflow (0 to 2) and heating (0 to 5) of a tank that leaks; it must not run dry or boil."""

    max_episode_steps = 200  # after which an episode is cut off
    action_space = Box(np.zeros(2, np.float32), np.array([2.0, 5.0], np.float32))
    observation_space = Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, leak: float = 0.05):
        self.leak = leak

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.level = self.np_random.uniform(0.5, 1.5)
        self.temperature = self.np_random.uniform(20.0, 60.0)
        return self._observe(), {}

    def step(self, action):
        inflow, heating = action
        out = self.leak * np.sqrt(self.level) + 0.02
        self.level += DT * (0.1 * inflow - out)
        warm = 0.1 * inflow * (15.0 - self.temperature) / max(self.level, 0.1)
        self.temperature += DT * (2.0 * heating / max(self.level, 0.1) + warm)
        failed = not (0.1 < self.level < 3.0 and self.temperature < 95.0)
        error = abs(self.level - LEVEL) + abs(self.temperature - TEMPERATURE) / 20.0
        reward = -20.0 if failed else float(np.exp(-error))
        return self._observe(), reward, failed, False, {"error": error}

    def _observe(self):
        scaled = [self.level - LEVEL, (self.temperature - TEMPERATURE) / 20.0, self.leak]
        return np.array(scaled, np.float32)
