"""What networks read of a map and of what happens on it: channels a cell, and compact features.

Channels are those of the compressed grid (`packed.channels`) that some map uses, a plane for each
agent and direction and a mask of each human's goals, without the border. The compact features are
the reference's (docs/sources.md#empo), in [0, 1]: global 4 (time left, chances of stumbling,
entering magic walls, their hardening), 13 an agent, and 96 of 4 buttons of each kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import layout as maps
from mbx.empo.multigrid import packed
from mbx.empo.multigrid.effects import CONTROL, DISABLE, HUMAN, KILL, PAUSE
from mbx.empo.multigrid.layout import BUTTONS, DIRECTIONS, ITEMS, Layout
from mbx.empo.multigrid.objects import COLORS
from mbx.empo.multigrid.paths import on
from mbx.empo.multigrid.state import CARRIED, State, goal_cells
from mbx.types import Array

SLOTS = 4  # buttons of a kind
BITS = 32  # cells of a row, one each in a word
_NUMBERS = {KILL: 5, PAUSE: 6, DISABLE: 6, CONTROL: 7}  # in the features' order


def used_channels(places: Any) -> np.ndarray:
    """Numbers of the compressed grid's channels that some of the maps `[L, ...]` uses."""
    used = np.asarray(packed.channels(places.grid)).any(axis=(0, 2, 3))
    first = packed.CHANNELS - packed.COLORS
    used[[first + packed.COLORS_OF[name] for name in ("yellow", "grey")]] = True
    return np.flatnonzero(used)


def make_features(
    template: Layout, kept: np.ndarray
) -> tuple[Callable[[Layout, State], Array], tuple[int, int, int]]:
    """`features(layout, state) -> [D]`, and the shape (C, Y, X) of the channels it begins with.
    template: a layout with as much of everything as any map. kept: those of `used_channels`.
    Raises ValueError for more than SLOTS buttons of a kind.
    """
    for kind, name in enumerate(BUTTONS):
        count = int((template.button_kind == kind).sum())
        if count > SLOTS:
            raise ValueError(f"{count} buttons of kind {name} on one map: at most {SLOTS}")
    rows, columns = template.wall.shape

    def planes(layout: Layout, state: State) -> Array:
        grid = packed.channels(packed.encode(packed.grid_fields(layout, state)))[kept]
        at = jax.vmap(functools.partial(on, layout))(state.agents[:, None])
        looks = jax.nn.one_hot(state.agents[:, 2], 4) * (state.alive > 0)[:, None]
        looking = (at[:, None] * looks[:, :, None, None]).reshape(-1, rows, columns)
        goals = goal_cells(layout).reshape(-1, rows, columns)
        return jnp.concatenate([grid, looking, goals])[:, 1:-1, 1:-1]

    def features(layout: Layout, state: State) -> Array:
        left = 1.0 - state.time / layout.horizon if layout.horizon else 1.0
        parts = (
            planes(layout, state),
            *(left, layout.stumble, layout.magic_entry, layout.magic_solidify),
            agent_features(layout, state),
            interactive_features(layout, state) if len(template.buttons) else jnp.zeros(0),
        )
        return jnp.concatenate([jnp.asarray(part, jnp.float32).ravel() for part in parts])

    num_goals = int(np.prod(template.goals.shape[:2]))
    return features, (len(kept) + 4 * len(template.agents) + num_goals, rows - 2, columns - 2)


def with_closeness(
    template: Layout, features: Callable[[Layout, State], Array]
) -> tuple[Callable[[Layout, State], Array], np.ndarray | None]:
    """Features and then `closeness`, as a network needs many layers to find ways; and which of it,
    `[H, G, F]`, is about a human's goal. Not on maps that are too wide: None."""
    if template.wall.shape[1] > BITS:
        return features, None
    shape = template.goals.shape[:2]
    near = (3, shape[0] * shape[1] + len(template.movable), len(template.agents), 5)
    last = np.arange(-int(np.prod(near)), 0).reshape(near)[:, : shape[0] * shape[1]]

    def whole(layout: Layout, state: State) -> Array:
        return jnp.concatenate([features(layout, state), closeness(layout, state).ravel()])

    return whole, np.moveaxis(last, 1, 0).reshape(*shape, -1)


def closeness(layout: Layout, state: State) -> Array:
    """`[3, G, N, 5]`, 0.9^steps to goals, then to rocks and blocks, from the cell of each agent and
    from those ahead, to its right, behind and to its left.
    Steps from cell to cell, turns not counted; 0 where there is no way. First with robots and all
    that is shut in the way (rocks, blocks, locked doors, magic walls), then without robots, then
    with walls alone. For maps at most BITS cells wide.
    """
    bit = jnp.uint32(1) << jnp.arange(layout.wall.shape[1], dtype=jnp.uint32)
    board = lambda x: jnp.dot(x.astype(jnp.uint32), bit)  # noqa: E731
    wall = layout.wall | layout.lava | on(layout, layout.buttons)
    stuck = wall | on(layout, state.movable) | on(layout, layout.magic)
    stuck |= on(layout, layout.doors, state.doors == maps.LOCKED)
    robots = on(layout, state.agents[jnp.asarray(layout.robots)])
    free = board(~jnp.stack([stuck | robots, stuck, wall]))[:, None]
    things = jax.vmap(functools.partial(on, layout))(state.movable[:, None])
    ends = board(jnp.concatenate([goal_cells(layout).reshape(-1, *wall.shape), things]))
    turns = (state.agents[:, 2:].astype(jnp.int32) + jnp.arange(4)[None]) % 4
    around = jnp.pad(jnp.asarray(DIRECTIONS)[turns], ((0, 0), (1, 0), (0, 0)))  # [N, 5, 2]
    x, y = jnp.moveaxis(state.agents[:, None, :2].astype(jnp.int32) + around, -1, 0)

    here = lambda there: (there[..., y] >> x.astype(jnp.uint32)[None, None]) & 1  # noqa: E731

    def sweep(old: tuple) -> tuple:
        there, _, near = old
        grown = there << 1 | there >> 1 | jnp.roll(there, 1, axis=-1) | jnp.roll(there, -1, axis=-1)
        return there | grown & free, there, near * jnp.where(here(there) > 0, 1.0, 0.9)

    start = jnp.broadcast_to(ends, (3, *ends.shape))
    init = start, ~start, jnp.ones((3, len(ends), *x.shape))
    there, _, near = jax.lax.while_loop(lambda v: jnp.any(v[0] != v[1]), sweep, init)
    return jnp.where(here(there) > 0, near, 0.0)


def agent_features(layout: Layout, state: State) -> Array:
    """`[N, 13]`."""
    rows, columns = layout.wall.shape
    human, num = jnp.asarray(layout.is_human), len(layout.agents)
    agents = state.agents.astype(jnp.float32)
    kind, color = jnp.zeros(num), jnp.zeros(num)
    colors = jnp.asarray(layout.item_color)
    for item, what in enumerate(layout.item_kind):
        holds = (state.items[item, 0] == CARRIED) & (state.items[item, 1] == jnp.arange(num))
        kind = jnp.where(holds, (int(what) + 1) / len(ITEMS), kind)
        color = jnp.where(holds, (colors[item] + 1) / len(COLORS), color)
    paused = jnp.zeros(num, bool)
    for button in np.flatnonzero(layout.button_kind == PAUSE):
        works = (state.buttons[button, 0] > 0) & (state.buttons[button, 1] > 0)
        paused |= works & (human == (layout.button_target[button] == HUMAN))
    features = (
        agents[:, 0] / (columns - 1),
        agents[:, 1] / (rows - 1),
        *jax.nn.one_hot(state.agents[:, 2], 4).T,
        layout.may_enter_magic,
        layout.may_push,
        kind,
        color,
        paused,
        state.alive == 0,
        state.forced / layout.num_actions if len(state.forced) else jnp.zeros(num),
    )
    return jnp.stack([jnp.asarray(each, jnp.float32) for each in features], axis=-1)


def interactive_features(layout: Layout, state: State) -> Array:
    """`[96]`."""
    rows, columns = layout.wall.shape
    places, result = jnp.asarray(layout.buttons), []
    for kind, size in _NUMBERS.items():
        slots = jnp.zeros((SLOTS, size))
        for slot, button in enumerate(np.flatnonzero(layout.button_kind == kind)):
            enabled, on, action, learner = state.buttons[button].astype(jnp.float32)
            target = int(layout.button_target[button])
            whom = {
                KILL: [target == HUMAN],
                PAUSE: [target == HUMAN, on],
                DISABLE: [1.0, (target + 1) / len(BUTTONS)],
                CONTROL: [
                    target == HUMAN,
                    action / layout.num_actions,
                    learner / len(layout.agents),
                ],
            }
            x, y = places[button, 0], places[button, 1]
            trigger = int(layout.button_trigger[button]) == HUMAN
            numbers = [x / (columns - 1), y / (rows - 1), enabled, trigger, *whom[kind]]
            values = jnp.stack([jnp.asarray(value, jnp.float32) for value in numbers])
            slots = slots.at[slot].set(jnp.where(x > 0, values, 0.0))
        result.append(slots.ravel())
    return jnp.concatenate(result)
