"""A task whose observation is a dictionary: a picture and a number, of which both are needed.

python -m experiments.train --config=tdmpc --config.env.name=gym:examples/own_dictionary.py:Signpost
"""

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Dict

SIZE = 64


class Signpost(gymnasium.Env):
    """A sign and a flag each say left or right: go where both say, to the middle where they differ.

    A step is worth 1 minus the distance to that place, which is -0.8, 0 or 0.8. An episode of ten
    steps gives 10 to who sees both. Whoever misses the picture or the flag gets 6 at best, as
    always staying in the middle does; random actions get 3.4.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}
    max_episode_steps = 10
    action_space = Box(-1.0, 1.0, (1,))

    def __init__(self, size=SIZE, render_mode=None):
        self.size, self.render_mode = size, render_mode
        self.observation_space = Dict(
            camera=Box(0, 255, (size, size, 1), np.uint8), flag=Box(-1.0, 1.0, (1,))
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side, self.flag = (2 * self.np_random.integers(2, size=2) - 1).tolist()
        return self._seen(), {}

    def step(self, action):
        reward = 1.0 - abs(float(action[0]) - 0.4 * (self.side + self.flag))
        return self._seen(), reward, False, False, {}

    def render(self):
        return np.repeat(self._camera(), 3, axis=-1)

    def _camera(self):
        picture = np.zeros((self.size, self.size, 1), np.uint8)
        half = self.size // 2
        picture[:, half:] = 255 if self.side > 0 else 0
        picture[:, :half] = 255 - picture[:, half:]
        return picture

    def _seen(self):
        return {"camera": self._camera(), "flag": np.float32([self.flag])}
