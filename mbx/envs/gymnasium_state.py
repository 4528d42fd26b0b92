"""Saving a Gymnasium environment and continuing from it exactly, without pickle.

An environment's state is taken to be the attributes of its layers that are plain data or random
generators, and MuJoCo's state where it has one. Spaces, specifications and renderers stay those of
the environment that continues. Whatever holds anything else (Box2D's worlds, emulators) cannot be
saved.
"""

from __future__ import annotations

import hashlib
import types
from typing import Any

import numpy as np

from mbx.envs import snapshot as snapshots

# What never changes while an environment is stepped, or belongs to the process.
_LEFT_OUT = ("env", "spec", "_cached_spec", "mujoco_renderer", "model", "data")
# Results of MuJoCo's last step whose sizes vary with the contacts; every step makes them again.
_OF_CONTACTS = ("contact", "efc_", "iefc_", "island", "map_")


def get(env: Any) -> bytes | None:
    """The state of a Gymnasium environment, or None where it holds what is not plain data."""
    saved = {}
    physics = _physics(env)
    if physics is not None:
        saved["mujoco"] = _get_mujoco(*physics)
    try:
        saved["layers"] = [_plain(layer, physics is not None) for layer in _layers(env)]
        return snapshots.encode(saved)
    except TypeError:
        return None


def put(env: Any, snapshot: bytes) -> None:
    """Continue in `env` from what `get` gave.

    Raises `snapshot.SnapshotError` where that was another environment, another version of it, or
    where it changed its own model.
    """
    with snapshots.understood("it does not fit the environment"):
        saved, physics = snapshots.decode(snapshot), _physics(env)
        for layer, values in zip(_layers(env), saved["layers"], strict=True):
            for name in values:
                if name in _LEFT_OUT or _is_code(layer, name):
                    raise snapshots.SnapshotError(f"it sets {type(layer).__name__}.{name}")
        if (physics is None) != ("mujoco" not in saved):
            raise snapshots.SnapshotError("with MuJoCo or without")
        if physics is not None:
            _put_mujoco(*physics, saved["mujoco"])
        for layer, values in zip(_layers(env), saved["layers"], strict=True):
            vars(layer).update(values)


def _layers(env: Any) -> list[Any]:
    """The environment and all that it wraps, outermost first."""
    from gymnasium import Wrapper

    layers = [env]
    while isinstance(layers[-1], Wrapper):
        layers.append(layers[-1].env)
    return layers


def _plain(layer: Any, with_mujoco: bool) -> dict[str, Any]:
    """Attributes of a layer that are its state. Raises TypeError where others may be."""
    from gymnasium import Space

    if any(getattr(kind, "__slots__", ()) for kind in type(layer).__mro__):
        raise TypeError("attributes outside of vars()")
    left_out = _LEFT_OUT if with_mujoco else _LEFT_OUT[:3]
    constant = (Space, type, types.ModuleType, types.FunctionType)
    values = {}
    for name, value in vars(layer).items():
        kept = name not in left_out and not name.startswith("_ezpickle")
        if kept and not isinstance(value, constant) and not _is_code(layer, name):
            snapshots.encode(value)
            values[name] = value
    return values


def _is_code(layer: Any, name: str) -> bool:
    """Whether an attribute would hide a method or a property of the layer's class."""
    known = getattr(type(layer), name, None)
    return callable(known) or hasattr(known, "__get__")


def _physics(env: Any) -> tuple[Any, Any] | None:
    """MuJoCo's model and data of an environment that has them."""
    base = env.unwrapped
    model, data = getattr(base, "model", None), getattr(base, "data", None)
    found = type(model).__name__ == "MjModel" and type(data).__name__ == "MjData"
    return (model, data) if found else None


def _get_mujoco(model: Any, data: Any) -> dict[str, Any]:
    """All that the next step starts from, and the last one's results.

    Tasks read results before they step (a body's place, to know how far it then moved), and those
    are of the state before the last integration, so that they cannot be computed again.
    """
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return {"model": _digest(model), "state": state, "results": _results(data)}


def _put_mujoco(model: Any, data: Any, saved: dict[str, Any]) -> None:
    import mujoco

    if saved["model"] != _digest(model):
        raise snapshots.SnapshotError("its MuJoCo model is another one")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(model, data, saved["state"], kind)
    mujoco.mj_forward(model, data)
    mujoco.mj_setState(model, data, saved["state"], kind)  # the solver's start was overwritten
    for name, array in _results(data).items():
        array[...] = saved["results"][name]


def _results(data: Any) -> dict[str, np.ndarray]:
    """Arrays of a simulation's data, of sizes that its model fixes; not copied."""
    names = [n for n in dir(data) if not n.startswith(("_", *_OF_CONTACTS))]
    arrays = {name: getattr(data, name) for name in names}
    return {
        name: array
        for name, array in arrays.items()
        if isinstance(array, np.ndarray) and array.size and array.flags.writeable
    }


def _digest(model: Any) -> str:
    """SHA-256 of a compiled model, its options included."""
    import mujoco

    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.sha256(buffer).hexdigest()
