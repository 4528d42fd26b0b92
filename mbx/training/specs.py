"""What a run directory says of its task, so that a policy acts without the environment.

`spec.json` holds the sizes and units of `EnvSpec`. Tasks that are more than these (several at once,
or a world of their own) have none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mbx.envs.base import check_reward_range
from mbx.training.files import atomic_write, read_json
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


def _action_dtype(value: Any) -> str:
    if np.dtype(value).kind not in "iuf":
        raise ValueError(f"{value!r} is no type of numbers")
    return np.dtype(value).name


# Fields that are left out where they are at their defaults, and how they are read.
_IF_ANY: dict[str, Callable[[Any], Any]] = {
    "parts": lambda found: tuple(Part(str(name), tuple(map(int, shape))) for name, shape in found),
    "reward_range": lambda found: check_reward_range("the task", found),
    "choices": lambda found: tuple(
        (str(name), tuple((int(first), int(count)) for first, count in entries))
        for name, entries in found
    ),
    "action_shape": lambda found: tuple(map(int, found)),
    "action_dtype": _action_dtype,
}


def save(spec: EnvSpec, workdir: str) -> None:
    """Write spec.json, where the task is no more than that."""
    if spec.tasks or spec.world is not None:
        return
    usual = EnvSpec._field_defaults
    values = {name: getattr(spec, name) for name in (*_KINDS, *_IF_ANY)}
    values = {n: x for n, x in values.items() if n in _KINDS or x != usual[n]}
    os.makedirs(workdir, exist_ok=True)  # of one of several seeds: nothing made it yet
    values["obs_dtype"] = np.dtype(spec.obs_dtype).name
    atomic_write(os.path.join(workdir, "spec.json"), json.dumps(values, indent=2).encode())


def load(workdir: str) -> EnvSpec | None:
    """What `save` wrote, None where it did not. Raises ValueError for anything else."""
    path = os.path.join(workdir, "spec.json")
    if not os.path.exists(path):
        return None
    found = read_json(path)
    for name, kind in _KINDS.items():
        if not isinstance(found.get(name), kind):
            raise ValueError(f"{path}: field {name!r} is missing or no {kind.__name__}")
    values = {n: tuple(found[n]) if isinstance(found[n], list) else found[n] for n in _KINDS}
    for name, read in {"obs_dtype": np.dtype, **_IF_ANY}.items():
        if name in found:
            try:
                values[name] = read(found[name])
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path}: field {name!r}: {error}") from error
    return EnvSpec(**values)
