"""A grid as a `TabularWorld`: every reachable state, by breadth-first search in jitted batches."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.multigrid.dynamics import Grid
from mbx.empo.multigrid.state import pack, unpack
from mbx.empo.power.worlds import TabularWorld, profiles

Array = jax.Array


class TooManyStates(ValueError):
    """A map has more reachable states than may be listed."""


def make_expand(grid: Grid) -> Callable[[Array], tuple[Array, Array]]:
    """`expand(flat [b, W]) -> (next [b, J, K, W], prob [b, J, K])` for all joint actions."""
    layout = grid.layout
    joint = jnp.asarray(profiles(len(layout.agents), layout.num_actions), jnp.int32)

    def one(row: Array) -> tuple[Array, Array]:
        state = unpack(row, grid.initial)
        states, prob = jax.vmap(lambda actions: grid.outcomes(state, actions))(joint)
        return jax.vmap(jax.vmap(pack))(states), prob

    return jax.jit(jax.vmap(one))


def enumerate_states(
    grid: Grid, *, limit: int = 200_000
) -> tuple[np.ndarray, tuple[np.ndarray, ...]]:
    """All reachable states and their transitions.
    Returns flat states `[S, W]` in the order they were found, and transitions as arrays `[n]`:
    state, joint action, next state, probability (equal successors of a pair merged). Raises
    TooManyStates when there are more than `limit` states.
    """
    expand, batch = make_expand(grid), 256
    start = np.asarray(pack(grid.initial))
    found: dict[bytes, int] = {start.tobytes(): 0}
    states, frontier = [start], [0]
    links: list[tuple[np.ndarray, ...]] = []
    while frontier:
        now, frontier = frontier[:batch], frontier[batch:]
        rows = np.stack([states[s] for s in now])
        padded = np.concatenate([rows, np.repeat(rows[:1], batch - len(rows), axis=0)])
        following, prob = (np.asarray(x)[: len(now)] for x in expand(jnp.asarray(padded)))
        at = np.argwhere(prob > 0.0)
        flats = following[tuple(at.T)]
        different, which = _different(flats)
        numbers = np.empty(len(different), np.int64)
        for number, flat in enumerate(flats[different]):
            name = flat.tobytes()
            if name not in found:
                if len(found) >= limit:
                    raise TooManyStates(
                        f"the map has more than {limit} reachable states: shorten the horizon, "
                        "draw it smaller, raise humans.max_states or choose other humans"
                    )
                found[name] = len(states)
                states.append(flat)
                # The last word is the time; without a horizon it stays 0.
                if not grid.layout.horizon or flat[-1] < grid.layout.horizon:
                    frontier.append(found[name])
            numbers[number] = found[name]
        origin = np.asarray(now, np.int64)[at[:, 0]]
        links.append((origin, at[:, 1], numbers[which], prob[tuple(at.T)]))
    return np.stack(states), _merge(links)


def _different(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each different row stands first, in that order; and which of these each row is."""
    rows = np.ascontiguousarray(rows)
    whole = rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, first, inverse = np.unique(whole, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]


def _merge(links: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Transitions sorted by state, joint action and next state, each once."""
    state, joint, following, chance = (np.concatenate(part) for part in zip(*links, strict=True))
    joints, states = int(joint.max()) + 1, int(following.max()) + 1
    code = (state * joints + joint) * states + following
    codes, inverse = np.unique(code, return_inverse=True)
    prob = np.zeros(len(codes))
    np.add.at(prob, inverse.reshape(-1), chance.astype(np.float64))
    parts = (codes // states // joints, codes // states % joints, codes % states)
    return (*(part.astype(np.int32) for part in parts), prob)


def export(grid: Grid, *, limit: int = 200_000) -> tuple[TabularWorld, np.ndarray]:
    """The tabular world of a grid, and its flat states `[S, W]`; limit as `enumerate_states`."""
    flat, (state, joint, following, prob) = enumerate_states(grid, limit=limit)
    all_states = unpack(jnp.asarray(flat), grid.initial)
    achieved = np.asarray(jax.jit(jax.vmap(grid.achieved))(all_states))
    layout = grid.layout
    table = TabularWorld(
        succ_state=state,
        succ_joint=joint,
        succ_next=following,
        succ_prob=prob,
        terminal=np.asarray(grid.terminal(all_states)),
        achieved=np.moveaxis(achieved, 0, -1).astype(np.int8),
        goal_weight=layout.goal_weight,
        humans=layout.humans,
        robots=layout.robots,
        num_actions=layout.num_actions,
        num_states=len(flat),
    )
    return table, flat
