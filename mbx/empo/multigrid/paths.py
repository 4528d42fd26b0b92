"""Humans that take the shortest way there is: open doors, fetch keys, go round rocks.

The way of a lone human is a search over where it stands, which way it looks and which key it
carries, by the rules of `effects`, in the state as it is: doors where they are open, rocks where
they lie. Each sweep improves all lengths at once, for every goal; it stops when none changes. What
a human cannot move counts as if that took `help_steps`, so that it goes round where it can, and
waits beside it where it cannot. A block counts as free while it has room for one push. Other
agents are ignored. The policy prefers shorter ways left:
pi(a) ~ exp(-beta way(after a)).

The layout's arrays may be traced (`family`), all but those that say what kind a thing is.

Axes: H humans, G goals, C what is carried (0: no key), D directions, Y rows, X columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid.layout import DIRECTIONS, ITEMS, Layout
from mbx.empo.multigrid.state import CARRIED, INSIDE, State, goal_cells
from mbx.types import Array

_KEY, _BOX = ITEMS.index("key"), ITEMS.index("box")


class Ways(NamedTuple):
    """What the search reads of a state."""

    enter: Array  # `[C, D, Y, X]` actions it takes to enter a cell looking that way, once beside it
    # `[C, Y, X]` actions it takes to hold key c once one looks at the cell; inf elsewhere
    take: Array


def make_paths(layout: Layout, beta: float) -> Callable[[State], Array]:
    """`human_policy(state) -> [H, G, A]` of shortest ways; beta: inverse temperature."""
    lengths, policy = make_lengths(layout), _make_policy(layout, beta)
    return lambda state: policy(state, *lengths(state))


def make_lengths(layout: Layout) -> Callable[[State], tuple[Array, list[Ways]]]:
    """`lengths(state) -> ([H, G, C, D, Y, X], ways of each human)`: actions to each goal."""
    inside = goal_cells(layout)
    num_hands = 1 + int((layout.item_kind == _KEY).sum())
    most = longest(layout)

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
        of_human = jax.vmap(search, in_axes=(None, 0))
        return jax.vmap(of_human)(every, inside), each

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


def _on(layout: Layout, places: Array, there: Array) -> Array:
    """`[Y, X]` bool: cells (x, y) of `places` `[n, 2]` that are `there` `[n]`."""
    rows, columns = layout.wall.shape
    index = jnp.where(
        there, places[:, 1].astype(jnp.int32) * columns + places[:, 0], rows * columns
    )
    return jnp.zeros(rows * columns, bool).at[index].set(True, mode="drop").reshape(rows, columns)


def _ways(layout: Layout, state: State, human: int) -> Ways:
    """What it takes a human to enter cells and to take keys, in a state."""
    never = jnp.inf
    closed = jnp.asarray(layout.wall | layout.lava)
    if len(layout.buttons):
        closed |= _on(layout, jnp.asarray(layout.buttons), jnp.ones(len(layout.buttons), bool))
    cost = jnp.where(closed, never, 1.0)
    key_items = np.flatnonzero(layout.item_kind == _KEY)
    cost = jnp.broadcast_to(cost, (1 + len(key_items), 4, *layout.wall.shape))
    doors = jnp.asarray(layout.doors)
    if len(layout.doors):
        cost += _on(layout, doors, state.doors == maps.CLOSED)[None, None]
        for hand in range(1 + len(key_items)):
            color = layout.item_color[key_items[hand - 1]] if hand else maps.NONE
            fits = jnp.asarray(layout.door_color == color)
            locked = state.doors == maps.LOCKED
            opened = jnp.where(_on(layout, doors, locked & fits), 1.0, 0.0)
            opened = jnp.where(_on(layout, doors, locked & ~fits), never, opened)
            cost = cost.at[hand].add(opened[None])
    take = jnp.full((1 + len(key_items), *layout.wall.shape), never)
    if len(layout.items):
        cost, take = _with_items(layout, state, cost, take, key_items)
    return Ways(cost + (_magic(layout, state, human) + _pushed(layout, state))[None], take)


def _with_items(
    layout: Layout, state: State, cost: Array, take: Array, key_items: np.ndarray
) -> tuple[Array, Array]:
    """Items are in the way until they are taken or opened; keys can be taken."""
    for item in range(len(layout.items)):
        here = _on(layout, state.items[item : item + 1], state.items[item, :1] >= 0)
        full = 0.0 if layout.item_kind[item] == _BOX else 1.0  # hands that hold a key drop it first
        extra = jnp.where(jnp.arange(len(cost)) == 0, 1.0, 1.0 + full)
        own = np.flatnonzero(key_items == item) + 1
        inside = np.flatnonzero(layout.item_box[key_items] == item) + 1
        # Who holds a key has taken it from there, out of the box if it was in one.
        extra = extra.at[np.concatenate([own, inside])].set(0.0)
        cost += jnp.where(here[None, None], extra[:, None, None, None], 0.0)
        for hand in own:
            box = max(int(layout.item_box[item]), 0)
            boxed = _on(layout, state.items[box : box + 1], state.items[item, :1] == INSIDE)
            steps = jnp.where(here, 1.0, jnp.where(boxed, 2.0, jnp.inf))
            take = take.at[hand].set(steps)
    return cost, take


def _magic(layout: Layout, state: State, human: int) -> Array:
    """Tries beyond the first to get through magic walls, `[D, Y, X]`."""
    extra = jnp.zeros((4, *layout.wall.shape))
    for number in range(len(layout.magic)):
        here = _on(layout, jnp.asarray(layout.magic)[number : number + 1], jnp.ones(1, bool))
        side = jnp.asarray(layout.magic_side)[number]
        right_side = (side == 4) | (jnp.arange(4) == (side + 2) % 4)
        asks = bool(layout.may_enter_magic[human]) and layout.magic_entry > 0.0
        tries = 1.0 / layout.magic_entry - 1.0 if asks else np.inf
        each = jnp.where(right_side & (state.solid[number] == 0), tries, jnp.inf)
        extra += jnp.where(here[None], each[:, None, None], 0.0)
    return extra


def _pushed(layout: Layout, state: State) -> Array:
    """Rocks, and blocks that have no room beyond, wait for help: `[D, Y, X]`."""
    extra = jnp.zeros((4, *layout.wall.shape))
    if not len(layout.movable):
        return extra
    every = jnp.ones(len(layout.movable), bool)
    heavy = _on(layout, state.movable, jnp.asarray(layout.heavy))
    light = _on(layout, state.movable, ~jnp.asarray(layout.heavy))
    taken = jnp.asarray(layout.wall | layout.lava) | _on(layout, state.movable, every)
    if len(layout.doors):
        taken |= _on(layout, jnp.asarray(layout.doors), state.doors != maps.OPEN)
    if len(layout.items):
        taken |= _on(layout, state.items, state.items[:, 0] >= 0)
    for places in (layout.buttons, layout.magic):
        if len(places):
            taken |= _on(layout, jnp.asarray(places), jnp.ones(len(places), bool))
    stuck = jnp.stack([_ahead(taken, d) for d in range(4)])
    return jnp.where(heavy[None] | (light[None] & stuck), help_steps(layout), extra)


def _make_policy(layout: Layout, beta: float) -> Callable[[State, Array, list[Ways]], Array]:
    """`policy(state, lengths, ways) -> [H, G, A]` from the ways left after each action."""
    most = longest(layout)

    def of_human(state: State, number: int, v: Array, ways: Ways) -> Array:
        human = int(layout.humans[number])
        x, y, d = (state.agents[human, c].astype(jnp.int32) for c in range(3))
        held = (state.items[:, 0] == CARRIED) & (state.items[:, 1] == human)
        key_items = np.flatnonzero(layout.item_kind == _KEY)
        numbers = jnp.arange(1, 1 + len(key_items), dtype=jnp.int32)
        hand = jnp.sum(held[key_items] * numbers, dtype=jnp.int32) if len(held) else 0
        dx, dy = jnp.asarray(DIRECTIONS)[d]
        now, ahead = v[:, hand, d, y, x], v[:, hand, d, y + dy, x + dx]
        enter = ways.enter[hand, d, y + dy, x + dx]
        lava = jnp.asarray(layout.lava)[y + dy, x + dx]
        bumped = jnp.where(lava, most, now)
        # A magic wall lets one through now and then: as often as tries are needed on average.
        door = _on(layout, jnp.asarray(layout.doors), state.doors != maps.OPEN)
        thing = _on(layout, state.items, state.items[:, 0] >= 0)
        obstacle = (door | thing)[y + dy, x + dx]
        free = ~obstacle & jnp.isfinite(enter) & (enter < help_steps(layout))
        share = jnp.where(free, 1.0 / jnp.maximum(enter, 1.0), 0.0)
        after = [
            now,
            v[:, hand, (d - 1) % 4, y, x],
            v[:, hand, (d + 1) % 4, y, x],
            share * jnp.where(free, ahead, 0.0) + (1.0 - share) * bumped,
        ]
        if layout.num_actions > maps.TOGGLE:
            closed = jnp.asarray(door)[y + dy, x + dx] & jnp.isfinite(enter)
            opened = _on(layout, jnp.asarray(layout.doors), state.doors == maps.OPEN)
            after.append(jnp.where(closed, 1.0 + ahead, now + opened[y + dy, x + dx]))
        if layout.num_actions > maps.PICK_UP:
            empty = ~jnp.any(held)
            box = jnp.asarray(layout.item_kind == _BOX)
            is_box = _on(layout, state.items, (state.items[:, 0] >= 0) & box)[y + dy, x + dx]
            steps = ways.take[:, y + dy, x + dx]  # [C]
            with_key = jnp.min(
                jnp.where(jnp.isfinite(steps), 0.0, most)[:, None] + v[:, :, d, y, x].T, 0
            )
            cleared = jnp.where(thing[y + dy, x + dx] & jnp.isfinite(enter), 1.0 + ahead, now)
            opened = jnp.minimum(jnp.minimum(1.0 + with_key, cleared), now)
            after[maps.TOGGLE] = jnp.where(is_box, opened, after[maps.TOGGLE])
            taken = jnp.minimum(jnp.where(is_box, now, with_key), cleared)
            takes = empty & thing[y + dy, x + dx]
            after.append(jnp.where(takes, jnp.minimum(taken, most), now))
        if layout.num_actions > maps.DROP:
            after.append(jnp.where(jnp.any(held), 1.0 + v[:, 0, d, y, x], now))
        return jax.nn.softmax(-beta * jnp.stack(after, axis=-1), axis=-1)

    def policy(state: State, lengths: Array, ways: list[Ways]) -> Array:
        each = zip(lengths, ways, strict=True)
        return jnp.stack([of_human(state, n, v, w) for n, (v, w) in enumerate(each)])

    return policy
