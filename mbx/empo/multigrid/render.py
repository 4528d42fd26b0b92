"""A grid's state as a picture, `make_render(layout)`, and as text, `make_text(layout)`.

Everything is a tile: a mask of shape [TILE, TILE] in one colour, laid over the cell it stands on.
Agents that are out are drawn pale; a goal that a human pursues is outlined in that human's shade.
Text has three symbols that maps lack: `/` an open door, `!` an agent that is out for the rest of
the episode, `=` an empty cell of a goal that is asked for; it does not know a map's own symbols."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid.layout import BUTTONS, HUMANS, ITEMS, NONE, ROBOTS, Layout
from mbx.empo.multigrid.state import CARRIED, State
from mbx.types import Array

TILE = 24
ACTIONS = ("still", "left", "right", "forward", "toggle", "pick up", "drop")
_DOORS, _ITEMS, _BUTTONS = "/DL", "k*x", "KPCX"  # in the order of their numbers
_EMPTY, _GOAL, _OUT = ".", "=", "!"


def _colors(text: str) -> np.ndarray:
    return np.array([list(bytes.fromhex(color)) for color in text.split()], np.uint8)


PALETTE = _colors("cd3c32 3c9646 3c64c8 823ca0 dcb41e 787878 8c5f37")  # as `objects.COLORS`
HUMAN_SHADES = _colors("e6a000 f05a28 c83c78 967800 7850c8")
ROBOT_SHADES = _colors("505a64 326e82 6e6e6e 464682")
_FLOOR, _WALL, _LAVA, _ROCK, _BLOCK = _colors("f0eee8 3c3c42 eb781e 827c76 be9664")
_BUTTON_COLORS, _OFF = (0, 2, 1, 3), PALETTE[5]


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
    ground = _ground(layout, masks)
    columns, rows = jnp.arange(width), jnp.arange(height)

    def render(state: State, goals: Array | None = None) -> Array:
        image = ground
        for human, number in enumerate(() if goals is None else goals):
            shade = jnp.asarray(HUMAN_SHADES[human % len(HUMAN_SHADES)])
            outline = _outline(jnp.asarray(layout.goals)[human][number], height, width)
            image = jnp.where(outline[..., None], shade[None, None, None, None], image)
        for x, y, mask, color in _tiles(layout, masks, state):
            cell = (rows == y)[:, None] & (columns == x)[None]  # none where that is outside
            image = _over(image, cell, mask, color)
        return image.reshape(height * TILE, width * TILE, 3)

    return render


def _over(image: Array, cells: Array, mask: Array, color: Any) -> Array:
    """The image `[height, TILE, width, TILE, 3]` with `mask` on marked cells `[height, width]`."""
    covered = cells[:, None, :, None] & mask[None, :, None, :]
    color = jnp.asarray(color, jnp.uint8)[None, None, None, None]
    return jnp.where(covered[..., None], color, image)


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
    for cells, name, color in (
        *((layout.floor == n, "full", 128 + color // 2) for n, color in enumerate(PALETTE)),
        (layout.wall, "full", _WALL),
        (layout.unsteady, "stripes", PALETTE[6]),
        (layout.switch, "dot", PALETTE[0]),
        (layout.lava, "full", _LAVA),
        (layout.lava, "waves", _WALL),
    ):
        image = _over(image, jnp.asarray(cells), masks[name], color)
    return image


def _tiles(layout: Layout, masks: dict[str, Array], state: State) -> Iterator[tuple]:
    """What lies on the ground, the lowest first: (x, y, mask, colour)."""
    palette = jnp.asarray(PALETTE)
    leaves = jnp.stack([masks["open"], masks["closed"], masks["locked"]])
    for number, (x, y) in enumerate(layout.doors):
        mask = leaves[state.doors[number].astype(jnp.int32)]
        yield x, y, mask, palette[layout.door_color[number]]
    for number, (x, y) in enumerate(layout.magic):
        if layout.bush[number]:
            yield x, y, masks["rock"] & (state.solid[number] == 0), PALETTE[1]
            continue
        yield x, y, masks["full"], _WALL
        yield x, y, masks["stripes"] & (state.solid[number] == 0), PALETTE[2]
    for number, (x, y) in enumerate(layout.buttons):
        kind, (enabled, on, learned, _) = layout.button_kind[number], state.buttons[number]
        yield x, y, masks["button"], jnp.where(enabled > 0, PALETTE[_BUTTON_COLORS[kind]], _OFF)
        signs = {
            "kill_button": masks["cross"],
            "disabling_switch": masks["slash"],
            "pause_switch": masks["bars"] & (on > 0),
            "control_button": jnp.where(learned > 0, masks["ball"], masks["ring"]),
        }
        yield x, y, signs[BUTTONS[kind]], (255, 255, 255)
    for (x, y), heavy in zip(state.movable, layout.heavy, strict=True):
        yield x, y, masks["rock" if heavy else "block"], _ROCK if heavy else _BLOCK
    for number, (x, y) in enumerate(state.items):
        mask = masks[ITEMS[layout.item_kind[number]]]
        yield x, y, mask, palette[layout.item_color[number]]
    # In the corner stands, of a family's maps, what others have and this one lacks.
    yield 0, 0, masks["full"] & layout.wall[0, 0], _WALL
    shades = {True: itertools.cycle(HUMAN_SHADES), False: itertools.cycle(ROBOT_SHADES)}
    for number, human in enumerate(layout.is_human.tolist()):
        (x, y, heading), shade = state.agents[number], jnp.asarray(next(shades[human]))
        color = jnp.where(state.alive[number] > 0, shade, 128 + shade // 2)
        yield x, y, masks["arrow"][heading.astype(jnp.int32)], color
        for item, (where, bearer) in enumerate(state.items):
            held = masks["dot"] & (where == CARRIED) & (bearer == number)
            yield x, y, held, palette[layout.item_color[item]]


def make_text(layout: Layout) -> Callable[[State, Sequence[int] | None], str]:
    """`draw(state, goals=None)`: the map as it is now, a line a row.
    What it returns takes `goals` `[H]`, the goal of each human that is to be shown, or -1.
    """
    layout = jax.device_get(layout)
    ground = np.full(layout.wall.shape, _EMPTY)
    for cells, symbol in (
        (layout.floor != NONE, ","),
        (layout.unsteady, "u"),
        (layout.switch, "s"),
        (layout.lava, "~"),
        (layout.wall, "#"),
    ):
        ground[cells] = symbol
    buttons = [_BUTTONS[kind] for kind in layout.button_kind]

    def things(now: State) -> Iterator[tuple[Any, str]]:
        """Places and symbols of what lies on the ground, the lowest first."""
        magic = np.where(now.solid > 0, "#", "m")
        bushes = np.where(now.solid > 0, _EMPTY, "&")
        yield from zip(layout.magic, np.where(layout.bush, bushes, magic), strict=True)
        yield from zip(layout.buttons, buttons, strict=True)
        yield from zip(layout.doors, (_DOORS[state] for state in now.doors), strict=True)
        yield from zip(now.movable, np.where(layout.heavy, "o", "b"), strict=True)
        yield from (
            (place, _ITEMS[kind])
            for place, kind in zip(now.items, layout.item_kind, strict=True)
            if place[0] >= 0
        )
        if layout.wall[0, 0]:  # where a family's maps have what others have and they lack
            yield (0, 0), "#"

    def draw(state: State, goals: Sequence[int] | None = None) -> str:
        now, cells = jax.device_get(state), ground.copy()
        for (x, y), symbol in things(now):
            cells[y, x] = symbol
        for human, goal in enumerate(() if goals is None else goals):
            if goal >= 0:
                x1, y1, x2, y2 = layout.goals[human, goal]
                inside = cells[y1 : y2 + 1, x1 : x2 + 1]
                inside[inside == _EMPTY] = _GOAL
        for (x, y, heading), human, alive in zip(
            now.agents, layout.is_human, now.alive, strict=True
        ):
            cells[y, x] = (HUMANS if human else ROBOTS)[heading] if alive else _OUT
        return "\n".join("".join(row) for row in cells.tolist())

    return draw
