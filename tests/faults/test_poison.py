"""A step that gave NaN is not learned from: what led to it and came of it changes no update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.training import build
from mbx.training.environments import make_environment
from tests.helpers import tiny_config

NUM_ENVS, ROWS, BREAK = 2, 12, 5  # the step from row BREAK - 1 to row BREAK was a fault


def broken_replay(agent: Any, seed: int) -> replay.ReplayState:
    """Two episodes of noise an environment; the first lacks its last row, as after a fault."""
    rng = np.random.default_rng(seed)
    spec = agent.store.spec if agent.store else None
    example = agent.example_row()
    state = replay.init(example, num_envs=NUM_ENVS, capacity=ROWS + 2, target_spec=spec)
    for t in range(ROWS):
        row = {
            name: jnp.asarray(rng.uniform(-0.5, 0.5, (NUM_ENVS, *x.shape)), x.dtype)
            for name, x in example.items()
        }
        flag = jnp.zeros(NUM_ENVS, bool)
        row |= dict(is_first=flag | (t in (0, BREAK)), is_last=flag, terminated=flag)
        row["reward"] = jnp.where(row["is_first"], 0.0, row["reward"])
        state = replay.insert(state, row)
    return state


def poisoned(state: replay.ReplayState) -> replay.ReplayState:
    """Another action led to the fault, and a reward of a million came with it."""
    data = dict(state.data)
    data["action"] = data["action"].at[:, BREAK - 1].multiply(-1.0)
    data["reward"] = data["reward"].at[:, BREAK].set(1e6)
    return state.replace(data=data)


def differs(a: Any, b: Any) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return any(not np.array_equal(x, y, equal_nan=True) for x, y in leaves)


@pytest.mark.parametrize("value_target", ["planner", "lambda"])
def test_tdmpc_learns_nothing_from_a_fault(value_target):
    config = build.read(tiny_config(loss=dict(value_target=value_target, batch_size=32)))
    agent = build.build_agent(config, make_environment(config, 1, seed=0).spec)
    train = agent.init(jax.random.key(0))
    update = jax.jit(lambda state: agent.update(train, state, jax.random.key(1))[::2])
    state = broken_replay(agent, 0)
    params = [update(s)[0].params for s in (state, poisoned(state), other_row(state))]
    assert not differs(params[0], params[1])
    assert differs(params[0], params[2])


def other_row(state: replay.ReplayState) -> replay.ReplayState:
    """An action and a reward beside the fault: those do count."""
    data = dict(state.data)
    data["action"] = data["action"].at[:, BREAK + 1].multiply(-1.0)
    data["reward"] = data["reward"].at[:, BREAK + 2].add(1.0)
    return state.replace(data=data)
