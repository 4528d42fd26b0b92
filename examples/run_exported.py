"""Runs a policy that `experiments.export` wrote; needs jax, numpy and flatbuffers, nothing of mbx.

python examples/run_exported.py policy.mbx
"""

import io
import json
import sys
import time
import zipfile

import jax.export
import numpy as np


class Policy:
    """`policy(observation)`: the environment's observation in, its action out; `reset` first."""

    def __init__(self, path):
        with zipfile.ZipFile(path) as file:
            self.about = json.loads(file.read("about.json"))
            self._act = jax.jit(jax.export.deserialize(bytearray(file.read("program"))).call)
            arrays = np.load(io.BytesIO(file.read("arrays.npz")))
        # Bound to a device as results are: one program for all calls.
        placed = {name: jax.device_put(arrays[name], jax.devices()[0]) for name in arrays.files}
        self._params = [x for name, x in placed.items() if name.startswith("params")]
        self._memory = [x for name, x in placed.items() if name.startswith("memory")]
        self.reset()
        zeros = np.zeros(self.about["obs_shape"], self.about["obs_dtype"])
        self._act(self._params, self._memory, zeros, self._first)  # compiled before it is needed

    def reset(self):
        self._first = np.ones(self.about["obs_shape"][0], bool)

    def __call__(self, observation):
        obs = as_seen(self.about, observation)
        action, self._memory = self._act(self._params, self._memory, obs, self._first)
        self._first = np.zeros_like(self._first)
        action = in_space(self.about, np.asarray(action))
        return action if self.about["batch"] else jax.tree.map(lambda x: x[0], action)


def as_seen(about, observation):
    """One array of the environment's observation; ValueError for one that does not fit."""
    num, *shape = about["obs_shape"]
    if not about["parts"] or not isinstance(observation, dict | tuple):
        return finite("", one_part(about, "", shape, observation).astype(about["obs_dtype"]))
    given, images, numbers = named(observation), [], []
    for name, shape in about["parts"]:
        if name not in given:
            raise ValueError(f"an observation without {name!r}")
        array, image = one_part(about, name, shape, given[name]), len(shape) == 3
        array = finite(name, array.astype(np.uint8 if image else np.float32))
        (images if image else numbers).append(array if image else array.reshape(num, -1))
    joined = [np.concatenate(x, axis=-1) for x in (images, numbers) if x]
    if len(joined) == 2:  # as bytes
        joined = [np.concatenate([x.view(np.uint8).reshape(num, -1) for x in joined], axis=-1)]
    return joined[0].reshape(about["obs_shape"])


def named(observation, path=""):
    """Parts by name: arm/angle of dictionaries in dictionaries, places of tuples."""
    if not isinstance(observation, dict | tuple):
        return {path.removesuffix("/"): observation}
    parts = enumerate(observation) if isinstance(observation, tuple) else observation.items()
    inner = (named(one, f"{path}{name}/") for name, one in parts)
    return {name: one for part in inner for name, one in part.items()}


def one_part(about, name, shape, value):
    """A part `[batch, *shape]`; numbers of choices become one-hot."""
    num, array = about["obs_shape"][0], np.asarray(value)
    choices, wanted = dict(about["choices"]).get(name, ()), [num, *shape]
    if choices and shape == [len(choices)]:  # a single value each
        array = np.ones(wanted)
    elif choices and array.size == num * len(choices) and list(array.shape) != wanted:
        columns = zip(array.reshape(num, -1).T.astype(int), choices, strict=True)
        hot = [np.arange(n) == x[:, None] - low for x, (low, n) in columns]
        if not all(one.any(1).all() for one in hot):
            raise ValueError(f"the observation {name!r} is {value}, beyond its choices {choices}")
        array = np.concatenate(hot, axis=1)
    if array.size != np.prod(wanted):
        raise ValueError(f"the observation {name!r} has shape {array.shape}, wanted {wanted}")
    return array.reshape(wanted)


def finite(name, array):
    if not np.isfinite(array).all():
        raise ValueError(f"the observation {name!r} is not finite: {array}")
    return array


def in_space(about, action):
    """An action in the shape and the type that the environment takes, within its bounds."""
    if about["action_parts"]:
        return in_parts(about, action)
    if about["discrete"]:
        return action
    dtype = np.dtype(about["action_dtype"])
    action = (np.rint(action) if dtype.kind in "iu" else action).astype(dtype)
    if about["action_high"]:
        bounds = (np.asarray(about[name]).astype(dtype) for name in ("action_low", "action_high"))
        action = np.clip(action, *bounds)
    shape = about["action_shape"]
    return action if shape is None else action.reshape(len(action), *shape)


def in_parts(about, action):
    """Actions of several parts: a dictionary by their names ("0", "1", … of a tuple's), or one."""
    parts, found, start = about["action_parts"], {}, 0
    if about["discrete"]:
        firsts, counts = zip(*(one for *_, entries in parts for one in entries), strict=True)
        action = np.stack(np.unravel_index(action, counts), axis=-1) + firsts
    for name, shape, dtype, _ in parts:
        here = slice(start, start := start + int(np.prod(shape)))
        own = dict(discrete=False, action_parts=(), action_shape=shape, action_dtype=dtype)
        own |= {bound: about[bound][here] for bound in ("action_low", "action_high")}
        found[name] = in_space(about | own, action[:, here])
    return found.get("", found)


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
