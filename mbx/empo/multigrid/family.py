"""Many maps in one program, a generator's or a folder's: the map is part of the state.

A state is a `Situation`: a `Place`, which is the map as a compressed grid (`packed`)
with the humans' goals, and the `State` of what moves on it. `read_place` gives the layout back, its
places and colours traced. What other maps have and one lacks lies in its corner (0, 0), which is
wall and out of reach. Axes: L maps, N agents (humans first), H humans, G goals, Y, X cells."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import dynamics, packed
from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.compact import make_features, used_channels, with_closeness
from mbx.empo.multigrid.generate import generate
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout, read_worlds
from mbx.empo.multigrid.paths import on
from mbx.empo.multigrid.state import GONE, State, board_arrays, initial_state
from mbx.empo.multigrid.world import grid_world, make_prior, make_views
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.named import HumanModel, NamedWorld
from mbx.empo.power.worlds import World
from mbx.types import Array

SHARED = ("horizon", "stumble", "magic_entry", "magic_solidify", "magic_users", "drop")
SHARED += ("rock_pushers", "rocks_kill", "physics", "actions")
# What lies on a map, with the values that each thing has of its own.
_VALUES: dict[str, tuple[str, ...]] = {
    "movable": (),
    "doors": ("door_state", "door_color"),
    "items": ("item_color",),
    "buttons": (),
    "magic": ("magic_side",),
}


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

    template: Layout  # with as much of everything as any map; agents, kinds, chances are all maps'
    layouts: tuple[Layout, ...]  # with the missing things in the corner, agents humans first
    places: Place  # `[L, ...]`
    starts: State  # `[L, ...]`


def make_family(layouts: Sequence[Layout], names: Sequence[str] = ()) -> Family:
    """Maps padded to one shape; names are for messages, by default numbers.
    Raises ValueError naming map, field and remedy, where maps differ in what has to be one, or
    buttons of a kind have several triggers or targets, and for boxes that hold something.
    """
    names = list(names) or [f"map {number + 1}" for number in range(len(layouts))]
    if not layouts:
        raise ValueError("there is no map: give at least one")
    for name, layout in zip(names, layouts, strict=True):
        _check(names[0], layouts[0], name, layout)
    roles, kinds = _roles(layouts, names), [_kinds(layout) for layout in layouts]
    most = {
        thing: np.max([np.bincount(each[thing], minlength=4) for each in kinds], axis=0)
        for thing in _VALUES
    }
    padded = tuple(_padded(layout, most, roles) for layout in layouts)
    template = padded[0]._replace(unsteady=np.any([one.unsteady for one in padded], axis=0))
    if len(padded) > 1:
        template = template._replace(magic_side=np.full(len(template.magic), 4, np.int32))
    starts = jax.tree.map(lambda *x: jnp.stack(x), *(_start(layout) for layout in padded))
    return Family(template, padded, _places(template, padded, starts), starts)


def read_fields(template: Layout, place: Place) -> dict[str, Array]:
    """The fields of a place's layout in which it may differ from others."""
    f = packed.decode(place.grid)
    is_type = lambda name: f.object_type == packed.TYPES[name]  # noqa: E731

    def cells(*found: tuple[Array, Any]) -> tuple[Array, Array]:
        """Of each mask the first so many places in reading order, where there are fewer the
        corner; and which of them are no corner.
        """
        flat = [jnp.nonzero(x.ravel(), size=int(n), fill_value=0)[0] for x, n in found]
        y, x = jnp.divmod(jnp.concatenate(flat), place.grid.shape[1])
        return jnp.stack([x, y], axis=-1).astype(jnp.int32), x > 0

    def of_kinds(kinds: np.ndarray, names: Sequence[str]) -> tuple[Array, Array]:
        """The places of things of several kinds, `kinds` of which are sorted."""
        return cells(*((is_type(name), (kinds == k).sum()) for k, name in enumerate(names)))

    def values(field: Array, places: tuple[Array, Array], missing: int = 0) -> Array:
        where, there = places
        return jnp.where(there, field[where[:, 1], where[:, 0]], missing)

    doors = cells((is_type("door"), len(template.doors)))
    items = of_kinds(template.item_kind, ITEMS)
    magic = cells((f.magic_wall_state > 0, len(template.magic)))
    return dict(
        **{name: is_type(name) for name in ("wall", "lava", "unsteady", "switch")},
        floor=jnp.where(is_type("floor"), f.object_color, maps.NONE).astype(jnp.int8),
        movable=of_kinds(~template.heavy, ("rock", "block"))[0],
        doors=doors[0],
        door_state=values(f.object_state - 1, doors, maps.OPEN),
        door_color=values(f.object_color, doors),
        items=items[0],
        item_color=values(f.object_color, items),
        buttons=of_kinds(template.button_kind, BUTTONS)[0],
        magic=magic[0],
        magic_side=values(f.magic_wall_state - 1, magic),
        goals=place.goals.astype(jnp.int32),
    )


def read_place(template: Layout, place: Place) -> Layout:
    """The layout of a place, its arrays traced where the place is."""
    return template._replace(**read_fields(template, place))


def family_world(
    family: Family, numbers: Any, people: HumanModel, params: PowerParams | None = None
) -> World:
    """A world whose episodes begin on the maps of those numbers, each equally likely.
    people: who lives there; "auto" is shortest ways. params: None for the theory's defaults.
    Raises ValueError for humans that need a list of states, and no maps; and as `learned.load`.
    """
    if people.model == "exact":
        raise ValueError(
            "humans.model='exact' needs a list of states, and worlds of many maps have "
            "none: choose paths, uniform, learned or auto"
        )
    if not len(numbers):
        raise ValueError("a world of no maps: give at least one")
    params, template = params or PowerParams(), family.template
    chosen = jnp.asarray(numbers, jnp.int32)
    begin = jax.tree.map(lambda x: x[chosen], Situation(family.places, family.starts))
    outcomes = dynamics.make_outcomes(template)
    plain, channels = make_features(template, used_channels(family.places))
    features, of_goals = with_closeness(template, plain)
    fields = jax.jit(lambda place: read_fields(template, place))
    goals = int(np.prod(template.goals.shape[:2]))

    def read(situation: Situation) -> tuple[Layout, State]:
        return template._replace(**fields(situation.place)), situation.now

    def successors(situation: Situation, joint: Array) -> tuple[Situation, Array, Array]:
        layout, now = read(situation)
        states, prob = outcomes(board_arrays(layout), now, joint)
        again = lambda x: jnp.broadcast_to(x, (len(prob), *x.shape))  # noqa: E731
        places = jax.tree.map(again, situation.place)
        return Situation(places, states), prob, jnp.bool_(False)

    def init(key: Array) -> Situation:
        number = jax.random.randint(key, (), 0, len(chosen))
        return jax.tree.map(lambda x: x[number], begin)

    prior, views = make_prior(template, read, people, params.nu_h), make_views(template, read)
    if people.model == "learned":
        from mbx.empo.multigrid import learned  # which imports this module

        network = learned.load(people.network, family, params)
        prior = lambda state: network(*read(state))  # noqa: E731
    return grid_world(
        template,
        read,
        prior,
        example_state=jax.tree.map(lambda x: x[0], begin),
        init=init,
        successors=successors,
        features=lambda situation: features(*read(situation)),
        goal_features=jnp.eye(goals).reshape(*template.goals.shape[:2], -1),
        channels=channels,
        of_goals=of_goals,
        scatter=lambda key: scatter(template, key, init(jax.random.fold_in(key, 0))),
        views=views._replace(
            blocked=np.zeros(template.wall.shape, bool), walls=lambda s: read(s)[0].wall
        ),
    )


def scatter(template: Layout, key: Array, situation: Situation) -> Situation:
    """The situation with agents on random empty cells, looking anywhere.
    Doors that are not locked are open or closed; and in every other draw rocks and blocks lie on
    random empty cells, too.
    """
    now, layout = situation.now, read_place(template, situation.place)
    cell_key, look_key, door_key, kept_key = jax.random.split(jax.random.fold_in(key, 1), 4)
    rows, columns = template.wall.shape
    full = layout.wall | layout.lava | on(layout, layout.doors) | on(layout, layout.buttons)
    full |= on(layout, layout.magic) | on(layout, now.items, now.items[:, 0] >= 0)
    kept = jax.random.bernoulli(kept_key)
    full |= kept & on(layout, now.movable)
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


def _check(first_name: str, first: Layout, name: str, layout: Layout) -> None:
    """Raises ValueError where a map is not of the first one's family."""

    def facts(one: Layout) -> dict[str, Any]:
        return {
            "the size": "x".join(map(str, one.wall.shape[::-1])),
            "humans:": len(one.humans),
            "robots:": len(one.robots),
            "goals a human:": one.goals.shape[1],
            "goal_weight": np.round(one.goal_weight, 6).tolist(),
            "goal_prob": np.round(one.goal_prob, 6).tolist() if one.goal_prob is not None else None,
            **{field: getattr(one, field) for field in SHARED},
        }

    others = facts(first)
    for what, own in facts(layout).items():
        if own != others[what]:
            raise ValueError(
                f"{name} has {what} {own}, {first_name} {others[what]}: maps of one run have the "
                "same, draw it again or leave it out"
            )
    if layout.bush.any():
        raise ValueError(f"{name} has a bush, which only single maps have: leave it out")
    if (layout.item_box != maps.NONE).any():
        raise ValueError(
            f"{name} has a box that holds something, which no compressed grid shows: draw what it "
            "holds next to it"
        )


def _roles(layouts: Sequence[Layout], names: Sequence[str]) -> dict[int, list[int]]:
    """The trigger and the target of each kind of button."""
    roles: dict[int, list[int]] = {}
    for name, one in zip(names, layouts, strict=True):
        for kind, *role in zip(one.button_kind, one.button_trigger, one.button_target, strict=True):
            if roles.setdefault(int(kind), role) != role:
                raise ValueError(
                    f"{name} has a {BUTTONS[kind]} with another trigger or target than other maps: "
                    "in one run all of a kind do the same"
                )
    return roles


def _kinds(layout: Layout) -> dict[str, np.ndarray]:
    """The kind of every thing."""
    return {
        "movable": (~layout.heavy).astype(int),
        "doors": np.zeros(len(layout.doors), int),
        "items": layout.item_kind,
        "buttons": layout.button_kind,
        "magic": np.zeros(len(layout.magic), int),
    }


def _padded(layout: Layout, most: dict[str, np.ndarray], roles: dict[int, list[int]]) -> Layout:
    """The map with humans first, and everything else by kind, in reading order, and padded.
    Missing things are the last of their kind and have values 0.
    """
    agents = np.concatenate([layout.humans, layout.robots])
    kinds, fields = _kinds(layout), {}
    for thing, values in _VALUES.items():
        number = len(kinds[thing])
        missing = np.repeat(np.arange(4), most[thing] - np.bincount(kinds[thing], minlength=4))
        kind = np.concatenate([kinds[thing], missing]).astype(np.int32)
        x, y = np.pad(getattr(layout, thing), ((0, len(missing)), (0, 0))).T
        order = np.lexsort((x, y, np.arange(len(kind)) >= number, kind))
        kinds[thing], fields[thing] = kind[order], np.stack([x, y], axis=-1)[order]
        for name in values:
            fields[name] = np.pad(getattr(layout, name), (0, len(missing)))[order]
    role = np.array([roles[kind] for kind in kinds["buttons"]], np.int32).reshape(-1, 2)
    return layout._replace(
        bush=np.zeros(len(fields["magic"]), bool),
        agents=layout.agents[agents],
        is_human=layout.is_human[agents],
        **fields,
        heavy=kinds["movable"] == 0,
        item_kind=kinds["items"],
        item_box=np.full(len(kinds["items"]), maps.NONE, np.int32),
        button_kind=kinds["buttons"],
        button_trigger=role[:, 0],
        button_target=role[:, 1],
    )


def _start(layout: Layout) -> State:
    """Where an episode starts, missing items gone."""
    start = initial_state(layout)
    gone = (layout.items == 0).all(axis=1, keepdims=True)
    return start._replace(items=jnp.where(gone, jnp.array([[GONE, 0]], jnp.int8), start.items))


def _places(template: Layout, layouts: Sequence[Layout], starts: State) -> Place:
    """`[L, ...]`."""
    drawn = "wall lava unsteady switch floor doors door_color item_color buttons magic magic_side"
    own = {name: np.stack([getattr(one, name) for one in layouts]) for name in drawn.split()}
    nobody = jnp.full(template.wall.shape, packed.NOBODY, jnp.int32)

    def grid(own: dict[str, Array], start: State) -> Array:
        fields = packed.grid_fields(template._replace(**own), start)
        return packed.encode(fields._replace(agent_color=nobody))

    goals = np.stack([one.goals for one in layouts])
    return Place(jax.jit(jax.vmap(grid))(own, starts), jnp.asarray(goals, jnp.int8))


class Choice(NamedTuple):
    """Which maps of a source."""

    maps: int = 64  # to train on; of a folder at most that many
    held_out: int = 16  # others that only evaluations see
    seed: int = 0  # of the generator, or of the draw of a folder's held-out maps


def make_many(
    source: str,
    choice: Choice,
    humans: HumanModel | None = None,
    *,
    params: PowerParams | None = None,
    default: PowerParams | None = None,
) -> NamedWorld:
    """A world whose episodes begin on the maps to train on, and one on those held out.
    source: see `choose`. humans, params: None: as the maps' files say. default: parameters where
    the files have none.
    Raises ValueError as `choose` and `family_world`.
    """
    family, own, people = choose(source, choice)
    params, humans = params or own or default, humans or people or HumanModel()
    every = np.arange(len(family.layouts))
    new, training = every[: choice.held_out], every[choice.held_out :]
    return NamedWorld(
        family_world(family, training, humans, params),
        params,
        held_out=family_world(family, new, humans, params) if len(new) else None,
        prior="paths" if humans.model == "auto" else humans.model,
    )


def choose(source: str, choice: Choice) -> tuple[Family, PowerParams | None, HumanModel | None]:
    """The maps held out and then those to train on, and what their files say of power and humans.
    source: a generator's name (`generate.KINDS`); or, with a / or a dot in it, the path of a folder
    of YAML files, or of one file with several maps.
    Raises ValueError for too few maps, a seed that chooses nothing, files that differ in what they
    say of power and humans, and as `generate` and `make_family`.
    """
    if choice.maps < 1 or choice.held_out < 0:
        raise ValueError(
            f"env.maps={choice.maps}, env.held_out={choice.held_out}: at least 1 and 0"
        )
    number = choice.held_out + choice.maps
    if "/" not in source and "." not in source:
        return make_family(generate(source, number, seed=choice.seed)), None, None
    names, layouts, own, people = _read(source, choice)
    order = np.random.default_rng(choice.seed).permutation(len(names))[:number]
    return make_family([layouts[i] for i in order], [names[i] for i in order]), own, people


def _read(path: str, choice: Choice) -> tuple[Any, ...]:
    """Names and layouts of the maps at a path, and the parameters and humans that they give."""
    if os.path.isdir(path):
        files = sorted(os.path.join(path, n) for n in os.listdir(path) if n.endswith(".yaml"))
        read = [(file, *found) for file in files for found in read_worlds(file)]
    else:
        read = [(f"{path}, map {n + 1}", *found) for n, found in enumerate(read_worlds(path))]
    if not read:
        raise ValueError(f"{path} holds no .yaml file: give a folder of maps")
    if len(read) <= choice.held_out:
        raise ValueError(
            f"{path} has {len(read)} maps, of which env.held_out={choice.held_out} are for "
            "evaluations: give more maps or hold fewer out"
        )
    if choice.seed and not choice.held_out and choice.maps >= len(read):
        raise ValueError(
            f"env.map_seed={choice.seed} has no effect: {path} has {len(read)} maps, all of "
            "which are trained on; hold some out (env.held_out), or leave it 0"
        )
    for name, _, *given in read:
        if given != list(read[0][2:]):
            raise ValueError(
                f"{name} says other things of power or humans than {read[0][0]}: one run has one "
                "robot, give all the same"
            )
    names, layouts, *_ = zip(*read, strict=True)
    return names, layouts, *read[0][2:]
