"""Means and variances of batches, against those of all their rows at once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mbx import observations
from tests.helpers import PARTS, in_parts


def after(batches):
    known = observations.init(batches[0].shape[-1])
    for rows in batches:
        known = observations.update(known, jnp.asarray(rows, jnp.float32))
    return jax.tree.map(np.asarray, known)


def test_they_are_those_of_all_rows_of_all_batches():
    batches = [np.array([[0.0, 5.0], [2.0, 5.0]]), np.array([[9.0, 5.0], [1.0, 5.0]])]
    known = after(batches)
    np.testing.assert_allclose(known["mean"], [3.0, 5.0])
    np.testing.assert_allclose(known["variance"], [12.5, 0.0], atol=1e-6)  # (9 + 1 + 36 + 4) / 4
    assert known["count"] == 2.0


def test_numbers_that_are_large_and_vary_by_little_cost_no_precision():
    rng = np.random.default_rng(0)
    batches = 3000.0 + 0.1 * rng.normal(size=(500, 64, 1)).astype(np.float32)
    known = after(batches)
    # The first batch has no mean to be measured from: of 64 rows its error is that of 3000 squared.
    np.testing.assert_allclose(known["variance"], 0.01, rtol=0.2)
    np.testing.assert_allclose(known["mean"], 3000.0, atol=0.01)


def test_normalised_rows_have_a_mean_of_zero_and_a_variance_of_one():
    rows = np.random.default_rng(0).normal(size=(4, 50, 2)) * [0.5, 20.0] + [3.0, -7.0]
    known = observations.update(observations.init(2), jnp.asarray(rows))
    found = np.asarray(observations.normalize(known, jnp.asarray(rows))).reshape(-1, 2)
    np.testing.assert_allclose(found.mean(0), 0.0, atol=1e-5)
    np.testing.assert_allclose(
        found.var(0), rows.reshape(-1, 2).var(0) / (rows.reshape(-1, 2).var(0) + 1e-4), rtol=1e-4
    )


def test_what_never_varied_is_bounded_and_what_was_never_seen_stays():
    rows = jnp.asarray([[0.5], [2.0]])
    new = observations.init(1)
    np.testing.assert_allclose(observations.normalize(new, rows), rows, rtol=1e-4)
    known = observations.update(new, jnp.zeros((3, 1)))
    np.testing.assert_allclose(observations.normalize(known, rows), 100.0 * rows, rtol=1e-4)


def test_parts_of_a_batch_give_what_the_whole_gives():
    rows = jnp.asarray(np.random.default_rng(0).normal(3.0, 2.0, size=(3, 2 * PARTS, 2)))
    start = observations.update(observations.init(2), 2.0 * rows)
    whole = observations.update(start, rows)
    parts = in_parts(lambda rows: observations.update(start, rows), (1,), rows)
    for name, wanted in whole.items():
        for found in parts[name]:
            np.testing.assert_allclose(found, wanted, rtol=1e-5)
