"""The compressed grid: the reference's layout exactly, and the one in which empty is not wall."""

from __future__ import annotations

import pathlib

import jax.numpy as jnp
import numpy as np

from mbx.empo import multigrid as mg
from mbx.empo.multigrid import packed

FIXTURE = pathlib.Path(__file__).parents[1] / "fixtures" / "empo" / "packed_grid_7x7.npz"


def fields_of(a):
    return packed.Fields(*(jnp.asarray(a[name]) for name in packed.Fields._fields))


def shifted(packed_grid):
    """The reference's grid with types counted from 1."""
    kind = packed_grid & 31
    return packed_grid + (kind < packed.DOOR)


def test_document_004s_layout_but_for_types_that_count_from_one():
    a = dict(np.load(FIXTURE))
    assert a["shifts"].tolist() == list(packed.SHIFTS.values())
    assert a["widths"].tolist() == list(packed.WIDTHS.values())
    there = shifted(a["packed"])
    np.testing.assert_array_equal(packed.encode(fields_of(a)), there)
    for name, ours in packed.decode(jnp.asarray(there))._asdict().items():
        np.testing.assert_array_equal(ours, a[name], err_msg=name)
    np.testing.assert_array_equal(packed.channels(jnp.asarray(there)), a["channels"])


def test_every_value_of_every_field_returns():
    for name, width in packed.WIDTHS.items():
        values = np.resize(np.arange(1 << width), 32)  # one length: operations are compiled once
        if name == "object_type":
            values = np.array([packed.NOTHING, *range(29), packed.DOOR, packed.KEY])
        other = dict.fromkeys(packed.Fields._fields, np.ones((1, len(values)), int))
        fields = packed.Fields(**{**other, name: values[None]})
        again = packed.decode(packed.encode(fields))
        for field, ours in again._asdict().items():
            np.testing.assert_array_equal(ours, getattr(fields, field), err_msg=f"{name}/{field}")


def test_empty_is_no_wall():
    empty = packed.Fields(
        *(jnp.full((2, 2), x) for x in (packed.NOTHING, 0, 0, packed.NOBODY, 0, 0))
    )
    assert not np.asarray(packed.channels(packed.encode(empty))).any()
    wall = empty._replace(object_type=jnp.zeros((2, 2), int))
    assert np.asarray(packed.channels(packed.encode(wall)))[0].all()


def test_every_object_of_a_grid_returns_from_its_compressed_form():
    legend = {
        "R": {"type": "door", "color": "red", "state": "locked"},
        "W": {"type": "magic_wall"},
        "B": {"type": "box", "color": "blue", "holds": {"type": "key", "color": "green"}},
        "f": {"type": "floor", "color": "brown"},
        "M": {"type": "magic_wall", "side": "up"},
    }
    text = "########\n#>obDRk#\n#*BfsuL#\n#WMKPCX#\n#~1..<.#\n########"
    layout = mg.parse_map(text, goals=[[1, 1, 6, 4]], horizon=5, legend=legend)
    state = mg.make_grid(layout).initial._replace(solid=jnp.asarray([1, 0], jnp.int8))
    fields = packed.grid_fields(layout, state)
    again = packed.decode(packed.encode(fields))
    for name, ours in again._asdict().items():
        np.testing.assert_array_equal(ours, getattr(fields, name), err_msg=name)
    names = {number: name for name, number in packed.TYPES.items()} | {packed.NOTHING: "."}
    read = [[names[int(k)] for k in row[1:7]] for row in np.asarray(again.object_type)[1:5]]
    assert read == [
        [".", "rock", "block", "door", "door", "key"],
        ["ball", "box", "floor", "switch", "unsteady", "door"],
        [".", ".", "kill_button", "pause_switch", "control_button", "disabling_switch"],
        ["lava", ".", ".", ".", ".", "."],
    ]
    assert np.asarray(again.object_state)[1, 4:6].tolist() == [2, 3]  # closed, locked
    assert np.asarray(again.object_color)[1, 4:6].tolist() == [4, 0]
    assert np.asarray(again.magic_wall_state)[3, 1:4].tolist() == [6, 4, 0]
    assert np.asarray(again.agent_color)[[1, 4, 4, 4], [1, 2, 3, 5]].tolist() == [4, 5, 7, 4]
