"""A step that gave NaN is not learned from: what led to it and came of it changes no update."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs, power, replay
from mbx.empo import suite as empo
from mbx.empo.agent import learners, make_agent, targets
from mbx.empo.power.named import NamedWorld
from mbx.training import build
from mbx.training.build import make_environment
from tests.empo.helpers import AT_ONCE, TABLES, environment_of, load, problem_of, settings_of
from tests.helpers import tiny_config

NUM_ENVS, ROWS, BREAK = 2, 12, 5  # the step from row BREAK - 1 to row BREAK was a fault


def broken_replay(agent: Any, seed: int) -> replay.ReplayState:
    """Two episodes of noise an environment; the first lacks its last row, as after a fault."""
    rng = np.random.default_rng(seed)
    spec = agent.store.spec if agent.store else None
    example, insert = agent.example_row(), jax.jit(replay.insert)
    state = replay.init(example, num_envs=NUM_ENVS, capacity=ROWS + 2, target_spec=spec)
    for t in range(ROWS):
        row = {
            name: jnp.asarray(rng.uniform(-0.5, 0.5, (NUM_ENVS, *x.shape)), x.dtype)
            for name, x in example.items()
        }
        flag = jnp.zeros(NUM_ENVS, bool)
        row |= dict(is_first=flag | (t in (0, BREAK)), is_last=flag, terminated=flag)
        row["reward"] = jnp.where(row["is_first"], 0.0, row["reward"])
        state = insert(state, row)
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


def tdmpc(value_target: str) -> Any:
    settings = build.read(tiny_config(loss=dict(value_target=value_target, batch_size=32)))
    return build.build_agent(settings, make_environment(settings, 1, seed=0).spec)


@pytest.fixture(scope="module")
def train() -> Any:
    """A train state of TD-MPC, whose shape no value target changes."""
    return jax.jit(tdmpc("planner").init)(jax.random.key(0))


@pytest.mark.parametrize("value_target", ["planner", "lambda"])
def test_tdmpc_learns_nothing_from_a_fault(value_target, train):
    agent = tdmpc(value_target)
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


# -------------------------------------------------------------------------------------------------
# EMPO, whose targets come from the states of rows and from the world's own list of what follows


EMPO = {
    "tables": (dict(model=TABLES), dict()),
    "rollout": (dict(model=dict(hidden=8)), dict(human_expectation="rollout")),
}


def empo_rows(world: power.World, changes: dict[int, int]) -> jax.Array:
    """Observations `[ROWS, W]`: other places for the rows named, else 0, 1, 2, ..., 0, ..."""
    codec, none = power.make_codec(world), jnp.zeros(world.num_humans, jnp.int32)
    running = np.flatnonzero(~np.asarray(jax.vmap(world.terminal)(world.states)))
    places = [running[changes.get(t, t % 3)] for t in range(ROWS)]
    return jnp.stack([codec.pack(jnp.int32(place), none, none) for place in places])


@pytest.mark.parametrize("name", list(EMPO))
def test_empo_learns_nothing_from_a_fault(name):
    sections, loss = EMPO[name]
    found = load("dag_2h2r")
    settings = settings_of(**sections, curriculum=AT_ONCE, loss=dict(loss, batch_size=32))
    agent = make_agent(settings, environment_of(found).spec)
    train = jax.jit(agent.init)(jax.random.key(0))
    update = jax.jit(lambda state: agent.update(train, state, jax.random.key(1))[::2])
    first, no, insert = jnp.arange(ROWS) % 2 == 0, jnp.zeros(1, bool), jax.jit(replay.insert)

    def after(changes: dict[int, int]) -> Any:
        """What is learned when every second step was a fault: few rows are transitions."""
        state = replay.init(agent.example_row(), num_envs=1, capacity=ROWS)
        action = jnp.zeros((1, agent.example_row()["action"].shape[0]))
        for obs, begins in zip(empo_rows(found.world, changes), first, strict=True):
            row = dict(obs=obs[None], action=action, reward=jnp.zeros(1))
            state = insert(state, row | dict(is_first=begins[None], is_last=no, terminated=no))
        return update(state)

    plain, poisoned, other = (after(x) for x in ({}, {1: 4, 5: 3, 7: 4}, {2: 4}))
    assert not differs(plain[0].params, poisoned[0].params)
    told = {x for x in plain[1] if differs(plain[1][x], poisoned[1][x])}
    # Of the list of successors, where masked rows take room.
    assert told <= {"fill", "n_successors", "zero_ability"}
    assert differs(plain[0].params, other[0].params)


def leaky(world: power.World, bad: float, chance: float = 1.0) -> power.World:
    """With a number beside its state, which robot 0's action 1 in the first place makes `bad`; what
    follows that has its probabilities times `chance`."""
    begin = world.init(jax.random.key(0))

    def successors(state: Any, joint: jax.Array) -> Any:
        following, prob, overflow = world.successors(state[0], joint)
        leaks = (state[0] == begin) & (joint[world.num_humans] == 1)
        number = jnp.full(prob.shape, jnp.where(leaks, bad, 0.0))
        return (following, number), prob * jnp.where(leaks, chance, 1.0), overflow

    def of_place(name: str) -> Any:
        return lambda state: getattr(world, name)(state[0])

    own = {name: of_place(name) for name in ("terminal", "achieved", "human_policy", "index")}
    return world._replace(
        **own,
        num_states=None,
        states=None,
        example_state=(world.example_state, jnp.float32(0.0)),
        init=lambda key: (world.init(key), jnp.float32(0.0)),
        successors=successors,
        features=lambda state: jnp.append(world.features(state[0]), state[1]),
    )


def test_a_world_without_numbers_for_a_step_is_a_fault_there():
    world = leaky(load("dag_2h2r").world, jnp.nan)
    environment = envs.episodic(empo.raw_environment("empo:leaky", world), 4)
    state, _ = environment.reset(jax.random.key(0))
    joint = jnp.eye(world.num_actions**world.num_robots)[jnp.array([0, 1, 1, 0])]
    _, step = jax.jit(environment.step)(state, joint, jax.random.key(1))
    assert step.fault.tolist() == step.truncated.tolist() == [False, True, True, False]
    assert np.isfinite(step.reward).all() and not np.any(step.terminated & step.fault)
    codec = power.make_codec(world)
    (place, number), _, humans = jax.vmap(codec.unpack)(step.obs)
    # What followed a fault is the start of another episode.
    start = world.init(jax.random.key(0))[0]
    assert [*place[1:3]] == [start] * 2 and start not in (place[0], place[3])
    assert not np.any(number) and not np.any(humans[1:3])


def test_empo_learns_the_rest_where_a_world_has_no_numbers():
    found = load("dag_2h2r")
    settings = settings_of(model=dict(hidden=8), curriculum=AT_ONCE)
    running = np.flatnonzero(~np.asarray(found.table.terminal))[:4]
    states = (jnp.asarray(running, jnp.int32), jnp.zeros(4))
    mask, made = jnp.ones(4, bool), []
    for bad, chance in ((0.0, 1.0), (jnp.nan, 1.0), (0.0, jnp.nan)):
        world = leaky(found.world, bad, chance)
        problem = problem_of(NamedWorld(world, found.params, None, None), settings)
        train = jax.jit(lambda key, p=problem: learners.init_state(p, key))(jax.random.key(0))

        @jax.jit
        def run(train: Any, problem: Any = problem, world: Any = world) -> Any:
            human = targets.exact_profiles(world, states)
            made, metrics = targets.make_targets(problem, train, states, human, mask)
            return made, metrics, learners.learn_networks(problem, train, states, made, mask)[0]

        made.append(run(train))
    good, told, _ = made[0]
    begin = int(found.world.init(jax.random.key(0)))
    num = found.world.num_actions
    lost = (running == begin)[:, None] & (np.arange(num**found.world.num_robots) % num == 1)
    assert lost.any() and float(told["broken_targets"]) == float(told["lost_targets"]) == 0.0
    partly = lost.any(axis=1)
    for got, told, after in made[1:]:
        np.testing.assert_array_equal(got.known, good.known & ~lost)
        np.testing.assert_array_equal(got.q_r[~lost], good.q_r[~lost])
        np.testing.assert_allclose(told["broken_targets"], lost.mean())
        assert float(told["lost_targets"]) == 0.0
        covered = np.asarray(got.coverage) > 0
        np.testing.assert_array_equal(covered[~partly], good.coverage[~partly] > 0)
        np.testing.assert_array_equal(got.v_h_e[covered], good.v_h_e[covered])
        assert not covered[partly].all() and np.isfinite(got.v_h_e).all()
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.params))
