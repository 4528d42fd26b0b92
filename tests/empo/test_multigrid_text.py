"""Maps as text: a state is drawn in the symbols that its map was."""

from __future__ import annotations

import importlib.resources

import numpy as np
import pytest
import yaml

from mbx.empo import multigrid as mg
from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.render import ACTIONS, make_text
from mbx.empo.multigrid.state import CARRIED, GONE, INSIDE, initial_state

FOLDER = importlib.resources.files("mbx.empo.multigrid") / "maps"
NAMES = sorted(path.name.removesuffix(".yaml") for path in FOLDER.iterdir())

EVERYTHING = """\
##########
#>~u,sobD#
#1Lk*xmKP#
#v^<2.CX.#
##########
"""


def state_of(layout, **changed):
    state = initial_state(layout)
    return state._replace(**{name: np.asarray(x) for name, x in changed.items()})


@pytest.mark.parametrize("name", NAMES)
def test_the_first_state_is_the_map(name):
    text = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["map"]
    layout = mg.load_map(name)
    assert make_text(layout)(initial_state(layout)) == text.strip()


def test_every_symbol_is_drawn_as_it_was():
    layout = mg.parse_map(EVERYTHING, goals=[[1, 1, 1, 1]] * 2, horizon=0)
    assert make_text(layout)(initial_state(layout)) == EVERYTHING.strip()
    assert ACTIONS[: layout.num_actions] == (
        *("still", "left", "right", "forward", "toggle", "pick up", "drop"),
    )
    assert [ACTIONS[maps.TOGGLE], ACTIONS[maps.PICK_UP], ACTIONS[maps.DROP]] == [*ACTIONS[4:]]


def test_what_has_changed_is_drawn():
    text = "########\n#>.D1ok#\n#.b.Lxm#\n########"
    layout = mg.parse_map(text, goals=[[1, 1, 3, 2], [2, 2, 2, 2]], horizon=0)
    draw, begun = make_text(layout), initial_state(layout)
    # Doors are numbered closed ones first, rocks before blocks, keys before boxes.
    state = begun._replace(
        agents=np.array([[1, 2, 3], [3, 1, 1]]),
        alive=np.array([0, 1]),
        doors=np.array([maps.OPEN, maps.CLOSED]),
        movable=np.array([[5, 1], [2, 1]]),
        items=np.array([[CARRIED, 1], [2, 2]]),
        solid=np.array([1]),
    )
    assert draw(state) == "########\n#.b2.o.#\n#!x.D.##\n########"
    assert draw(state._replace(items=np.array([[INSIDE, 0], [GONE, 0]]))).count("x") == 0
    # A goal is marked where nothing is: of the one human, then of none.
    assert draw(state, [0]) == "########\n#=b2.o.#\n#!x=D.##\n########"
    assert draw(state, [-1]) == draw(state)
    open_door = state._replace(agents=np.array([[1, 2, 3], [4, 1, 1]]))
    assert draw(open_door, [1]).splitlines()[1] == "#.b/2o.#"
    facing = [draw(begun._replace(agents=np.array([[1, 1, d], [4, 1, d]]))) for d in range(4)]
    assert [row.splitlines()[1][1:5:3] for row in facing] == [">1", "v2", "<3", "^4"]
