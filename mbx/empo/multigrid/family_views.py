"""Pictures and text of states that hold their map: the `Views` of worlds of many maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mbx.empo.multigrid.layout import Layout
from mbx.empo.multigrid.render import make_render
from mbx.empo.multigrid.text import ACTIONS, make_text
from mbx.empo.power.worlds import Views
from mbx.types import Array

# What a text shows of a layout; the rest of it is the template's.
_SHOWN = ("wall", "lava", "unsteady", "switch", "floor", "doors", "buttons", "magic", "goals")


def make_family_views(template: Layout, read: Callable[[Any], Layout]) -> Views:
    """The views of a family's situations, each drawn by its own map.

    Args:
        template: of the family, humans first.
        read: place -> its layout, `family.read_place` of that template.
    """
    num_humans = len(template.humans)
    shown = jax.jit(lambda place: {name: getattr(read(place), name) for name in _SHOWN})

    def render(situation: Any, goals: Array | None = None) -> Array:
        return make_render(read(situation.place))(situation.now, goals)

    def text(situation: Any, goals: Any = None) -> str:
        own = {name: np.asarray(x) for name, x in shown(situation.place).items()}
        return make_text(template._replace(**own))(situation.now, goals)

    return Views(
        render=render,
        positions=lambda situation: situation.now.agents[:num_humans, :2],
        size=template.wall.shape[::-1],
        blocked=np.zeros(template.wall.shape, bool),
        text=text,
        actions=ACTIONS[: template.num_actions],
        robots=lambda situation: situation.now.agents[num_humans:, :2],
        walls=lambda situation: read(situation.place).wall,
    )
