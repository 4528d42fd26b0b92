"""A policy that `mbx export --format=onnx` wrote; copy this file to the robot."""

import json

import numpy as np
import onnxruntime


class Policy:
    def __init__(self, path, seed=0):
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        self.about = json.loads(self.session.get_modelmeta().custom_metadata_map["mbx"])
        random = np.random.default_rng(seed)
        self.draw = {"normal": random.standard_normal, "uniform": random.random}
        self.reset()

    def reset(self):  # before the first observation of an episode
        self.feeds = {n: np.full(s, n == "first", d) for n, d, s in self.about["inputs"]}

    def __call__(self, observation):  # as the agent sees it: choices one-hot, parts in one array
        if not np.isfinite(observation).all():
            raise ValueError(f"the observation is not finite: {observation}")
        for name, dtype, shape in self.about["inputs"]:
            if name == "observation":
                self.feeds[name] = np.asarray(observation, dtype).reshape(shape)
            elif draw := self.draw.get(name.split("_")[0]):
                self.feeds[name] = draw(shape, dtype)
        found = dict(zip(self.about["outputs"], self.session.run(None, self.feeds), strict=True))
        action = found.pop("action").astype(self.about["action_dtype"])
        self.feeds |= {name.removeprefix("next_"): x for name, x in found.items()}
        return action if self.about["batch"] else action[0]
