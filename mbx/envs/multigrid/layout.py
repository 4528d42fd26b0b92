"""Maps: text to arrays, every mistake told with its place.

    #  wall      .  floor     ~  lava: an agent that enters is out for the rest of the episode
    o  rock: pushed by robots alone      b  block: pushed by every agent
    D  closed door    L  locked door (opens for whoever carries a key)    k  key
    u  unsteady ground
    > v < ^  a human facing that way     1 2 3 4  a robot facing right, down, left, up

Actions are still, left, right, forward; a map with doors adds toggle, one with keys pick up.
Agents are numbered in reading order. Source: document 004's multigrid; which objects are left out
is said in `docs/empo.md`.
"""

from __future__ import annotations

import importlib.resources
from typing import Any, NamedTuple

import numpy as np

HUMANS, ROBOTS = ">v<^", "1234"
SYMBOLS = "#.~obDLku" + HUMANS + ROBOTS
DIRECTIONS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], np.int32)  # right, down, left, up
STILL, LEFT, RIGHT, FORWARD, TOGGLE, PICK_UP = range(6)
OPEN, CLOSED, LOCKED = range(3)


class Layout(NamedTuple):
    """A map: what never changes, and how an episode starts. Cells are (x, y), x to the right.

    wall, lava, unsteady: `[height, width]` bool. agents: `[N, 3]` x, y, direction; is_human `[N]`.
    movable: `[M, 2]`, heavy `[M]` (rocks: robots only). doors `[D, 2]`, door_state `[D]`. keys
    `[Q, 2]`. goals: `[H, G, 4]` rectangles x1, y1, x2, y2, both ends included; goal_weight
    `[H, G]`. horizon: steps of an episode. stumble: probability of a step off unsteady ground
    going astray.
    """

    wall: np.ndarray
    lava: np.ndarray
    unsteady: np.ndarray
    agents: np.ndarray
    is_human: np.ndarray
    movable: np.ndarray
    heavy: np.ndarray
    doors: np.ndarray
    door_state: np.ndarray
    keys: np.ndarray
    goals: np.ndarray
    goal_weight: np.ndarray
    horizon: int
    stumble: float

    @property
    def num_actions(self) -> int:
        """Actions of an agent: 4, with doors 5, with keys 6."""
        return 6 if len(self.keys) else 5 if len(self.doors) else 4

    @property
    def humans(self) -> np.ndarray:
        """Numbers of the agents that are human."""
        return np.flatnonzero(self.is_human)

    @property
    def robots(self) -> np.ndarray:
        """Numbers of the agents that are robots."""
        return np.flatnonzero(~self.is_human)


def parse_map(
    text: str,
    *,
    goals: Any,
    horizon: int,
    goal_weight: Any = None,
    stumble: float = 0.5,
) -> Layout:
    """A layout from a text map.

    goals: rectangles `[G, 4]`, the same for every human, or `[H, G, 4]`. goal_weight: `[H, G]` or
    `[G]`, positive, default equal; divided by its sum per human. Raises ValueError, naming line and
    column, for unknown symbols and ragged lines, and for maps without a human or a robot, an open
    border, goals outside the map or that no free cell lies in.
    """
    rows = text.strip("\n").splitlines()
    cells = _cells(rows)
    where = {symbol: np.argwhere(cells == symbol)[:, ::-1] for symbol in SYMBOLS}
    agents, is_human = _agents(cells)
    _check_border(cells)
    if horizon < 1:
        raise ValueError(f"horizon={horizon}: an episode needs at least one step")
    if not 0.0 <= stumble <= 1.0:
        raise ValueError(f"stumble={stumble}: a probability lies in [0, 1]")
    rectangles, weight = _goals(goals, goal_weight, int(is_human.sum()), cells)
    rocks, blocks = where["o"], where["b"]
    doors = np.concatenate([where["D"], where["L"]])
    return Layout(
        wall=cells == "#", lava=cells == "~", unsteady=cells == "u", agents=agents,
        is_human=is_human, movable=np.concatenate([rocks, blocks]).astype(np.int32),
        heavy=np.arange(len(rocks) + len(blocks)) < len(rocks), doors=doors.astype(np.int32),
        door_state=np.repeat([CLOSED, LOCKED], [len(where["D"]), len(where["L"])]).astype(np.int32),
        keys=where["k"].astype(np.int32), goals=rectangles, goal_weight=weight,
        horizon=int(horizon), stumble=float(stumble),
    )  # fmt: skip


def load_map(name: str) -> Layout:
    """A map that comes with the package, or a YAML file by its path.

    The file has the fields map, goals and horizon, and may have goal_weight and stumble. Raises
    ValueError for an unknown name and for missing or unknown fields.
    """
    import yaml

    folder = importlib.resources.files("mbx.envs.multigrid") / "maps"
    known = sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name[-5:] == ".yaml")
    if name in known:
        text = (folder / f"{name}.yaml").read_text()
    elif name.endswith(".yaml"):
        with open(name) as file:
            text = file.read()
    else:
        raise ValueError(f"map {name!r} is unknown: choose one of {known}, or give a .yaml file")
    fields = yaml.safe_load(text)
    wanted = {"map", "goals", "horizon"}
    allowed = wanted | {"goal_weight", "stumble"}
    if not isinstance(fields, dict) or not wanted <= fields.keys() <= allowed:
        raise ValueError(f"map {name!r} must have the fields {sorted(wanted)}, may have "
                         f"{sorted(allowed - wanted)}, and no others")  # fmt: skip
    return parse_map(fields.pop("map"), **fields)


def _cells(rows: list[str]) -> np.ndarray:
    if not rows:
        raise ValueError("the map is empty: draw at least one cell")
    for y, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"line {y + 1} of the map has {len(row)} cells, the first has {len(rows[0])}: make "
                "all lines equally long"
            )
        for x, symbol in enumerate(row):
            if symbol not in SYMBOLS:
                raise ValueError(
                    f"line {y + 1}, column {x + 1} of the map: {symbol!r} is unknown, choose one "
                    f"of {SYMBOLS!r}"
                )
    return np.array([list(row) for row in rows])


def _agents(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    found = [
        (x, y, (HUMANS + ROBOTS).index(symbol))
        for (y, x), symbol in np.ndenumerate(cells)
        if symbol in HUMANS + ROBOTS
    ]
    kinds = np.array([kind < len(HUMANS) for _, _, kind in found], bool)
    for some, name, symbols in ((kinds, "human", HUMANS), (~kinds, "robot", ROBOTS)):
        if not some.any():
            raise ValueError(f"the map has no {name}: place one of {symbols!r}")
    return np.array([(x, y, kind % 4) for x, y, kind in found], np.int32), kinds


def _check_border(cells: np.ndarray) -> None:
    border = np.concatenate([cells[0], cells[-1], cells[:, 0], cells[:, -1]])
    if (border != "#").any():
        raise ValueError("the map's border must be wall ('#') all around")


def _goals(
    goals: Any, goal_weight: Any, humans: int, cells: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    rectangles = np.asarray(goals, np.int32)
    if rectangles.ndim == 2:
        rectangles = np.broadcast_to(rectangles, (humans, *rectangles.shape))
    if rectangles.ndim != 3 or rectangles.shape[0] != humans or rectangles.shape[2] != 4:
        raise ValueError(
            f"goals have shape {np.shape(goals)}: give rectangles [G, 4] or [{humans}, G, 4]"
        )
    height, width = cells.shape
    for x1, y1, x2, y2 in rectangles.reshape(-1, 4):
        if not (0 <= x1 <= x2 < width and 0 <= y1 <= y2 < height):
            raise ValueError(
                f"goal {(int(x1), int(y1), int(x2), int(y2))} does not lie in the {width}x{height} "
                "map: give x1 <= x2 and y1 <= y2 inside it"
            )
        if (cells[y1 : y2 + 1, x1 : x2 + 1] == "#").all():
            raise ValueError(
                f"goal {(int(x1), int(y1), int(x2), int(y2))} is all wall and can never be reached"
            )
    weight = (
        np.ones(rectangles.shape[:2]) if goal_weight is None else np.asarray(goal_weight, float)
    )
    weight = np.broadcast_to(weight, rectangles.shape[:2])
    if (weight <= 0).any():
        raise ValueError(f"goal_weight={np.asarray(goal_weight).tolist()}: all must be positive")
    return np.array(rectangles), weight / weight.sum(axis=1, keepdims=True)
