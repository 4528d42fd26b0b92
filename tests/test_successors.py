"""Successor expectations: golden targets, padding, overflow, order, de-duplication."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbx import power, successors
from tests.helpers import FIXTURES, in_programs

power = in_programs(power, "attained", "intrinsic_reward", "robot_policy")
successors = in_programs(successors)

Q_FILES = ("q_targets_b32_a16", "q_targets_ragged_empty", "q_targets_single")
V_FILES = ("v_h_e_targets_b32", "v_h_e_targets_b5")


def load(name):
    return dict(np.load(FIXTURES / "empo" / f"{name}.npz"))


@pytest.fixture(params=[True, False], ids=["float64", "float32"])
def tolerance(request):
    """Relative tolerance of the README in this precision."""
    with jax.enable_x64(request.param):
        yield 1e-12 if request.param else 1e-5


@pytest.mark.parametrize("name", Q_FILES)
def test_q_targets_match_golden_in_any_order_and_with_nan_padding(name, tolerance):
    d = load(name)
    shape = d["expected_value"].shape
    segments = shape[0] * shape[1]
    values, probs = d["value_table"][d["succ_state"]], d["succ_prob"]
    ids = d["segment"]
    got = successors.segment_expectation(values, probs, ids, segments)
    np.testing.assert_allclose(np.reshape(got, shape), d["expected_value"], rtol=tolerance)
    order = d["shuffle"]
    shuffled = successors.segment_expectation(values[order], probs[order], ids[order], segments)
    np.testing.assert_allclose(np.reshape(shuffled, shape), d["expected_value"], rtol=tolerance)
    table = np.append(d["value_table"], np.nan)  # state -1: NaN
    padded = successors.segment_expectation(
        table[d["padded_state"]], d["padded_prob"], d["padded_segment"], segments
    )
    target = float(d["gamma_r"]) * np.asarray(padded).reshape(shape)
    np.testing.assert_allclose(target, d["q_target"], rtol=tolerance)
    counts = successors.segment_mass(np.ones_like(probs), ids, segments)
    np.testing.assert_array_equal(np.reshape(counts, shape), d["count"])


@pytest.mark.parametrize("name", Q_FILES)
def test_dense_and_flat_forms_agree_with_golden(name, tolerance):
    d = load(name)
    shape = d["expected_value"].shape
    room = max(1, d["count"].max())
    states = np.zeros((*shape, room), np.int32)
    probs = np.zeros((*shape, room))
    for b, a, s, p in zip(
        d["succ_trans"], d["succ_action"], d["succ_state"], d["succ_prob"], strict=True
    ):
        k = int((probs[b, a] > 0).sum())
        states[b, a, k], probs[b, a, k] = s, p
    values = np.where(probs > 0, d["value_table"][states], np.nan)
    gamma = float(d["gamma_r"])
    dense = gamma * successors.dense_expectation(values, probs)
    np.testing.assert_allclose(dense, d["q_target"], rtol=tolerance)
    flat = successors.flatten(states, probs, len(d["succ_prob"]))
    assert int(flat.overflow) == 0 and float(flat.fill) == 1.0
    np.testing.assert_array_equal(flat.state, d["succ_state"])
    np.testing.assert_array_equal(flat.segment, d["segment"])
    got = successors.segment_expectation(
        d["value_table"][flat.state], flat.prob, flat.segment, shape[0] * shape[1]
    )
    np.testing.assert_allclose(gamma * np.reshape(got, shape), d["q_target"], rtol=tolerance)


@pytest.mark.parametrize("name", V_FILES)
def test_v_h_e_targets_match_golden(name, tolerance):
    d = load(name)
    entries, trans = len(d["entry_trans"]), d["succ_trans"]
    policy = np.asarray(power.robot_policy(d["Q_r"], d["beta_r"]))
    np.testing.assert_allclose(policy, d["pi_r"], rtol=0, atol=max(tolerance, 1e-12))
    weight = policy[trans, d["succ_action"]]
    value, achieved = d["succ_value"], d["succ_achieved"]

    def target(terminal):
        got = power.attained(value, achieved, d["gamma_h"], terminal)
        prob = d["succ_prob"] * weight
        return successors.segment_expectation(got, prob, d["succ_entry"], entries)

    close = dict(rtol=tolerance, atol=tolerance)
    ended = d["terminal"][trans]
    np.testing.assert_allclose(target(None), d["target_ignore_terminal"], **close)
    np.testing.assert_allclose(target(ended), d["target_terminal_keep_achieved"], **close)
    # Readings that are not ours: what the original drops is a number we can name.
    first = d["terminal"][d["entry_trans"]]
    assert np.all(d["target_terminal_zero"][first] == 0)
    others = np.asarray(target(None))[~first]
    np.testing.assert_allclose(others, d["target_terminal_zero"][~first], **close)
    skipped = np.abs(d["target_skip_tiny_policy"] - np.asarray(target(None)))
    assert skipped.max() <= d["Q_r"].shape[1] * 1e-8 + tolerance


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_u_r_matches_golden_for_any_number_of_humans(reduce, tolerance):
    d = load("u_r_ragged")
    n = len(d["humans_per_state"])
    widest = d["humans_per_state"].max()
    start = np.concatenate([[0], np.cumsum(d["humans_per_state"])[:-1]])
    slot = np.arange(widest)[None] + start[:, None]
    mask = np.arange(widest)[None] < d["humans_per_state"][:, None]
    padded = np.where(mask, d["X_h"][np.minimum(slot, len(d["X_h"]) - 1)], np.nan)
    for i, (xi, eta) in enumerate(zip(d["xi"], d["eta"], strict=True)):
        y, u_r = successors.segment_reward(
            jnp.asarray(d["X_h"]), jnp.asarray(d["state_index"]), n, xi, eta, reduce
        )
        np.testing.assert_allclose(y, d[f"y_{reduce}_{i}"], rtol=10 * tolerance)
        np.testing.assert_allclose(u_r, d[f"U_r_{reduce}_{i}"], rtol=10 * tolerance)
        dense = power.intrinsic_reward(jnp.asarray(padded), xi, eta, jnp.asarray(mask), reduce)
        np.testing.assert_allclose(dense, d[f"U_r_{reduce}_{i}"], rtol=10 * tolerance)


def test_a_state_without_humans_has_no_reward():
    _, u_r = successors.segment_reward(jnp.ones(2), jnp.array([0, 2]), 3, 1.0, 1.0)
    assert np.isnan(u_r[1]) and np.all(np.asarray(u_r)[[0, 2]] == -1.0)
    with pytest.raises(ValueError, match="reduce='max'"):
        successors.segment_reward(jnp.ones(2), jnp.array([0, 1]), 2, 1.0, 1.0, "max")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("padding_id", [-1, 3, 99])
def test_padding_reaches_neither_value_nor_gradient(bad, padding_id):
    values = jnp.array([1.0, 2.0, bad, bad])
    probs = jnp.array([0.25, 0.75, bad, 0.0])
    ids = jnp.array([0, 2, padding_id, 1])

    def total(values, probs):
        return jnp.sum(successors.segment_expectation(values, probs, ids, 3))

    assert float(total(values, probs)) == 0.25 + 1.5
    by_value, by_prob = jax.grad(total, argnums=(0, 1))(values, probs)
    np.testing.assert_allclose(by_value, [0.25, 0.75, 0.0, 0.0])
    np.testing.assert_allclose(by_prob, [1.0, 2.0, 0.0, 0.0])
    dense = jax.grad(lambda v: successors.dense_expectation(v, jnp.array([1.0, 0.0])))
    np.testing.assert_allclose(dense(jnp.array([1.0, bad])), [1.0, 0.0])


def test_values_with_several_entries_are_summed_entry_by_entry():
    values = np.arange(10.0).reshape(5, 2)
    values[1, 0] = np.nan  # of probability 0: does not count, and its neighbour does
    probs, ids = np.array([0.5, 0.0, 0.25, 1.0, 0.5]), np.array([0, 0, 2, 3, 2])
    got = successors.segment_expectation(jnp.asarray(values), jnp.asarray(probs), ids, 3)
    np.testing.assert_allclose(got, [[0.0, 0.5], [0.0, 0.0], [5.0, 5.75]])
    for short in ((values[:4], probs, ids), (values, probs[:4], ids), (values, probs, ids[:4])):
        with pytest.raises(ValueError, match="leading axis"):
            successors.segment_expectation(*short, 3)


def test_a_probability_of_zero_still_has_a_gradient():
    """How much more the expectation would be if the successor became possible: its value."""
    values, ids = jnp.array([3.0, -2.0, 7.0]), jnp.array([0, 0, 1])
    slope = jax.grad(lambda p: successors.segment_expectation(values, p, ids, 1)[0])
    np.testing.assert_array_equal(slope(jnp.array([1.0, 0.0, 0.5])), [3.0, -2.0, 0.0])


def test_what_cannot_be_chosen_may_be_worth_anything_and_nothing_else_may():
    values, probs = jnp.array([jnp.nan, 2.0, 4.0]), jnp.array([0.5, 0.5, 1.0])
    ids, policy = jnp.array([0, 0, 1]), jnp.array([0.0, 0.5, 0.25])
    got = successors.segment_expectation(values, probs * policy, ids, 2)
    np.testing.assert_allclose(got, [0.5, 1.0])
    bad = successors.segment_expectation(values, probs, ids, 2)
    assert np.isnan(bad[0]) and bad[1] == 4.0
    assert np.isnan(successors.dense_expectation(values, probs))
    np.testing.assert_allclose(successors.dense_expectation(values, probs.at[0].set(0.0)), 5.0)


def test_distinct_keys_by_hand():
    keys = jnp.array([[3, 0], [3, 0], [1, 2], [3, 0], [3, 1]])  # the unused slot has one, too
    unique = successors.deduplicate(keys, jnp.array([False, True, True, True, True]), 3)
    assert int(unique.count) == 3 and not bool(unique.overflowed)
    np.testing.assert_array_equal(keys[unique.first[unique.inverse[1:]]], keys[1:])
    assert set(np.asarray(unique.inverse[1:]).tolist()) == {0, 1, 2} and unique.inverse[0] == 0
    assert bool(successors.deduplicate(keys, jnp.ones(5, bool), 2).overflowed)


def test_overflow_is_counted_and_never_renormalised():
    probs = jnp.array([[[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]])
    states = jnp.arange(6).reshape(1, 2, 3)
    flat = successors.flatten(states, probs, 4)
    assert int(flat.overflow) == 1 and int(flat.count) == 4
    np.testing.assert_allclose(flat.lost_mass, [0.0, 0.5])
    mass = successors.segment_mass(flat.prob, flat.segment, 2)
    np.testing.assert_allclose(mass, [1.0, 0.5])
    assert float(successors.mass_error(mass)) == 0.5
    roomy = successors.flatten(states, probs, 8)
    assert int(roomy.overflow) == 0 and float(roomy.fill) == 5 / 8
    assert np.all(np.asarray(roomy.segment)[5:] == 2) and np.all(np.asarray(roomy.prob)[5:] == 0)


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1))
def test_flat_form_equals_dense_form(seed):
    rng = np.random.default_rng(seed)
    probs = rng.random((3, 2, 4)) * (rng.random((3, 2, 4)) < 0.5)
    values = rng.normal(size=(3, 2, 4))
    values[probs == 0] = np.nan
    dense = successors.dense_expectation(jnp.asarray(values), jnp.asarray(probs))
    flat = successors.flatten(jnp.asarray(values), jnp.asarray(probs), 20)
    order = rng.permutation(20)
    shuffled = (x[order] for x in (flat.state, flat.prob, flat.segment))
    got = successors.segment_expectation(*shuffled, 6).reshape(3, 2)
    if int(flat.overflow) == 0:
        np.testing.assert_allclose(got, dense, rtol=1e-5, atol=1e-6)
    assert int(flat.count) + int(flat.overflow) == (probs > 0).sum()


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**31 - 1), st.integers(1, 20))
def test_deduplication_never_changes_results(seed, size):
    rng = np.random.default_rng(seed)
    keys = jnp.asarray(rng.integers(0, 3, (16, 2)))
    valid = jnp.asarray(rng.random(16) < 0.8)
    values = 10.0 * keys[:, 0] + keys[:, 1]
    true = len({tuple(k) for k, v in zip(np.asarray(keys), valid, strict=True) if v})
    got, count = successors.map_unique(lambda x: 2.0 * x, values, keys, valid, size)
    assert int(count) == true
    np.testing.assert_array_equal(np.asarray(got)[valid], 2.0 * np.asarray(values)[valid])
    unique = successors.deduplicate(keys, valid, size)
    assert bool(unique.overflowed) == (true > size)


def test_deduplication_evaluates_each_key_once():
    seen = []

    def function(x):
        seen.append(x.shape[0])
        return x

    keys = jnp.array([5, 3, 5, 3, 3])
    got, count = successors.map_unique(function, keys, keys, jnp.ones(5, bool), 2)
    assert int(count) == 2 and sorted(set(seen)) == [2, 5]  # the branch taken, and the fallback
    np.testing.assert_array_equal(got, keys)
