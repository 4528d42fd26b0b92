"""Digests that detect damage to a checkpoint: one for every array, one for the metadata.

A sharded array has one digest per device's part, named by its place, so that every process can
check what it reads and a single process all of it.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

Digests = dict[str, dict[str, str]]  # of a tree: name of the leaf -> part -> digest

_WHOLE = ""


def of_bytes(array: np.ndarray) -> str:
    """CRC-32 of an array's bytes, without shape and dtype.
    Faster than a cryptographic hash; detects every change within 32 neighbouring bits, and all but
    one in 4e9 others.
    """
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8)):08x}"


def of_record(record: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, independent of the order of its names."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def of_tree(tree: Any) -> Digests:
    """Digests of all leaves; collective over the processes that hold a share of them."""
    named = [(name, part, data) for name, x in _named(tree) for part, data in _parts(x)]
    numbers = np.array([int(of_bytes(d), 16) if d is not None else 0 for *_, d in named], np.uint32)
    if jax.process_count() > 1:
        # Whoever does not hold a part has a zero there, and all who do the same number.
        numbers = np.max(multihost_utils.process_allgather(numbers), axis=0)
    digests: Digests = {}
    for (name, part, _), number in zip(named, numbers.tolist(), strict=True):
        digests.setdefault(name, {})[part] = f"{number:08x}"
    return digests


def damaged(tree: Any, saved: Digests) -> str | None:
    """Name of the first leaf that differs from `of_tree`'s digests, as far as this process holds
    it."""
    for name, x in _named(tree):
        whole = getattr(x, "is_fully_addressable", True)
        held = {} if whole else {p: d for p, d in _parts(x) if d is not None}
        array = np.asarray(x) if whole else None
        for part, number in saved[name].items():
            data = array[_slices(part)] if whole else held.get(part)
            if data is not None and of_bytes(data) != number:
                return name
    return None


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), x


def _parts(x: Any) -> Iterator[tuple[str, np.ndarray | None]]:
    """An array's parts, equal on all processes, with the data of local ones."""
    if getattr(x, "is_fully_addressable", True):
        yield _WHOLE, np.asarray(x)
        return
    here = {_place(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    places = x.sharding.devices_indices_map(x.shape).values()
    for place in sorted({_place(index, x.shape) for index in places}):
        yield place, np.asarray(here[place]) if place in here else None


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


def _slices(part: str) -> tuple[slice, ...]:
    bounds = [bound.split(":") for bound in part.split(",")] if part else []
    return tuple(slice(int(start), int(stop)) for start, stop in bounds)
