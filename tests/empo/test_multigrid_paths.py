"""Humans on their shortest ways: lengths against a search through the oracle's dynamics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from mbx.empo import multigrid as mg
from mbx.empo.multigrid.dynamics import achieved
from mbx.empo.multigrid.layout import FORWARD, PICK_UP, RIGHT, STILL, TOGGLE
from mbx.empo.multigrid.paths import longest, make_lengths, make_paths
from mbx.empo.multigrid.state import CARRIED, State, initial_state
from tests.empo.grid_oracle import Oracle

# The robot is walled in and stands still: what is left is the human alone.
BOX = {"B": {"type": "box", "holds": {"type": "key", "color": "yellow"}}}
ROOMS = {
    "door": ("#######\n#>.D..#\n#.###.#\n#...#.#\n###1###\n#######", {}),
    "key": ("########\n#>.k.L.#\n####1###\n########", {"drop": False}),
    "rock": ("#######\n#>.o..#\n#.###.#\n#.....#\n##1####\n#######", {}),
    "block": ("########\n#>.b...#\n###1####\n########", {}),
    "boxed": ("########\n#>.B.L.#\n###1####\n########", {"drop": False, "legend": BOX}),
}


def searched(layout, far):
    """States that the human alone can bring about, by the oracle, and their ways to the goal."""
    start, restore = ravel_pytree(initial_state(layout))
    oracle, human = Oracle(layout), int(layout.humans[0])
    found, before = [tuple(start.tolist())], {}
    for name in found:  # grows
        for action in range(layout.num_actions):
            actions = [STILL, STILL]
            actions[human] = action
            state = State(*map(np.asarray, restore(jnp.asarray(name))))
            ((after, _),) = oracle.outcomes(state, actions).items()
            after = (*after[:-1], 0)
            if after not in before:
                found.append(after)
            before.setdefault(after, set()).add(name)
    found = list(dict.fromkeys(found))
    states = jax.vmap(restore)(jnp.asarray(found))
    inside = np.asarray(jax.vmap(lambda s: achieved(layout, s))(states))[:, 0, 0]
    way = {name: 0.0 for name, there in zip(found, inside, strict=True) if there}
    for name in (queue := list(way)):
        for earlier in before.get(name, ()):
            if earlier not in way:
                way[earlier] = way[name] + 1
                queue.append(earlier)
    return states, np.array([way.get(name, far) for name in found])


@pytest.mark.parametrize("name", ROOMS)
def test_lengths_are_those_of_the_dynamics(name):
    text, options = ROOMS[name]
    x = len(text.split("\n")[0]) - (3 if name == "block" else 2)  # the block's place is the last
    layout = mg.parse_map(text, goals=[[x, 1, x, 1]], horizon=0, **options)
    far = longest(layout)
    states, way = searched(layout, far)
    # [S, 1, 1, C, D, Y, X]
    lengths = jax.jit(jax.vmap(lambda s: make_lengths(layout)(s)[0]))(states)
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
    state = initial_state(layout)
    state = state._replace(
        agents=state.agents.at[int(layout.humans[0])].set(jnp.asarray(where, jnp.int8))
    )
    prior = jax.jit(lambda state, beta: make_paths(layout, beta)(state)[0, 0])
    policy = np.asarray(prior(state, 3.0))
    assert policy.argmax() == best and policy[best] > 0.8, policy
    np.testing.assert_allclose(prior(state, 0.0), 1.0 / layout.num_actions, rtol=1e-5)
