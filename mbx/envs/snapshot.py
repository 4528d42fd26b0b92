"""Snapshots of host environments as JSON data, which cannot execute code when read.

`get` and `put` save a Gymnasium environment and continue from it exactly. Its state is the
attributes of its layers that are plain data or random generators, and MuJoCo's state. Environments
that hold anything else (Box2D's worlds, emulators, one object under two names) cannot be saved.
`encode` takes None, booleans, numbers, strings, bytes, lists, tuples, dicts, NumPy arrays, scalars
and random generators; `decode` returns them bit for bit.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import types
from collections.abc import Iterator
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, str)
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
# What never changes while an environment is stepped, or belongs to the process.
_FIXED = ("env", "spec", "_cached_spec", "mujoco_renderer", "model", "data")
# Results of MuJoCo's last step whose sizes vary with the contacts; every step recomputes them.
_OF_CONTACTS = ("contact", "efc_", "iefc_", "iacc", "ifrc_", "island", "map_")
_KINDS = "biufSU"  # of arrays: no objects, which would be unpickled


class SnapshotError(ValueError):
    """Data that is not a snapshot, or one of another environment."""


def encode(tree: Any) -> bytes:
    """Plain data as bytes. Raises TypeError for anything else."""
    return json.dumps(_pack(tree)).encode()


def decode(data: bytes) -> Any:
    """The data given to `encode`. Raises SnapshotError for other bytes."""
    with understood("it is not plain data"):
        return _unpack(json.loads(data))


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn any error in reading foreign data into a SnapshotError."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SnapshotError(f"{what} ({reason[:200]})") from error


def fitting(name: str) -> contextlib.AbstractContextManager[None]:
    """Turn any error in continuing the environment `name` into a SnapshotError."""
    return understood(f"a snapshot of another version or environment than {name}")


def _pack(x: Any) -> Any:
    if x is None or type(x) in _PLAIN:
        return x
    if type(x) in (list, tuple):
        found = [_pack(item) for item in x]
        return found if type(x) is list else {"tuple": found}
    if type(x) is dict:
        return {"dict": [[_pack(key), _pack(value)] for key, value in x.items()]}
    if type(x) is bytes:
        return {"bytes": base64.b64encode(x).decode()}
    if isinstance(x, np.random.Generator):
        return {"generator": _pack(x.bit_generator.state)}
    if isinstance(x, np.ndarray | np.generic) and x.dtype.kind in _KINDS:
        content = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
        kind = "array" if isinstance(x, np.ndarray) else "scalar"
        return {kind: [x.dtype.str, list(x.shape), content]}
    raise TypeError(f"{type(x).__name__} is not plain data")


def _unpack(x: Any) -> Any:
    if isinstance(x, list):
        return [_unpack(item) for item in x]
    if not isinstance(x, dict):
        return x
    ((kind, content),) = x.items()
    if kind == "tuple":
        return tuple(_unpack(content))
    if kind == "dict":
        return {_unpack(key): _unpack(value) for key, value in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "generator":
        state = _unpack(content)
        if state["bit_generator"] not in _GENERATORS:
            raise SnapshotError(f"a random generator {state['bit_generator']!r}")
        bits = getattr(np.random, state["bit_generator"])()
        bits.state = state
        return np.random.Generator(bits)
    dtype, shape, data = np.dtype(content[0]), content[1], base64.b64decode(content[2])
    if kind not in ("array", "scalar") or dtype.kind not in _KINDS:
        raise SnapshotError(f"{kind} of {dtype}")
    array = np.frombuffer(data, dtype).reshape(shape).copy()
    return array if kind == "array" else array[()]


# -------------------------------------------------------------------------------------------------
# Gymnasium


def get(env: Any) -> bytes | None:
    """State of a Gymnasium environment, or None where not all of it is plain data."""
    physics, layers = _physics(env), []
    saved: dict[str, Any] = {} if physics is None else {"mujoco": get_mujoco(*physics)}
    try:
        for layer in _layers(env):
            if any(getattr(kind, "__slots__", ()) for kind in type(layer).__mro__):
                raise TypeError("attributes outside of vars()")
            layers.append({n: x for n, x in vars(layer).items() if _is_state(layer, n, physics)})
            _check_separate(list(layers[-1].values()), set())
        return encode(saved | {"layers": layers})
    except TypeError:
        return None


def put(env: Any, snapshot: bytes) -> None:
    """Continue in `env` from a snapshot by `get`.
    Raises `SnapshotError` for another environment, another version of it, or a changed model.
    """
    with understood("it does not fit the environment"):
        saved, physics = decode(snapshot), _physics(env)
        pairs = list(zip(_layers(env), saved["layers"], strict=True))
        for layer, values in pairs:
            if wrong := [name for name in values if not _is_state(layer, name, physics)]:
                raise SnapshotError(f"it sets {type(layer).__name__}.{wrong[0]}")
        if (physics is None) != ("mujoco" not in saved):
            raise SnapshotError("with MuJoCo or without")
        if physics is not None:
            put_mujoco(*physics, saved["mujoco"])
        for layer, values in pairs:
            for name in [n for n in vars(layer) if _is_state(layer, n, physics)]:
                del vars(layer)[name]  # maybe it came later
            vars(layer).update(values)


def _layers(env: Any) -> list[Any]:
    """The environment and all that it wraps, outermost first."""
    from gymnasium import Wrapper

    layers = [env]
    while isinstance(layers[-1], Wrapper):
        layers.append(layers[-1].env)
    return layers


def _is_state(layer: Any, name: str, physics: tuple[Any, Any] | None) -> bool:
    """Whether a snapshot holds an attribute: no method, space, class, module or MuJoCo object."""
    import gymnasium

    value, known = vars(layer).get(name), getattr(type(layer), name, None)
    if callable(known) or hasattr(known, "__get__"):  # it would hide a method or a property
        return False
    kinds = (gymnasium.Space, gymnasium.envs.registration.EnvSpec, type)
    if isinstance(value, (*kinds, types.ModuleType, types.FunctionType)):
        return False
    if physics is not None and (name == "mujoco_renderer" or any(value is x for x in physics)):
        return False
    inner = name == "env" and isinstance(layer, gymnasium.Wrapper)  # a layer of its own
    return not (inner or name.startswith("_ezpickle") or (value is None and name in _FIXED))


def _check_separate(tree: Any, seen: set[int]) -> None:
    """Raise TypeError for attributes that share memory: a snapshot would separate them."""
    if isinstance(tree, np.ndarray):
        while isinstance(tree.base, np.ndarray):
            tree = tree.base
        if not isinstance(tree.base, bytes | None):
            raise TypeError("memory of something else")
    if isinstance(tree, np.ndarray | np.random.Generator | list | dict):
        if id(tree) in seen:
            raise TypeError("one object under two names")
        seen.add(id(tree))
    inner = tree.values() if isinstance(tree, dict) else tree
    for one in inner if isinstance(tree, dict | list | tuple) else ():
        _check_separate(one, seen)


def _physics(env: Any) -> tuple[Any, Any] | None:
    """MuJoCo's model and data, or None."""
    base = env.unwrapped
    model, data = getattr(base, "model", None), getattr(base, "data", None)
    kinds = type(model).__name__, type(data).__name__
    return (model, data) if kinds == ("MjModel", "MjData") else None


def get_mujoco(model: Any, data: Any) -> dict[str, Any]:
    """MuJoCo's integration state, and the last step's results.
    Tasks read results before they step, and those precede the last integration, so that they cannot
    be computed again.
    """
    import mujoco

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(model, kind))
    mujoco.mj_getState(model, data, state, kind)
    return {"model": _digest(model), "state": state, "results": _results(data)}


def put_mujoco(model: Any, data: Any, saved: dict[str, Any]) -> None:
    """Continue from `get_mujoco`. Raises SnapshotError for another model."""
    import mujoco

    if saved["model"] != _digest(model):
        raise SnapshotError("its MuJoCo model is another one")
    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    mujoco.mj_setState(model, data, saved["state"], kind)
    mujoco.mj_forward(model, data)
    mujoco.mj_setState(model, data, saved["state"], kind)  # the solver's start was overwritten
    for name, array in _results(data).items():
        array[...] = saved["results"][name]


def _results(data: Any) -> dict[str, np.ndarray]:
    """Arrays of `data` with sizes that the model fixes; not copied."""
    found = {n: getattr(data, n) for n in dir(data) if not n.startswith(("_", *_OF_CONTACTS))}
    arrays = {name: x for name, x in found.items() if isinstance(x, np.ndarray)}
    return {name: x for name, x in arrays.items() if x.size and x.flags.writeable}


def _digest(model: Any) -> str:
    """SHA-256 of a compiled model, its options included."""
    import mujoco

    buffer = np.empty(mujoco.mj_sizeModel(model), np.uint8)
    mujoco.mj_saveModel(model, None, buffer)
    return hashlib.sha256(buffer).hexdigest()
