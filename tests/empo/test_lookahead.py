"""EMPO's robot acting a step ahead, by Q_r's network and successors' values (`eval.lookahead`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.empo import suite as empo_envs
from mbx.empo.agent import make_agent
from mbx.empo.agent.acting import acting_policy, policy_of, q_ahead
from mbx.empo.agent.evaluation import learned_policy
from mbx.empo.agent.learners import init_state
from mbx.empo.power.codec import make_codec
from mbx.empo.power.worlds import profiles
from tests.empo.helpers import (
    AT_ONCE,
    TABLES,
    exact_tables,
    load,
    problem_of,
    settings_of,
    train_state,
)

NAME = "grid_rock_1h1r"
SECTIONS = dict(model=TABLES, curriculum=AT_ONCE, eval=dict(review_episodes=0, lookahead=True))


@pytest.fixture(scope="module")
def found():
    return load(NAME)


@pytest.fixture(scope="module")
def problem(found):
    return problem_of(found, settings_of(**SECTIONS))


@pytest.fixture(scope="module")
def drawn(found):
    """Tables that agree with nothing: Q_r in (-3, -1), V_h^e in (0.1, 0.9)."""
    rng = np.random.default_rng(0)
    exact = exact_tables(found)
    return {
        "v_h_e": jnp.asarray(rng.uniform(0.1, 0.9, exact["v_h_e"].shape), jnp.float32),
        "q_r": jnp.asarray(-rng.uniform(1, 3, exact["q_r"].shape), jnp.float32),
    }


def by_loops(found, tables):
    """Eqs. (7), (8), (9) and (4), state after state: {state that goes on: [R]}."""
    world, p, table = found.world, found.params, found.table
    weight, prior = np.asarray(world.goal_weight)[0], np.asarray(found.solution.pi_h)[0]
    v, q = (np.asarray(tables[name], np.float64) for name in ("v_h_e", "q_r"))

    def value(s):
        if table.terminal[s]:
            return p.terminal_v_r
        ability = sum(w * v[s, 0, g] ** p.zeta for g, w in enumerate(weight))
        power = (-q[s]) ** -p.beta_r
        return -((1.0 / ability) ** (p.xi * p.eta)) + np.sum(power / power.sum() * q[s])

    joint = jnp.asarray(profiles(2, world.num_actions), jnp.int32)  # [J, 2], the human first
    every = jnp.arange(table.num_states, dtype=jnp.int32)
    listed = jax.jit(jax.vmap(lambda s: jax.vmap(lambda j: world.successors(s, j))(joint)))(every)
    following, probability = (np.asarray(x) for x in listed[:2])  # [S, J, K]
    result = {}
    for s in np.flatnonzero(~np.asarray(table.terminal)):
        row = np.zeros(world.num_actions)
        for j, (human, robot) in enumerate(np.asarray(joint)):
            chance = sum(w * prior[g, s, human] for g, w in enumerate(weight))
            for after, prob in zip(following[s, j], probability[s, j], strict=True):
                row[robot] += chance * prob * value(after)
        result[int(s)] = p.gamma_r * row
    return result


def test_q_a_step_ahead_is_the_expected_value_of_what_follows(found, problem, drawn):
    want = by_loops(found, drawn)
    some = list(want)[::7]
    got = jax.jit(lambda s: q_ahead(problem, train_state(drawn), s))(jnp.array(some, jnp.int32))
    np.testing.assert_allclose(got, [want[s] for s in some], rtol=2e-4)


def test_the_exact_solution_is_the_same_a_step_ahead(found, problem):
    train = train_state(exact_tables(found))
    states = jnp.asarray(np.flatnonzero(~np.asarray(found.table.terminal)), jnp.int32)
    got = jax.jit(lambda s: acting_policy(problem, train, s))(states)
    np.testing.assert_allclose(got, np.asarray(found.solution.pi_r)[states], atol=2e-3)


def test_it_acts_by_the_geometric_mean_of_both(found, problem, drawn):
    q, ahead = np.asarray(drawn["q_r"], np.float64), by_loops(found, drawn)
    some = list(ahead)[::7]
    want = np.array([(q[s] * ahead[s]) ** (-found.params.beta_r / 2) for s in some])
    train = train_state(drawn, updates=10_000)
    got = jax.jit(lambda s: acting_policy(problem, train, s))(jnp.array(some, jnp.int32))
    np.testing.assert_allclose(got, want / want.sum(axis=1, keepdims=True), rtol=2e-3)


def test_it_looks_ahead_where_it_does_not_learn(found, problem, drawn):
    """Evaluations and `learned_policy` draw from the policy a step ahead, training from Q_r's."""
    train, state = train_state(drawn, updates=10_000), jnp.int32(0)
    both = jax.jit(lambda s: [f(problem, train, s)[0] for f in (acting_policy, policy_of)])
    ahead, own = both(state[None])
    assert float(jnp.abs(ahead - own).max()) > 0.05
    empo_envs.register_world("test", lambda: found)
    spec = envs.make("empo:test", 1, episode_length=20).spec
    act = make_agent(problem.settings, spec).act
    codec = make_codec(found.world)
    obs = codec.pack(state, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
    keys = jax.random.split(jax.random.key(0), 4_000)
    robot = learned_policy(problem, train)

    @jax.jit
    def shares(keys):
        def one(key):
            none = jnp.zeros(1, bool)
            drawn = (act(train, jnp.zeros((1, 0)), obs[None], none, key, e)[0][0] for e in (1, 0))
            return *drawn, jax.nn.one_hot(robot(state, key), 4)

        return jax.tree.map(lambda x: x.mean(axis=0), jax.vmap(one)(keys))

    evaluated, trained, learned = shares(keys)
    # Four standard errors of a share of 4,000 draws are 0.032 at most.
    np.testing.assert_allclose(evaluated, ahead, atol=0.032)
    np.testing.assert_allclose(learned, ahead, atol=0.032)
    # While learning a share is uniform, a tenth after so many updates.
    np.testing.assert_allclose(trained, 0.9 * own + 0.1 / 4, atol=0.032)


def test_where_successors_are_missing_the_network_is_asked(found, problem, drawn):
    """A state that lacks a successor has Q_r's own numbers for all actions."""
    world = found.world

    def successors(state, joint):
        after, prob, more = world.successors(state, joint)
        return after, jnp.where((state == 0) & (joint[1] == 2), 0.5, 1.0) * prob, more

    short = dataclasses.replace(problem, world=world._replace(successors=successors))
    train, states = train_state(drawn), jnp.arange(2, dtype=jnp.int32)
    got, whole = (jax.jit(lambda s, p=p: q_ahead(p, train, s))(states) for p in (short, problem))
    np.testing.assert_array_equal(got[0], drawn["q_r"][0])
    np.testing.assert_array_equal(got[1], whole[1])
    assert not np.allclose(whole[0], drawn["q_r"][0])


def test_a_network_of_v_r_is_read_once_it_has_had_its_stage(found):
    model = dict(v_r="network", encoder="identity", hidden=4)
    stages = dict(v_h_e_steps=1, q_r_steps=1, v_r_steps=1, ramp_steps=5)
    problem = problem_of(found, settings_of(**SECTIONS | dict(model=model, curriculum=stages)))
    train = init_state(problem, jax.random.key(0))
    changed = train.params | {"v_r": jax.tree.map(lambda x: x + 0.5, train.params["v_r"])}

    @jax.jit
    def moves(step):
        """How far Q_r a step ahead depends on V_r's network."""
        own = train.replace(step=step, target=train.params)
        own, other = (
            q_ahead(problem, own.replace(target=p), jnp.arange(1)) for p in (train.params, changed)
        )
        return jnp.abs(own - other).max()

    assert float(moves(jnp.int32(2))) == 0.0
    assert float(moves(jnp.int32(3))) > 0.0
