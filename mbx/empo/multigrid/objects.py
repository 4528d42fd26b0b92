"""What may lie on a map: kinds of objects, their options, colours, and the symbols they have.

A legend gives further symbols in the words of `OPTIONS`, B: {type: box, holds: {type: key}} say.
Kinds and colours are the reference's (docs/sources.md#empo), numbered as there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLORS = ("red", "green", "blue", "purple", "yellow", "grey", "brown")
GROUPS = ("humans", "robots")
ITEMS = ("key", "ball", "box")  # may be picked up and dropped
BUTTONS = ("kill_button", "pause_switch", "control_button", "disabling_switch")
SIDES = ("right", "down", "left", "up", "all")
DOOR_STATES = ("open", "closed", "locked")
HUMANS, ROBOTS = ">v<^", "1234"  # facing right, down, left, up

# The options of each kind with their defaults, in the order of the built-in symbols.
OPTIONS: dict[str, dict[str, Any]] = {
    **{"empty": {}, "wall": {}, "lava": {}, "unsteady": {}},
    "floor": {"color": "blue"},
    **{"switch": {}, "rock": {}, "block": {}},
    "door": {"color": "yellow", "state": "closed"},
    "key": {"color": "yellow"},
    "ball": {"color": "green"},
    "box": {"color": "purple", "holds": None},
    "magic_wall": {"side": "all"},
    "bush": {},
    **{kind: {"trigger": "humans", "target": "robots"} for kind in BUTTONS[:3]},
    "disabling_switch": {"trigger": "robots", "target": "kill_button"},
}

SYMBOLS: dict[str, dict[str, Any]] = {
    symbol: {"type": kind} for symbol, kind in zip(".#~u,sobDk*xm&KPCX", OPTIONS, strict=True)
} | {"L": {"type": "door", "state": "locked"}}

_CHOICES = {"color": COLORS, "state": DOOR_STATES, "side": SIDES, "trigger": GROUPS}


def read_legend(legend: Any) -> dict[str, dict[str, Any]]:
    """Every symbol's object with all its options, the legend's added to the built-in ones.
    Raises ValueError, naming the symbol and what is allowed, for a wrong entry.
    """
    if not isinstance(legend, Mapping):
        raise ValueError(f"legend={legend!r}: give a mapping of one symbol to one object each")
    for symbol in legend:
        if not (isinstance(symbol, str) and len(symbol) == 1) or symbol in HUMANS + ROBOTS + " ":
            raise ValueError(
                f"legend has the symbol {symbol!r}: one character, and none of {HUMANS + ROBOTS!r}"
            )
    return {symbol: _read(symbol, spec) for symbol, spec in {**SYMBOLS, **legend}.items()}


def _read(symbol: str, spec: Any) -> dict[str, Any]:
    kind = spec.get("type") if isinstance(spec, Mapping) else None
    if kind not in OPTIONS:
        raise ValueError(f"legend {symbol!r} has type {kind!r}: choose one of {tuple(OPTIONS)}")
    unknown = set(spec) - {"type", *OPTIONS[kind]}
    if unknown:
        raise ValueError(
            f"legend {symbol!r} gives {sorted(unknown)}: a {kind} has {sorted(OPTIONS[kind])}"
        )
    result = {"type": kind, **OPTIONS[kind], **{k: v for k, v in spec.items() if k != "type"}}
    allowed = dict(_CHOICES)
    allowed["target"] = BUTTONS[:3] if kind == "disabling_switch" else GROUPS
    for name, choices in allowed.items():
        if name in result and result[name] not in choices:
            raise ValueError(f"legend {symbol!r}: {name}={result[name]!r}, choose one of {choices}")
    if kind == "control_button" and result["trigger"] == result["target"]:
        raise ValueError(f"legend {symbol!r}: trigger and target are both {result['target']}")
    if result.get("holds") is not None:
        result["holds"] = _read(symbol, result["holds"])
        if result["holds"]["type"] not in ("key", "ball"):
            raise ValueError(
                f"legend {symbol!r}: a box cannot hold a {result['holds']['type']}, only a key or "
                "a ball"
            )
    return result
