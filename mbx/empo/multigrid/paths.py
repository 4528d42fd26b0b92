"""Humans that take the shortest way there is: open doors, fetch keys, go round rocks.

The way of a lone human is a search over where it stands, which way it looks and which key it
carries, by the rules of `effects`, in the state as it is. What a human cannot move counts as
`help_steps`, so that it goes round where it can, and waits where it cannot. A block counts as free
while it has room for one push; other agents are ignored. pi(a) ~ exp(-beta way(after a)). The
layout's arrays may be traced (`family`), all but those that say what kind a thing is.

Axes: H humans, G goals, C what is carried (0: no key), D directions, Y rows, X columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.effects import BOX, KEY
from mbx.empo.multigrid.layout import DIRECTIONS, Layout
from mbx.empo.multigrid.state import CARRIED, INSIDE, State, goal_cells
from mbx.types import Array


class Ways(NamedTuple):
    """What the search reads of a state."""

    enter: Array  # `[C, D, Y, X]` actions it takes to enter a cell looking that way, once beside it
    # `[C, Y, X]` actions it takes to hold key c once one looks at the cell; inf elsewhere
    take: Array


def make_paths(layout: Layout, beta: float) -> Callable[[State], Array]:
    """`human_policy(state) -> [H, G, A]` of shortest ways; beta: inverse temperature."""
    lengths = make_lengths(layout)

    def policy(state: State) -> Array:
        each = zip(layout.humans, *lengths(state), strict=True)
        left = [_ways_left(layout, state, int(human), v, ways) for human, v, ways in each]
        return jax.nn.softmax(-beta * jnp.stack(left), axis=-1)

    return policy


def make_lengths(layout: Layout) -> Callable[[State], tuple[Array, list[Ways]]]:
    """`lengths(state) -> ([H, G, C, D, Y, X], ways of each human)`: actions to each goal."""
    inside, most = goal_cells(layout), longest(layout)
    num_hands = 1 + int((layout.item_kind == KEY).sum())

    def search(ways: Ways, goal: Array) -> Array:
        def sweep(v: Array) -> Array:
            turned = 1.0 + jnp.minimum(jnp.roll(v, 1, axis=1), jnp.roll(v, -1, axis=1))
            ahead = jnp.stack([_ahead(ways.enter[:, d] + v[:, d], d) for d in range(4)], axis=1)
            new = jnp.minimum(v, jnp.minimum(turned, ahead))
            for key in range(1, num_hands):
                cost = jnp.stack([_ahead(ways.take[key], d) for d in range(4)])
                swap = jnp.where(jnp.arange(num_hands) == 0, 0.0, 1.0)[:, None, None, None]
                new = jnp.minimum(new, swap + (cost + v[key])[None])
            return jnp.minimum(new, most)

        start = jnp.broadcast_to(jnp.where(goal, 0.0, most), ways.enter.shape)
        step = lambda old: (sweep(old[0]), old[0])  # noqa: E731
        return jax.lax.while_loop(lambda v: jnp.any(v[0] < v[1]), step, (sweep(start), start))[0]

    def lengths(state: State) -> tuple[Array, list[Ways]]:
        each = [_ways(layout, state, int(human)) for human in layout.humans]
        every = jax.tree.map(lambda *x: jnp.stack(x), *each)
        return jax.vmap(jax.vmap(search, in_axes=(None, 0)))(every, inside), each

    return lengths


def longest(layout: Layout) -> float:
    """What counts as no way at all: more actions than any way takes."""
    return 8.0 * layout.wall.size + help_steps(layout) * (1 + len(layout.movable))


def help_steps(layout: Layout) -> float:
    """Actions that what only others can move counts for: more than a way round."""
    return 4.0 * layout.wall.size


def _ahead(cells: Array, direction: int) -> Array:
    """`[..., Y, X]` of the cell ahead, by the cell one stands on; the border is wall."""
    dx, dy = DIRECTIONS[direction]
    return jnp.roll(cells, (-dy, -dx), axis=(-2, -1))


def on(layout: Layout, places: Any, there: Any = True) -> Array:
    """`[Y, X]` bool: cells (x, y) of `places` `[n, 2]` that are `there` `[n]`."""
    rows, columns = layout.wall.shape
    cell = places[:, 1].astype(jnp.int32) * columns + places[:, 0]
    index = jnp.where(there, cell, rows * columns)
    return jnp.zeros(rows * columns, bool).at[index].set(True, mode="drop").reshape(rows, columns)


def _ways(layout: Layout, state: State, human: int) -> Ways:
    """What it takes a human to enter cells and to take keys, in a state."""
    keys = np.flatnonzero(layout.item_kind == KEY)
    closed = layout.wall | layout.lava | on(layout, layout.buttons)
    cost = jnp.where(closed, jnp.inf, 1.0) + on(layout, layout.doors, state.doors == maps.CLOSED)
    locked, every = state.doors == maps.LOCKED, []
    for color in (maps.NONE, *(layout.item_color[key] for key in keys)):
        fits = jnp.asarray(layout.door_color == color)
        opened = jnp.where(on(layout, layout.doors, locked & fits), 1.0, 0.0)
        refused = on(layout, layout.doors, locked & ~fits)
        every.append(cost + jnp.where(refused, jnp.inf, opened))
    cost = jnp.broadcast_to(jnp.stack(every)[:, None], (len(every), 4, *layout.wall.shape))
    take = jnp.full((len(every), *layout.wall.shape), jnp.inf)
    for item in range(len(layout.items)):  # in the way until they are taken or opened
        here = on(layout, state.items[item : item + 1], state.items[item, :1] >= 0)
        full = 0.0 if layout.item_kind[item] == BOX else 1.0  # hands that hold a key drop it first
        extra = jnp.where(jnp.arange(len(every)) == 0, 1.0, 1.0 + full)
        own = np.flatnonzero(keys == item) + 1
        inside = np.flatnonzero(layout.item_box[keys] == item) + 1
        # Who holds a key has taken it from there, out of the box if it was in one.
        extra = extra.at[np.concatenate([own, inside])].set(0.0)
        cost += jnp.where(here[None, None], extra[:, None, None, None], 0.0)
        for hand in own:
            box = max(int(layout.item_box[item]), 0)
            boxed = on(layout, state.items[box : box + 1], state.items[item, :1] == INSIDE)
            take = take.at[hand].set(jnp.where(here, 1.0, jnp.where(boxed, 2.0, jnp.inf)))
    return Ways(cost + (_magic(layout, state, human) + _pushed(layout, state, human))[None], take)


def _magic(layout: Layout, state: State, human: int) -> Array:
    """Tries beyond the first to get through magic walls, `[D, Y, X]`."""
    extra = jnp.zeros((4, *layout.wall.shape))
    asks = bool(layout.may_enter_magic[human]) and layout.magic_entry > 0.0
    tries = 1.0 / layout.magic_entry - 1.0 if asks else np.inf
    for number in range(len(layout.magic)):
        here = on(layout, layout.magic[number : number + 1])
        side = jnp.asarray(layout.magic_side)[number]
        right_side = (side == 4) | (jnp.arange(4) == (side + 2) % 4)
        each = jnp.where(right_side & (state.solid[number] == 0), tries, jnp.inf)
        if layout.bush[number]:
            through = 1.0 / layout.magic_entry - 1.0 if layout.magic_entry else jnp.inf
            each = jnp.where(jnp.full(4, state.solid[number] == 0), through, 0.0)
        extra += jnp.where(here[None], each[:, None, None], 0.0)
    return extra


def _pushed(layout: Layout, state: State, human: int) -> Array:
    """Rocks, and blocks that have no room beyond, wait for help: `[D, Y, X]`."""
    if not len(layout.movable):
        return jnp.zeros((4, *layout.wall.shape))
    taken = layout.wall | layout.lava | on(layout, state.movable)
    taken |= on(layout, layout.doors, state.doors != maps.OPEN)
    taken |= on(layout, state.items, state.items[:, 0] >= 0)
    taken |= on(layout, layout.buttons) | on(layout, layout.magic)
    stuck = jnp.stack([_ahead(taken, d) for d in range(4)])
    heavy, light = (on(layout, state.movable, kind) for kind in (layout.heavy, ~layout.heavy))
    heavy = heavy[None] & (stuck if layout.may_push[human] else True)
    return jnp.where(heavy | (light[None] & stuck), help_steps(layout), 0.0)


def _ways_left(layout: Layout, state: State, human: int, v: Array, ways: Ways) -> Array:
    """`[G, A]`: the way that is left after each action, by the lengths `v` `[G, C, D, Y, X]`."""
    most = longest(layout)
    x, y, d = (state.agents[human, c].astype(jnp.int32) for c in range(3))
    dx, dy = jnp.asarray(DIRECTIONS)[d]

    def facing(cells: Any) -> Array:
        return jnp.asarray(cells)[..., y + dy, x + dx]

    keys = np.flatnonzero(layout.item_kind == KEY)
    held = (state.items[:, 0] == CARRIED) & (state.items[:, 1] == human)
    hand = jnp.sum(held[keys] * jnp.arange(1, 1 + len(keys), dtype=jnp.int32), dtype=jnp.int32)
    now, ahead, enter = v[:, hand, d, y, x], facing(v[:, hand, d]), facing(ways.enter[hand, d])
    door = facing(on(layout, layout.doors, state.doors != maps.OPEN))
    there = state.items[:, 0] >= 0
    thing = facing(on(layout, state.items, there))
    # A magic wall lets one through now and then: as often as tries are needed on average.
    free = ~(door | thing) & jnp.isfinite(enter) & (enter < help_steps(layout))
    share = jnp.where(free, 1.0 / jnp.maximum(enter, 1.0), 0.0)
    bumped = jnp.where(facing(layout.lava), most, now)
    after = [
        now,
        v[:, hand, (d - 1) % 4, y, x],
        v[:, hand, (d + 1) % 4, y, x],
        share * jnp.where(free, ahead, 0.0) + (1.0 - share) * bumped,
    ]
    if layout.num_actions > maps.TOGGLE:
        opened = facing(on(layout, layout.doors, state.doors == maps.OPEN))
        after.append(jnp.where(door & jnp.isfinite(enter), 1.0 + ahead, now + opened))
    if layout.num_actions > maps.PICK_UP:
        is_box = facing(on(layout, state.items, there & (layout.item_kind == BOX)))
        takes = jnp.where(jnp.isfinite(facing(ways.take)), 0.0, most)  # [C]
        with_key = jnp.min(takes[:, None] + v[:, :, d, y, x].T, 0)
        cleared = jnp.where(thing & jnp.isfinite(enter), 1.0 + ahead, now)
        emptied = jnp.minimum(jnp.minimum(1.0 + with_key, cleared), now)
        after[maps.TOGGLE] = jnp.where(is_box, emptied, after[maps.TOGGLE])
        taken = jnp.minimum(jnp.where(is_box, now, with_key), cleared)
        after.append(jnp.where(~jnp.any(held) & thing, jnp.minimum(taken, most), now))
    if layout.num_actions > maps.DROP:
        after.append(jnp.where(jnp.any(held), 1.0 + v[:, 0, d, y, x], now))
    return jnp.stack(after, axis=-1)
