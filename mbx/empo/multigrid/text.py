"""A grid's state as text, in the symbols that maps are drawn with.

    draw = make_text(layout)        # draw(state, goals) -> lines, joined

What maps have no symbol for: `/` an open door, `!` an agent that is out for the rest of the
episode, `=` an empty cell of a goal that is asked for. A map's own symbols (its legend) are not
known here: a coloured door is a door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.layout import Layout
from mbx.empo.multigrid.objects import HUMANS, ROBOTS
from mbx.empo.multigrid.state import State

ACTIONS = ("still", "left", "right", "forward", "toggle", "pick up", "drop")
_DOORS, _ITEMS, _BUTTONS = "/DL", "k*x", "KPCX"  # in the order of their numbers
_EMPTY, _GOAL, _OUT = ".", "=", "!"


def make_text(layout: Layout) -> Callable[[State, Sequence[int] | None], str]:
    """`draw(state, goals=None)`: the map as it is now, a line a row.
    What it returns takes `goals` `[H]`, the goal of each human that is to be shown, or -1.
    """
    layout = jax.device_get(layout)
    ground = np.full(layout.wall.shape, _EMPTY)
    for cells, symbol in (
        (layout.floor != maps.NONE, ","),
        (layout.unsteady, "u"),
        (layout.switch, "s"),
        (layout.lava, "~"),
        (layout.wall, "#"),
    ):
        ground[cells] = symbol
    buttons = [_BUTTONS[kind] for kind in layout.button_kind]

    def things(now: State) -> Iterator[tuple[Any, str]]:
        """Places and symbols of what lies on the ground, the lowest first."""
        yield from zip(layout.magic, np.where(now.solid > 0, "#", "m"), strict=True)
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
