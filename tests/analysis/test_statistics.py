"""Statistics over tasks and seeds against independent implementations and enumerations."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from mbx.analysis.tables import (
    improvement_interval,
    interquartile_mean,
    mean_of_tasks,
    probability_of_improvement,
    stratified_bootstrap,
)


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (4, 4), (5, 3, 2), (1, 1, 1)])
def test_the_interquartile_mean_is_the_trimmed_mean_of_all_runs(sizes):
    rng = np.random.default_rng(sum(sizes))
    scores = [rng.normal(size=n) for n in sizes]
    wanted = scipy.stats.trim_mean(np.concatenate(scores), 0.25)
    assert interquartile_mean(scores) == pytest.approx(wanted)


def test_every_task_weighs_the_same_in_the_mean():
    assert mean_of_tasks([[1.0, 3.0, 5.0], [10.0]]) == 6.5


def test_the_bootstrap_draws_seeds_within_tasks():
    # All 2^2 * 3^3 resamples, enumerated: seeds of one task never stand in for another's.
    scores = [np.array([0.0, 1.0]), np.array([10.0, 20.0, 60.0])]
    exact = [
        np.mean([np.mean(a), np.mean(b)])
        for a in itertools.product(scores[0], repeat=2)
        for b in itertools.product(scores[1], repeat=3)
    ]
    for level in (0.5, 0.9):
        wanted = np.percentile(exact, [50 * (1 - level), 50 * (1 + level)])
        found = stratified_bootstrap(scores, mean_of_tasks, draws=20_000, level=level)
        np.testing.assert_allclose(found, wanted, atol=0.6)  # the grid of sums is that fine


def test_intervals_are_those_of_their_documented_defaults():
    scores = [np.random.default_rng(0).normal(size=5), np.arange(4.0)]
    told = dict(draws=2000, level=0.95, seed=0)
    wanted = stratified_bootstrap(scores, interquartile_mean, **told)
    assert stratified_bootstrap(scores) == wanted != stratified_bootstrap(scores, seed=1)
    others = [scores[0] + 0.3, scores[1] - 0.5]
    told["draws"] = 50
    wanted = improvement_interval(scores, others, **told)
    assert improvement_interval(scores, others, draws=50) == wanted
    wanted = stratified_bootstrap(
        [*scores, *others], lambda x: probability_of_improvement(x[:2], x[2:]), **told
    )
    assert improvement_interval(scores, others, draws=50) == wanted


def test_one_seed_has_no_interval():
    assert stratified_bootstrap([[1.0, 2.0], [3.0]]) is None


def test_the_probability_of_improvement_is_the_mann_whitney_statistic_over_pairs():
    rng = np.random.default_rng(0)
    ours = [rng.integers(0, 9, n).astype(float) for n in (4, 7)]
    theirs = [rng.integers(0, 9, n).astype(float) for n in (5, 3)]
    wanted = [
        scipy.stats.mannwhitneyu(x, y).statistic / (x.size * y.size)
        for x, y in zip(ours, theirs, strict=True)
    ]
    assert probability_of_improvement(ours, theirs) == pytest.approx(np.mean(wanted))


def test_the_interval_of_the_improvement_draws_both_kinds_again():
    ours, theirs = [np.array([0.0, 2.0, 7.0])], [np.array([1.0, 3.0, 4.0])]
    exact = [
        probability_of_improvement([a], [b])
        for a in itertools.product(ours[0], repeat=3)
        for b in itertools.product(theirs[0], repeat=3)
    ]
    for level in (0.5, 0.9):
        wanted = np.percentile(exact, [50 * (1 - level), 50 * (1 + level)])
        found = improvement_interval(ours, theirs, draws=20_000, level=level)
        np.testing.assert_allclose(found, wanted, atol=0.12)  # one pair of nine
    assert improvement_interval(ours, [[1.0]]) is None
