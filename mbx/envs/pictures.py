"""Pictures of gymnax states: Pendulum-v1, CartPole-v1, and every task that observes a grid.

Grids (Catch-bsuite, the MinAtar games, DeepSea-bsuite, Pong-misc) have one colour a channel.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mbx.envs.render import Renderer

SIZE = 240  # pixels a side
GRID_SECONDS = 0.15  # a step of a world without a clock
_FINE = 3  # drawn larger and shrunk, for smooth edges
_PAPER, _INK = (250, 250, 248), (60, 60, 66)
# By channel: red, green, blue, purple, yellow, grey, brown, and so on around.
_HEX = "cd3c32 3c9646 3c64c8 823ca0 dcb41e 787878 8c5f37 28a0aa e682aa 96be3c"
_COLORS = np.array([list(bytes.fromhex(one)) for one in _HEX.split()], np.uint8)


def of_gymnax(task: str) -> Renderer:
    """Renderer of a gymnax task. Raises ValueError for a task that cannot be drawn."""
    import gymnax

    if task not in gymnax.registered_envs:
        raise ValueError(f"env.name='gymnax:{task}' is unknown: nothing to draw")
    env, params = gymnax.make(task)
    if task == "Pendulum-v1":
        view = lambda s: dict(angle=s.theta, torque=s.last_u / params.max_torque)  # noqa: E731
        return Renderer(view, draw_pendulum, params.dt)
    if task == "CartPole-v1":
        view = lambda s: dict(position=s.x / params.x_threshold, angle=s.theta)  # noqa: E731
        return Renderer(view, draw_cartpole, params.tau)
    if len(env.observation_space(params).shape) in (2, 3):
        return Renderer(lambda s: env.get_obs(s, params), draw_grid, GRID_SECONDS)
    raise ValueError(
        f"env.name='gymnax:{task}' is not drawn: Pendulum-v1, CartPole-v1 and tasks that observe a "
        "grid are; for another one, register a suite with a make_renderer"
    )


def draw_pendulum(view: dict[str, Any]) -> np.ndarray:
    """uint8 `[SIZE, SIZE, 3]`. angle: radians from upright; torque: share of the largest."""
    angle, torque = (float(np.reshape(view[name], ())) for name in ("angle", "torque"))
    middle, red = (0.5, 0.5), (200, 80, 70)
    tip = (0.5 - 0.36 * math.sin(angle), 0.5 - 0.36 * math.cos(angle))
    arrow = ((0.5, 0.95), (0.5 - 0.4 * torque, 0.95), 0.02, (60, 100, 200))
    return _drawn((middle, tip, 0.07, red), (tip, 0.035, red), (middle, 0.02, _INK), arrow)


def draw_cartpole(view: dict[str, Any]) -> np.ndarray:
    """uint8 `[SIZE, SIZE, 3]`. position: share of the track; angle: radians from upright."""
    position, angle = (float(np.reshape(view[name], ())) for name in ("position", "angle"))
    x, y = 0.5 + 0.42 * position, 0.72
    tip = (x + 0.42 * math.sin(angle), y - 0.42 * math.cos(angle))
    return _drawn(
        ((0.04, y + 0.05), (0.96, y + 0.05), 0.008, _INK),
        ((x - 0.08, y), (x + 0.08, y), 0.09, _INK),
        ((x, y), tip, 0.03, (190, 140, 90)),
        ((x, y), 0.018, (60, 100, 200)),
    )


def _drawn(*shapes: tuple) -> np.ndarray:
    """Lines (two points, width, colour) and discs (center, radius, colour) from 0 to 1, y down."""
    scale = SIZE * _FINE
    image = Image.new("RGB", (scale, scale), _PAPER)
    draw = ImageDraw.Draw(image)
    for *points, size, color in shapes:
        places, size = [tuple(scale * x for x in point) for point in points], scale * size
        if len(places) == 2:
            draw.line(places, fill=color, width=max(1, round(size)))
        else:
            (x, y) = places[0]
            draw.ellipse((x - size, y - size, x + size, y + size), fill=color)
    return np.asarray(image.resize((SIZE, SIZE), Image.Resampling.LANCZOS))


def draw_grid(view: Any) -> np.ndarray:
    """uint8 picture of `[rows, columns]` or `[rows, columns, C]`, about SIZE pixels high.
    A cell has the colour of its last nonzero channel; a single channel is black or white.
    """
    grid = np.asarray(view)
    grid = grid[..., None] if grid.ndim == 2 else grid
    rows, columns, channels = grid.shape
    image = np.full((rows, columns, 3), _INK, np.uint8)
    for channel in range(channels):
        color = _PAPER if channels == 1 else _COLORS[channel % len(_COLORS)]
        image[grid[..., channel] != 0] = color
    side = max(1, round(SIZE / max(rows, columns)))
    image = image.repeat(side, axis=0).repeat(side, axis=1)
    if side > 4:  # a line between cells
        image[::side], image[:, ::side] = (85, 85, 92), (85, 85, 92)
    return image
