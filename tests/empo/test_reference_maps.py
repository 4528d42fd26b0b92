"""Maps in the reference's format: what they become, its numbers on them, and what is refused."""

from __future__ import annotations

import pathlib

import jax
import numpy as np
import pytest
import yaml

from mbx.commands import convert_map
from mbx.empo import multigrid as mg
from mbx.empo.multigrid import family, packed
from mbx.empo.multigrid.objects import COLORS
from mbx.empo.multigrid.render import make_text
from mbx.empo.power import PowerParams, solve, solver

MAPS = pathlib.Path(__file__).parents[1] / "fixtures" / "empo" / "maps"
NUMBERS = PowerParams(beta_h=10.0, gamma_h=0.95, beta_r=50.0, gamma_r=0.99, zeta=2.0, eta=1.1)


@pytest.fixture(scope="module")
def two_freed():
    """The listed map of 7 steps, and the part of it that a map of 6 steps has."""
    table, states = mg.export(
        mg.make_grid(mg.load_map(str(MAPS / "two_freed.yaml"))._replace(horizon=7))
    )
    time = np.asarray(states.time)
    kept, count = time[table.succ_state] < 6, int((time <= 6).sum())
    parts = {name: getattr(table, name)[kept] for name in table._fields[:4]}
    parts |= {"terminal": time[:count] >= 6, "achieved": table.achieved[..., :count]}
    return table, table._replace(**parts, num_states=count)


def test_the_references_numbers(two_freed):
    longer, table = two_freed
    assert (table.num_states, longer.num_states) == (1384, 2240)
    solution = solve(table, NUMBERS)
    # Its actions are ours where nothing can be toggled; it scales values by 0.99499.
    np.testing.assert_allclose(solution.pi_r[0], [0.16344, 0.29766, 0.37546, 0.16344], rtol=1e-3)
    np.testing.assert_allclose(solution.V_r[0], -81.143, rtol=1e-5)


def test_states_of_a_larger_map():
    layout = mg.load_map(str(MAPS / "far_rooms.yaml"))._replace(horizon=5)
    states, _ = mg.enumerate_states(mg.make_grid(layout))
    assert np.bincount(np.asarray(states.time)).cumsum().tolist()[3:] == [389, 757, 1253]


def test_backward_is_what_sweeps_find(two_freed, monkeypatch):
    table, given = two_freed[1], None
    swept = solve(table, NUMBERS)
    monkeypatch.setattr(solver, "LARGE", 0)
    monkeypatch.setattr(solver, "CHUNK", 200)
    for given in (None, swept.pi_h):
        found = solve(table, NUMBERS, human_policy=given)
        for name in ("pi_h", "V_h_e", "X_h", "U_r", "V_r", "Q_r", "pi_r", "y", "unreachable"):
            want = np.asarray(getattr(swept, name))
            np.testing.assert_allclose(getattr(found, name), want, rtol=2e-5, atol=1e-6)
        assert found.converged and found.bound == 0.0 and found.iterations == 6
    np.testing.assert_allclose(np.exp2(found.W_h), found.X_h, rtol=1e-5)
    assert solver._layers(table._replace(succ_next=table.succ_state)) is None  # cycles: swept


def test_every_kind_of_cell(tmp_path, capsys):
    path, made = str(MAPS / "everything.yaml"), str(tmp_path / "made.yaml")
    with pytest.warns(UserWarning, match=r"goal \(1, 1, 1, 1\) .* nor 12 others"):
        layout = mg.load_map(path)
    assert (layout.num_actions, layout.physics, layout.rock_pushers) == (7, "reference", "all")
    assert layout.rocks_kill and layout.bush.tolist() == [True] and layout.horizon == 4
    assert (layout.stumble, layout.magic_entry, layout.goals.shape) == (0.4, 0.6, (1, 20, 4))
    assert layout.agents.tolist() == [[4, 4, 3], [5, 4, 2]] and layout.is_human.tolist() == [1, 0]
    assert [COLORS[c] for c in layout.door_color] == ["blue", "green", "red"]
    assert (
        layout.door_state.tolist() == [0, 1, 2]
        and layout.wall[3, 1]
        and not layout.magic_side[0] < 4
    )
    assert [COLORS[c] for c in layout.item_color] == ["red", "yellow", "purple"]
    assert layout.button_kind.tolist() == [0, 1, 2, 3, 3, 3]
    assert layout.button_target.tolist()[3:] == [0, 1, 2]
    standing = mg.make_grid(layout).initial
    for state, bushes in ((standing, 1), (standing._replace(solid=standing.solid + 1), 0)):
        assert make_text(layout)(state, None).count("&") == bushes
        kinds = packed.grid_fields(layout, state).object_type
        assert int((kinds == packed.TYPES["bush"]).sum()) == bushes
    convert_map.main([path, made])
    assert "goals of each human: 20" in capsys.readouterr().out
    with pytest.warns(UserWarning):
        jax.tree.map(np.testing.assert_array_equal, mg.load_map(made), layout)
    with pytest.raises(ValueError, match="ours already"):
        convert_map.main([made, str(tmp_path / "again.yaml")])
    with pytest.raises(ValueError, match="has a bush, which only single maps have"):
        family.make_family([layout])


WRONG = {
    r"line 2, column 3 of the map: 'Zr' is no kind": {"map": "We We We\nWe Ay Zr"},
    r"line 1, column 2 of the map: agent 'Ar' is neither": {"map": "We Ar"},
    r"\['wind'\]: a map of the reference may have": {"wind": 1},
    r"orientations=\['q'\]": {"orientations": ["q"]},
    r"possible_goals has '1,2,3'": {"possible_goals": ["1,2,3"]},
    r"possible_goals has 7": {"possible_goals": [7]},
    r"can_push_rocks='z'": {"can_push_rocks": "z"},
    r"action_class='MineActions'": {"action_class": "MineActions"},
    r"map=3: give lines": {"map": 3},
    r"not of its kind \(TypeError: can only join": {"map": [1, 2]},
    r"not of its kind \(TypeError: 'int'": {"possible_goals": 5},
    r"not of its kind \(TypeError: unhashable": {"action_class": ["Actions"]},
    r"not of its kind \(StopIteration": {
        "map": "".join(k + c for k in "KBXGOCL" for c in "rgbpye")
    },
}


@pytest.mark.parametrize("message", list(WRONG))
def test_what_cannot_be_represented_is_refused(message, tmp_path):
    fields = {"map": "We We We We\nWe Ay Ae We\nWe We We We", "max_steps": 3, **WRONG[message]}
    path = tmp_path / "map.yaml"
    path.write_text(yaml.safe_dump(fields))
    with pytest.raises(ValueError, match=message):
        mg.load_map(str(path))


@pytest.mark.parametrize("given", ["1,1,2,1", "2,1, 1,1", [1, 1, 2, 1], [[2, 1], [1, 1]]], ids=str)
def test_ways_to_write_a_goal(given, tmp_path):
    fields = {"map": "We We We We\nWe Ay Ae We\nWe We We We", "possible_goals": [given, "1,1"]}
    (tmp_path / "map.yaml").write_text(yaml.safe_dump(fields))
    layout = mg.load_map(str(tmp_path / "map.yaml"))
    assert layout.goals.tolist() == [[[1, 1, 2, 1], [1, 1, 1, 1]]] and layout.num_actions == 4


def test_rows_are_pushed_as_one_but_not_to_where_somebody_was():
    text = "#########\n#>bb1...#\n#########"
    layout = mg.parse_map(text, goals=[[1, 1, 7, 1]], horizon=9, physics="reference")
    step = jax.jit(mg.make_grid(layout).outcomes)

    def following(state, actions):
        states, prob = step(state, np.array(actions))
        assert prob.max() == 1.0
        return jax.tree.map(lambda x: x[int(np.argmax(prob))], states)

    state = following(mg.make_grid(layout).initial, [3, 3])
    assert state.movable[:, 0].tolist() == [2, 3] and state.agents[:, 0].tolist() == [1, 5]
    state = following(state, [3, 0])
    assert state.movable[:, 0].tolist() == [3, 4] and state.agents[:, 0].tolist() == [2, 5]
