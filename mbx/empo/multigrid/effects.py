"""What an agent's action does to a scene, object by object.

`blocked` says what stands in the way, `TOGGLES` what a toggle changes, `act` joins all actions.
Every effect takes `do`, whether it happens. Kill buttons take targets out for the episode; while a
pause switch is on, targets stand still from the next step; a control button learns the next action
of who toggles it, and a trigger's toggle makes that agent take it; a disabling switch turns buttons
of its target kind off and on. They follow the reference's multigrid (docs/sources.md#empo), but a
paused switch that was disabled and enabled again pauses its targets again."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import NamedTuple

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
from mbx.types import Array

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
    pushes: Array  # rocks
    enters: Array
    answer: Array
    start: Scene  # when the step began


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


def blocked(board: Board, scene: Scene, turn: Turn, cell: Array, *, to_all: bool) -> Array:
    """Whether walls, doors, items, buttons or agents, now or at the beginning, close `cell`.
    Agents in lava are in nobody's way. to_all: also by the agent whose turn it is.
    """
    taken = jnp.bool_(False)
    for number, (now, before) in enumerate(zip(scene.cell, turn.start.cell, strict=True)):
        here = (now == cell) | (before == cell)
        taken = taken | (here if to_all else here & (turn.agent != number))
    ground = terrain(board, cell)
    closed = taken & ((ground & LAVA) == 0) | ((ground & WALL) != 0)
    for number, state in enumerate(scene.doors):
        closed = closed | ((board.door_cell[number] == cell) & (state != maps.OPEN))
    return closed | among((*scene.items, *board.button_cell), cell)


def vacant(board: Board, scene: Scene, turn: Turn, cell: Array) -> Array:
    """Whether a thing may come to lie on `cell`: nothing there, no lava, no magic wall."""
    walls = zip(board.magic_cell, scene.solid, board.layout.bush, strict=True)
    closed = (jnp.where(gone > 0, -1, at) if bush else at for at, gone, bush in walls)
    there = among((*scene.movable, *closed), cell)
    there = there | blocked(board, scene, turn, cell, to_all=True)
    return ~there & ((terrain(board, cell) & LAVA) == 0)


# Actions


def forward(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Step ahead, pushing a rock or block; into lava, which ends it; through a magic wall."""
    free = do & ~blocked(board, scene, turn, turn.ahead, to_all=False)
    scene, free = _through_magic(board, scene, turn, free)
    row, _, stuck, hit = push(board, scene, turn)
    free = once(free & ~stuck, 2) > 0
    drowned = free & ((terrain(board, turn.ahead) & LAVA) != 0)
    pushed = (
        jnp.where(here & free, cell + turn.delta, cell)
        for cell, here in zip(scene.movable, row, strict=True)
    )
    if board.layout.rocks_kill:  # who is under a rock is moved to the corner
        out = [victim & free for victim in hit]
        alive = (now & ~dead for now, dead in zip(scene.alive, out, strict=True))
        cells = (jnp.where(dead, 0, at) for at, dead in zip(scene.cell, out, strict=True))
        scene = scene._replace(alive=tuple(alive), cell=tuple(cells))
    return scene._replace(
        movable=tuple(pushed),
        cell=put(scene.cell, turn.agent, turn.ahead, free),
        alive=put(scene.alive, turn.agent, jnp.bool_(False), drowned),
    )


def push(board: Board, scene: Scene, turn: Turn) -> tuple[Scalars, Array, Array, Scalars]:
    """What an agent that goes ahead would push: which rocks and blocks, where the last one lands,
    whether they are stuck, and which agents it lands on (where rocks kill).
    """
    layout, landing, last_is_rock = board.layout, turn.ahead, jnp.bool_(False)
    row = [jnp.bool_(False)] * len(scene.movable)
    if not row:
        return (), landing, jnp.bool_(False), ()
    for _ in row if layout.physics == "reference" else row[:1]:
        here = [cell == landing for cell in scene.movable]
        row = [old | new for old, new in zip(row, here, strict=True)]
        rocks = [new for new, heavy in zip(here, layout.heavy, strict=True) if heavy]
        last_is_rock = jnp.where(among(scene.movable, landing), _any(rocks), last_is_rock)
        landing = jnp.where(among(scene.movable, landing), landing + turn.delta, landing)
    rocks = [there for there, heavy in zip(row, layout.heavy, strict=True) if heavy]
    fits, hit = vacant(board, scene, turn, landing), []
    if layout.rocks_kill:
        agents = zip(scene.cell, scene.alive, layout.may_push, strict=True)
        hit = [(at == landing) & alive & (not strong) & turn.pushes for at, alive, strong in agents]
        hit = [victim & last_is_rock for victim in hit]
        fits = fits | _any(hit)
    stuck = _any(row) & ((_any(rocks) & ~turn.pushes) | ~fits)
    return tuple(row), landing, stuck, tuple(hit)


def _any(values: Iterable[Array]) -> Array:
    return functools.reduce(jnp.bitwise_or, values, jnp.bool_(False))


def magic_ahead(
    board: Board, solid: Scalars, cell: Array, heading: Array, human: Array, enters: Array
) -> Array:
    """Whether an agent with that heading may ask what is at `cell` to let it through: magic walls
    those who enter them, bushes humans.
    """
    found = jnp.bool_(False)
    for number, stone in enumerate(solid):
        side = board.magic_side[number]
        right_side = (side == 4) | (heading == ((side + 2) & 3))
        asks = human if board.layout.bush[number] else enters
        found = found | ((board.magic_cell[number] == cell) & right_side & (stone == 0) & asks)
    return found


def _through_magic(board: Board, scene: Scene, turn: Turn, free: Array) -> tuple[Scene, Array]:
    if not scene.solid:
        return scene, free
    seen = turn.heading, turn.human, turn.enters
    asked = free & magic_ahead(board, scene.solid, turn.ahead, *seen)
    hardens, passes = asked & (turn.answer == PETRIFIED), asked & (turn.answer == ENTER)
    solid, closed = [], jnp.bool_(False)
    walls = zip(scene.solid, tuple(board.magic_cell), board.layout.bush, strict=True)
    for stone, cell, bush in walls:
        here = cell == turn.ahead
        changes = free & (passes | ~turn.human) if bush else hardens
        closed = closed | (here & (((stone == 0) & turn.human) if bush else True))
        solid.append(jnp.where(changes & here, 1, stone))
    return scene._replace(solid=tuple(solid)), free & (~closed | passes)


def pick_up(scene: Scene, turn: Turn, do: Array) -> Scene:
    """Take the item ahead, with empty hands."""
    mine = CARRIED_BY - turn.agent
    do = do & ~among(scene.items, mine)
    return scene._replace(
        items=tuple(jnp.where(do & (cell == turn.ahead), mine, cell) for cell in scene.items)
    )


def drop(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Put what is carried on the cell ahead: no doorway, lava, magic wall, nor anything there."""
    mine = CARRIED_BY - turn.agent
    do = do & vacant(board, scene, turn, turn.ahead) & ~among(tuple(board.door_cell), turn.ahead)
    return scene._replace(
        items=tuple(jnp.where(do & (cell == mine), turn.ahead, cell) for cell in scene.items)
    )


# Toggling what is ahead


def _toggle_doors(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Open and close; unlock with a key of the door's colour. An open door in use stays open."""
    filled = among((*scene.cell, *scene.movable), turn.ahead)
    doors = []
    for number, state in enumerate(scene.doors):
        key = jnp.bool_(False)
        for item in np.flatnonzero(board.layout.item_kind == KEY):
            fits = board.item_color[item] == board.door_color[number]
            key = key | (fits & (scene.items[item] == CARRIED_BY - turn.agent))
        opens = (state == maps.CLOSED) | ((state == maps.LOCKED) & key)
        closes = (state == maps.OPEN) & ~filled
        after = jnp.where(opens, maps.OPEN, jnp.where(closes, maps.CLOSED, state))
        doors.append(jnp.where(do & (board.door_cell[number] == turn.ahead), after, state))
    return scene._replace(doors=tuple(doors))


def _toggle_boxes(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Open a box: it is gone, and its contents take its place."""
    items = list(scene.items)
    for box in np.flatnonzero(board.layout.item_kind == BOX):
        opened = do & (scene.items[box] == turn.ahead)
        items[box] = jnp.where(opened, NOWHERE, items[box])
        for item in np.flatnonzero(board.layout.item_box == box):
            still = opened & (items[item] == INSIDE_OF - int(box))
            items[item] = jnp.where(still, turn.ahead, items[item])
    return scene._replace(items=tuple(items))


def _press(board: Board, scene: Scene, turn: Turn, do: Array) -> Scene:
    """Buttons and switches, see the module's first lines."""
    layout = board.layout
    for number, kind in enumerate(layout.button_kind):
        button, target = scene.buttons[number], layout.button_target[number]
        facing = do & (board.button_cell[number] == turn.ahead)
        trigger = facing & (turn.human == (layout.button_trigger[number] == HUMAN))
        pressed = trigger & (button.enabled > 0)
        if kind == KILL:
            hit = layout.is_human == (target == HUMAN)
            alive = zip(scene.alive, hit, strict=True)
            scene = scene._replace(alive=tuple(a & ~pressed if h else a for a, h in alive))
        elif kind == PAUSE:
            scene = _with(scene, number, on=jnp.where(pressed, 1 - button.on, button.on))
        elif kind == CONTROL:
            made = pressed & (button.action > 0)
            forced = put(scene.forced, button.learner - 1, button.action, made)
            # Who is being listened to is programming a toggle, not starting again.
            listened = (turn.start.buttons[number].on > 0) & (button.learner == turn.agent + 1)
            starts = facing & (button.enabled > 0) & (turn.human == (target == HUMAN)) & ~listened
            learner = jnp.where(starts, turn.agent + 1, button.learner)
            on = jnp.where(starts, 1, button.on)
            scene = _with(scene._replace(forced=forced), number, on=on, learner=learner)
        else:
            for other in np.flatnonzero(layout.button_kind == target):
                enabled = scene.buttons[other].enabled
                scene = _with(scene, other, enabled=jnp.where(trigger, 1 - enabled, enabled))
    return scene


def _with(scene: Scene, number: int, **changes: Array) -> Scene:
    """The scene with changes to a button."""
    buttons = list(scene.buttons)
    buttons[number] = buttons[number]._replace(**changes)
    return scene._replace(buttons=tuple(buttons))


TOGGLES = (_toggle_doors, _toggle_boxes, _press)


def act(board: Board, scene: Scene, turn: Turn, action: Array) -> Scene:
    """The scene after an agent's action; nothing changes where the agent is out."""
    able, most = pick(scene.alive, turn.agent), board.layout.num_actions
    does = [able & (action == number) for number in range(7)]
    heading = turn.heading + jnp.where(does[maps.RIGHT], 1, -1)
    turns = does[maps.LEFT] | does[maps.RIGHT]
    scene = scene._replace(heading=put(scene.heading, turn.agent, heading & 3, turns))
    scene = forward(board, scene, turn, does[maps.FORWARD])
    for toggle in TOGGLES if most > maps.TOGGLE else ():
        scene = toggle(board, scene, turn, does[maps.TOGGLE])
    if most > maps.PICK_UP:
        scene = pick_up(scene, turn, does[maps.PICK_UP])
    if most > maps.DROP:
        scene = drop(board, scene, turn, does[maps.DROP])
    return scene


# Buttons before and after a step


def commanded(layout: Layout, scene: Scene, actions: Scalars) -> tuple[Scalars, Scene]:
    """The actions that agents really take, paused or made to; nobody is made to act any more."""
    taken = list(actions)
    for agent, forced in enumerate(scene.forced):
        taken[agent] = jnp.where(forced > 0, forced - 1, taken[agent])
    for number in np.flatnonzero(layout.button_kind == PAUSE):
        paused = (scene.buttons[number].enabled > 0) & (scene.buttons[number].on > 0)
        for agent in np.flatnonzero(layout.is_human == (layout.button_target[number] == HUMAN)):
            taken[agent] = jnp.where(paused, maps.STILL, taken[agent])
    return tuple(taken), scene._replace(forced=tuple(jnp.zeros_like(f) for f in scene.forced))


def remembered(layout: Layout, before: Scene, after: Scene, actions: Scalars) -> Scene:
    """Control buttons that waited when the step began have learned the action."""
    for number in np.flatnonzero(layout.button_kind == CONTROL):
        old, now = before.buttons[number], after.buttons[number]
        heard = (old.on > 0) & (now.learner == old.learner)
        learned = pick(actions, now.learner - 1) + 1
        action, on = jnp.where(heard, learned, now.action), jnp.where(heard, 0, now.on)
        after = _with(after, number, on=on, action=action)
    return after
