"""The compressed grid: one int32 a cell, and what networks see of it.

    bits 0-4 object type, 5-7 its colour, 8-9 its state (doors: 1 open, 2 closed, 3 locked),
    10-12 the colour of an agent there (7: nobody), 13-15 magic wall, 16-17 other category

The reference's layout (version 1) writes type 0 both for a wall and for nothing, so that empty
cells are read as walls. Version 2, the default, counts types from 1 and keeps 0 for nothing. Fields
are `[..., H, W]` arrays; source: docs/sources.md#empo.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mbx.empo.multigrid import objects
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout
from mbx.empo.multigrid.state import State

Array = jax.Array


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
NOTHING = -1  # object type of an empty cell, in version 2
DOOR, KEY = 30, 31
PLAIN_TYPES, COLORS = 15, len(objects.COLORS)
# The reference's numbers; a goal cell is a rectangle next to the grid here.
_NAMES = (
    "wall ball box goal lava block rock unsteady switch floor kill_button pause_switch "
    "disabling_switch control_button"
)
TYPES = {name: number for number, name in enumerate(_NAMES.split())} | {"door": DOOR, "key": KEY}
COLORS_OF = {name: number for number, name in enumerate(objects.COLORS)}
CHANNELS = PLAIN_TYPES + 2 * COLORS + 1 + 3 + COLORS


def encode(fields: Fields, *, version: int = 2) -> Array:
    """The packed grid, int32 `[..., H, W]`. Values must fit their bits (see `check_fields`)."""
    _check_version(version)
    parts = fields._asdict()
    if version == 2:
        # -1 -> 0, 0..28 -> 1..29, door and key stay: type 29, which no object has, is given up.
        kind = jnp.asarray(fields.object_type, jnp.int32)
        parts["object_type"] = jnp.where(kind >= DOOR, kind, kind + 1)
    packed = jnp.zeros(jnp.shape(fields.object_type), jnp.int32)
    for name, value in parts.items():
        packed = packed | (jnp.asarray(value, jnp.int32) << SHIFTS[name])
    return packed


def decode(packed: Array, *, version: int = 2) -> Fields:
    """The fields of a packed grid."""
    _check_version(version)
    parts = {name: (packed >> shift) & ((1 << WIDTHS[name]) - 1) for name, shift in SHIFTS.items()}
    if version == 2:
        code = parts["object_type"]
        parts["object_type"] = jnp.where(code >= DOOR, code, code - 1)
    return Fields(**parts)


def grid_fields(layout: Layout, state: State) -> Fields:
    """The fields of a grid's state, int32 `[height, width]` each, for `encode` in version 2.
    The layout's places and colours may be traced (`family`). What lies on top hides what is below:
    an item or a rock the ground it lies on. Humans are yellow
    and robots grey. Magic walls have the number of their side, from 1 (right) to 5 (all), 6 once
    solid. Directions, time, what is carried or boxed and what buttons remember are not in a grid.
    """
    height, width = layout.wall.shape
    cells = jnp.arange(height * width).reshape(height, width)
    kind = jnp.full((height, width), NOTHING, jnp.int32)
    for name, mask in (
        ("floor", layout.floor >= 0),
        ("switch", layout.switch),
        ("unsteady", layout.unsteady),
        ("lava", layout.lava),
        ("wall", layout.wall),
    ):
        kind = jnp.where(mask, TYPES[name], kind)
    color = jnp.maximum(jnp.asarray(layout.floor, jnp.int32), 0)
    door = jnp.zeros((height, width), jnp.int32)
    agent, magic = jnp.full((height, width), NOBODY, jnp.int32), jnp.zeros_like(door)

    def at(place: Array) -> Array:
        return (cells == place[1] * width + place[0]) & (place[0] > 0)  # the border is wall

    for number, place in enumerate(jnp.asarray(layout.doors)):
        kind = jnp.where(at(place), DOOR, kind)
        color = jnp.where(at(place), jnp.asarray(layout.door_color)[number], color)
        door = jnp.where(at(place), state.doors[number] + 1, door)
    for number, place in enumerate(jnp.asarray(layout.buttons)):
        kind = jnp.where(at(place), TYPES[BUTTONS[layout.button_kind[number]]], kind)
    for number, place in enumerate(jnp.asarray(layout.magic)):
        side = jnp.where(state.solid[number] > 0, 6, jnp.asarray(layout.magic_side)[number] + 1)
        magic = jnp.where(at(place), side, magic)
    for number, heavy in enumerate(layout.heavy):
        here = at(state.movable[number].astype(jnp.int32))
        kind = jnp.where(here, TYPES["rock" if heavy else "block"], kind)
    for number, item in enumerate(layout.item_kind):
        here = at(state.items[number].astype(jnp.int32))
        kind = jnp.where(here, TYPES[ITEMS[item]], kind)
        color = jnp.where(here, jnp.asarray(layout.item_color)[number], color)
    for number, human in enumerate(layout.is_human):
        here = at(state.agents[number].astype(jnp.int32))
        agent = jnp.where(here, COLORS_OF["yellow" if human else "grey"], agent)
    return Fields(kind, color, door, agent, magic, jnp.zeros_like(door))


def check_fields(fields: Fields, *, version: int = 2) -> None:
    """Raise ValueError, naming the field and the value, for concrete values that do not fit."""
    for name, value in fields._asdict().items():
        value = jnp.asarray(value)
        low = NOTHING if name == "object_type" and version == 2 else 0
        high = (1 << WIDTHS[name]) - 1
        if int(value.min()) < low or int(value.max()) > high:
            raise ValueError(
                f"{name} holds {int(value.min())}..{int(value.max())}: it has {WIDTHS[name]} bits "
                f"and must lie in {low}..{high}"
            )
    if version == 2 and bool(jnp.any(fields.object_type == DOOR - 1)):
        raise ValueError(f"object_type={DOOR - 1} has no code in version 2: use version 1")


def channels(packed: Array, *, version: int = 2) -> Array:
    """What a network sees: float32 `[..., 40, H, W]`.
    0-14 object types one-hot; 15-21 doors by colour (0.33 open, 0.67 closed, 1 locked); 22-28 keys
    by colour; 29 the magic wall's state; 30-32 other category; 33-39 agents by colour.
    """
    f = decode(packed, version=version)

    def one_hot(values: Array, first: int, num: int) -> Array:
        return jax.nn.one_hot(values - first, num, axis=-3)

    colors = one_hot(f.object_color, 0, COLORS)
    door = jnp.asarray([0.0, 0.33, 0.67, 1.0], jnp.float32)[f.object_state] * (
        f.object_type == DOOR
    )
    key = (f.object_type == KEY).astype(jnp.float32)
    magic = jnp.where(f.magic_wall_state <= 6, f.magic_wall_state, 0).astype(jnp.float32)
    return jnp.concatenate(
        [
            one_hot(f.object_type, 0, PLAIN_TYPES),
            colors * jnp.expand_dims(door, -3),
            colors * jnp.expand_dims(key, -3),
            jnp.expand_dims(magic, -3),
            one_hot(f.other_category, 1, 3),
            one_hot(f.agent_color, 0, COLORS),
        ],
        axis=-3,
    )


def _check_version(version: int) -> None:
    if version not in (1, 2):
        raise ValueError(f"version={version}: choose 2, or 1 for the reference's own layout")
