"""A grid as a `TabularWorld`: every reachable state, by breadth-first search in batches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from mbx.empo.multigrid.dynamics import Grid
from mbx.empo.multigrid.state import State
from mbx.empo.power.worlds import TabularWorld, profiles

BATCH = 256  # states that are expanded at once


class TooManyStates(ValueError):
    """A map has more reachable states than may be listed."""


def enumerate_states(grid: Grid, *, limit: int = 200_000) -> tuple[State, tuple[np.ndarray, ...]]:
    """All reachable states and their transitions.
    Returns states `[S, ...]` in the order they were found, and transitions as arrays `[n]`:
    state, joint action, next state, probability (equal successors of a pair merged). Raises
    TooManyStates when there are more than `limit` states.
    """
    layout = grid.layout
    start, restore = ravel_pytree(grid.initial)  # int32 words, of which the last is the time
    joint = jnp.asarray(profiles(len(layout.agents), layout.num_actions), jnp.int32)
    pack = jax.vmap(jax.vmap(lambda state: ravel_pytree(state)[0]))

    @jax.jit
    @jax.vmap
    def expand(words: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`[J, K, W]` and `[J, K]`, of all joint actions."""
        state = restore(words)
        states, prob = jax.vmap(lambda actions: grid.outcomes(state, actions))(joint)
        return pack(states), prob

    rows, numbers, links = np.asarray(start)[None], np.zeros(1, np.int64), []
    found, every = {rows.tobytes(): 0}, [rows]
    while len(rows):
        now, origin = np.resize(rows[:BATCH], (BATCH, rows.shape[1])), numbers[:BATCH]
        following, prob = (np.asarray(x)[: len(origin)] for x in expand(now))
        at = np.nonzero(prob > 0.0)
        names = following[at].view(np.dtype((np.void, rows.shape[1] * 4)))[:, 0]
        names, first, inverse = np.unique(names, return_index=True, return_inverse=True)
        order, count = np.argsort(first), len(found)  # new states are numbered as they appear
        own = np.empty(len(names), np.int64)
        own[order] = [found.setdefault(names[i].tobytes(), len(found)) for i in order]
        fresh = order[own[order] >= count]
        every.append(following[at][first[fresh]])
        links.append((origin[at[0]], at[1], own[inverse], prob[at]))
        goes_on = np.full(len(fresh), not layout.horizon) | (every[-1][:, -1] < layout.horizon)
        rows = np.concatenate([rows[BATCH:], every[-1][goes_on]])
        numbers = np.concatenate([numbers[BATCH:], own[fresh][goes_on]])
        if len(found) > limit:
            raise TooManyStates(
                f"the map has more than {limit} reachable states: shorten the horizon, "
                "draw it smaller, raise humans.max_states or choose other humans"
            )
    return jax.vmap(restore)(np.concatenate(every)), _merge(links)


def _merge(links: list[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    """Transitions sorted by state, joint action and next state, each once."""
    state, joint, following, chance = (np.concatenate(part) for part in zip(*links, strict=True))
    joints, states = int(joint.max()) + 1, int(following.max()) + 1
    codes, inverse = np.unique((state * joints + joint) * states + following, return_inverse=True)
    parts = (codes // states // joints, codes // states % joints, codes % states)
    return (*(part.astype(np.int32) for part in parts), np.bincount(inverse.reshape(-1), chance))


def export(grid: Grid, *, limit: int = 200_000) -> tuple[TabularWorld, State]:
    """The tabular world of a grid, and its states `[S, ...]`; limit as `enumerate_states`."""
    states, (state, joint, following, prob) = enumerate_states(grid, limit=limit)
    achieved = np.asarray(jax.jit(jax.vmap(grid.achieved))(states))
    layout = grid.layout
    table = TabularWorld(
        succ_state=state,
        succ_joint=joint,
        succ_next=following,
        succ_prob=prob,
        terminal=np.asarray(grid.terminal(states)),
        achieved=np.moveaxis(achieved, 0, -1).astype(np.int8),
        goal_weight=layout.goal_weight,
        humans=layout.humans,
        robots=layout.robots,
        num_actions=layout.num_actions,
        num_states=len(states.time),
    )
    return table, states
