"""Small parts of EMPO's targets and evaluation by hand."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.agents.empo import agent, diagnostics, evaluation, targets
from mbx.agents.empo.types import TrainState
from mbx.power.worlds import World
from tests.agents.empo_helpers import TABLES, load, problem_of, settings_of


@pytest.mark.parametrize(
    ("model", "loss", "wanted"),
    [({}, {}, 20), (TABLES, {}, 1), ({}, dict(target_interval=7), 7)],
)
def test_how_often_parameters_are_copied(model, loss, wanted):
    settings = settings_of(model=model, loss=loss)
    assert problem_of(load("dag_2h2r"), settings).target_interval == wanted


def test_copies_are_made_after_every_interval_of_updates():
    problem, now, then = SimpleNamespace(target_interval=3), {"w": 1.0}, {"w": 2.0}
    for step, copied in ((0, False), (1, False), (2, True), (3, False), (5, True)):
        train = agent._advance(problem, TrainState(now, then, {}, jnp.int32(step)))
        assert int(train.step) == step + 1 and train.params is now
        assert float(train.target["w"]) == (1.0 if copied else 2.0)
    assert agent._advance(problem, TrainState(now, None, {}, jnp.int32(2))).target is None


@pytest.mark.parametrize(("candidates", "drawn"), [(1, 3), (2, 6)])
def test_a_batch_is_one_candidate_a_row_or_chosen_among_more(monkeypatch, candidates, drawn):
    found = load("dag_2h2r")
    settings = settings_of(loss=dict(batch_size=3, candidates=candidates))
    problem, seen = problem_of(found, settings), []

    def sample(buffer, key, *, batch_size, length):
        seen.append((batch_size, length))
        rows = {"obs": jnp.zeros((2, batch_size, 5), jnp.int32)}
        return replay.Sample(rows, None, jnp.ones((1, batch_size), bool), None)

    monkeypatch.setattr(replay, "sample", sample)
    batch = jax.eval_shape(lambda key: agent._sample(problem, None, key), jax.random.key(0))
    assert seen == [(drawn, 1)] and batch.mask.shape == (1, 3)
    assert batch.rows["obs"].shape == (2, 3, 5)
    if candidates == 1:  # as it was drawn: nothing is ordered
        same = SimpleNamespace()
        monkeypatch.setattr(replay, "sample", lambda *_, **__: same)
        assert agent._sample(problem, None, jax.random.key(0)) is same


def test_shares_are_of_the_actions_of_rows_that_exist():
    which = jnp.asarray([[True, False, False], [True, True, False], [True, True, True]])
    mask = jnp.asarray([True, True, False])
    np.testing.assert_allclose(targets._share(which, mask), 3 / 6)
    assert float(targets._share(which, jnp.zeros(3, bool))) == 0.0


def test_what_is_broken_is_no_target_and_finite():
    q = jnp.asarray([[-2.0, jnp.nan], [-jnp.inf, -3.0]])
    v = jnp.asarray([[[0.5, jnp.inf]], [[0.25, 0.75]]])
    known = jnp.asarray([[True, True], [True, False]])
    made = targets.Targets(q, known, v, jnp.ones((2, 1, 2)), q, q)
    found, told = jax.jit(targets._without_broken)(made, jnp.asarray([True, True]))
    np.testing.assert_array_equal(found.q_r, [[-2.0, -1.0], [-1.0, -3.0]])
    np.testing.assert_array_equal(found.known, [[True, False], [False, False]])
    np.testing.assert_array_equal(found.v_h_e, [[[0.5, 0.0]], [[0.25, 0.75]]])
    np.testing.assert_array_equal(found.coverage, [[[1.0, 0.0]], [[1.0, 1.0]]])
    assert float(told["broken_targets"]) == 0.5


def test_what_is_lost_is_no_target():
    """Two human profiles: the second is never played in row 0, and only for goal 1 in row 1."""
    lost = jnp.zeros((2, 2, 3), bool).at[:, 1, 2].set(True)
    weight = jnp.asarray([[1.0, 0.0], [0.5, 0.5]])
    entry = jnp.asarray([[[[1.0, 0.0], [1.0, 0.0]]], [[[1.0, 0.0], [0.5, 0.5]]]])
    human = targets.Profiles(jnp.zeros((2, 2, 1), jnp.int32), weight, entry, jnp.ones((2, 1, 2)))
    made = targets.Targets(*[jnp.ones((2, 3))] * 6)._replace(
        known=jnp.ones((2, 3), bool), coverage=human.coverage
    )
    found, told = jax.jit(targets._without_lost)(made, lost, human, jnp.ones(2, bool))
    np.testing.assert_array_equal(found.known, [[True] * 3, [True, True, False]])
    np.testing.assert_array_equal(found.coverage, [[[1.0, 1.0]], [[1.0, 0.0]]])
    np.testing.assert_allclose(told["lost_targets"], 1 / 6)


def test_numbers_of_episodes():
    reached = np.array([[True, True], [True, False], [False, False], [True, True]])
    value = np.array([[0.5, 1.0], [0.25, 0.0], [0.0, 0.0], [1.0, 1.0]])
    told = evaluation.summarise(reached, value)
    assert told == {
        "reached": 0.625,
        "reached_error": np.std([1.0, 0.5, 0.0, 1.0]) / 2,
        "discounted": value.mean(),
        "discounted_error": np.std([0.75, 0.125, 0.0, 1.0]) / 2,
        "all_reached": 0.5,
    }


def test_states_of_episodes_one_after_the_other():
    x = np.arange(24).reshape(2, 3, 4)
    joined = diagnostics._joined({"x": x, "n": x[..., 0]})
    np.testing.assert_array_equal(joined["x"], x.reshape(6, 4))
    np.testing.assert_array_equal(joined["n"], [0, 4, 8, 12, 16, 20])


def corridor(length):
    """One human walks right for ever along cells 0, 1, ...; goals are to be at cell 1 or 3. The
    robot's second action holds everybody back. The last cell ends the episode."""

    def successors(state, actions):
        new = jnp.where(actions[1] == 1, state, jnp.minimum(state + 1, length - 1))
        return new[None], jnp.ones(1), jnp.ones(1, bool)

    fields = dict.fromkeys(World._fields)
    return World(**fields)._replace(
        num_humans=1,
        num_robots=1,
        num_actions=2,
        init=lambda key: jnp.int32(0),
        successors=successors,
        terminal=lambda state: state == length - 1,
        achieved=lambda state: (state == jnp.asarray([1, 3]))[None],
        goal_weight=jnp.full((1, 2), 0.5),
        human_policy=lambda state: jnp.broadcast_to(jnp.asarray([1.0, 0.0]), (1, 2, 2)),
    )


def test_what_is_reached_and_when():
    world, length = corridor(5), 6

    played = jax.jit(
        lambda key: evaluation.play(
            world, evaluation.frozen_policy, key, episodes=8, length=length, gamma=0.5
        )
    )(jax.random.key(0))
    goals = np.asarray(played.goals)[:, 0]
    assert set(goals) == {0, 1} and np.asarray(played.reached).all()
    np.testing.assert_allclose(played.value[:, 0], np.where(goals == 0, 1.0, 0.25))
    np.testing.assert_array_equal(played.states, [[0, 1, 2, 3, 4, 4, 4]] * 8)
    np.testing.assert_array_equal(played.over, [[False] * 5 + [True] * 2] * 8)
    held = jax.jit(
        lambda key: evaluation.play(world, lambda s, k: jnp.int32(1), key, episodes=2, length=2)
    )(jax.random.key(0))
    assert not np.any(held.reached) and not np.any(held.value) and not np.any(held.states)
