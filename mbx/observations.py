"""Observations of named parts: dictionaries joined to one array, and split again.

A part of three axes is an image, uint8 `[height, width, channels]`; every other one is of numbers.
Numbers alone are joined to a vector, float32 `[D]`; images alone, of one size, on their channels,
uint8 `[H, W, C]`. Where there are both, an observation is a packed row of bytes, uint8 `[P]`: the
images', then the vector's float32 as bytes in memory. Environments, replay and devices then
know one array, in which an image takes a byte a value.

NumPy arrays stay NumPy arrays; everything else is traced by JAX. Leading axes `...` are free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.fast import collectives
from mbx.types import Array, EnvSpec, Params, Part

# What did not vary so far is no more than a hundred times as large once it does.
LEAST_VARIANCE = 1e-4
MASK = "action_mask"  # the part that says which discrete actions are possible
HIDDEN = "privileged"  # parts of such names are for a simulator alone, unless they are asked for


class Layout(NamedTuple):
    """What parts come to: the shape of their images, joined on channels (None: there are none), and
    the entries of their vector."""

    image_shape: tuple[int, int, int] | None
    vector_dim: int


def choose(
    name: str, shapes: Mapping[str, Sequence[int]], dtypes: Any, observe: Sequence[str] = ()
) -> tuple[Part, ...]:
    """The parts of a dictionary that are observed, in its order.

    Args:
        name: of the environment, for messages.
        shapes: of all its entries.
        dtypes: of all its entries, or one for all of them.
        observe: names of those wanted; empty: all but text and names that begin with "privileged".

    Raises:
        ValueError: for names that are not there, entries that are no numbers, images that are not
            uint8 or of several sizes, and where nothing is left.
    """
    if unknown := [one for one in observe if one not in shapes]:
        raise ValueError(
            f"env.observe={tuple(observe)}: the observations of {name} have no {unknown[0]!r}: "
            f"choose among {', '.join(shapes)}"
        )
    hidden = [one for one in shapes if one.rpartition("/")[2].startswith(HIDDEN)]
    wanted = [one for one in shapes if (one in observe if observe else one not in hidden)]
    if not observe:  # without text, such as a mission's, where there is more than that
        wanted = [one for one in wanted if _type(dtypes, one).kind in "biuf"] or wanted
    if not wanted:
        raise ValueError(
            f"env.observe={tuple(observe)}: of the observations of {name} nothing is left "
            f"({', '.join(shapes) or 'it has none'}): name those that the agent shall see"
        )
    parts = tuple(Part(one, tuple(map(int, shapes[one]))) for one in wanted)
    for part in parts:
        dtype = _type(dtypes, part.name)
        if dtype.kind not in "biuf":
            kind = "text" if dtype.kind in "SU" else f"of type {dtype}"
            raise ValueError(
                f"env.name={name!r}: the observation's {part.name!r} is {kind}: numbers "
                "are needed; name the other parts by env.observe to leave it out"
            )
        if part.is_image and dtype != np.uint8:
            raise ValueError(
                f"env.name={name!r}: the observation's {part.name!r} is {dtype}{list(part.shape)}: "
                "three axes are an image, which is uint8 [height, width, channels]; cast it, or "
                "flatten it to numbers"
            )
    sizes = {part.name: part.shape[:2] for part in parts if part.is_image}
    if len(set(sizes.values())) > 1:
        raise ValueError(
            f"env.name={name!r}: the observation's images are of different sizes, {sizes}: resize "
            "them to one, or choose by env.observe"
        )
    return parts


def _type(dtypes: Any, name: str) -> np.dtype:
    return np.dtype(dtypes[name] if isinstance(dtypes, Mapping) else dtypes)


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """A dictionary of dictionaries as one, whose names are joined by a stroke.

    Examples:
        >>> observations.flat({"arm": {"angle": 1, "speed": 2}, "goal": 3})
        {'arm/angle': 1, 'arm/speed': 2, 'goal': 3}
    """
    if not isinstance(tree, Mapping):
        return {path: tree}
    found: dict[str, Any] = {}
    for name, one in tree.items():
        found |= flat(one, f"{path}/{name}" if path else str(name))
    return found


def nested(found: Mapping[str, Any]) -> Any:
    """The tree whose `flat` names are these; names 0, 1, … are the places of a tuple.

    Examples:
        >>> observations.nested({"arm/0": 1, "arm/1": 2, "goal": 3})
        {'arm': (1, 2), 'goal': 3}
    """
    inner: dict[str, dict[str, Any]] = {}
    for path, one in found.items():
        name, _, rest = path.partition("/")
        inner.setdefault(name, {})[rest] = one
    made = {name: nested(one) if name else one[""] for name, one in inner.items()}
    is_tuple = list(made) == [str(i) for i in range(len(made))]
    return made.get("", tuple(made.values()) if is_tuple else made)


def layout(parts: Sequence[Part]) -> Layout:
    """What parts come to."""
    images = [part.shape for part in parts if part.is_image]
    shape: Any = (*images[0][:2], sum(one[2] for one in images)) if images else None
    return Layout(shape, sum(math.prod(part.shape) for part in parts if not part.is_image))


def is_packed(parts: Sequence[Part]) -> bool:
    """Whether an observation of these parts is a row of bytes."""
    found = layout(parts)
    return found.image_shape is not None and found.vector_dim > 0


def joined(parts: Sequence[Part]) -> tuple[tuple[int, ...], Any]:
    """Shape and type of an observation of these parts."""
    image, size = layout(parts)
    if image is None:
        return (size,), np.float32
    return ((math.prod(image) + 4 * size,) if size else image), np.uint8


def join(parts: Sequence[Part], values: Mapping[str, Any]) -> Any:
    """One array of the values `[..., *shape]` of all parts.

    Raises:
        ValueError: where one is missing or has another shape; names it.

    Examples:
        >>> parts = (types.Part("camera", (2, 2, 1)), types.Part("pole", (1,)))
        >>> values = {"camera": np.full((2, 2, 1), 7, np.uint8), "pole": np.float32([1.0])}
        >>> observations.join(parts, values).tolist()
        [7, 7, 7, 7, 0, 0, 128, 63]
    """
    if missing := [part.name for part in parts if part.name not in values]:
        raise ValueError(f"an observation without {missing[0]!r}, wanted {_told(parts)}")
    xp = jnp if any(isinstance(values[part.name], jax.Array) for part in parts) else np
    lead: tuple[int, ...] | None = None
    images, vectors = [], []
    for part in parts:
        x = xp.asarray(values[part.name], np.uint8 if part.is_image else np.float32)
        rank = x.ndim - len(part.shape)
        if rank < 0 or x.shape[rank:] != part.shape or lead not in (None, x.shape[:rank]):
            raise ValueError(
                f"an observation whose {part.name!r} is of shape {x.shape}, wanted {_told(parts)}"
            )
        lead = x.shape[:rank]
        (images if part.is_image else vectors).append(
            x if part.is_image else x.reshape((*lead, math.prod(part.shape)))
        )
    image = xp.concatenate(images, axis=-1) if images else None
    vector = xp.concatenate(vectors, axis=-1) if vectors else None
    if image is None or vector is None or not vector.shape[-1]:
        return vector if image is None else image
    return _pack(xp, image, vector)


def _pack(xp: Any, image: Any, vector: Any) -> Any:
    lead = vector.shape[:-1]
    if xp is np:
        numbers = np.ascontiguousarray(vector).view(np.uint8)
    else:
        numbers = jax.lax.bitcast_convert_type(vector, jnp.uint8).reshape(*lead, -1)
    return xp.concatenate([image.reshape((*lead, -1)), numbers], axis=-1)


def split(parts: Sequence[Part], obs: Any) -> dict[str, Any]:
    """An observation as "image" `[..., H, W, C]` and "vector" `[..., D]`, as far as it has them."""
    shape, size = layout(parts)
    if shape is None:
        return {"vector": obs}
    if not size:
        return {"image": obs}
    lead, pixels = obs.shape[:-1], math.prod(shape)
    numbers = obs[..., pixels:]
    if isinstance(obs, np.ndarray):
        vector = np.ascontiguousarray(numbers).view(np.float32)
    else:
        numbers = numbers.reshape(*lead, size, 4)
        vector = jax.lax.bitcast_convert_type(numbers, jnp.float32)
    return {"image": obs[..., :pixels].reshape(*lead, *shape), "vector": vector}


def named(parts: Sequence[Part], found: Mapping[str, Any]) -> dict[str, Any]:
    """What `split` gives, by the names of the parts, each `[..., *shape]`."""
    begun, values = {True: 0, False: 0}, {}
    for part in parts:
        whole = found["image" if part.is_image else "vector"]
        length = part.shape[2] if part.is_image else math.prod(part.shape)
        start = begun[part.is_image]
        begun[part.is_image] += length
        piece = whole[..., start : start + length]
        values[part.name] = (
            piece if part.is_image else piece.reshape((*piece.shape[:-1], *part.shape))
        )
    return values


def action_mask(spec: Any, obs: Any) -> Any:
    """Which discrete actions are possible, bool `[..., A]`: by the part "action_mask" of an
    observation, numbers `[A]` where 0 is impossible; None where there is no such part.
    spec: an `EnvSpec`, or what else has its `parts`, `action_dim` and `discrete`.
    """
    if not spec.discrete or MASK not in {part.name for part in spec.parts}:
        return None
    return named(spec.parts, split(spec.parts, obs))[MASK] > 0


def check_mask(spec: EnvSpec) -> None:
    """Raises ValueError where `action_mask` would not be a number for each action."""
    shapes = {part.name: part.shape for part in spec.parts if spec.discrete}
    if shapes.get(MASK, (spec.action_dim,)) != (spec.action_dim,):
        raise ValueError(
            f"env.name={spec.name!r}: its observation's {MASK!r} is of shape {list(shapes[MASK])}, "
            f"but there are {spec.action_dim} actions: give a number each, leave it out by "
            "env.observe, or call it something else"
        )


def numbers(parts: Sequence[Part], obs: Any) -> Any:
    """What of an observation can fail to be finite: the vector of a packed row, else all of it."""
    return split(parts, obs)["vector"] if is_packed(parts) else obs


def map_image(parts: Sequence[Part], obs: Any, function: Callable[[Any], Any]) -> Any:
    """The observation with `function` of its image, of the same type, in its place."""
    found, xp = split(parts, obs), np if isinstance(obs, np.ndarray) else jnp
    image = function(found["image"])
    return _pack(xp, image, found["vector"]) if "vector" in found else image


def _told(parts: Sequence[Part]) -> str:
    return ", ".join(f"{part.name} {list(part.shape)}" for part in parts)


# Running statistics: mean and variance of what a network reads, made from the batches that it
# learns from, all of one weight (in SimBa's RSNorm, arXiv 2410.09754, every observation counts).
# They are among a model's parameters, but no gradient moves them.


def init(size: int) -> Params:
    """Before the first batch: numbers stay as they are, but for the least variance.

    Of rows of `size` D: "mean" and "variance" `[D]`, "count" of batches.
    """
    return dict(mean=jnp.zeros(size), variance=jnp.ones(size), count=jnp.float32(0.0))


def update(statistics: Params, rows: Array) -> Params:
    """Statistics of one batch more, `[..., D]`: of all its parts where devices share it.

    Means and variances of the two are joined about the old mean, so that large numbers which vary
    by little cost no precision (Chan, Golub, LeVeque 1983).
    """
    mean, variance, count = (statistics[name] for name in ("mean", "variance", "count"))
    off = rows.reshape(-1, rows.shape[-1]).astype(jnp.float32) - mean[None]
    share = 1.0 / collectives.axis_size()
    moments = jnp.mean(off, axis=0) * share, jnp.mean(off**2, axis=0) * share
    moved, squares = collectives.psum(moments)
    weight = 1.0 / (count + 1.0)
    own = jnp.maximum(squares - moved**2, 0.0)
    return dict(
        mean=mean + weight * moved,
        variance=(1.0 - weight) * (variance + weight * moved**2) + weight * own,
        count=count + 1.0,
    )


def normalize(statistics: Params, rows: Array) -> Array:
    """Rows `[..., D]` less the mean, in standard deviations."""
    shape = (1,) * (rows.ndim - 1) + (-1,)
    mean, variance = (statistics[name].reshape(shape) for name in ("mean", "variance"))
    return (rows - mean) / jnp.sqrt(variance + LEAST_VARIANCE)
