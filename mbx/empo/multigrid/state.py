"""A grid's state, and the form in which its rules work on it.

`State` is what replays, features and users see: small arrays. `Scene` is the same as scalars, one a
number, cells as y * width + x: under `vmap` every scalar is one contiguous array over the batch,
which the compiler turns into vector code; arrays with a few entries a state it would not.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.layout import Layout
from mbx.types import Array

Scalars = tuple[Array, ...]

# The first number of an item's place where it lies on no cell; the second is the bearer or the box.
CARRIED, INSIDE, GONE = -1, -2, -3
# The same in one number: CARRIED_BY - agent, INSIDE_OF - box.
CARRIED_BY, INSIDE_OF, NOWHERE = -1, -1_000, -10_000
WALL, LAVA, UNSTEADY = 1, 2, 4  # bits of a board's terrain


class State(NamedTuple):
    """All that changes, int8 but for `time` (int32; stays 0 without a horizon).
    agents `[N, 3]` x, y, direction; alive `[N]`; movable `[M, 2]`; doors `[D]` open, closed or
    locked; items `[Q, 2]` x, y, or (CARRIED, agent), (INSIDE, box), (GONE, 0); buttons `[U, 4]`
    enabled, on, action + 1 and agent + 1 that a control button has learned (its `on`: it waits for
    the action); forced `[N]`, or `[0]` without control buttons: action + 1 that an agent has to
    take next, 0 none; solid `[W]` magic walls that have turned to stone, bushes that are trampled.
    """

    agents: Array
    alive: Array
    movable: Array
    doors: Array
    items: Array
    buttons: Array
    forced: Array
    solid: Array
    time: Array


class Board(NamedTuple):
    """A map as the rules read it: its layout, and as arrays what may differ within a family.
    Places are cells. On boards of many maps terrain has n as the first axis, others as the last.
    """

    layout: Layout
    terrain: Array  # bits, `[height, width]`
    door_cell: Array
    door_color: Array
    item_color: Array
    button_cell: Array
    magic_cell: Array
    magic_side: Array


class Button(NamedTuple):
    """A button's numbers, as in `State`."""

    enabled: Array
    on: Array
    action: Array
    learner: Array


class Scene(NamedTuple):
    """A state as scalars, in tuples over agents, rocks and blocks, doors and so on."""

    cell: Scalars
    heading: Scalars
    alive: Scalars
    movable: Scalars
    doors: Scalars
    items: Scalars
    buttons: tuple[Button, ...]
    forced: Scalars
    solid: Scalars


def initial_state(layout: Layout) -> State:
    """Everybody and everything where the map has them."""
    num = len(layout.agents)
    control = (layout.button_kind == maps.BUTTONS.index("control_button")).any()
    inside = layout.item_box != maps.NONE
    boxed = np.stack([np.full(len(inside), INSIDE), layout.item_box], axis=-1)
    buttons = np.zeros((len(layout.buttons), 4), np.int8)
    buttons[:, 0] = 1
    small = lambda x: jnp.asarray(x, jnp.int8)  # noqa: E731
    return State(
        agents=small(layout.agents),
        alive=jnp.ones(num, jnp.int8),
        movable=small(layout.movable),
        doors=small(layout.door_state),
        items=small(np.where(inside[:, None], boxed, layout.items)),
        buttons=small(buttons),
        forced=jnp.zeros(num if control else 0, jnp.int8),
        solid=jnp.zeros(len(layout.magic), jnp.int8),
        time=jnp.int32(0),
    )


def board_arrays(layout: Layout) -> dict[str, Array]:
    """The arrays of the layout's board. Its places and colours may be traced (`family`)."""
    width = layout.wall.shape[1]
    cells = lambda places: jnp.asarray(places[:, 1] * width + places[:, 0], jnp.int32)  # noqa: E731
    terrain = layout.wall * WALL + layout.lava * LAVA + layout.unsteady * UNSTEADY
    return {
        "terrain": jnp.asarray(terrain, jnp.int32),
        "door_cell": cells(layout.doors),
        "door_color": jnp.asarray(layout.door_color),
        "item_color": jnp.asarray(layout.item_color),
        "button_cell": cells(layout.buttons),
        "magic_cell": cells(layout.magic),
        "magic_side": jnp.asarray(layout.magic_side),
    }


def goal_cells(layout: Layout) -> Array:
    """`[H, G, height, width]` bool: the cells of each goal. The layout's goals may be traced."""
    y, x = np.indices(layout.wall.shape)[:, None, None]
    x1, y1, x2, y2 = jnp.moveaxis(jnp.asarray(layout.goals), -1, 0)[..., None, None]
    return (x1 <= x) & (x <= x2) & (y1 <= y) & (y <= y2)


def to_scene(state: State, width: int) -> Scene:
    """States, `[n, ...]`, as scalars, `[n]` each."""
    read = iter(_bytes(state))
    agents, alive, movable, doors, items, buttons, forced, solid = (
        [[next(read) for _ in range(math.prod(leaf.shape[2:]))] for _ in range(leaf.shape[1])]
        for leaf in state[:-1]
    )
    first = lambda rows: tuple(x for (x,) in rows)  # noqa: E731
    return Scene(
        cell=tuple(y * width + x for x, y, _ in agents),
        heading=tuple(heading for *_, heading in agents),
        alive=tuple(x > 0 for x in first(alive)),
        movable=tuple(y * width + x for x, y in movable),
        doors=first(doors),
        items=tuple(_item_code(x, y, width) for x, y in items),
        buttons=tuple(Button(*numbers) for numbers in buttons),
        forced=first(forced),
        solid=first(solid),
    )


def to_state(scene: Scene, example: State, width: int, time: Array) -> State:
    """The inverse of `to_scene`; example: any un-batched state of the layout."""
    agents = zip(scene.cell, scene.heading, strict=True)
    rows = (
        *((cell % width, cell // width, heading) for cell, heading in agents),
        scene.alive,
        *((cell % width, cell // width) for cell in scene.movable),
        scene.doors,
        *(_item_place(cell, width) for cell in scene.items),
        *scene.buttons,
        scene.forced,
        scene.solid,
    )
    number = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), time.shape) & 255  # noqa: E731
    columns = [number(x) for row in rows for x in row]
    words = [
        functools.reduce(jnp.bitwise_or, (x << (8 * i) for i, x in enumerate(columns[k : k + 4])))
        for k in range(0, len(columns), 4)
    ]
    flat = jax.lax.bitcast_convert_type(jnp.stack(words, axis=-1), jnp.int8)
    sizes = np.cumsum([like.size for like in example[:-1]])
    parts = jnp.split(flat.reshape(*time.shape, -1), sizes, axis=-1)  # a rest of the last word
    leaves = zip(parts, example[:-1], strict=False)
    return State(*(part.reshape(*time.shape, *like.shape) for part, like in leaves), time)


def _bytes(state: State) -> list[Array]:
    """All int8 numbers of states `[n, ...]`, an int32 `[n]` each.
    They go through words of four, which the sum makes the compiler lay out along the batch, once.
    """
    num = state.time.shape[0]
    flat = jnp.concatenate([leaf.reshape(num, -1) for leaf in state[:-1]], axis=1)
    count = flat.shape[1]
    flat = jnp.pad(flat, ((0, 0), (0, -count % 4))).astype(jnp.int32) & 255
    shifts = jnp.asarray([0, 8, 16, 24], jnp.int32)
    # The type is named: with 64 bits the sum would have them, and shifts by 24 cut no bytes off.
    shifted = flat.T.reshape(-1, 4, num) << shifts[None, :, None]
    words = jnp.sum(shifted, axis=1, dtype=jnp.int32)
    return [(words[k // 4] << (24 - 8 * (k % 4))) >> 24 for k in range(count)]


def _item_code(x: Array, y: Array, width: int) -> Array:
    away = jnp.where(x == CARRIED, CARRIED_BY - y, INSIDE_OF - y)
    return jnp.where(x >= 0, y * width + x, jnp.where(x == GONE, NOWHERE, away))


def _item_place(code: Array, width: int) -> tuple[Array, Array]:
    x = jnp.where(code > INSIDE_OF, CARRIED, jnp.where(code > NOWHERE, INSIDE, GONE))
    y = jnp.where(code > INSIDE_OF, CARRIED_BY - code, INSIDE_OF - code)
    y = jnp.where(code > NOWHERE, y, 0)
    return jnp.where(code >= 0, code % width, x), jnp.where(code >= 0, code // width, y)
