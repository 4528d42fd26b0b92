"""Maps of the reference's multigrid (docs/sources.md#empo), as the fields of ours.

Yellow agents are humans and grey ones robots. Magic walls become walls, since no agent of its maps
enters them, and goal cells coloured floor. There, pick up and drop come before toggle."""

from __future__ import annotations

import string
from typing import Any

from mbx.empo.multigrid.objects import HUMANS, ROBOTS, SYMBOLS

_COLORS = {"r": "red", "g": "green", "b": "blue", "p": "purple", "y": "yellow", "e": "grey"}
_HEADINGS = "eswn"
_FIXED: dict[str, dict[str, str]] = {
    **{"..": {"type": "empty"}, "Bl": {"type": "block"}, "Ro": {"type": "rock"}},
    **{"La": {"type": "lava"}, "Sw": {"type": "switch"}, "Un": {"type": "unsteady"}},
    **{"Bu": {"type": "bush"}, "CB": {"type": "control_button"}},
    **dict.fromkeys(("Kb", "Ki"), {"type": "kill_button"}),
    **dict.fromkeys(("Ps", "Pa"), {"type": "pause_switch"}),
    **dict.fromkeys(("Dk", "dK"), {"type": "disabling_switch"}),
    **dict.fromkeys(("Dp", "dP"), {"type": "disabling_switch", "target": "pause_switch"}),
    **dict.fromkeys(("DC", "dC"), {"type": "disabling_switch", "target": "control_button"}),
    **dict.fromkeys(("Mn", "Ms", "Mw", "Me", "Ma"), {"type": "wall"}),
}
_COLORED = {
    **{"W": {"type": "wall"}, "K": {"type": "key"}, "B": {"type": "ball"}, "X": {"type": "box"}},
    **{"G": {"type": "floor"}, "O": {"type": "door", "state": "open"}},
    **{"C": {"type": "door", "state": "closed"}, "L": {"type": "door", "state": "locked"}},
}
# What makes its agents have seven actions instead of four; a kill button alone does not.
_HANDS = {"key", "ball", "box", "door", "pause_switch", "disabling_switch", "control_button"}
_ACTIONS = {"SmallActions": 4, "ObjectActions": 7, "Actions": 0}
_READ = {"map", "max_steps", "possible_goals", "orientations", "can_push_rocks", "rocks_can_kill"}
_READ |= {"stumble_probability", "trample_probability", "action_class"}
# Nothing that happens depends on these.
_IGNORED = {"metadata", "seed", "partial_obs", "agent_view_size", "see_through_walls"}
_IGNORED |= {"grid_size", "width", "height", "solidify_probability"}
_CLOSED = {"wall", "lava", "kill_button", "pause_switch", "disabling_switch", "control_button"}


def convert(fields: Any) -> Any:
    """The fields of a map file of ours for one of the reference's; others come back as they are.
    Goals that it does not give are all cells that somebody may stand on, as in most of its maps.
    Raises ValueError, naming the field or the line and column, for what cannot be represented.
    """
    if not isinstance(fields, dict) or "map" not in fields or "goals" in fields:
        return fields
    known, unknown = _READ | _IGNORED, fields.keys() - _READ - _IGNORED
    if not known & fields.keys() - {"map"}:
        return fields
    if unknown:
        raise ValueError(f"{sorted(unknown)}: a map of the reference may have {sorted(known)}")
    rows, kinds, legend = _rows(fields["map"], fields.get("orientations", 0))
    names = fields.get("action_class", "Actions")
    if names not in _ACTIONS:
        raise ValueError(f"action_class={names!r}: choose one of {tuple(_ACTIONS)}")
    closed = {s for s, spec in (SYMBOLS | legend).items() if spec["type"] in _CLOSED}
    cells = [(x, y, symbol) for y, row in enumerate(rows) for x, symbol in enumerate(row)]
    every = [[x, y, x, y] for x, y, symbol in cells if symbol not in closed]
    return {
        "map": "\n".join(rows) + "\n",
        "goals": [_goal(goal) for goal in fields.get("possible_goals") or every],
        "horizon": fields.get("max_steps", 100),
        "legend": legend,
        "stumble": fields.get("stumble_probability", 0.5),
        "magic_entry": fields.get("trample_probability", 0.7),
        "rock_pushers": _pushers(fields.get("can_push_rocks", "e")),
        "rocks_kill": bool(fields.get("rocks_can_kill", False)),
        "physics": "reference",
        "actions": _ACTIONS[names] or (7 if kinds & _HANDS else 4),
        "unreachable": "keep",
    }


def _rows(text: Any, orientations: Any) -> tuple[list[str], set[str], dict[str, dict[str, str]]]:
    """The map in our symbols, the kinds on it, and the legend that the symbols need."""
    lines = text.strip().split("\n") if isinstance(text, str) else text
    if not isinstance(lines, list):
        raise ValueError(f"map={text!r}: give lines of two-letter cells")
    headings = _directions(orientations)
    rows, kinds, legend, agents = [], set(), {}, 0
    free = iter(s for s in string.ascii_letters if s not in {*SYMBOLS, *HUMANS, *ROBOTS})
    for y, line in enumerate(lines, 1):
        row, joined = "", "".join("".join(line).split())
        for x in range(0, len(joined), 2):
            cell, where = joined[x : x + 2], f"line {y}, column {x // 2 + 1} of the map"
            if cell in ("Ay", "Ae"):
                heading = headings[agents] if agents < len(headings) else 0
                agents, row = agents + 1, row + (HUMANS if cell == "Ay" else ROBOTS)[heading]
                continue
            spec = _FIXED.get(cell) or _colored(cell, where)
            kinds.add(spec["type"])
            same = [s for s, own in (SYMBOLS | legend).items() if own == spec]
            row += same[0] if same else next(free)
            legend |= {} if same else {row[-1]: spec}
        rows.append(row)
    return rows, kinds, legend


def _colored(cell: str, where: str) -> dict[str, str]:
    """What a kind and a colour stand for."""
    if cell[:1] == "A":
        raise ValueError(f"{where}: agent {cell!r} is neither yellow (Ay) nor grey (Ae)")
    if cell[:1] not in _COLORED or cell[1:] not in _COLORS:
        raise ValueError(f"{where}: {cell!r} is no kind of cell that is known here")
    spec = _COLORED[cell[0]]
    return spec if spec["type"] == "wall" else spec | {"color": _COLORS[cell[1]]}


def _directions(orientations: Any) -> list[int]:
    """One direction an agent; an agent that has none looks right."""
    given = orientations if isinstance(orientations, list) else [orientations] * 99
    for one in given:
        if one not in (0, 1, 2, 3, *_HEADINGS):
            raise ValueError(f"orientations={orientations!r}: 0 to 3 or letters of {_HEADINGS!r}")
    return [_HEADINGS.index(one) if isinstance(one, str) else one for one in given]


def _pushers(codes: Any) -> str:
    """Who pushes rocks, by the colours of agents."""
    wrong = set(codes or "") - _COLORS.keys()
    if wrong:
        raise ValueError(f"can_push_rocks={codes!r}: letters of {''.join(_COLORS)!r}")
    groups = {"ye": "all", "y": "humans", "e": "robots", "": "nobody"}
    return groups["".join(c for c in "ye" if c in (codes or ""))]


def _goal(given: Any) -> list[int]:
    """A cell or a rectangle, as text or as one or two lists, as x1, y1, x2, y2."""
    try:
        parts = given.split(",") if isinstance(given, str) else [*given]
        if len(parts) == 2 and all(isinstance(part, list) for part in parts):
            parts = parts[0] + parts[1]
        x1, y1, x2, y2 = [int(part) for part in parts] * (2 if len(parts) == 2 else 1)
    except (TypeError, ValueError) as error:
        raise ValueError(f"possible_goals has {given!r}: give x,y or x1,y1,x2,y2") from error
    return [min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2)]
