"""The content of PNG and GIF files from arrays, uint8 `[height, width, 3]` a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

SHOWN = 4  # sequences in a film
LINE = 3  # pixels between its pictures
SEEN, IMAGINED = (110, 110, 110), (240, 140, 20)  # colours of that line
ENDED = 0.25  # brightness of what follows an episode's end


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


def film(
    truth: np.ndarray, prediction: np.ndarray, inside: np.ndarray, context: int
) -> list[np.ndarray]:
    """Frames, uint8 `[height, width, 3]`: observed | predicted | difference, a row a sequence.
    The lines between pictures are grey while the model observes and orange from the first step that
    it imagines; a sequence turns dark where its episode has ended.
    """
    difference = np.abs(truth - prediction)
    scale = max(1, 64 // truth.shape[2])
    parts = [to_rgb(x[:, :SHOWN]) for x in (truth, prediction, difference)]
    frames = []
    for step in range(len(truth)):
        line = np.asarray(SEEN if step < context else IMAGINED, np.uint8)
        dim = np.where(inside[step, :SHOWN], 1.0, ENDED)[:, None, None, None]
        columns = [(dim * x[step]).astype(np.uint8) for x in parts]
        columns = [x.repeat(scale, axis=1).repeat(scale, axis=2) for x in columns]
        rows, height, width = columns[0].shape[:3]
        frame = np.empty((rows * (height + LINE) + LINE, 3 * (width + LINE) + LINE, 3), np.uint8)
        frame[:] = line
        for row, column in np.ndindex(rows, 3):
            y, x = (LINE + i * (n + LINE) for i, n in ((row, height), (column, width)))
            frame[y : y + height, x : x + width] = columns[column][row]
        frames.append(frame)
    return frames


def to_rgb(images: Any) -> np.ndarray:
    """Images `[..., C]` in [0, 1] as uint8 `[..., 3]`; other than three channels get a colour each,
    of which a pixel shows the strongest."""
    images = np.clip(np.asarray(images, np.float32), 0.0, 1.0)
    channels = images.shape[-1]
    if channels == 1:
        images = images.repeat(3, axis=-1)
    elif channels != 3:
        hues = 2 * np.pi * (np.arange(channels)[:, None] / channels + np.arange(3) / 3)
        images = (images[..., None] * (0.55 + 0.45 * np.cos(hues))).max(axis=-2)
    return (255.0 * images).round().astype(np.uint8)
