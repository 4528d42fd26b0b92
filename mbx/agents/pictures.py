"""The content of PNG and GIF files from arrays, uint8 `[height, width, 3]` a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np


def to_png(image: Any) -> bytes:
    """A picture, uint8 `[height, width, 3]`, as a PNG file's content."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray(_checked(image)).save(target, "PNG")
    return target.getvalue()


def to_gif(frames: Sequence[Any], *, milliseconds: int = 250) -> bytes:
    """Pictures of one size as an endless GIF's content. Raises ValueError for none."""
    from PIL import Image

    if not len(frames):
        raise ValueError("a GIF needs at least one frame: frames is empty")
    images = [Image.fromarray(_checked(frame)) for frame in frames]
    target = io.BytesIO()
    images[0].save(
        target, "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0
    )
    return target.getvalue()


def _checked(image: Any) -> np.ndarray:
    image = np.asarray(image)
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
        raise ValueError(
            f"a picture of type {image.dtype} and shape {image.shape}: give uint8 [height, width, "
            "3]"
        )
    return image
