"""What an agent's action does to a scene, object by object.

`BLOCKERS` say what stands in the way, `TOGGLES` what a toggle changes, `act` joins all actions. A
new object is a field of `Scene` with, in these tables, its blocker and its toggle. Every effect
takes `do`, whether it happens, and is plain arithmetic on scalars.

    kill button      a trigger's toggle takes every target out for the rest of the episode
    pause switch     while it is on, targets can only stand still (from the next step)
    control button   a target's toggle makes it learn that agent's next action; a trigger's toggle
                     makes that agent take it in the next step
    disabling switch a trigger's toggle turns all buttons of its target kind off, or on again

They follow the reference's multigrid (docs/sources.md#empo); where it keeps agents unpaused after a
paused switch was disabled and enabled again, the switch here pauses them again.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout
from mbx.empo.multigrid.state import (
    CARRIED_BY,
    INSIDE_OF,
    LAVA,
    NOWHERE,
    WALL,
    Board,
    Scalars,
    Scene,
)

Array = jax.Array
KEY, BOX = ITEMS.index("key"), ITEMS.index("box")
KILL, PAUSE, CONTROL, DISABLE = range(len(BUTTONS))
HUMAN = 0  # number of the humans among objects.GROUPS
ENTER, REFUSED, PETRIFIED = range(3)  # what a magic wall answers


class Turn(NamedTuple):
    """One agent's turn: its number (traced), place, what it faces, what magic walls answer it."""

    agent: Array
    cell: Array
    heading: Array
    ahead: Array
    delta: Array
    human: Array  # whether it is one
    enters: Array
    answer: Array
    began: Scalars  # where all agents stood when the step began
    awaited: Scalars  # which buttons waited for an action when the step began


def pick(values: Scalars, index: Array) -> Array:
    """values[index], for a traced index."""
    result = values[0]
    for number, value in enumerate(values[1:], start=1):
        result = jnp.where(index == number, value, result)
    return result


def put(values: Scalars, index: Array, new: Array, do: Array) -> Scalars:
    """values with values[index] = new where `do`."""
    return tuple(jnp.where(do & (index == n), new, old) for n, old in enumerate(values))


def among(values: Scalars, cell: Array) -> Array:
    """Whether some value equals `cell`."""
    found = jnp.bool_(False)
    for value in values:
        found = found | (value == cell)
    return found


def once(value: Array, size: int) -> Array:
    """A number in 0..size-1, computed once.
    On CPUs the compiler repeats cheap operations wherever their result is used, and this one may
    end a hundred of them. It does not repeat a look-up.
    """
    table = np.arange(size, dtype=np.int32)
    return jnp.asarray(table).at[value.astype(jnp.int32)].get(mode="promise_in_bounds")


def terrain(board: Board, cell: Array) -> Array:
    """The bits of a cell; cells outside count as the nearest one inside (a wall).
    Of a board a scene, `[n, height, width]`, each cell is one of its own scene's board.
    """
    flat = board.terrain.reshape(-1)
    if board.terrain.ndim == 2:
        return flat.at[cell].get(mode="clip")
    num, size = board.terrain.shape[0], math.prod(board.terrain.shape[1:])
    inside = jnp.clip(cell, 0, size - 1) + size * jnp.arange(num)
    return flat.at[inside].get(mode="promise_in_bounds")


def delta(heading: Array, width: int) -> Array:
    """How far the cell ahead is: 1, width, -1, -width."""
    return jnp.where(heading % 2 == 0, 1, width) * (1 - (heading & 2))


# What stands in the way of `cell`; agents are asked separately, since nobody blocks itself


def _walls(board: Board, scene: Scene, cell: Array) -> Array:
    return (terrain(board, cell) & WALL) != 0


def _doors(board: Board, scene: Scene, cell: Array) -> Array:
    found = jnp.bool_(False)
    for number, state in enumerate(scene.doors):
        found = found | ((board.door_cell[number] == cell) & (state != maps.OPEN))
    return found


def _items(board: Board, scene: Scene, cell: Array) -> Array:
    return among(scene.items, cell)


def _buttons(board: Board, scene: Scene, cell: Array) -> Array:
    return among(tuple(board.button_cell), cell)


BLOCKERS = (_walls, _doors, _items, _buttons)


def blocked(board: Board, scene: Scene, turn: Turn, cell: Array, *, to_all: bool) -> Array:
    """Whether `cell` is closed by what `BLOCKERS` know, or by an agent now or at the beginning.
    Agents in lava are in nobody's way. to_all: also by the agent whose turn it is.
    """
    taken = jnp.bool_(False)
    for number, (now, before) in enumerate(zip(scene.cell, turn.began, strict=True)):
        here = (now == cell) | (before == cell)
        taken = taken | (here if to_all else here & (turn.agent != number))
    closed = taken & ((terrain(board, cell) & LAVA) == 0)
    for blocker in BLOCKERS:
        closed = closed | blocker(board, scene, cell)
    return closed


# Actions


def turned(scene: Scene, turn: Turn, by: int, do: Array) -> Scene:
    """Turn left (-1) or right (+1)."""
    return scene._replace(heading=put(scene.heading, turn.agent, (turn.heading + by) & 3, do))


def forward(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Step ahead, pushing a rock or block; into lava, which ends it; through a magic wall."""
    pushed = tuple(cell == turn.ahead for cell in scene.movable)
    free = do & ~blocked(board, scene, turn, turn.ahead, to_all=False)
    scene, free = _through_magic(board, scene, turn, free)
    if scene.movable:
        beyond = turn.ahead + turn.delta
        room = ~blocked(board, scene, turn, beyond, to_all=True) & ~among(scene.movable, beyond)
        room &= ((terrain(board, beyond) & LAVA) == 0) & ~among(tuple(board.magic_cell), beyond)
        too_heavy = jnp.bool_(False)
        for number, here in enumerate(pushed):
            too_heavy = too_heavy | (here & board.heavy[number] & turn.human)
        free = free & (~among(scene.movable, turn.ahead) | (room & ~too_heavy))
    free = once(free, 2) > 0
    moved = zip(scene.movable, pushed, strict=True)
    beyond = turn.ahead + turn.delta
    scene = scene._replace(
        movable=tuple(jnp.where(here & free, beyond, cell) for cell, here in moved)
    )
    drowned = free & ((terrain(board, turn.ahead) & LAVA) != 0)
    return scene._replace(
        cell=put(scene.cell, turn.agent, turn.ahead, free),
        alive=put(scene.alive, turn.agent, jnp.bool_(False), drowned),
    )


def magic_ahead(board: Board, solid: Scalars, cell: Array, heading: Array, enters: Array) -> Array:
    """Whether an agent with that heading may ask the magic wall at `cell` to let it through."""
    found = jnp.bool_(False)
    for number, stone in enumerate(solid):
        side = board.magic_side[number]
        right_side = (side == 4) | (heading == ((side + 2) & 3))
        found = found | ((board.magic_cell[number] == cell) & right_side & (stone == 0))
    return found & enters


def _through_magic(board: Board, scene: Scene, turn: Turn, free: Array) -> tuple[Scene, Array]:
    if not scene.solid:
        return scene, free
    asked = free & magic_ahead(board, scene.solid, turn.ahead, turn.heading, turn.enters)
    solid = []
    for number, stone in enumerate(scene.solid):
        hardens = asked & (turn.answer == PETRIFIED) & (board.magic_cell[number] == turn.ahead)
        solid.append(jnp.where(hardens, 1, stone))
    passes = asked & (turn.answer == ENTER)
    free = free & (~among(tuple(board.magic_cell), turn.ahead) | passes)
    return scene._replace(solid=tuple(solid)), free


def pick_up(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Take the item ahead, with empty hands."""
    mine = CARRIED_BY - turn.agent
    do = do & ~among(scene.items, mine)
    return scene._replace(
        items=tuple(jnp.where(do & (cell == turn.ahead), mine, cell) for cell in scene.items)
    )


def drop(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Put what is carried on the cell ahead: no doorway, lava, magic wall, nor anything there."""
    mine = CARRIED_BY - turn.agent
    do = do & ~blocked(board, scene, turn, turn.ahead, to_all=True)
    do = do & ((terrain(board, turn.ahead) & LAVA) == 0) & ~among(scene.movable, turn.ahead)
    do = do & ~among((*board.magic_cell, *board.door_cell), turn.ahead)
    return scene._replace(
        items=tuple(jnp.where(do & (cell == mine), turn.ahead, cell) for cell in scene.items)
    )


# Toggling what is ahead


def _toggle_doors(board: Board, layout: Layout, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Open and close; unlock with a key of the door's colour. An open door in use stays open."""
    filled = among((*scene.cell, *scene.movable), turn.ahead)
    doors = []
    for number, state in enumerate(scene.doors):
        key = jnp.bool_(False)
        for item, kind in enumerate(layout.item_kind):
            if kind == KEY:
                fits = board.item_color[item] == board.door_color[number]
                key = key | (fits & (scene.items[item] == CARRIED_BY - turn.agent))
        opens = (state == maps.CLOSED) | ((state == maps.LOCKED) & key)
        closes = (state == maps.OPEN) & ~filled
        after = jnp.where(opens, maps.OPEN, jnp.where(closes, maps.CLOSED, state))
        doors.append(jnp.where(do & (board.door_cell[number] == turn.ahead), after, state))
    return scene._replace(doors=tuple(doors))


def _toggle_boxes(board: Board, layout: Layout, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Open a box: it is gone, and what it held lies in its place."""
    items = list(scene.items)
    for box, kind in enumerate(layout.item_kind):
        if kind != BOX:
            continue
        opened = do & (scene.items[box] == turn.ahead)
        items[box] = jnp.where(opened, NOWHERE, items[box])
        for item, holder in enumerate(layout.item_box):
            if holder == box:
                still = opened & (items[item] == INSIDE_OF - box)
                items[item] = jnp.where(still, turn.ahead, items[item])
    return scene._replace(items=tuple(items))


def _press(board: Board, layout: Layout, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Buttons and switches, see the module's first lines."""
    for number, kind in enumerate(layout.button_kind):
        enabled, on, action, learner = scene.buttons[number]
        facing = do & (board.button_cell[number] == turn.ahead)
        trigger = facing & (turn.human == (layout.button_trigger[number] == HUMAN))
        works, target = enabled > 0, layout.button_target[number]
        if kind == KILL:
            killed = [trigger & works & (h == (target == HUMAN)) for h in board.is_human]
            alive = tuple(a & ~k for a, k in zip(scene.alive, killed, strict=True))
            scene = scene._replace(alive=alive)
        elif kind == PAUSE:
            button = (enabled, jnp.where(trigger & works, 1 - on, on), action, learner)
            scene = _with_button(scene, number, button)
        elif kind == CONTROL:
            forced = scene.forced
            for agent, old in enumerate(forced):
                made = trigger & works & (learner == agent + 1) & (action > 0)
                forced = (*forced[:agent], jnp.where(made, action, old), *forced[agent + 1 :])
            # Who is being listened to is programming a toggle, not starting again.
            listened = (turn.awaited[number] > 0) & (learner == turn.agent + 1)
            starts = facing & works & (turn.human == (target == HUMAN)) & ~listened
            button = (
                enabled,
                jnp.where(starts, 1, on),
                action,
                jnp.where(starts, turn.agent + 1, learner),
            )
            scene = _with_button(scene._replace(forced=forced), number, button)
        else:
            for other, its_kind in enumerate(layout.button_kind):
                if its_kind == target:
                    own = scene.buttons[other]
                    flipped = jnp.where(trigger, 1 - own[0], own[0])
                    scene = _with_button(scene, other, (flipped, *own[1:]))
    return scene


def _with_button(scene: Scene, number: int, button: Scalars) -> Scene:
    buttons = list(scene.buttons)
    buttons[number] = button
    return scene._replace(buttons=tuple(buttons))


TOGGLES = (_toggle_doors, _toggle_boxes, _press)


def act(board: Board, layout: Layout, scene: Scene, turn: Turn, action: Array) -> Scene:
    """The scene after an agent's action; nothing changes where the agent is out."""
    able = pick(scene.alive, turn.agent)
    does = [able & (action == number) for number in range(7)]
    scene = turned(scene, turn, -1, does[maps.LEFT])
    scene = turned(scene, turn, 1, does[maps.RIGHT])
    scene = forward(board, scene, turn, does[maps.FORWARD])
    if layout.num_actions > maps.TOGGLE:
        for toggle in TOGGLES:
            scene = toggle(board, layout, scene, turn, does[maps.TOGGLE])
    if layout.num_actions > maps.PICK_UP:
        scene = pick_up(board, scene, turn, does[maps.PICK_UP])
    if layout.num_actions > maps.DROP:
        scene = drop(board, scene, turn, does[maps.DROP])
    return scene


# Buttons before and after a step


def commanded(
    board: Board, layout: Layout, scene: Scene, actions: Scalars
) -> tuple[Scalars, Scene]:
    """The actions that agents really take, paused or made to; nobody is made to act any more."""
    taken = []
    for agent, action in enumerate(actions):
        if scene.forced:
            forced = scene.forced[agent]
            action = jnp.where(forced > 0, forced - 1, action)
        for number, kind in enumerate(layout.button_kind):
            if kind == PAUSE:
                enabled, on, *_ = scene.buttons[number]
                own = board.is_human[agent] == (layout.button_target[number] == HUMAN)
                action = jnp.where((enabled > 0) & (on > 0) & own, maps.STILL, action)
        taken.append(action)
    return tuple(taken), scene._replace(forced=tuple(jnp.zeros_like(f) for f in scene.forced))


def remembered(layout: Layout, before: Scene, after: Scene, actions: Scalars) -> Scene:
    """Control buttons that waited when the step began have learned the action."""
    for number, kind in enumerate(layout.button_kind):
        if kind != CONTROL:
            continue
        enabled, on, action, learner = after.buttons[number]
        heard = (before.buttons[number][1] > 0) & (learner == before.buttons[number][3])
        learned = pick(actions, learner - 1) + 1
        button = (enabled, jnp.where(heard, 0, on), jnp.where(heard, learned, action), learner)
        after = _with_button(after, number, button)
    return after
