"""Every transition and its probability against a slow second implementation, on random walks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.empo import multigrid as mg
from tests.empo.grid_oracle import Oracle

BATCH, STEPS = 48, 16
COLORED = {
    "R": {"type": "door", "color": "red", "state": "locked"},
    "r": {"type": "key", "color": "red"},
    "B": {"type": "box", "color": "blue", "holds": {"type": "key", "color": "red"}},
    "W": {"type": "magic_wall", "side": "left"},
    "S": {"type": "disabling_switch", "target": "pause_switch"},
    "T": {"type": "disabling_switch", "target": "control_button"},
}
WORLDS = {
    "push": ("######\n#>ob.#\n#..~.#\n#1b.3#\n######", {}),
    "unsteady": ("#####\n#>uv#\n#uuu#\n#1u3#\n#####", dict(stumble=0.3)),
    "items": ("######\n#>*Bk#\n#1RxL#\n#r.v.#\n######", dict(legend=COLORED)),
    "magic": (
        "######\n#>W1##\n#vm.##\n#.u.##\n######",
        dict(legend=COLORED, magic_entry=0.6, magic_solidify=0.25, magic_users="all"),
    ),
    "reference": (
        "#######\n#1ob.<#\n#o&.k.#\n#v..o.#\n#######",
        dict(physics="reference", rocks_kill=True, actions=7, magic_entry=0.7),
    ),
    "buttons": ("######\n#>C1S#\n#P.3##\n#KvT.#\n######", dict(legend=COLORED)),
}


@pytest.mark.parametrize("name", list(WORLDS))
def test_transitions_against_the_oracle(name):
    text, fields = WORLDS[name]
    layout = mg.parse_map(text, goals=[[1, 1, 3, 3]], horizon=99, **fields)
    grid, oracle, rng = mg.make_grid(layout), Oracle(layout), np.random.default_rng(1)
    expand = jax.jit(lambda s, a: jax.vmap(grid.outcomes)(s, a))
    num = len(layout.agents)
    states = jax.tree.map(lambda x: jnp.broadcast_to(x, (BATCH, *x.shape)), grid.initial)
    start, moved, most = jax.device_get(grid.initial), np.zeros(len(grid.initial), bool), 0
    for step in range(STEPS):
        # Mostly actions that do something: turning in place is tested soon enough.
        weight = np.r_[0.3, 1, 1, 3 * np.ones(layout.num_actions - 3)]
        actions = rng.choice(layout.num_actions, (BATCH, num), p=weight / weight.sum())
        following, prob = expand(states, jnp.asarray(actions, jnp.int32))
        leaves, prob = jax.device_get(following), np.asarray(prob)
        flat = np.concatenate([x.reshape(*prob.shape, -1) for x in leaves], axis=-1)  # as `pack`
        np.testing.assert_allclose(prob.sum(axis=1), 1.0, rtol=1e-5)
        chosen = []
        now = jax.device_get(states)
        moved |= [bool((leaf != first[None]).any()) for leaf, first in zip(now, start, strict=True)]
        for b in range(BATCH):
            found: dict = {}
            for k in np.flatnonzero(prob[b]):
                key = tuple(flat[b, k].tolist())
                found[key] = found.get(key, 0.0) + float(prob[b, k])
            if b % 3 == step % 3:  # the walk is cheap, the oracle is not
                one = jax.tree.map(lambda x, b=b: x[b], now)
                expected = oracle.outcomes(one, actions[b].tolist())
                assert found.keys() == expected.keys(), (one, actions[b])
                for key, p in expected.items():
                    np.testing.assert_allclose(found[key], p, rtol=1e-5)
                most = max(most, len(expected))
            chosen.append(rng.choice(len(prob[b]), p=prob[b] / prob[b].sum()))
        pick = jnp.asarray(chosen)
        states = jax.tree.map(lambda x, i=pick: x[jnp.arange(BATCH), i], following)
    there = np.array([leaf.size > 0 for leaf in start])
    there[1] = name in ("push", "buttons", "reference")  # who else might die
    chance = most > 1 or name == "buttons"
    assert chance and (moved >= there).all(), (most, moved)
