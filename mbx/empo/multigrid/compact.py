"""What networks read of a map and of what happens on it: channels a cell, and compact features.

Channels are those of the compressed grid (`packed.channels`) that some map uses, a plane for each
agent and direction and a mask of each human's goals, without the border. The compact features are
the reference's (docs/sources.md#empo), in [0, 1]: global 4 (time left, chances of stumbling,
entering magic walls, their hardening), 13 an agent, and 96 of 4 buttons of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid import packed
from mbx.empo.multigrid.effects import CONTROL, DISABLE, HUMAN, KILL, PAUSE
from mbx.empo.multigrid.layout import BUTTONS, ITEMS, Layout
from mbx.empo.multigrid.objects import COLORS
from mbx.empo.multigrid.state import CARRIED, State, goal_cells
from mbx.types import Array

SLOTS = 4  # buttons of a kind
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
    cells = jnp.arange(rows * columns).reshape(rows, columns)

    def planes(layout: Layout, state: State) -> Array:
        grid = packed.channels(packed.encode(packed.grid_fields(layout, state)))[kept]
        agents = state.agents.astype(jnp.int32)
        at = cells[None] == (agents[:, 1] * columns + agents[:, 0])[:, None, None]
        looks = jax.nn.one_hot(agents[:, 2], 4) * (state.alive > 0)[:, None]
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
