"""Humans on their shortest ways: lengths against a search through the real dynamics."""

from __future__ import annotations

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.empo import multigrid as mg
from mbx.empo.multigrid.paths import longest, make_lengths, make_paths
from mbx.empo.multigrid.state import CARRIED
from mbx.empo.power.worlds import profiles

STILL, LEFT, RIGHT, FORWARD, TOGGLE, PICK_UP = range(6)

# The robot is walled in and stands still: what is left is the human alone.
ROOMS = {
    "door": ("#######\n#>.D..#\n#.###.#\n#...#.#\n###1###\n#######", {}),
    "key": ("########\n#>.k.L.#\n####1###\n########", {"drop": False}),
    "rock": ("#######\n#>.o..#\n#.###.#\n#.....#\n##1####\n#######", {}),
    "block": ("########\n#>.b...#\n###1####\n########", {}),
    "boxed": (
        "#######\n#>.B.L.#\n".replace("#######\n", "########\n", 1) + "###1####\n########",
        {
            "drop": False,
            "legend": {"B": {"type": "box", "holds": {"type": "key", "color": "yellow"}}},
        },
    ),
}


def searched(layout, far):
    """Ways of the listed states to the first goal when the robot stands still: (states, [S])."""
    grid = mg.make_grid(layout)
    table, states = mg.export(grid)
    moves = profiles(2, table.num_actions)[table.succ_joint]
    alone = moves[:, int(table.robots[0])] == STILL
    before = {}
    for s, following in zip(table.succ_state[alone], table.succ_next[alone], strict=True):
        before.setdefault(int(following), set()).add(int(s))
    way = np.full(table.num_states, far)
    queue = deque(np.flatnonzero(table.achieved[0, 0]).tolist())
    way[list(queue)] = 0.0
    while queue:
        now = queue.popleft()
        for s in before.get(now, ()):
            if way[s] == far:
                way[s] = way[now] + 1
                queue.append(s)
    return grid, states, way


@pytest.mark.parametrize("name", ROOMS)
def test_lengths_are_those_of_the_dynamics(name):
    text, options = ROOMS[name]
    x = len(text.split("\n")[0]) - (3 if name == "block" else 2)  # the block's place is the last
    layout = mg.parse_map(text, goals=[[x, 1, x, 1]], horizon=0, **options)
    far = longest(layout)
    grid, states, way = searched(layout, far)
    lengths = jax.jit(jax.vmap(lambda s: make_lengths(layout)(s)[0]))(
        states
    )  # [S, 1, 1, C, D, Y, X]
    human = int(layout.humans[0])
    x, y, d = (np.asarray(states.agents)[:, human, c] for c in range(3))
    held = np.asarray(states.items[:, :, 0] == CARRIED)
    hand = held[:, layout.item_kind == 0].any(axis=1).astype(int) if len(layout.items) else 0 * x
    got = np.asarray(lengths)[np.arange(len(x)), 0, 0, hand, d, y, x]
    reachable = way < far
    assert reachable.sum() > 10
    np.testing.assert_array_equal(got[reachable], way[reachable])


@pytest.mark.parametrize(
    ("name", "where", "best"),
    [
        ("door", (2, 1, 0), TOGGLE),  # before a closed door, the goal behind it
        ("key", (2, 1, 0), PICK_UP),
        ("boxed", (2, 1, 0), TOGGLE),
        ("rock", (1, 1, 0), RIGHT),  # round the rock: facing it, turn down the long way
        ("block", (2, 1, 0), FORWARD),
    ],
)
def test_humans_open_fetch_and_go_round(name, where, best):
    text, options = ROOMS[name]
    columns = len(text.split("\n")[0])
    layout = mg.parse_map(text, goals=[[columns - 2, 1, columns - 2, 1]], horizon=0, **options)
    state = mg.make_grid(layout).initial
    state = state._replace(
        agents=state.agents.at[int(layout.humans[0])].set(jnp.asarray(where, jnp.int8))
    )
    prior = jax.jit(lambda state, beta: make_paths(layout, beta)(state)[0, 0])
    policy = np.asarray(prior(state, 3.0))
    assert policy.argmax() == best and policy[best] > 0.8, policy
    np.testing.assert_allclose(prior(state, 0.0), 1.0 / layout.num_actions, rtol=1e-5)
