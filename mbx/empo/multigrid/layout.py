"""Maps: text to arrays; every mistake is reported with its place.

Symbols: docs/empo_worlds.md and `objects`, whose legend gives further ones. Actions are still,
left, right, forward; toggle where something can be toggled; pick up and drop where something can be
carried. Agents are numbered in reading order. Source: docs/sources.md#empo."""

from __future__ import annotations

import importlib.resources
import inspect
import os
import warnings
from typing import Any, NamedTuple

import numpy as np

from mbx.empo.multigrid import objects, reference
from mbx.empo.multigrid.objects import BUTTONS, COLORS, GROUPS, HUMANS, ITEMS, ROBOTS
from mbx.empo.power.equations import PowerParams, check_params
from mbx.empo.power.named import HumanModel

DIRECTIONS = np.array([(1, 0), (0, 1), (-1, 0), (0, -1)], np.int32)  # right, down, left, up
STILL, LEFT, RIGHT, FORWARD, TOGGLE, PICK_UP, DROP = range(7)
OPEN, CLOSED, LOCKED = range(3)
NONE = -1  # no colour, no content
PUSHERS = (*GROUPS, "all", "nobody")
_WANTED = ("map", "goals", "horizon")


class Layout(NamedTuple):
    """A map: what never changes, and how an episode starts. Cells are (x, y), x to the right."""

    wall: np.ndarray  # `[height, width]` bool
    lava: np.ndarray  # `[height, width]` bool
    unsteady: np.ndarray  # `[height, width]` bool
    switch: np.ndarray  # `[height, width]` bool
    floor: np.ndarray  # `[height, width]`, its colour or NONE
    agents: np.ndarray  # `[N, 3]` x, y, direction
    is_human: np.ndarray  # `[N]`
    movable: np.ndarray  # `[M, 2]`, cells of blocks and rocks
    heavy: np.ndarray  # `[M]`, rocks: robots only push them
    doors: np.ndarray  # `[D, 2]`
    door_state: np.ndarray  # `[D]`
    door_color: np.ndarray  # `[D]`
    # `[Q, 2]`, cells of keys, balls and boxes; what a box holds has the box's cell
    items: np.ndarray
    item_kind: np.ndarray  # `[Q]`, of ITEMS
    item_color: np.ndarray  # `[Q]`, of COLORS
    item_box: np.ndarray  # `[Q]`, the box that holds it or NONE
    buttons: np.ndarray  # `[U, 2]`
    button_kind: np.ndarray  # `[U]`, of BUTTONS
    button_trigger: np.ndarray  # `[U]`, of GROUPS
    button_target: np.ndarray  # `[U]`, of GROUPS; of a disabling switch of BUTTONS
    magic: np.ndarray  # `[W, 2]`, cells of magic walls and bushes
    bush: np.ndarray  # `[W]`, which of them are bushes
    magic_side: np.ndarray  # `[W]`, of `objects.SIDES`
    goals: np.ndarray  # `[H, G, 4]` rectangles x1, y1, x2, y2, both ends included
    goal_weight: np.ndarray  # `[H, G]`
    goal_prob: np.ndarray | None  # `[H, G]`, how often goals are pursued; None: by their weights
    horizon: int  # steps of an episode, 0 for one without end
    stumble: float  # probability of a step off unsteady ground going astray
    magic_entry: float  # probability of being let through a magic wall, of a human through a bush
    magic_solidify: float  # of a refusal turning the wall into stone
    magic_users: str  # "humans", "robots" or "all"
    drop: bool  # whether what is carried can be put down
    rock_pushers: str  # of PUSHERS
    rocks_kill: bool  # whether rocks may be pushed onto agents that push none, who are out then
    physics: str  # "mbx" or "reference", see `dynamics`
    actions: int  # of an agent; 0: as many as the map has use for

    @property
    def num_actions(self) -> int:
        """Actions of an agent: 4, with things to toggle 5, with things to carry 6 or 7."""
        if self.actions:
            return self.actions
        if len(self.items):
            return 7 if self.drop else 6
        return 5 if len(self.doors) + len(self.buttons) else 4

    @property
    def humans(self) -> np.ndarray:
        """Numbers of the agents that are human."""
        return np.flatnonzero(self.is_human)

    @property
    def robots(self) -> np.ndarray:
        """Numbers of the agents that are robots."""
        return np.flatnonzero(~self.is_human)

    @property
    def may_enter_magic(self) -> np.ndarray:
        """`[N]` bool: the agents that magic walls let through."""
        return self._members(self.magic_users)

    @property
    def may_push(self) -> np.ndarray:
        """`[N]` bool: the agents that push rocks."""
        return self._members(self.rock_pushers)

    def _members(self, group: str) -> np.ndarray:
        none = np.zeros(len(self.agents), bool)
        return {"humans": self.is_human, "robots": ~self.is_human, "all": ~none}.get(group, none)


# A map, with the parameters and the humans that its file gives.
Described = tuple[Layout, PowerParams | None, HumanModel | None]


def parse_map(
    text: str,
    *,
    goals: Any,
    horizon: int,
    goal_weight: Any = None,
    goal_prob: Any = None,
    stumble: float = 0.5,
    legend: Any = None,
    drop: bool = True,
    magic_entry: float = 0.5,
    magic_solidify: float = 0.0,
    magic_users: str = "humans",
    rock_pushers: str = "robots",
    rocks_kill: bool = False,
    physics: str = "mbx",
    actions: int = 0,
    unreachable: str = "refuse",
) -> Layout:
    """A layout from a text map.
    goals: rectangles `[G, 4]`, the same for every human, or `[H, G, 4]`; or {random: G, seed: 0},
    rectangles with corners drawn evenly, different for every human; goal_weight: `[H, G]` or `[G]`,
    positive, or "area", default equal, divided by its sum per human; goal_prob: likewise, default
    as goal_weight; legend: see `objects`;
    unreachable: "refuse" goals that can never be reached, or "keep" them with a warning; the
    others: see `Layout`.
    Raises ValueError naming line and column, for unknown symbols and ragged lines, and for maps
    without a human or a robot, an open border, goals outside the map or out of a human's reach, and
    impossible numbers.
    """
    symbols = objects.read_legend({} if legend is None else legend)
    cells = _cells(text.strip("\n").splitlines(), "".join(symbols) + HUMANS + ROBOTS)
    things = {kind: [] for kind in objects.OPTIONS}
    for (y, x), symbol in np.ndenumerate(cells):
        if symbol in symbols:
            things[symbols[symbol]["type"]].append((x, y, symbols[symbol]))
    agents, is_human = _agents(cells)
    chances = {"stumble": stumble, "magic_entry": magic_entry, "magic_solidify": magic_solidify}
    masks = {kind: np.zeros(cells.shape, bool) for kind in ("wall", "lava", "unsteady", "switch")}
    for kind, mask in masks.items():
        for x, y, _ in things[kind]:
            mask[y, x] = True
    _check_numbers(horizon, chances, masks["wall"])
    words = {
        "magic_users": (magic_users, (*GROUPS, "all")),
        "rock_pushers": (rock_pushers, PUSHERS),
        "physics": (physics, ("mbx", "reference")),
        "actions": (actions, (0, 4, 5, 6, 7)),
        "unreachable": (unreachable, ("refuse", "keep")),
    }
    for name, (value, choices) in words.items():
        if value not in choices:
            raise ValueError(f"{name}={value!r}: choose one of {choices}")
    rectangles = _goals(goals, int(is_human.sum()), masks["wall"])
    weight = _shares("goal_weight", goal_weight, rectangles)
    floor = np.full(cells.shape, NONE, np.int8)
    for x, y, spec in things["floor"]:
        floor[y, x] = COLORS.index(spec["color"])
    layout = Layout(
        **masks,
        floor=floor,
        agents=agents,
        is_human=is_human,
        **_things(things),
        goals=rectangles,
        goal_weight=weight,
        goal_prob=None if goal_prob is None else _shares("goal_prob", goal_prob, rectangles),
        horizon=horizon,
        **chances,
        magic_users=magic_users,
        drop=drop,
        rock_pushers=rock_pushers,
        rocks_kill=rocks_kill,
        physics=physics,
        actions=actions,
    )
    _check_reach(layout, unreachable == "keep")
    return layout


def load_map(name: str) -> Layout:
    """The map alone of `load_world`."""
    return load_world(name)[0]


def load_world(name: str) -> Described:
    """A map that comes with the package, or a YAML file by its path.
    The file has the fields map, goals and horizon, and may have the others of `parse_map` (or it is
    one of the reference's, see `reference`); and `power` and `humans`, else these are None.
    Raises ValueError for an unknown name, missing or unknown fields, and impossible values. Raises
    FileNotFoundError for a path where nothing is.
    """
    folder = importlib.resources.files("mbx.empo.multigrid") / "maps"
    known = sorted(p.name.removesuffix(".yaml") for p in folder.iterdir() if p.name[-5:] == ".yaml")
    if name in known:
        documents = _documents(name, (folder / f"{name}.yaml").read_text())
    elif name.endswith(".yaml"):
        documents = _documents(name, _text(name))
    else:
        raise ValueError(f"map {name!r} is unknown: choose one of {known}, or give a .yaml file")
    if len(documents) > 1:
        raise ValueError(f"map {name!r} has {len(documents)} maps: for many, name it empo:maps/…")
    return _world(name, documents[0])


def read_worlds(path: str) -> list[Described]:
    """The maps of a YAML file, one or several with a line `---` between them; see `load_world`."""
    return [_world(path, fields) for fields in _documents(path, _text(path))]


def _text(path: str) -> str:
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"map {path!r}: there is no such file in {os.getcwd()}: fix the path"
        )
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()


def _documents(name: str, text: str) -> list[Any]:
    """The fields of each map in a file; [None] where there is none."""
    import yaml

    try:
        return [fields for fields in yaml.safe_load_all(text) if fields is not None] or [None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ValueError(f"map {name!r} is no YAML: {reason}") from error


def _world(name: str, fields: Any) -> Described:
    """The map that a file's fields describe, ours or the reference's."""
    try:
        fields = reference.convert(fields)
    except ValueError as error:
        raise ValueError(f"map {name!r}: {error}") from error
    except (TypeError, StopIteration) as error:  # the latter of more things than letters
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"map {name!r}: a field is not of its kind ({reason})") from error
    options = {*inspect.signature(parse_map).parameters, "power", "humans"} - {"text", *_WANTED}
    if not isinstance(fields, dict) or not set(_WANTED) <= fields.keys() <= {*_WANTED, *options}:
        raise ValueError(
            f"map {name!r} must have the fields {sorted(_WANTED)}, may have {sorted(options)}, and "
            "no others"
        )
    try:
        params = _section("power", PowerParams, fields.pop("power", None))
        humans = _section("humans", HumanModel, fields.pop("humans", None))
        if params is not None:
            check_params(params)
        if humans is not None and humans.network:
            raise ValueError("humans.network is a setting of a run, which keeps a copy of the file")
        return parse_map(fields.pop("map"), **fields), params, humans
    except ValueError as error:
        raise ValueError(f"map {name!r}: {error}") from error
    except (TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"map {name!r}: a field is not of its kind ({reason})") from error


def _section(section: str, kind: Any, values: Any) -> Any:
    """A section of a map's file as its type; None where there is none."""
    if values is None:
        return None
    defaults = {name: field.default for name, field in inspect.signature(kind).parameters.items()}
    if not isinstance(values, dict) or not set(values) <= set(defaults):
        raise ValueError(f"{section}={values!r}, choose among {tuple(defaults)}")
    for field, value in values.items():
        if isinstance(value, str) != isinstance(defaults[field], str):
            raise ValueError(f"{section}.{field}={value!r} has the wrong type")
    return kind(**values)


def reachable(layout: Layout, agent: int) -> np.ndarray:
    """`[height, width]` bool: where an agent might get if everything that can move or open did."""
    closed = layout.wall | layout.lava
    keys = layout.item_color[layout.item_kind == ITEMS.index("key")]
    locked = (layout.door_state == LOCKED) & ~np.isin(layout.door_color, keys)
    enters = layout.may_enter_magic[agent] and layout.magic_entry > 0.0
    magic = layout.magic[~layout.bush & (not enters)]
    x, y = np.concatenate([layout.buttons, magic, layout.doors[locked]]).T
    closed[y, x] = True
    x, y, _ = layout.agents[agent]
    found, grown = np.zeros_like(closed), np.zeros_like(closed)
    grown[y, x] = True
    while (grown != found).any():
        found = grown
        steps = [np.roll(found, by, axis) for by in (1, -1) for axis in (0, 1)]  # walls all around
        grown = (found | np.any(steps, axis=0)) & ~closed
    return found


def _cells(rows: list[str], symbols: str) -> np.ndarray:
    if not rows:
        raise ValueError("the map is empty: draw at least one cell")
    for y, row in enumerate(rows):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"line {y + 1} of the map has {len(row)} cells, the first has {len(rows[0])}: make "
                "all lines equally long"
            )
        for x, symbol in enumerate(row):
            if symbol not in symbols:
                raise ValueError(
                    f"line {y + 1}, column {x + 1} of the map: {symbol!r} is unknown, choose one "
                    f"of {symbols!r} or explain it in the legend"
                )
    return np.array([list(row) for row in rows])


def _places(found: list) -> np.ndarray:
    return np.array([(x, y) for x, y, _ in found], np.int32).reshape(-1, 2)


def _numbers(found: list, option: str, names: tuple[str, ...]) -> np.ndarray:
    return np.array([names.index(spec[option]) for *_, spec in found], np.int32)


def _things(found: dict[str, list]) -> dict[str, np.ndarray]:
    """What lies on the map: places, kinds and options."""
    rocks, blocks, magic = found["rock"], found["block"], found["magic_wall"]
    # Closed ones first: so they are numbered.
    doors = sorted(found["door"], key=lambda door: objects.DOOR_STATES.index(door[2]["state"]))
    items = [thing for kind in ITEMS for thing in found[kind]]
    held = [
        (box, (x, y, spec["holds"])) for box, (x, y, spec) in enumerate(items) if spec.get("holds")
    ]
    inside = [NONE] * len(items) + [box for box, _ in held]
    items += [thing for _, thing in held]
    buttons = [thing for kind in BUTTONS[:-1] for thing in found[kind]]
    targets = [
        _numbers(buttons, "target", GROUPS),
        _numbers(found["disabling_switch"], "target", BUTTONS),
    ]
    buttons += found["disabling_switch"]
    return dict(
        movable=_places(rocks + blocks),
        heavy=np.arange(len(rocks) + len(blocks)) < len(rocks),
        doors=_places(doors),
        door_state=_numbers(doors, "state", objects.DOOR_STATES),
        door_color=_numbers(doors, "color", COLORS),
        items=_places(items),
        item_kind=_numbers(items, "type", ITEMS),
        item_color=_numbers(items, "color", COLORS),
        item_box=np.array(inside, np.int32),
        buttons=_places(buttons),
        button_kind=_numbers(buttons, "type", BUTTONS),
        button_trigger=_numbers(buttons, "trigger", GROUPS),
        button_target=np.concatenate(targets),
        magic=_places(magic + found["bush"]),
        bush=np.arange(len(magic) + len(found["bush"])) >= len(magic),
        magic_side=np.concatenate(
            [_numbers(magic, "side", objects.SIDES), np.full(len(found["bush"]), 4, np.int32)]
        ),
    )


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


def _check_numbers(horizon: int, chances: dict[str, float], wall: np.ndarray) -> None:
    if horizon < 0:
        raise ValueError(f"horizon={horizon}: steps of an episode, or 0 for one without end")
    for name, value in chances.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name}={value}: give a probability, 0 to 1")
    if not np.concatenate([wall[0], wall[-1], wall[:, 0], wall[:, -1]]).all():
        raise ValueError("the map's border must be wall ('#') all around")


def _check_reach(layout: Layout, keep: bool) -> None:
    for human, rectangles in zip(layout.humans, layout.goals, strict=True):
        free = reachable(layout, human)
        lost = [
            (x1, y1, x2, y2)
            for x1, y1, x2, y2 in rectangles.tolist()
            if not free[y1 : y2 + 1, x1 : x2 + 1].any()
        ]
        if lost:
            x, y, _ = layout.agents[human]
            what = (
                f"goal {lost[0]} can never be reached by the human at column {x + 1}, "
                f"line {y + 1} of the map, whatever is opened or moved"
            )
            if not keep:
                raise ValueError(f"{what}: change goal or map")
            warnings.warn(f"{what}, nor {len(lost) - 1} others: V_h^e is 0 there", stacklevel=3)


def _goals(goals: Any, humans: int, wall: np.ndarray) -> np.ndarray:
    height, width = wall.shape
    if isinstance(goals, dict):
        if goals.keys() - {"random", "seed"} or int(goals.get("random", 0)) < 1:
            raise ValueError(f"goals={goals}: give rectangles, or {{random: NUMBER, seed: 0}}")
        rng, found = np.random.default_rng(goals.get("seed", 0)), []
        while len(found) < humans * int(goals["random"]):  # corners, of boxes that are not all wall
            (x1, x2), (y1, y2) = (np.sort(rng.integers(1, n - 1, 2)) for n in (width, height))
            if not wall[y1 : y2 + 1, x1 : x2 + 1].all():
                found.append((x1, y1, x2, y2))
        goals = np.reshape(found, (humans, -1, 4))
    rectangles = np.asarray(goals, np.int32)
    if rectangles.ndim == 2:
        rectangles = np.broadcast_to(rectangles, (humans, *rectangles.shape))
    if rectangles.ndim != 3 or rectangles.shape[0] != humans or rectangles.shape[2] != 4:
        raise ValueError(
            f"goals have shape {np.shape(goals)}: give rectangles [G, 4] or [{humans}, G, 4]"
        )
    for x1, y1, x2, y2 in rectangles.reshape(-1, 4):
        if not (0 <= x1 <= x2 < width and 0 <= y1 <= y2 < height):
            raise ValueError(
                f"goal {(int(x1), int(y1), int(x2), int(y2))} is outside the {width}x{height} "
                "map: give x1 <= x2 and y1 <= y2 inside it"
            )
    return np.array(rectangles)


def _shares(name: str, given: Any, rectangles: np.ndarray) -> np.ndarray:
    """Numbers of goals, equal by default, or their areas; divided by their sum per human."""
    x1, y1, x2, y2 = np.moveaxis(rectangles, -1, 0)
    given = (x2 - x1 + 1) * (y2 - y1 + 1) if given == "area" else 1 if given is None else given
    shares = np.broadcast_to(np.asarray(given, float), rectangles.shape[:2])
    if (shares <= 0).any():
        raise ValueError(f"{name}={np.asarray(given).tolist()}: all must be positive")
    return shares / shares.sum(axis=1, keepdims=True)
