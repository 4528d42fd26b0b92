"""A grid's state as text, in the symbols that maps are drawn with.

    draw = make_text(layout)        # draw(state, goals) -> lines, joined

What maps have no symbol for: `/` an open door, `!` an agent that is out for the rest of the
episode, `=` an empty cell of a goal that is asked for. A map's own symbols (its legend) are not
known here: a coloured door is a door.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout
from mbx.empo.multigrid.objects import HUMANS, ROBOTS
from mbx.empo.multigrid.state import State

ACTIONS = ("still", "left", "right", "forward", "toggle", "pick up", "drop")
_DOORS = {maps.OPEN: "/", maps.CLOSED: "D", maps.LOCKED: "L"}
_ITEMS = dict(zip(ITEMS, "k*x", strict=True))
_BUTTONS = dict(zip(BUTTONS, "KPCX", strict=True))
_EMPTY, _GOAL, _OUT = ".", "=", "!"


def make_text(layout: Layout) -> Callable[[State, Sequence[int] | None], str]:
    """`draw(state, goals=None)`: the map as it is now, a line a row.
    What it returns takes `goals` `[H]`, the goal of each human that is to be shown, or -1.
    """
    ground = np.full(layout.wall.shape, _EMPTY)
    for cells, symbol in (
        (layout.floor != maps.NONE, ","),
        (layout.unsteady, "u"),
        (layout.switch, "s"),
        (layout.lava, "~"),
        (layout.wall, "#"),
    ):
        ground[cells] = symbol

    def draw(state: State, goals: Sequence[int] | None = None) -> str:
        now = State(*(np.asarray(x) for x in state))
        cells = ground.copy()

        def put(place: np.ndarray, symbol: str) -> None:
            cells[place[1], place[0]] = symbol

        for number, place in enumerate(layout.magic):
            put(place, "#" if now.solid[number] else "m")
        for number, place in enumerate(layout.buttons):
            put(place, _BUTTONS[BUTTONS[layout.button_kind[number]]])
        for number, place in enumerate(layout.doors):
            put(place, _DOORS[int(now.doors[number])])
        for number, place in enumerate(now.movable):
            put(place, "o" if layout.heavy[number] else "b")
        for number, place in enumerate(now.items):
            if place[0] >= 0:
                put(place, _ITEMS[ITEMS[layout.item_kind[number]]])
        if layout.wall[0, 0]:  # where a family's maps have what others have and they lack
            cells[0, 0] = "#"
        for human, goal in enumerate(() if goals is None else goals):
            if goal >= 0:
                x1, y1, x2, y2 = layout.goals[human, goal]
                inside = cells[y1 : y2 + 1, x1 : x2 + 1]
                inside[inside == _EMPTY] = _GOAL
        for number, (x, y, heading) in enumerate(now.agents):
            facing = (HUMANS if layout.is_human[number] else ROBOTS)[heading]
            put(np.array([x, y]), facing if now.alive[number] else _OUT)
        return "\n".join("".join(row) for row in cells.tolist())

    return draw
