"""A grid as a `TabularWorld`: every reachable state, by breadth-first search in jitted batches."""

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

    frontier = [np.asarray(start).tobytes()]
    found, links = {frontier[0]: 0}, []
    while frontier:
        now, frontier = frontier[:BATCH], frontier[BATCH:]
        rows = _words(now + now[:1] * (BATCH - len(now)))
        following, prob = (np.asarray(x)[: len(now)] for x in expand(rows))
        at = np.nonzero(prob > 0.0)
        names = [row.tobytes() for row in following[at]]
        for name in names:
            if name not in found:
                found[name] = len(found)
                if not layout.horizon or _words([name])[0, -1] < layout.horizon:
                    frontier.append(name)
        if len(found) > limit:
            raise TooManyStates(
                f"the map has more than {limit} reachable states: shorten the horizon, "
                "draw it smaller, raise humans.max_states or choose other humans"
            )
        origin = np.array([found[name] for name in now])[at[0]]
        links.append((origin, at[1], np.array([found[name] for name in names]), prob[at]))
    return jax.vmap(restore)(_words(list(found))), _merge(links)


def _words(names: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(names), np.int32).reshape(len(names), -1)


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
