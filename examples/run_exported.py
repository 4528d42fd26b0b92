"""Runs a policy that `experiments.export` wrote; needs jax, numpy and flatbuffers, nothing of mbx.

python examples/run_exported.py policy.mbx
"""

import io
import json
import sys
import time
import zipfile

import jax
import numpy as np
from jax import export


class Policy:
    """`policy(observation)` gives the action in the environment's units; `reset` at an episode."""

    def __init__(self, path):
        with zipfile.ZipFile(path) as file:
            self.about = json.loads(file.read("about.json"))
            self._act = jax.jit(export.deserialize(bytearray(file.read("program"))).call)
            arrays = np.load(io.BytesIO(file.read("arrays.npz")))
        here = jax.devices()[0]  # bound to it as results are: one program for all calls
        placed = {name: jax.device_put(arrays[name], here) for name in arrays.files}
        self._params = [x for name, x in placed.items() if name.startswith("params")]
        self._memory = [x for name, x in placed.items() if name.startswith("memory")]
        self.reset()
        zeros = np.zeros(self.about["obs_shape"], self.about["obs_dtype"])
        self._act(self._params, self._memory, zeros, self._first)  # compiled before it is needed

    def reset(self):
        self._first = np.ones(self.about["obs_shape"][0], bool)

    def __call__(self, observation):
        if isinstance(observation, dict):
            observation = self._join(observation)
        obs = np.asarray(observation, self.about["obs_dtype"]).reshape(self.about["obs_shape"])
        action, self._memory = self._act(self._params, self._memory, obs, self._first)
        self._first = np.zeros_like(self._first)
        return np.asarray(action) if self.about["batch"] else np.asarray(action)[0]

    def _join(self, observation):
        """One array of the parts: images and numbers, as bytes where there are both."""
        num, images, numbers = self.about["obs_shape"][0], [], []
        for name, shape in self.about["parts"]:
            if len(shape) == 3:
                images.append(np.asarray(observation[name], np.uint8).reshape(num, *shape))
            else:
                numbers.append(np.asarray(observation[name], np.float32).reshape(num, -1))
        joined = [np.concatenate(x, axis=-1) for x in (images, numbers) if x]
        if len(joined) == 1:
            return joined[0]
        return np.concatenate([x.view(np.uint8).reshape(num, -1) for x in joined], axis=-1)


if __name__ == "__main__":
    policy = Policy(sys.argv[1])
    num, times = int((sys.argv + ["200"])[2]), []
    for _ in range(num):
        start = time.perf_counter()
        action = policy(np.zeros(policy.about["obs_shape"]))
        times.append(1e3 * (time.perf_counter() - start))
    later = sorted(times[1:])
    print(f"{policy.about['task']}: action {action}")
    print(f"first {times[0]:.0f} ms, median {later[num // 2]:.2f} ms, worst {later[-1]:.2f} ms")
