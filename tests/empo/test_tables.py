"""Tables: each network may be one; states that are not listed get rows as they are met."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.empo.agent import learners, make_agent, models, targets
from mbx.training.checkpoint import Checkpointer
from tests.empo.helpers import (
    AT_ONCE,
    TABLES,
    changed,
    environment_of,
    exact_tables,
    load,
    problem_of,
    settings_of,
)


def learned(found, updates, most=36, **model):
    """Problem and train state after updates on `most` states that are not over."""
    stages = {f"{name}_steps": 0 for name in ("x_h", "u_r", "v_r") if name in model}
    problem = problem_of(found, settings_of(model=model, curriculum=AT_ONCE | stages))
    states = jnp.asarray(np.flatnonzero(~np.asarray(found.table.terminal))[:most], jnp.int32)
    human, every = targets.exact_profiles(found.world, states), jnp.ones(len(states), bool)

    @jax.jit
    def run(train):
        def update(_, train):
            wanted, _ = targets.make_targets(problem, train, states, human, every)
            train, _ = learners.learn(problem, train, states, wanted, every, shares={})
            return train.replace(step=train.step + 1)

        return jax.lax.fori_loop(0, updates, update, train)

    return problem, jax.device_get(run(learners.init_state(problem, jax.random.key(0))))


@pytest.fixture(scope="module")
def five():
    """Five tables, learned."""
    return learned(load("dag_2h2r"), 20, **TABLES, x_h="table", u_r="table", v_r="table")


def test_five_tables_find_the_exact_solution(five):
    exact, params = load("dag_2h2r").solution, five[1].params
    on = ~np.asarray(load("dag_2h2r").table.terminal)
    wanted = {name: np.moveaxis(np.asarray(x), -1, 0) for name, x in (("v_h_e", exact.V_h_e),)}
    wanted |= {"q_r": exact.Q_r, "x_h": exact.X_h.T, "u_r": exact.y, "v_r": exact.V_r}
    for name, values in wanted.items():
        np.testing.assert_allclose(params[name][on], np.asarray(values)[on], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("table", ["q_r", "v_h_e"])
def test_a_table_next_to_a_network(table):
    """Each learns by its own rule; the table's entries that were not met keep their defaults."""
    found, other = load("dag_2h2r"), {"q_r": "v_h_e", "v_h_e": "q_r"}[table]
    own = {table: "table", "x_h": "table", "hidden": 8, "table_x_h": 0.25}
    own[f"table_{table}"] = {"q_r": -3.0, "v_h_e": 0.75}[table]
    problem, after = learned(found, 1, 5, kind="mixed", **own)
    before = learners.init_state(problem, jax.random.key(0))
    assert changed(before.params[other], after.params[other])
    assert {*after.params} == {"v_h_e", "q_r", "x_h"}
    for name, default in ((table, own[f"table_{table}"]), ("x_h", 0.25)):
        met = np.asarray(after.opt_state[name]).reshape(36, -1).max(1) > 0
        values = np.asarray(after.params[name]).reshape(36, -1)
        assert met.sum() == 5 and np.all(values[~met] == default)
        assert np.all(np.any(values[met] != default, axis=1))
    # What is read comes from the table where there is one.
    exact = exact_tables(found)[table]
    params = before.params | {table: exact}
    latents = problem.model.trunk(params, problem.model.encode(jnp.arange(36)))
    np.testing.assert_array_equal(getattr(problem.model, table)(params, latents), exact)


def test_rows_are_given_once_and_a_full_table_says_so(monkeypatch):
    monkeypatch.setattr(models, "PROBES", 4)
    words = jnp.asarray([[n, 7 * n] for n in range(6)], jnp.int32)
    known = {"words": jnp.zeros((4, 2), jnp.int32), "used": jnp.zeros(4, bool)}
    some = jnp.asarray([True, False, True, True, False, False])
    known, lost = models.add_rows(known, words, some)
    rows = models.find_rows(known, words)
    assert int(lost) == 0 and len({*rows[some].tolist()}) == 3 and np.all(rows[~some] == 4)
    again, lost = models.add_rows(known, words, jnp.ones(6, bool))
    after = models.find_rows(again, words)
    np.testing.assert_array_equal(after[some], rows[some])
    assert int(lost) == 2 and sorted(after.tolist()) == [0, 1, 2, 3, 4, 4]


@pytest.fixture(scope="module")
def unlisted():
    """The same world, whose states have no numbers."""
    found = load("dag_2h2r")
    return dataclasses.replace(found, world=found.world._replace(num_states=None))


@pytest.fixture(scope="module")
def hashed(unlisted):
    """Five hash tables, learned."""
    every = TABLES | dict(x_h="table", u_r="table", v_r="table", table_rows=64)
    return learned(unlisted, 20, **every)


def test_tables_of_states_that_are_not_listed_learn_the_same(five, hashed):
    (problem, train), on = hashed, ~np.asarray(load("dag_2h2r").table.terminal)
    params = jax.tree.map(jnp.asarray, train.params)
    states, model = jnp.arange(36), problem.model
    rows = model.trunk(params, model.encode(states))
    np.testing.assert_array_equal(rows < 64, on)
    for name in ("v_h_e", "q_r", "x_h", "y", "v_r"):
        wanted = five[1].params[{"y": "u_r"}.get(name, name)]
        np.testing.assert_allclose(getattr(model, name)(params, rows), wanted, rtol=1e-5)


def test_tables_that_are_full_stop_the_run(unlisted):
    settings = settings_of(model=TABLES | dict(table_rows=7), curriculum=AT_ONCE)
    problem = problem_of(unlisted, settings)
    train = learners.init_state(problem, jax.random.key(0))
    one, eight = jnp.ones((8, 4)), jnp.ones(8, bool)
    wanted = targets.Targets(-one, one > 0, 0.5 * one[:, None], one[:, None], one, one[:, :2])
    after, metrics = jax.jit(functools.partial(learners.learn_tables, problem))(
        train, jnp.arange(8), wanted, eight
    )
    assert metrics["lost_states"] == 1 / 8 and np.all(after.params["rows"]["used"])
    assert np.all(after.opt_state["q_r"] == 1)
    agent = make_agent(settings, environment_of(unlisted).spec)
    with pytest.raises(ValueError, match="model.table_rows=7: .* find no row, give tables more"):
        agent.check(metrics)


def test_a_checkpoint_keeps_tables_and_their_rows(hashed, tmp_path):
    problem, train = hashed
    assert {*train.params} == {"v_h_e", "q_r", "x_h", "u_r", "v_r", "rows"}
    with Checkpointer(str(tmp_path)) as checkpoints:
        checkpoints.save(1, train, {})
        fresh = learners.init_state(problem, jax.random.key(1))
        loaded, _ = checkpoints.restore(fresh)
    assert changed(fresh.params["rows"], loaded.params["rows"])
    assert not changed(train, loaded)
