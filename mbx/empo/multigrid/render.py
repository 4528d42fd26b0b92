"""A grid's state as a picture: `make_render(layout)`, jit- and vmappable.

Everything is a tile: a mask of shape [TILE, TILE] in one colour, laid over the cell it stands on.
Humans are yellow and robots grey arrows, as in the reference's; agents that are out are drawn pale.
A goal that a human pursues is outlined in that human's shade.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.layout import BUTTONS, Layout
from mbx.empo.multigrid.state import State

Array = jax.Array

TILE = 24


def _colors(text: str) -> np.ndarray:
    return np.array([list(bytes.fromhex(color)) for color in text.split()], np.uint8)


PALETTE = _colors("cd3c32 3c9646 3c64c8 823ca0 dcb41e 787878 8c5f37")  # as `objects.COLORS`
HUMAN_SHADES = _colors("e6a000 f05a28 c83c78 967800 7850c8")
ROBOT_SHADES = _colors("505a64 326e82 6e6e6e 464682")
_FLOOR, _WALL, _LAVA, _ROCK, _BLOCK = _colors("f0eee8 3c3c42 eb781e 827c76 be9664")
_BUTTON_COLORS = dict(zip(BUTTONS, (0, 2, 1, 3), strict=True))


def _sprites() -> dict[str, np.ndarray]:
    """Masks `[TILE, TILE]` by name; "arrow" is `[4, TILE, TILE]`, by direction."""
    y, x = (np.mgrid[:TILE, :TILE] + 0.5) / TILE
    radius = np.hypot(x - 0.5, y - 0.5)
    inner = lambda m: (np.abs(x - 0.5) < 0.5 - m) & (np.abs(y - 0.5) < 0.5 - m)  # noqa: E731
    right = (x > 0.15) & (np.abs(y - 0.5) < 0.42 * (0.9 - x) / 0.75)
    key = (np.hypot(x - 0.5, y - 0.3) < 0.17) & (np.hypot(x - 0.5, y - 0.3) > 0.08)
    key |= (np.abs(x - 0.5) < 0.05) & (y > 0.42) & (y < 0.85)
    key |= (x > 0.5) & (x < 0.68) & ((np.abs(y - 0.62) < 0.04) | (np.abs(y - 0.8) < 0.04))
    slash = ((radius < 0.34) & (radius > 0.26)) | ((np.abs(x + y - 1.0) < 0.07) & (radius < 0.3))
    cross = (np.minimum(np.abs(x - y), np.abs(x + y - 1.0)) < 0.09) & inner(0.2)
    return {
        "full": inner(-1.0),
        "arrow": np.stack([np.rot90(right, -turns) for turns in range(4)]),
        "rock": radius < 0.42 + 0.05 * np.sin(5 * np.arctan2(y - 0.5, x - 0.5)),
        "block": inner(0.08),
        "ball": radius < 0.3,
        "key": key,
        "box": inner(0.18) & ~(inner(0.26) & ~(np.abs(y - 0.5) < 0.04)),
        "open": inner(0.0) & ~inner(0.08) & (x < 0.08),
        "closed": inner(0.0) & ~inner(0.14),
        "locked": inner(0.0) & ~((np.abs(x - 0.5) < 0.08) & (np.abs(y - 0.5) < 0.16)),
        "stripes": np.mod(x + y, 0.34) < 0.07,
        "waves": np.mod(y + 0.06 * np.sin(12 * x), 0.3) < 0.08,
        "dot": radius < 0.14,
        "button": inner(0.06),
        "cross": cross,
        "bars": inner(0.25) & (np.abs(np.abs(x - 0.5) - 0.15) < 0.07),
        "ring": (radius < 0.3) & (radius > 0.2),
        "slash": slash,
    }


def make_render(layout: Layout) -> Callable[..., Array]:
    """`render(state, goals=None)` -> uint8 `[height * TILE, width * TILE, 3]`.
    What it returns takes `goals` `[H]`, the number of the goal that each human pursues. Places and
    colours of the layout may be traced.
    """
    height, width = layout.wall.shape
    masks = {name: jnp.asarray(mask) for name, mask in _sprites().items()}
    ground, palette = _ground(layout, masks), jnp.asarray(PALETTE)
    columns, rows = jnp.arange(width), jnp.arange(height)

    def lay(image: Array, x: Array, y: Array, mask: Array, color: Any) -> Array:
        """`mask` in `color` over cell (x, y); nothing where that lies outside."""
        cell = (rows == y)[:, None] & (columns == x)[None]
        return _over(image, cell, mask, jnp.asarray(color, jnp.uint8))

    def render(state: State, goals: Array | None = None) -> Array:
        image = ground
        if goals is not None:
            for human, number in enumerate(goals):
                shade = jnp.asarray(HUMAN_SHADES[human % len(HUMAN_SHADES)])
                outline = _outline(jnp.asarray(layout.goals)[human][number], height, width)
                image = jnp.where(outline[..., None], shade[None, None, None, None], image)
        for number, (x, y) in enumerate(layout.doors):
            names = jnp.stack([masks["open"], masks["closed"], masks["locked"]])
            mask = names[state.doors[number].astype(jnp.int32)]
            image = lay(image, x, y, mask, palette[layout.door_color[number]])
        for number, (x, y) in enumerate(layout.magic):
            image = lay(image, x, y, masks["full"], _WALL)
            passable = masks["stripes"] & (state.solid[number] == 0)
            image = lay(image, x, y, passable, PALETTE[2])
        for number in range(len(layout.buttons)):
            image = _draw_button(layout, masks, lay, image, state, number)
        for number, heavy in enumerate(layout.heavy):
            x, y = state.movable[number]
            name, color = ("rock", _ROCK) if heavy else ("block", _BLOCK)
            image = lay(image, x, y, masks[name], color)
        for number, kind in enumerate(layout.item_kind):
            x, y = state.items[number]
            mask = masks[maps.ITEMS[kind]]
            image = lay(image, x, y, mask, palette[layout.item_color[number]])
        # In the corner stands, of a family's maps, what others have and this one lacks.
        corner = ((rows == 0)[:, None] & (columns == 0)[None]) & layout.wall
        image = _over(image, corner, masks["full"], jnp.asarray(_WALL, jnp.uint8))
        return _draw_agents(layout, masks, lay, image, state).reshape(
            height * TILE, width * TILE, 3
        )

    return render


def _over(image: Array, cells: Array, mask: Array, color: Array) -> Array:
    """The image `[height, TILE, width, TILE, 3]` with `mask` on marked cells `[height, width]`."""
    covered = cells[:, None, :, None] & mask[None, :, None, :]
    return jnp.where(covered[..., None], color[None, None, None, None], image)


def _outline(rectangle: Array, height: int, width: int) -> Array:
    """The edge of a rectangle of cells, drawn inside it: bool `[height, TILE, width, TILE]`."""
    x1, y1, x2, y2 = rectangle

    def inside(margin: int) -> Array:
        y, x = jnp.arange(height * TILE), jnp.arange(width * TILE)
        tall = (y >= y1 * TILE + margin) & (y < (y2 + 1) * TILE - margin)
        wide = (x >= x1 * TILE + margin) & (x < (x2 + 1) * TILE - margin)
        return tall[:, None] & wide[None]

    return (inside(0) & ~inside(2)).reshape(height, TILE, width, TILE)


def _ground(layout: Layout, masks: dict[str, Array]) -> Array:
    height, width = layout.wall.shape
    image = jnp.full((height, TILE, width, TILE, 3), jnp.asarray(_FLOOR, jnp.uint8))
    for color in range(len(PALETTE)):
        pale = jnp.asarray(128 + PALETTE[color] // 2)
        image = _over(image, jnp.asarray(layout.floor == color), masks["full"], pale)
    for cells, name, color in (
        (layout.wall, "full", _WALL),
        (layout.unsteady, "stripes", PALETTE[6]),
        (layout.switch, "dot", PALETTE[0]),
        (layout.lava, "full", _LAVA),
        (layout.lava, "waves", _WALL),
    ):
        image = _over(image, jnp.asarray(cells), masks[name], jnp.asarray(color, jnp.uint8))
    return image


def _draw_button(
    layout: Layout,
    masks: dict[str, Array],
    lay: Callable[..., Array],
    image: Array,
    state: State,
    number: int,
) -> Array:
    kind, (x, y) = BUTTONS[layout.button_kind[number]], layout.buttons[number]
    enabled, on, learned, _ = state.buttons[number]
    color = jnp.asarray(PALETTE[_BUTTON_COLORS[kind]])
    image = lay(image, x, y, masks["button"], jnp.where(enabled > 0, color, PALETTE[5]))
    signs = {
        "kill_button": masks["cross"],
        "disabling_switch": masks["slash"],
        "pause_switch": masks["bars"] & (on > 0),
        "control_button": jnp.where(learned > 0, masks["ball"], masks["ring"]),
    }
    return lay(image, x, y, signs[kind], (255, 255, 255))


def _draw_agents(
    layout: Layout, masks: dict[str, Array], lay: Callable[..., Array], image: Array, state: State
) -> Array:
    count = {True: 0, False: 0}
    for number, human in enumerate(layout.is_human.tolist()):
        shades = HUMAN_SHADES if human else ROBOT_SHADES
        shade = jnp.asarray(shades[count[human] % len(shades)])
        count[human] += 1
        shade = jnp.where(state.alive[number] > 0, shade, 128 + shade // 2)
        x, y, heading = state.agents[number]
        image = lay(image, x, y, masks["arrow"][heading.astype(jnp.int32)], shade)
        for item, color in enumerate(layout.item_color):
            place = state.items[item]
            held = masks["dot"] & (place[0] == -1) & (place[1] == number)
            image = lay(image, x, y, held, jnp.asarray(PALETTE)[color])
    return image
