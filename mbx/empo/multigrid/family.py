"""Many maps in one program: the map is part of the state.

    family = make_family(layouts)                  # maps of one size with equally many agents
    world = family_world(family, numbers, people)  # episodes begin on a map of those numbers

A state is a `Situation`: a `Place`, which is the map as a compressed grid (`packed`, version 2)
with the humans' goals, and the `State` of what moves on it. `read_place` gives the layout back,
its places and colours as traced arrays, and everything known of a layout (rules, goals, shortest
ways, features) is computed from that. Maps with fewer rocks, doors, items, buttons or magic walls
than others have the missing ones in the corner (0, 0), which is wall and out of reach.

Axes: L maps, N agents (humans first), H humans, G goals, Y rows, X columns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import dynamics, packed
from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.compact import make_features
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout
from mbx.empo.multigrid.paths import make_paths
from mbx.empo.multigrid.render import make_render
from mbx.empo.multigrid.state import GONE, State, initial_state, make_board
from mbx.empo.multigrid.text import ACTIONS, make_text
from mbx.empo.power.named import HumanModel
from mbx.empo.power.worlds import Views, World
from mbx.types import Array

_SHARED = ("horizon", "stumble", "magic_entry", "magic_solidify", "magic_users", "drop")
_BOX = ITEMS.index("box")


class Place(NamedTuple):
    """A map in a state."""

    grid: Array  # int32 `[Y, X]`, the map as it is drawn, without its agents
    goals: Array  # int8 `[H, G, 4]` rectangles


class Situation(NamedTuple):
    """A map and what happens on it."""

    place: Place
    now: State


class Family(NamedTuple):
    """Maps that one program serves."""

    # a layout with as much of everything as any of the maps, of the same kinds. What it shares with
    # all of them: agents, kinds, goal weights, horizon and chances
    template: Layout
    # the maps with the missing things in the corner, agents humans first
    layouts: tuple[Layout, ...]
    places: Place  # `[L, ...]`
    starts: State  # `[L, ...]`


def make_family(layouts: Sequence[Layout], names: Sequence[str] = ()) -> Family:
    """Maps padded to one shape; names are for messages, by default numbers.

    Raises:
        ValueError: naming map, field and remedy, where maps differ in what has to be one: size,
            numbers of humans, robots and goals, goal weights, horizon, chances; where buttons of a
            kind have several triggers or targets; for boxes that hold something.
    """
    names = list(names) or [f"map {number + 1}" for number in range(len(layouts))]
    if not layouts:
        raise ValueError("there is no map: give at least one")
    for name, layout in zip(names, layouts, strict=True):
        _check(names[0], layouts[0], name, layout)
    counts = _counts(layouts, names)
    padded = tuple(_padded(layout, counts) for layout in layouts)
    unsteady = np.any([layout.unsteady for layout in padded], axis=0)
    sides = np.full(len(padded[0].magic), 4) if len(padded) > 1 else padded[0].magic_side
    template = padded[0]._replace(unsteady=unsteady, magic_side=sides.astype(np.int32))
    starts = jax.tree.map(lambda *x: jnp.stack(x), *(_start(layout) for layout in padded))
    return Family(template, padded, _places(template, padded, starts), starts)


def read_place(template: Layout, place: Place) -> Layout:
    """The layout of a place, its arrays traced where the place is."""
    f = packed.decode(place.grid)
    width = place.grid.shape[1]

    def cells(found: Array, num: int) -> Array:
        """The first `num` places in reading order; where there are fewer the corner."""
        flat = jnp.nonzero(found.ravel(), size=num, fill_value=0)[0]
        return jnp.stack([flat % width, flat // width], axis=-1).astype(jnp.int32)

    def at(field: Array, places: Array) -> Array:
        return field[places[:, 1], places[:, 0]]

    def of_kinds(kinds: np.ndarray, names: Sequence[str]) -> Array:
        """The places of things of several kinds, `kinds` of which are sorted."""
        each = [
            cells(f.object_type == packed.TYPES[name], int((kinds == number).sum()))
            for number, name in enumerate(names)
        ]
        return jnp.concatenate(each)

    doors = cells(f.object_type == packed.DOOR, len(template.doors))
    items = of_kinds(template.item_kind, ITEMS)
    magic = cells(f.magic_wall_state > 0, len(template.magic))
    there = doors[:, 0] > 0
    is_type = lambda name: f.object_type == packed.TYPES[name]  # noqa: E731
    return template._replace(
        wall=is_type("wall"),
        lava=is_type("lava"),
        unsteady=is_type("unsteady"),
        switch=is_type("switch"),
        floor=jnp.where(is_type("floor"), f.object_color, maps.NONE).astype(jnp.int8),
        movable=of_kinds((~template.heavy).astype(int), ("rock", "block")),
        doors=doors,
        door_state=jnp.where(there, at(f.object_state, doors) - 1, maps.OPEN),
        door_color=jnp.where(there, at(f.object_color, doors), 0),
        items=items,
        item_color=jnp.where(items[:, 0] > 0, at(f.object_color, items), 0),
        buttons=of_kinds(template.button_kind, BUTTONS),
        magic=magic,
        magic_side=jnp.where(magic[:, 0] > 0, at(f.magic_wall_state, magic) - 1, 0),
        goals=place.goals.astype(jnp.int32),
    )


def family_world(
    family: Family, numbers: Sequence[int] | np.ndarray, people: HumanModel, nu_h: float = 0.0
) -> World:
    """A world whose episodes begin on the maps of those numbers, each equally likely.
    people: who lives there; "auto" is shortest ways. nu_h: share of uniform actions in their prior.

    Raises:
        ValueError: for humans that need a list of states, and no maps.
    """
    if people.model in ("exact", "file"):
        raise ValueError(
            f"humans.model={people.model!r} needs a list of states, and worlds of many maps have "
            "none: choose paths, uniform or auto"
        )
    if not len(numbers):
        raise ValueError("a world of no maps: give at least one")
    template = family.template
    chosen = jnp.asarray(numbers, jnp.int32)
    begin = jax.tree.map(lambda x: x[chosen], Situation(family.places, family.starts))
    outcomes = dynamics.make_outcomes(template)
    num_humans, num_goals = template.goals.shape[:2]
    features, channels = make_features(family.template, family.places, family.starts)

    def successors(situation: Situation, joint: Array) -> tuple[Situation, Array, Array]:
        place, now = situation
        board = make_board(read_place(template, place))
        own = {name: getattr(board, name) for name in dynamics.OWN}
        states, prob = outcomes(own, now, joint)
        places = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(prob), *x.shape)), place)
        return Situation(places, states), prob, jnp.bool_(False)

    def achieved(situation: Situation) -> Array:
        layout = template._replace(goals=situation.place.goals.astype(jnp.int32))
        return dynamics.achieved(layout, situation.now)

    def init(key: Array) -> Situation:
        number = jax.random.randint(key, (), 0, len(chosen))
        return jax.tree.map(lambda x: x[number], begin)

    return World(
        num_humans=num_humans,
        num_robots=len(template.robots),
        num_actions=template.num_actions,
        num_goals=num_goals,
        max_successors=dynamics.make_bounds(template).total,
        num_states=None,
        example_state=jax.tree.map(lambda x: x[0], begin),
        init=init,
        successors=successors,
        terminal=lambda s: (s.now.time >= template.horizon) & (template.horizon > 0),
        achieved=achieved,
        human_policy=_policy(template, people, nu_h),
        features=lambda s: features(read_place(template, s.place), s.now),
        index=lambda situation: jnp.int32(0),
        goal_features=jnp.eye(num_humans * num_goals).reshape(num_humans, num_goals, -1),
        goal_weight=jnp.asarray(template.goal_weight, jnp.float32),
        channels=channels,
        scatter=lambda key: scatter(template, key, init(jax.random.fold_in(key, 0))),
        views=_views(template),
    )


def scatter(template: Layout, key: Array, situation: Situation) -> Situation:
    """The situation with agents on random empty cells, looking anywhere.
    Doors that are not locked are open or closed; and in every other draw rocks and blocks lie on
    random empty cells, too.
    """
    now, layout = situation.now, read_place(template, situation.place)
    cell_key, look_key, door_key, kept_key = jax.random.split(jax.random.fold_in(key, 1), 4)
    rows, columns = template.wall.shape
    number = jnp.arange(rows * columns).reshape(rows, columns)

    def on(places: Array) -> Array:
        code = places[:, 1].astype(jnp.int32) * columns + places[:, 0].astype(jnp.int32)
        return jnp.any(number[None] == code[:, None, None], axis=0)

    full = layout.wall | layout.lava | on(layout.doors) | on(layout.buttons) | on(layout.magic)
    full |= on(now.items)
    kept = jax.random.bernoulli(kept_key)
    full |= kept & on(now.movable)
    there = jnp.where(kept, False, now.movable[:, 0] > 0)
    score = jax.random.uniform(cell_key, (rows * columns,)) - full.ravel()
    num = len(template.agents)
    best = jax.lax.top_k(score, num + len(template.movable))[1]
    cells = jnp.stack([best % columns, best // columns], axis=-1).astype(jnp.int8)
    looks = jax.random.randint(look_key, (num, 1), 0, 4).astype(jnp.int8)
    shut = jax.random.bernoulli(door_key, 0.5, now.doors.shape)
    free = (now.doors != maps.LOCKED) & (layout.doors[:, 0] > 0)
    doors = jnp.where(free, jnp.where(shut, maps.CLOSED, maps.OPEN), now.doors)
    now = now._replace(
        agents=jnp.concatenate([cells[:num], looks], axis=1),
        movable=jnp.where(there[:, None], cells[num:], now.movable),
        doors=doors.astype(now.doors.dtype),
    )
    return situation._replace(now=now)


def _policy(template: Layout, people: HumanModel, nu_h: float) -> Callable[[Situation], Array]:
    """The prior of a situation, with the share `nu_h` of uniform actions."""
    actions = template.num_actions
    if people.model == "uniform":
        even = jnp.full((*template.goals.shape[:2], actions), 1.0 / actions)
        return lambda situation: even

    def policy(situation: Situation) -> Array:
        paths = make_paths(read_place(template, situation.place), people.beta)
        return (1.0 - nu_h) * paths(situation.now) + nu_h / actions

    return policy


def _check(first_name: str, first: Layout, name: str, layout: Layout) -> None:
    """Raises ValueError where a map is not of the first one's family."""

    def differ(what: str, own: Any, others: Any) -> None:
        if own != others:
            raise ValueError(
                f"{name} has {what} {own}, {first_name} {others}: maps of one run have the same, "
                "draw it again or leave it out"
            )

    rows, columns = layout.wall.shape
    differ("the size", f"{columns}x{rows}", "x".join(map(str, first.wall.shape[::-1])))
    differ("humans:", len(layout.humans), len(first.humans))
    differ("robots:", len(layout.robots), len(first.robots))
    differ("goals a human:", layout.goals.shape[1], first.goals.shape[1])
    rounded = lambda one: np.round(one.goal_weight, 6).tolist()  # noqa: E731
    differ("goal_weight", rounded(layout), rounded(first))
    for field in _SHARED:
        differ(field, getattr(layout, field), getattr(first, field))
    if (layout.item_box != maps.NONE).any():
        raise ValueError(
            f"{name} has a box that holds something, which no compressed grid shows: draw what it "
            "holds next to it"
        )


class _Counts(NamedTuple):
    """How many of each kind there are in the map that has most, and what buttons do."""

    rocks: int
    blocks: int
    doors: int
    items: tuple[int, ...]
    buttons: tuple[int, ...]
    magic: int
    roles: dict[int, tuple[int, int]]


def _counts(layouts: Sequence[Layout], names: Sequence[str]) -> _Counts:
    most = lambda each: max(int(each(one)) for one in layouts)  # noqa: E731
    roles: dict[int, tuple[int, int]] = {}
    for name, one in zip(names, layouts, strict=True):
        for kind, *role in zip(one.button_kind, one.button_trigger, one.button_target, strict=True):
            if roles.setdefault(int(kind), tuple(map(int, role))) != tuple(map(int, role)):
                raise ValueError(
                    f"{name} has a {BUTTONS[kind]} with another trigger or target than other maps: "
                    "in one run all of a kind do the same"
                )
    return _Counts(
        rocks=most(lambda one: one.heavy.sum()),
        blocks=most(lambda one: (~one.heavy).sum()),
        doors=most(lambda one: len(one.doors)),
        items=tuple(
            most(lambda one, k=kind: (one.item_kind == k).sum()) for kind in range(len(ITEMS))
        ),
        buttons=tuple(
            most(lambda one, k=kind: (one.button_kind == k).sum()) for kind in range(len(BUTTONS))
        ),
        magic=most(lambda one: len(one.magic)),
        roles=roles,
    )


def _sorted(places: np.ndarray, num: int, *values: np.ndarray) -> list[np.ndarray]:
    """Places in reading order with their values, the missing ones in the corner with values 0."""
    order = np.lexsort((places[:, 0], places[:, 1]))
    missing = num - len(places)
    padded = [np.concatenate([places[order], np.zeros((missing, 2), places.dtype)])]
    return padded + [np.concatenate([v[order], np.zeros(missing, v.dtype)]) for v in values]


def _by_kind(
    places: np.ndarray, kinds: np.ndarray, counts: Sequence[int], *values: np.ndarray
) -> list[np.ndarray]:
    """`_sorted` kind after kind; the kinds come second."""
    parts = []
    for kind, num in enumerate(counts):
        own = kinds == kind
        place, *rest = _sorted(places[own], num, *(v[own] for v in values))
        parts.append([place, np.full(num, kind, np.int32), *rest])
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _padded(layout: Layout, counts: _Counts) -> Layout:
    """The map with agents humans first, and everything else sorted and padded."""
    agents = np.concatenate([layout.humans, layout.robots])
    movable, light = _by_kind(
        layout.movable, (~layout.heavy).astype(np.int32), (counts.rocks, counts.blocks)
    )
    doors, state, color = _sorted(layout.doors, counts.doors, layout.door_state, layout.door_color)
    items, item_kind, item_color = _by_kind(
        layout.items, layout.item_kind, counts.items, layout.item_color
    )
    buttons, button_kind = _by_kind(layout.buttons, layout.button_kind, counts.buttons)
    magic, side = _sorted(layout.magic, counts.magic, layout.magic_side)
    role = np.array([counts.roles[int(kind)] for kind in button_kind], np.int32).reshape(-1, 2)
    return layout._replace(
        agents=layout.agents[agents],
        is_human=layout.is_human[agents],
        movable=movable,
        heavy=light == 0,
        doors=doors,
        door_state=state,
        door_color=color,
        items=items,
        item_kind=item_kind,
        item_color=item_color,
        item_box=np.full(len(items), maps.NONE, np.int32),
        buttons=buttons,
        button_kind=button_kind,
        button_trigger=role[:, 0],
        button_target=role[:, 1],
        magic=magic,
        magic_side=side,
    )


def _start(layout: Layout) -> State:
    """Where an episode starts, missing items gone."""
    start = jax.tree.map(np.asarray, initial_state(layout))
    gone = (layout.items == 0).all(axis=1, keepdims=True)
    items = np.where(gone, np.array([GONE, 0], np.int8), start.items)
    return start._replace(items=items.astype(np.int8))


# What of a layout a place holds.
_DRAWN = (
    "wall",
    "lava",
    "unsteady",
    "switch",
    "floor",
    "doors",
    "door_color",
    "item_color",
    "buttons",
    "magic",
    "magic_side",
)


def _places(template: Layout, layouts: Sequence[Layout], starts: State) -> Place:
    """`[L, ...]`."""
    drawn = {name: np.stack([getattr(one, name) for one in layouts]) for name in _DRAWN}
    nobody = jnp.full(template.wall.shape, packed.NOBODY, jnp.int32)

    def grid(own: dict[str, Array], start: State) -> Array:
        fields = packed.grid_fields(template._replace(**own), start)
        return packed.encode(fields._replace(agent_color=nobody))

    goals = np.stack([one.goals for one in layouts])
    return Place(jax.jit(jax.vmap(grid))(drawn, starts), jnp.asarray(goals, jnp.int8))


# What a text shows of a layout; the rest of it is the template's.
_SHOWN = ("wall", "lava", "unsteady", "switch", "floor", "doors", "buttons", "magic", "goals")


def _views(template: Layout) -> Views:
    """Pictures and text of a family's situations, each drawn by its own map."""
    num_humans, read = len(template.humans), functools.partial(read_place, template)
    shown = jax.jit(lambda place: {name: getattr(read(place), name) for name in _SHOWN})

    def text(situation: Situation, goals: Any = None) -> str:
        own = {name: np.asarray(x) for name, x in shown(situation.place).items()}
        return make_text(template._replace(**own))(situation.now, goals)

    return Views(
        render=lambda s, goals=None: make_render(read(s.place))(s.now, goals),
        positions=lambda situation: situation.now.agents[:num_humans, :2],
        size=template.wall.shape[::-1],
        blocked=np.zeros(template.wall.shape, bool),
        text=text,
        actions=ACTIONS[: template.num_actions],
        robots=lambda situation: situation.now.agents[num_humans:, :2],
        walls=lambda situation: read(situation.place).wall,
    )
