"""What a host environment is saved as: plain data in JSON, which cannot execute when it is read.

`encode` takes None, booleans, numbers, strings, bytes, lists, tuples, dicts, NumPy arrays and
scalars, and NumPy's random generators; `decode` gives back equal ones, to the last bit.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

_PLAIN = (bool, int, float, str)
_GENERATORS = ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64")
_KINDS = "biufSU"  # of arrays: no objects, which would be unpickled


class SnapshotError(ValueError):
    """Data that no snapshot is, or one of something else."""


def encode(tree: Any) -> bytes:
    """Plain data as bytes. Raises TypeError for anything else."""
    return json.dumps(_pack(tree)).encode()


def decode(data: bytes) -> Any:
    """What `encode` was given. Raises SnapshotError for other bytes."""
    with understood("it is not plain data"):
        return _unpack(json.loads(data))


@contextlib.contextmanager
def understood(what: str) -> Iterator[None]:
    """Turn whatever reading someone else's data raises into a SnapshotError."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SnapshotError(f"{what} ({reason[:200]})") from error


def _pack(x: Any) -> Any:
    if x is None or type(x) in _PLAIN:
        return x
    if type(x) is list:
        return [_pack(item) for item in x]
    if type(x) is tuple:
        return {"tuple": [_pack(item) for item in x]}
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
        return tuple(_unpack(item) for item in content)
    if kind == "dict":
        return {_unpack(key): _unpack(value) for key, value in content}
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "generator":
        return _generator(_unpack(content))
    if kind in ("array", "scalar"):
        dtype, shape, data = np.dtype(content[0]), content[1], base64.b64decode(content[2])
        if dtype.kind not in _KINDS:
            raise SnapshotError(f"an array of {dtype}")
        array = np.frombuffer(data, dtype).reshape(shape).copy()
        return array if kind == "array" else array[()]
    raise SnapshotError(f"a value of kind {kind!r}")


def _generator(state: dict[str, Any]) -> np.random.Generator:
    name = state["bit_generator"]
    if name not in _GENERATORS:
        raise SnapshotError(f"a random generator {name!r}")
    bits = getattr(np.random, name)()
    bits.state = state
    return np.random.Generator(bits)
