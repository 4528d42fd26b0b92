"""Processing of observed images: drawing, resizing, grayscale, frame stacking.

The settings `env.pixels`, `env.image_size`, `env.grey`, `env.frame_stack` and `env.shadows`, for
all suites. An image is a part of an observation with three axes, `[H, W, C]` (`mbx.observations`).
NumPy arrays stay NumPy arrays, everything else is traced by JAX. Leading axes `...` are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from mbx import observations
from mbx.types import Part

DRAWN_SIZE = 64  # pixels a side of what is drawn, unless a run says otherwise
# Red, green and blue in a grey, of 2**16: ITU-R 601, as PIL rounds them.
_LUMA = (19595, 38470, 7471)


class Images(NamedTuple):
    """Settings of observed images."""

    # Images are observed instead of numbers: drawn on the host; in JAX the environment's own images
    # with floats from 0 to 1, as uint8.
    pixels: bool = False
    size: int = 0  # pixels a side after resizing; 0: unchanged (64 where drawn)
    grey: bool = False
    stack: int = 1  # newest images joined on channels, oldest first; the first one is repeated
    shadows: bool = True  # draw shadows, reflections and smoothed edges (MuJoCo)

    @property
    def drawn_size(self) -> int:
        return self.size or DRAWN_SIZE

    def settings(self) -> str:
        """Settings that are not at their defaults, as a command line writes them."""
        longer = {"size": "image_size", "stack": "frame_stack"}
        changed = {f: x for f, x in self._asdict().items() if x != self._field_defaults[f]}
        return ", ".join(f"env.{longer.get(field, field)}={x}" for field, x in changed.items())


def form(space: Any, alone: bool) -> tuple[tuple[int, ...], Any]:
    """Shape and type of what is observed of a box, Gymnasium's or gymnax's: an image or numbers.
    Three axes are an image in a dictionary; alone only bytes, or floats from 0 to 1.
    """
    shape, dtype = tuple(space.shape) or (1,), np.dtype(getattr(space, "dtype", None) or np.float32)
    low = np.min(getattr(space, "low", 0), initial=0)
    high = np.max(getattr(space, "high", 1), initial=0)
    if dtype == np.uint8 and (len(shape) == 3 or (len(shape) == 2 and high == 255)):
        return shape, np.uint8
    if len(shape) == 3 and not alone:
        return shape, dtype.type
    if len(shape) == 3 and not 0 <= low <= high <= 1:
        return (int(np.prod(shape)),), np.float32
    return shape, np.float32


def observed(
    name: str,
    shape: Any,
    dtype: Any,
    observe: Sequence[str] = (),
    images: Images = Images(),  # noqa: B008
) -> tuple[tuple[int, ...], Any, tuple[Part, ...]]:
    """Shape and type of an observation after `see`, as one array, and the parts that it joins.
    shape, dtype: of the environment's observations, or dictionaries of these.
    Raises ValueError for image settings without images that they apply to, for pictures without
    channels or with channels first, for parts named of an observation without parts, and as
    `observations.choose`.
    """
    shapes = {one: tuple(map(int, each)) for one, each in observations.flat(shape).items()}
    dtypes = observations.flat(dtype)
    if images != Images():
        _change(name, images, shapes, dtypes)
    if not isinstance(shape, Mapping):
        check_no_parts(name, observe)
        _check_picture(name, "", shapes[""], dtypes[""])
        return shapes[""], dtypes[""], ()
    parts = observations.choose(name, shapes, dtypes, observe)
    for part in parts:
        _check_picture(name, part.name, part.shape, dtypes[part.name])
    return (*observations.joined(parts), parts)


def _change(name: str, images: Images, shapes: dict, dtypes: dict) -> None:
    """Turn shapes and types of parts into those after `see`."""
    seen = {one: each for one, each in shapes.items() if len(each) == 3}
    of_bytes = [np.dtype(dtypes[one]) == np.uint8 for one in seen]
    if not seen:
        raise ValueError(
            f"{images.settings()}: {name} observes numbers, {shapes.get('', shapes)}, and no image:"
            " leave it out" + ("" if images.pixels else "; env.pixels=True draws dmc: and gym:")
        )
    for one, shape in seen.items():
        _check_picture(name, "", shape, dtypes[one])
    if images.grey and not any(one[2] == 3 for one in seen.values()):
        raise ValueError(
            f"env.grey=True: images of {name} are {list(seen.values())}, and three channels are "
            "colours: leave it out"
        )
    if images.pixels and all(of_bytes):
        raise ValueError(
            f"env.pixels=True: {name} observes an image already, uint8{list(seen.values())}: leave "
            "it out"
        )
    for one, (height, width, channels) in seen.items():
        side = (images.size, images.size) if images.size else (height, width)
        shapes[one] = (*side, 1 if images.grey and channels == 3 else channels)
        dtypes[one] = np.uint8 if images.pixels else dtypes[one]


def _check_picture(name: str, part: str, shape: Sequence[int], dtype: Any) -> None:
    """Raise ValueError for an image with channels first or without channels."""
    if np.dtype(dtype) != np.uint8:
        return
    what = f"env.name={name!r}: its observation" + (f" {part!r}" if part else "")
    if len(shape) == 2:
        raise ValueError(
            f"{what} is a grey picture, uint8{list(shape)}: add an axis, [height, width, 1] "
            "(AtariPreprocessing: grayscale_newaxis=True), or give a board as float32"
        )
    if len(shape) == 3 and shape[0] in (1, 3, 4) and min(shape[1:]) > 8:
        raise ValueError(
            f"{what}, uint8{list(shape)}, has its channels first: give them last, [height, width, "
            "channels] (np.moveaxis(image, 0, -1))"
        )


def check_no_parts(name: str, observe: Sequence[str]) -> None:
    """Raise ValueError where parts are chosen of an observation without parts."""
    if observe:
        raise ValueError(
            f"env.observe={tuple(observe)}: an observation of {name} is one array without named "
            "parts: leave it out"
        )


def see(images: Images, obs: Any) -> Any:
    """An observation, or a dictionary of arrays, with its images `[H, W, C]` processed: as uint8,
    then grayscale, then resized.
    """
    if images == Images():
        return obs
    if isinstance(obs, Mapping):
        return {one: see(images, x) for one, x in observations.flat(obs).items()}
    if np.ndim(obs) != 3:
        return obs
    if images.pixels and obs.dtype != np.uint8:
        obs = _bytes(255.0 * obs)
    if images.grey and obs.shape[2] == 3:
        obs = _grey(obs)
    size = images.size
    return _resized(obs, size) if size and obs.shape[:2] != (size, size) else obs


def _bytes(image: Any) -> Any:
    """Numbers as uint8: rounded, and clipped to 0 and 255."""
    xp = np if isinstance(image, np.ndarray) else jnp
    return xp.clip(xp.round(image), 0, 255).astype(np.uint8)


def _grey(image: Any) -> Any:
    """`[H, W, 3]` -> `[H, W, 1]`, of the same type."""
    xp = np if isinstance(image, np.ndarray) else jnp
    if image.dtype != np.uint8:
        return (image @ xp.asarray(_LUMA, image.dtype) / 2**16)[..., None]
    whole = image.astype(np.uint32) @ xp.asarray(_LUMA, np.uint32)
    return ((whole + 2**15) >> 16).astype(np.uint8)[..., None]


def _resized(image: Any, size: int) -> Any:
    """`[H, W, C]` -> `[size, size, C]`: linear, antialiased."""
    if not isinstance(image, np.ndarray):
        x = image.astype(jnp.float32)
        x = jax.image.resize(x, (size, size, image.shape[2]), "linear", antialias=True)
        return _bytes(x) if image.dtype == jnp.uint8 else x.astype(image.dtype)
    planes = np.moveaxis(image if image.dtype == np.uint8 else image.astype(np.float32), -1, 0)
    how = dict(size=(size, size), resample=Image.Resampling.BILINEAR)
    found = [Image.fromarray(np.ascontiguousarray(one)).resize(**how) for one in planes]
    return np.stack(found, axis=-1).astype(image.dtype)


class Stack(NamedTuple):
    """Frame stacking: newest images joined on channels, oldest first, for each image part.
    Parts that are not images are the newest alone. A stack of one changes nothing.
    """

    count: int
    parts: tuple[Part, ...]  # of one observation; a single image without a name where it has none

    @classmethod
    def of(
        cls, count: int, shape: Sequence[int], parts: Sequence[Part]
    ) -> tuple[Stack, tuple[int, ...], tuple[Part, ...]]:
        """A stack, and the stacked observation's shape and parts."""
        own = tuple(parts) or (Part("", tuple(shape)),)
        if count == 1:
            return cls(1, own), tuple(shape), tuple(parts)
        stacked = tuple(
            part._replace(shape=(*part.shape[:2], count * part.shape[2])) if part.is_image else part
            for part in own
        )
        return cls(count, own), observations.joined(stacked)[0], stacked if parts else ()

    def begin(self, obs: Any) -> tuple[Any, Any]:
        """Images `[..., count, H, W, C]` of an episode's start (the first one repeated; None of a
        stack of one), and `obs` with all of them in place of its own.
        """
        if self.count == 1:
            return None, obs
        xp = np if isinstance(obs, np.ndarray) else jnp
        frames = xp.repeat(self._image(obs), self.count, axis=-4)
        return frames, self._join(frames, obs)

    def push(self, frames: Any, obs: Any) -> tuple[Any, Any]:
        """As `begin`, with the image of `obs` in place of the oldest of `frames`."""
        if self.count == 1:
            return None, obs
        xp = np if isinstance(obs, np.ndarray) else jnp
        frames = xp.concatenate([frames[..., 1:, :, :, :], self._image(obs)], axis=-4)
        return frames, self._join(frames, obs)

    def _image(self, obs: Any) -> Any:
        return observations.split(self.parts, obs)["image"][..., None, :, :, :]

    def _join(self, frames: Any, obs: Any) -> Any:
        xp = np if isinstance(obs, np.ndarray) else jnp
        channels = [part.shape[2] for part in self.parts if part.is_image]
        pieces = xp.split(xp.moveaxis(frames, -4, -2), np.cumsum(channels)[:-1], axis=-1)
        pieces = [piece.reshape(*piece.shape[:-2], -1) for piece in pieces]
        image = xp.concatenate(pieces, axis=-1)
        return observations.map_image(self.parts, obs, lambda _: image)
