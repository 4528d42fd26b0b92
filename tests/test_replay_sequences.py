"""Which sequences `select` draws, against the official rules in NumPy."""

from __future__ import annotations

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx import replay_sequences as sequences
from mbx.replay_sequences import Selection

EVEN = Selection(priority_share=1.0, priority_zero=False)


class Official:
    """Items and probabilities of the official replay: rows are (worker, number)."""

    def __init__(self, workers, length, exponent=0.8, maxfrac=0.5):
        self.length, self.exponent, self.maxfrac = length, exponent, maxfrac
        self.rows, self.queue, self.items = [0] * workers, collections.deque(), []
        self.priorities = collections.defaultdict(lambda: np.inf)

    def add(self, worker):
        number = self.rows[worker]
        if number >= self.length - 1:
            item = (worker, number - self.length + 1)
            self.items.append(item)
            if number % self.length == 0:
                self.queue.append(item)
        self.rows[worker] += 1

    def steps(self, item):
        return [(item[0], item[1] + i) for i in range(self.length)]

    def by_priority(self):
        def weight(item):
            found = [self.priorities[step] ** self.exponent for step in self.steps(item)]
            mean = sum(found) / len(found)
            return self.maxfrac * max(found) + (1 - self.maxfrac) * mean if self.maxfrac else mean

        weights = np.array([weight(item) for item in self.items])
        if not np.isfinite(weights.sum()):
            weights = np.isinf(weights) * 1.0
        weights = weights if weights.sum() else np.ones(len(weights))
        return dict(zip(self.items, weights / weights.sum(), strict=True))

    def by_recency(self, capacity, exponent):
        probs = 1.0 / np.arange(1, capacity + 1) ** exponent
        found = dict.fromkeys(self.items, 0.0)
        for age, prob in enumerate(probs / probs.sum()):
            age = int(age / capacity * len(self.items))
            found[self.items[len(self.items) - 1 - age]] += prob
        return found


def empty(workers, capacity, rules, shards=1):
    row = dict(number=jnp.int32(0), worker=jnp.int32(0), is_first=False, is_last=False)
    shapes = {n: jax.ShapeDtypeStruct((), jnp.result_type(x)) for n, x in row.items()}
    return replay.init(shapes | rules.row, num_envs=workers, capacity=capacity, shards=shards)


@jax.jit
def add(state, number, mask=None):
    """One row of every environment, or of those in `mask`, with its number there."""
    workers = state.size.shape[0]
    rows = {n: jnp.zeros(workers, x.dtype) for n, x in state.data.items()}
    rows |= dict(number=jnp.broadcast_to(number, workers), worker=jnp.arange(workers))
    return replay.insert(state, rows, mask=mask)


@functools.partial(jax.jit, static_argnames=("rules", "batch_size", "length"))
def select(state, key, rules, batch_size, length):
    return sequences.select(state, key, rules, batch_size=batch_size, length=length)


def first(found):
    """(worker, number) of the sequences' first rows."""
    return list(
        zip(*(np.asarray(found.rows[n])[0].tolist() for n in ("worker", "number")), strict=True)
    )


@pytest.mark.parametrize("shards", [1, 2])
def test_the_queue_is_the_official_one(shards):
    """Each new sequence once, the first first, of every shard from its own environments."""
    rules, length, each, found = Selection(online=True), 4, 4 // shards, 0
    state = empty(4, 64, rules, shards)
    official = [Official(each, length) for _ in range(shards)]
    for number in range(60):
        state = add(state, number)
        for part, worker in itertools.product(official, range(each)):
            part.add(worker)
        if number % 7 == 6:  # late enough that several wait, of one environment as well
            plain = sequences.sample(state, jax.random.key(number), batch_size=10, length=length)
            drawn, state = select(state, jax.random.key(number), rules, 10, length)
            np.testing.assert_array_equal(np.diff(drawn.rows["number"], axis=0), 1)
            shares = [np.array_split(x, shards) for x in (first(drawn), first(plain))]
            for i, (part, own, uniform) in enumerate(zip(official, *shares, strict=True)):
                num = min(len(part.queue), len(own))
                due = [part.queue.popleft() for _ in range(num)]
                assert own[:num].tolist() == [[worker + i * each, n] for worker, n in due]
                assert own[num:].tolist() == uniform[num:].tolist()  # as without a queue
                found += num
    assert found == 4 * 13


def test_the_queue_of_environments_that_store_at_their_own_pace():
    """Every row is queued once; what was overwritten before its turn is lost."""
    rules, length, rng = Selection(online=True), 3, np.random.default_rng(0)
    state, rows, seen = empty(3, 16, rules), np.zeros(3, int), [[], [], []]
    for time in range(90):
        mask = rng.random(3) < [1.0, 0.6, 0.3]
        state = add(state, jnp.asarray(rows, jnp.int32), jnp.asarray(mask))
        rows += mask
        if time % 4 == 3 and not 30 < time < 60:  # in between more is written than is held
            before = np.asarray(state.data["seen"])
            state = select(state, jax.random.key(time), rules, 4, length)[1]
            new = np.asarray(state.data["seen"]) & ~before
            assert np.all(new.sum(axis=1) % length == 0)
            for worker in range(3):
                seen[worker] += sorted(np.asarray(state.data["number"])[worker][new[worker]])
    for worker, numbers in enumerate(seen):
        steps = np.diff(numbers)
        assert numbers[0] == 1 and steps.min() == 1 and np.sum(steps > 1) == (worker < 2)
        assert rows[worker] - numbers[-1] <= length + 3


def with_priorities(workers=2, rows=9, length=3, infinite=()):
    """A replay and the official one with the same random priorities."""
    official, state = Official(workers, length), empty(workers, 12, EVEN)
    rng = np.random.default_rng(1)
    for number in range(rows):
        state = add(state, number)
        for worker in range(workers):
            official.add(worker)
    given = rng.uniform(0.1, 5.0, (workers, rows)).astype(np.float32)
    given[0, :4] = 0.0
    for step in np.ndindex(workers, rows):
        if step not in infinite:
            official.priorities[step] = float(given[step])
    env, slot = (jnp.asarray(x) for x in np.meshgrid(range(workers), range(rows), indexing="ij"))
    mask = np.array([[(w, n) not in infinite for n in range(rows)] for w in range(workers)])
    index = replay.Index(env, jnp.where(jnp.asarray(mask), slot, 12))
    field = sequences.priority_field(jnp.asarray(given))
    return jax.jit(sequences.write)(state, index, field), official


def agrees(found, expected, names=None):
    """Counts against probabilities, within 4.5 standard deviations."""
    counts, total = collections.Counter(found), len(found)
    assert set(counts) <= {item for item, prob in expected.items() if prob > 0}
    for item, prob in expected.items():
        spread = 4.5 * np.sqrt(total * prob * (1 - prob)) + 1e-6
        assert abs(counts[item] - total * prob) <= spread, (item, counts[item], total * prob)


@pytest.mark.parametrize("infinite", [(), ((0, 6), (1, 2))])
@pytest.mark.parametrize("maxfrac", [0.0, 0.5, 1.0])
def test_priorities_weigh_as_officially(infinite, maxfrac):
    state, official = with_priorities(infinite=infinite)
    official.maxfrac = maxfrac
    rules = EVEN._replace(priority_maxfrac=maxfrac)
    expected = official.by_priority() if maxfrac < 1 or not infinite else None
    if expected is None:  # 0 times infinity, of which the official code makes NaN
        official.maxfrac = 0.5
        expected = official.by_priority()
    agrees(first(select(state, jax.random.key(2), rules, 8000, 3)[0]), expected)


def test_drawn_rows_lose_their_priority_within_a_batch():
    """The joint probabilities of two draws, the second after the first has zeroed its rows."""
    state, official = with_priorities(workers=1, rows=7)
    rules = EVEN._replace(priority_zero=True)
    pairs = jax.jit(
        jax.vmap(
            lambda key: sequences.select(state, key, rules, batch_size=2, length=3)[0].index.slot[0]
        )
    )
    found = pairs(jax.random.split(jax.random.key(0), 8000))
    expected = {}
    for one, prob in official.by_priority().items():
        kept = dict(official.priorities)
        official.priorities.update(dict.fromkeys(official.steps(one), 0.0))
        expected |= {(one[1], other[1]): prob * p for other, p in official.by_priority().items()}
        official.priorities.update(kept)
    agrees([tuple(pair) for pair in np.asarray(found).tolist()], expected)
    drawn, after = select(state, jax.random.key(1), rules, 2, 3)
    gone = np.asarray(after.data["priority_inverse"]) >= 1e30
    places = np.zeros_like(gone)
    places[np.asarray(drawn.index.env), np.asarray(drawn.index.slot)] = True
    np.testing.assert_array_equal(
        gone, places | (np.asarray(state.data["priority_inverse"]) >= 1e30)
    )
    np.testing.assert_array_equal(after.data["number"], state.data["number"])


@pytest.mark.parametrize("rows, exponent", [(9, 1.0), (30, 1.0), (30, 0.5)])
def test_recency_is_the_official_one(rows, exponent):
    """With a replay that is not full, and with one that has overwritten rows."""
    rules = Selection(recency_share=1.0, recency_exponent=exponent)
    official, state = Official(3, 3), empty(3, 12, rules)
    for number in range(rows):
        state = add(state, number)
        for worker in range(3):
            official.add(worker)
    official.items = official.items[-30:]  # ten of each environment
    found = first(select(state, jax.random.key(0), rules, 8000, 3)[0])
    agrees(found, official.by_recency(30, exponent))


def test_recency_of_environments_with_different_numbers_of_rows():
    rules, state = Selection(recency_share=1.0, recency_exponent=0.0), empty(3, 12, Selection())
    rows = np.zeros(3, int)
    for time in range(11):
        mask = np.array([True, time < 5, time < 2])
        state = add(state, jnp.asarray(rows, jnp.int32), jnp.asarray(mask))
        rows += mask
    found = first(select(state, jax.random.key(0), rules, 8000, 3)[0])
    items = [(0, n) for n in range(9)] + [(1, n) for n in range(3)]
    ages = collections.Counter(int(age / 30 * 12) for age in range(30))
    order = [(0, 8), (1, 2), (0, 7), (1, 1), (0, 6), (1, 0), *[(0, n) for n in range(5, -1, -1)]]
    # Ties go to the last environment.
    order[:6] = [(1, 2), (0, 8), (1, 1), (0, 7), (1, 0), (0, 6)]
    assert set(order) == set(items)
    agrees(found, {item: ages[age] / 30 for age, item in enumerate(order)})


def test_shares_of_a_mixture():
    """Half uniformly, a quarter each by priority and by recency, and the queue before all."""
    rules = Selection(online=True, priority_share=0.25, recency_share=0.25, recency_exponent=3.0)
    rules = rules._replace(priority_zero=False)
    state, official = empty(2, 12, rules), Official(2, 3)
    for number in range(10):
        state = add(state, number)
        for worker in range(2):
            official.add(worker)
    every = jnp.arange(10)
    index = replay.Index(jnp.zeros(10, jnp.int32), every)
    state = sequences.write(state, index, sequences.priority_field(1.0 + every))
    for number in range(10):
        official.priorities[(0, number)] = 1.0 + number
    found, after = select(state, jax.random.key(0), rules, 8006, 3)
    found = first(found)
    assert found[:6] == list(official.queue)
    mixed = {item: 0.5 / len(official.items) for item in official.items}
    for part in (official.by_priority(), official.by_recency(20, 3.0)):
        mixed = {item: prob + 0.25 * part[item] for item, prob in mixed.items()}
    agrees(found[6:], mixed)
    assert first(select(after, jax.random.key(0), rules, 8006, 3)[0])[:6] != list(official.queue)


def test_every_shard_draws_from_its_own_priorities():
    rules = Selection(priority_share=1.0)
    state = empty(4, 12, rules, shards=2)
    for number in range(8):
        state = add(state, number)
    index = replay.Index(jnp.arange(4).repeat(8), jnp.tile(jnp.arange(8), 4))
    index = jax.tree.map(lambda x: x.astype(jnp.int32), index)
    high = jnp.where((index.env % 2 == 1) & (index.slot == 5), 1e6, 1e-6)
    state = sequences.write(state, index, sequences.priority_field(high))
    drawn, after = select(state, jax.random.key(0), rules, 4, 3)
    found = first(drawn)
    # The first of each shard has the row of a high priority, which is then gone.
    assert [worker for worker, _ in found[::2]] == [1, 3]
    assert all(3 <= number <= 5 for _, number in found[::2])
    assert all(worker < 2 for worker, _ in found[:2]) and all(worker > 1 for worker, _ in found[2:])
    assert np.all(replay.row_at(after, drawn.index)["priority_inverse"] >= 1e30)
