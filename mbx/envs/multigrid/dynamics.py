"""What one agent's action does, and what a joint action can lead to.

Agents act one after the other. Those that reach for the same cell contend for it: one of them,
each with the same probability, comes first, the others after everyone else (so they find it taken,
unless the first could not move). A cell that an agent stood on when the step began stays closed to
others for that step. Leaving unsteady ground, an agent goes astray to its left or right with half
the stumbling probability each. These rules reproduce the transitions of document 004's multigrid as
the fixtures `grid_rock_1h1r` and `grid_corridor_2h1r` hold them.

Axes: N agents, M movable objects, D doors, Q keys, K outcomes of a joint action.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.envs.multigrid import layout as maps
from mbx.envs.multigrid.layout import DIRECTIONS, Layout

Array = jax.Array

GONE = -1  # coordinates of a key that is carried


class State(NamedTuple):
    """All that changes, int8 but for `time` (int32).

    agents `[N, 3]` x, y, direction; alive `[N]`; carrying `[N]` keys held; movable `[M, 2]`; doors
    `[D]` open, closed or locked; keys `[Q, 2]`.
    """

    agents: Array
    alive: Array
    carrying: Array
    movable: Array
    doors: Array
    keys: Array
    time: Array


class Grid(NamedTuple):
    """A layout's pure functions of one un-batched state.

    initial: the state an episode starts in. outcomes(state, actions `[N]`) -> (states `[K, ...]`,
    prob `[K]`, 0 for unused ones). terminal(state) -> bool, the horizon is reached. achieved(state)
    -> `[H, G]` bool. num_outcomes: K, which no joint action exceeds.
    """

    layout: Layout
    initial: State
    outcomes: Callable[[State, Array], tuple[State, Array]]
    terminal: Callable[[State], Array]
    achieved: Callable[[State], Array]
    num_outcomes: int


def max_winners(num_agents: int) -> int:
    """Largest product of block sizes over the ways to split `num_agents` contenders into blocks."""
    best = [1] * (num_agents + 1)
    for n in range(1, num_agents + 1):
        best[n] = max(size * best[n - size] for size in range(1, n + 1))
    return best[num_agents]


def initial_state(layout: Layout) -> State:
    """Everybody where the map has them."""
    num = len(layout.agents)
    small = lambda x: jnp.asarray(x, jnp.int8)  # noqa: E731
    return State(
        agents=small(layout.agents), alive=jnp.ones(num, jnp.int8),
        carrying=jnp.zeros(num, jnp.int8), movable=small(layout.movable),
        doors=small(layout.door_state), keys=small(layout.keys), time=jnp.int32(0),
    )  # fmt: skip


def same_cell(cells: Array, cell: Array) -> Array:
    """Which of `[n, 2]` cells are `[2]`: `[n]` bool."""
    return jnp.all(cells == cell[None].astype(cells.dtype), axis=-1)


def make_act(layout: Layout) -> Callable[..., State]:
    """`act(state, began, i, action) -> state`: agent i's action.

    began `[N, 2]`: where the agents stood when the step began.
    """
    wall, lava = jnp.asarray(layout.wall), jnp.asarray(layout.lava)
    heavy, is_human = jnp.asarray(layout.heavy), jnp.asarray(layout.is_human)
    doors, turns = jnp.asarray(layout.doors, jnp.int8), jnp.asarray(DIRECTIONS, jnp.int8)

    def blocked(state: State, began: Array, cell: Array, mine: Array) -> Array:
        """By wall, closed door, key, or an agent now or at the step's beginning."""
        others = (state.alive > 0) & (jnp.arange(len(layout.agents)) != mine)
        taken = same_cell(state.agents[:, :2], cell) | same_cell(began, cell)
        shut = same_cell(doors, cell) & (state.doors != maps.OPEN)
        return (
            wall[cell[1], cell[0]] | jnp.any(taken & others) | jnp.any(shut)
            | jnp.any(same_cell(state.keys, cell))
        )  # fmt: skip

    def forward(state: State, began: Array, i: Array) -> State:
        x, y, direction = state.agents[i]
        ahead = jnp.stack([x, y]) + turns[direction]
        beyond = ahead + turns[direction]
        pushed = same_cell(state.movable, ahead)
        free_beyond = ~blocked(state, began, beyond, jnp.int32(-1)) & ~jnp.any(
            same_cell(state.movable, beyond)
        )
        strong = ~jnp.any(pushed & heavy & is_human[i])
        may_push = free_beyond & strong & ~lava[beyond[1], beyond[0]]
        goes = ~blocked(state, began, ahead, i) & (~jnp.any(pushed) | may_push)
        agent = jnp.where(goes, jnp.stack([*ahead, direction]), state.agents[i])
        drowned = goes & lava[ahead[1], ahead[0]]
        return state._replace(
            agents=state.agents.at[i].set(agent),
            alive=state.alive.at[i].set(jnp.where(drowned, 0, state.alive[i])),
            movable=jnp.where((pushed & goes)[:, None], beyond[None], state.movable),
        )

    def turn(state: State, i: Array, by: int) -> State:
        return state._replace(agents=state.agents.at[i, 2].set((state.agents[i, 2] + by) % 4))

    def toggle(state: State, i: Array) -> State:
        x, y, direction = state.agents[i]
        ahead = jnp.stack([x, y]) + turns[direction]
        here = same_cell(doors, ahead)
        # An open door with something in it stays open.
        filled = jnp.any(same_cell(state.agents[:, :2], ahead)) | jnp.any(
            same_cell(state.movable, ahead)
        )
        unlocks = (state.doors == maps.LOCKED) & (state.carrying[i] > 0)
        after = jnp.where(state.doors == maps.CLOSED, maps.OPEN, state.doors)
        after = jnp.where(unlocks, maps.OPEN, after)
        after = jnp.where((state.doors == maps.OPEN) & ~filled, maps.CLOSED, after)
        return state._replace(doors=jnp.where(here, after, state.doors).astype(jnp.int8))

    def pick_up(state: State, i: Array) -> State:
        x, y, direction = state.agents[i]
        here = same_cell(state.keys, jnp.stack([x, y]) + turns[direction])
        return state._replace(
            keys=jnp.where(here[:, None], jnp.int8(GONE), state.keys),
            carrying=state.carrying.at[i].add(jnp.sum(here).astype(jnp.int8)),
        )

    def act(state: State, began: Array, i: Array, action: Array) -> State:
        results = [
            state, turn(state, i, -1), turn(state, i, 1), forward(state, began, i),
            toggle(state, i), pick_up(state, i),
        ][: layout.num_actions]  # fmt: skip
        chosen = jnp.where(state.alive[i] > 0, action, maps.STILL)
        return jax.tree.map(lambda *x: jnp.stack(x)[chosen], *results)

    return act


def contend(claims: Array, outcome: Array) -> tuple[Array, Array]:
    """Who comes first in the `outcome`-th way to settle all contests: (order `[N]`, prob).

    claims `[N]`: equal numbers contend. Outcomes beyond the number of ways have probability 0.
    """
    num = claims.shape[0]
    same = claims[:, None] == claims[None, :]
    size = jnp.sum(same, axis=1)
    rank = jnp.sum(jnp.tril(same, -1), axis=1)
    leads = rank == 0
    # Mixed radix over the blocks, whose digits say which member comes first.
    radix = jnp.where(leads, size, 1)
    stride = jnp.cumprod(radix) // radix
    leader = jnp.argmax(same, axis=1)
    first = outcome // stride[leader] % size
    loses = rank != first
    total = jnp.prod(radix)
    order = jnp.argsort(loses * num + jnp.arange(num))
    return order, jnp.where(outcome < total, 1.0 / total, 0.0)


def stumbles(affected: Array, outcome: Array, probability: float) -> tuple[Array, Array]:
    """How the agents that leave unsteady ground go in the `outcome`-th way: (turn `[N]`, prob).

    turn: 0 straight, -1 left, +1 right; 0 for agents not `affected` `[N]`.
    """
    rank = jnp.cumsum(affected) - affected
    digit = jnp.where(affected, outcome // 3**rank % 3, 0)
    valid = outcome < 3 ** jnp.sum(affected)
    chance = jnp.where(digit == 0, 1.0 - probability, probability / 2.0)
    prob = jnp.prod(jnp.where(affected, chance, 1.0))
    return jnp.asarray([0, -1, 1])[digit], jnp.where(valid, prob, 0.0)


def make_outcomes(layout: Layout) -> tuple[Callable[[State, Array], tuple[State, Array]], int]:
    """`outcomes` of `Grid`, and its K, which follows from the layout."""
    act = make_act(layout)
    num = len(layout.agents)
    ways = max_winners(num)
    slips = 3 ** min(num, int(layout.unsteady.sum())) if layout.stumble else 1
    unsteady = jnp.asarray(layout.unsteady)
    turns = jnp.asarray(DIRECTIONS)
    width = layout.wall.shape[1]
    indices = np.stack(np.meshgrid(np.arange(slips), np.arange(ways), indexing="ij"), -1)
    indices = jnp.asarray(indices.reshape(-1, 2), jnp.int32)

    def one(state: State, actions: Array, outcome: Array) -> tuple[State, Array]:
        agents = state.agents.astype(jnp.int32)
        moves = (actions == maps.FORWARD) & (state.alive > 0)
        shaky = moves & unsteady[agents[:, 1], agents[:, 0]]
        turn, slip = stumbles(shaky, outcome[0], layout.stumble)
        direction = (agents[:, 2] + turn) % 4
        ahead = agents[:, :2] + turns[direction]
        reaches = (actions >= maps.FORWARD) & (state.alive > 0)
        cell = ahead[:, 1] * width + ahead[:, 0]
        order, settled = contend(jnp.where(reaches, cell, -1 - jnp.arange(num)), outcome[1])
        began = state.agents[:, :2]
        turned = state._replace(agents=state.agents.at[:, 2].set(direction.astype(jnp.int8)))

        def follow(now: State, i: Array) -> tuple[State, None]:
            return act(now, began, i, actions[i]), None

        after, _ = jax.lax.scan(follow, turned, order)
        return after._replace(time=state.time + 1), slip * settled

    def outcomes(state: State, actions: Array) -> tuple[State, Array]:
        return jax.vmap(lambda k: one(state, actions, k))(indices)

    return outcomes, math.prod((slips, ways))


def make_grid(layout: Layout) -> Grid:
    """The layout's functions."""
    outcomes, num_outcomes = make_outcomes(layout)
    rectangles = jnp.asarray(layout.goals)
    humans = jnp.asarray(layout.humans)

    def achieved(state: State) -> Array:
        x, y = (state.agents[humans, c].astype(jnp.int32)[:, None] for c in (0, 1))
        inside = (rectangles[..., 0] <= x) & (x <= rectangles[..., 2])
        inside &= (rectangles[..., 1] <= y) & (y <= rectangles[..., 3])
        return inside & (state.alive[humans] > 0)[:, None]

    return Grid(
        layout=layout, initial=initial_state(layout), outcomes=outcomes,
        terminal=lambda state: state.time >= layout.horizon, achieved=achieved,
        num_outcomes=num_outcomes,
    )  # fmt: skip


def pack(state: State) -> Array:
    """The state as flat int32, from which `unpack` restores it: `[W]`."""
    return jnp.concatenate([jnp.ravel(x).astype(jnp.int32) for x in state])


def unpack(flat: Any, example: State) -> State:
    """The state of the flat form `[..., W]`; example: any state of the layout."""
    parts, start = [], 0
    for leaf in example:
        size = int(np.prod(leaf.shape))
        part = flat[..., start : start + size].reshape((*flat.shape[:-1], *leaf.shape))
        parts.append(part.astype(leaf.dtype))
        start += size
    return State(*parts)
