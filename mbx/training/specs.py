"""What a run directory says of its task, so that a policy acts without the environment.

`spec.json` holds the sizes and units of `EnvSpec`. Tasks that are more than these (several at once,
or a world of their own) have none.
"""

from __future__ import annotations

import json
import os

import numpy as np

from mbx.envs.base import check_reward_range
from mbx.files import atomic_write, read_json
from mbx.types import EnvSpec, Part

_KINDS = {
    "name": str,
    "obs_shape": list,
    "obs_dtype": str,
    "action_dim": int,
    "episode_length": int,
    "action_repeat": int,
    "discrete": bool,
    "can_terminate": bool,
    "metrics": list,
    "action_low": list,
    "action_high": list,
}
_IF_ANY = ("parts", "reward_range", "action_shape", "action_dtype")


def save(spec: EnvSpec, workdir: str) -> None:
    """Write spec.json, where the task is no more than that."""
    if spec.tasks or spec.world is not None:
        return
    values = {name: getattr(spec, name) for name in _KINDS}
    unset = EnvSpec._field_defaults
    values |= {name: x for name in _IF_ANY if (x := getattr(spec, name)) != unset[name]}
    os.makedirs(workdir, exist_ok=True)  # of one of several seeds: nothing made it yet
    values["obs_dtype"] = np.dtype(spec.obs_dtype).name
    atomic_write(os.path.join(workdir, "spec.json"), json.dumps(values, indent=2).encode())


def load(workdir: str) -> EnvSpec | None:
    """What `save` wrote, None where it did not. Raises ValueError for anything else."""
    path = os.path.join(workdir, "spec.json")
    if not os.path.exists(path):
        return None
    values = read_json(path)
    for name, kind in _KINDS.items():
        if not isinstance(values.get(name), kind):
            raise ValueError(f"{path}: field {name!r} is missing or no {kind.__name__}")
    parts, rewards = (values.get(name, []) for name in _IF_ANY[:2])
    shape, action_dtype = values.get("action_shape"), values.get("action_dtype", "float32")
    values = {name: values[name] for name in _KINDS}
    try:
        parts = tuple(Part(str(name), tuple(map(int, shape))) for name, shape in parts)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: field 'parts' holds no names with shapes: {error}") from error
    try:
        values["obs_dtype"] = np.dtype(values["obs_dtype"])
    except TypeError as error:
        raise ValueError(f"{path}: field 'obs_dtype': {error}") from error
    try:
        own = dict(action_shape=None if shape is None else tuple(map(int, shape)))
        own["action_dtype"] = np.dtype(action_dtype).name
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: fields 'action_shape', 'action_dtype': {error}") from error
    try:
        rewards = check_reward_range(values["name"], rewards)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: field 'reward_range': {error}") from error
    lists = {name: tuple(x) for name, x in values.items() if isinstance(x, list)}
    return EnvSpec(**{**values, **lists}, parts=parts, reward_range=rewards, **own)
