"""The compressed grid: one int32 a cell, and what networks see of it.

    bits 0-4 object type, 5-7 its colour, 8-9 its state (doors: 1 open, 2 closed, 3 locked),
    10-12 the colour of an agent there (7: nobody), 13-15 magic wall, 16-17 other category

The reference's layout writes type 0 both for a wall and for nothing, so that empty cells are read
as walls. Here types count from 1, and 0 is nothing. Fields are `[..., H, W]` arrays; source:
docs/sources.md#empo.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import objects
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout
from mbx.empo.multigrid.state import State
from mbx.types import Array


class Fields(NamedTuple):
    """The fields of a grid, int `[..., H, W]` each (see the module's first lines)."""

    object_type: Array
    object_color: Array
    object_state: Array
    agent_color: Array
    magic_wall_state: Array
    other_category: Array


WIDTHS = dict(zip(Fields._fields, (5, 3, 2, 3, 3, 2), strict=True))  # bits
SHIFTS = dict(zip(Fields._fields, (0, 5, 8, 10, 13, 16), strict=True))
NOBODY = 7
NOTHING = -1  # object type of an empty cell
DOOR, KEY = 30, 31
PLAIN_TYPES, COLORS = 15, len(objects.COLORS)
# The reference's numbers; a goal cell is a rectangle next to the grid here.
_NAMES = (
    "wall ball box goal lava block rock unsteady switch floor kill_button pause_switch "
    "disabling_switch control_button bush"
)
TYPES = {name: number for number, name in enumerate(_NAMES.split())} | {"door": DOOR, "key": KEY}
COLORS_OF = {name: number for number, name in enumerate(objects.COLORS)}
CHANNELS = PLAIN_TYPES + 2 * COLORS + 1 + 3 + COLORS


def encode(fields: Fields) -> Array:
    """The packed grid, int32 `[..., H, W]`. Values must fit their bits."""
    parts = fields._asdict()
    # -1 -> 0, 0..28 -> 1..29, door and key stay: type 29, which no object has, is given up.
    kind = jnp.asarray(fields.object_type, jnp.int32)
    parts["object_type"] = jnp.where(kind >= DOOR, kind, kind + 1)
    packed = jnp.zeros(jnp.shape(fields.object_type), jnp.int32)
    for name, value in parts.items():
        packed = packed | (jnp.asarray(value, jnp.int32) << SHIFTS[name])
    return packed


def decode(packed: Array) -> Fields:
    """The fields of a packed grid."""
    parts = {name: (packed >> shift) & ((1 << WIDTHS[name]) - 1) for name, shift in SHIFTS.items()}
    code = parts["object_type"]
    parts["object_type"] = jnp.where(code >= DOOR, code, code - 1)
    return Fields(**parts)


def grid_fields(layout: Layout, state: State) -> Fields:
    """The fields of a grid's state, int32 `[height, width]` each, for `encode`.
    The layout's places and colours may be traced (`family`). What lies on top hides what is below.
    Humans are yellow and robots grey. Magic walls have the number of their side, from 1 (right) to
    5 (all), 6 once solid. Directions, time, contents and what buttons remember are not in a grid.
    """
    height, width = layout.wall.shape
    cells = jnp.arange(height * width).reshape(height, width)

    def lay(field: Array, places: Any, values: Any) -> Array:
        """The field with a value at every place; nowhere at 0, since the border is wall."""
        for place, value in zip(jnp.asarray(places, jnp.int32), values, strict=True):
            here = (cells == place[1] * width + place[0]) & (place[0] > 0)
            field = jnp.where(here, value, field)
        return field

    kind = jnp.full((height, width), NOTHING, jnp.int32)
    kind = jnp.where(layout.floor >= 0, TYPES["floor"], kind)
    for name in ("switch", "unsteady", "lava", "wall"):
        kind = jnp.where(getattr(layout, name), TYPES[name], kind)
    kind = lay(kind, layout.doors, [DOOR] * len(layout.doors))
    kind = lay(kind, layout.buttons, [TYPES[BUTTONS[number]] for number in layout.button_kind])
    kind = lay(kind, state.movable, np.where(layout.heavy, TYPES["rock"], TYPES["block"]).tolist())
    kind = lay(kind, state.items, [TYPES[ITEMS[number]] for number in layout.item_kind])
    bush = np.flatnonzero(layout.bush)
    standing = jnp.where(state.solid[bush] > 0, 0, jnp.asarray(layout.magic)[bush].T).T
    kind = lay(kind, standing, [TYPES["bush"]] * len(bush))
    color = lay(jnp.maximum(jnp.int32(layout.floor), 0), layout.doors, layout.door_color)
    color = lay(color, state.items, layout.item_color)
    nothing = jnp.zeros((height, width), jnp.int32)
    people = np.where(layout.is_human, COLORS_OF["yellow"], COLORS_OF["grey"]).tolist()
    sides = jnp.where(state.solid > 0, 6, jnp.asarray(layout.magic_side) + 1)
    return Fields(
        object_type=kind,
        object_color=color,
        object_state=lay(nothing, layout.doors, state.doors + 1),
        agent_color=lay(nothing + NOBODY, state.agents, people),
        magic_wall_state=lay(nothing, layout.magic, jnp.where(layout.bush, 0, sides)),
        other_category=nothing,
    )


def channels(packed: Array) -> Array:
    """What a network sees: float32 `[..., 40, H, W]`.
    0-14 object types one-hot; 15-21 doors by colour (0.33 open, 0.67 closed, 1 locked); 22-28 keys
    by colour; 29 the magic wall's state; 30-32 other category; 33-39 agents by colour.
    """
    f = decode(packed)

    def one_hot(values: Array, first: int, num: int) -> Array:
        return jax.nn.one_hot(values - first, num, axis=-3)

    colors = one_hot(f.object_color, 0, COLORS)
    door = jnp.asarray([0.0, 0.33, 0.67, 1.0], jnp.float32)[f.object_state]
    parts = (
        one_hot(f.object_type, 0, PLAIN_TYPES),
        colors * jnp.expand_dims(door * (f.object_type == DOOR), -3),
        colors * jnp.expand_dims(f.object_type == KEY, -3),
        jnp.expand_dims(jnp.where(f.magic_wall_state <= 6, f.magic_wall_state, 0), -3),
        one_hot(f.other_category, 1, 3),
        one_hot(f.agent_color, 0, COLORS),
    )
    return jnp.concatenate([part.astype(jnp.float32) for part in parts], axis=-3)
