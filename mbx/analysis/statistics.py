"""Statistics of scores over tasks and seeds, as the field reports them.

Scores are one array `[seeds]` a task; tasks may have different numbers of seeds. Source: Agarwal et
al., Deep Reinforcement Learning at the Edge of the Statistical Precipice (arXiv 2108.13264).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

Scores = Sequence[np.ndarray]


def interquartile_mean(scores: Scores) -> float:
    """Mean of the middle half of all scores, those of all tasks together.

    As in the paper, a quarter of the scores, rounded down, is left out at either end.
    """
    ordered = np.sort(np.concatenate([np.asarray(x, float) for x in scores]))
    cut = ordered.size // 4
    return float(np.mean(ordered[cut : ordered.size - cut]))


def mean_of_tasks(scores: Scores) -> float:
    """Mean over tasks of the mean over seeds: every task weighs the same."""
    return float(np.mean([np.mean(x) for x in scores]))


def stratified_bootstrap(
    scores: Scores,
    statistic: Callable[[Scores], float] = interquartile_mean,
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float] | None:
    """Percentile interval of a statistic: seeds are drawn again within every task.

    Args:
        scores: `[seeds]` a task.
        statistic: of such scores.
        draws: resamples.
        level: coverage of the interval.
        seed: of the resampling.

    Returns:
        (low, high), or None where a task has a single seed: resampling one number says nothing
        about how much seeds differ.
    """
    scores = [np.asarray(x, float) for x in scores]
    if min(x.size for x in scores) < 2:
        return None
    rng = np.random.default_rng(seed)
    found = [statistic([x[rng.integers(0, x.size, x.size)] for x in scores]) for _ in range(draws)]
    low, high = np.percentile(found, [50.0 * (1.0 - level), 50.0 * (1.0 + level)])
    return float(low), float(high)


def probability_of_improvement(scores: Scores, others: Scores) -> float:
    """How likely a run of one kind is better than one of another, on a task drawn at random.

    On a task the share of pairs of runs in which the first is better; a tie counts half. Tasks
    weigh the same, and need no common scale.

    Args:
        scores: `[seeds]` a task.
        others: the same tasks in the same order, with any numbers of seeds.
    """
    each = []
    for ours, theirs in zip(scores, others, strict=True):
        gain = np.asarray(ours, float)[:, None] - np.asarray(theirs, float)[None, :]
        each.append(np.mean(np.where(gain > 0, 1.0, np.where(gain == 0, 0.5, 0.0))))
    return float(np.mean(each))


def improvement_interval(
    scores: Scores, others: Scores, *, draws: int = 2000, level: float = 0.95, seed: int = 0
) -> tuple[float, float] | None:
    """Bootstrap interval of `probability_of_improvement`: seeds of either kind are drawn again.

    As `stratified_bootstrap`, None where a task has a single seed of either.
    """
    num = len(scores)

    def statistic(both: Scores) -> float:
        return probability_of_improvement(both[:num], both[num:])

    return stratified_bootstrap([*scores, *others], statistic, draws=draws, level=level, seed=seed)
