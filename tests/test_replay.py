"""The replay against a plain Python list: windows, uniformity, masks, targets, donation."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbx import replay, replay_storage
from mbx import replay as replay_
from tests.helpers import in_programs

replay = in_programs(
    replay,
    "init",
    "insert",
    "num_transitions",
    "refresh_index",
    "row_at",
    "sample",
    "sample_rows",
    "sample_stale",
    "targets_at",
    "update_targets",
)

ROW = {
    "tag": jax.ShapeDtypeStruct((), jnp.int32),
    "obs": jax.ShapeDtypeStruct((2,), jnp.float32),
    "is_first": jax.ShapeDtypeStruct((), jnp.bool_),
    "is_last": jax.ShapeDtypeStruct((), jnp.bool_),
}
SPEC = replay.TargetSpec(num_actions=3, action_dim=2)
E, C, T, B = 3, 7, 4, 64

insert = jax.jit(replay.insert)
sample = jax.jit(replay.sample, static_argnames=("batch_size", "length"))
update_targets = jax.jit(replay.update_targets)
target_age = jax.jit(replay.target_age)
sample_stale = jax.jit(replay.sample_stale, static_argnames=("batch_size",))


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


class Model:
    """A list of (tag, is_first, is_last) per environment, bounded by the capacity."""

    def __init__(self, num_envs, capacity):
        self.rows = [[] for _ in range(num_envs)]
        self.capacity = capacity

    def insert(self, env, row):
        self.rows[env] = (self.rows[env] + [row])[-self.capacity :]

    def transitions(self):
        return [
            (env, k)
            for env, rows in enumerate(self.rows)
            for k in range(len(rows) - 1)
            if not rows[k][2] and not rows[k + 1][1]
        ]

    def window(self, env, start, length):
        """Tags of T+1 rows and the mask, by the definition."""
        rows = self.rows[env]
        tags = [rows[min(start + t, len(rows) - 1)][0] for t in range(length + 1)]
        alive, mask = True, []
        for k in range(start, start + length):
            alive = alive and k + 1 < len(rows) and not rows[k][2] and not rows[k + 1][1]
            mask.append(alive)
        return tags, mask


def row_batch(tags, firsts, lasts):
    tags = np.asarray(tags, np.int32)
    return {
        "tag": tags,
        "obs": np.stack([tags, -tags], -1).astype(np.float32),
        "is_first": np.asarray(firsts, bool),
        "is_last": np.asarray(lasts, bool),
    }


def targets_for(tags, step=0, num=3, valid=True):
    tags = np.asarray(tags, np.float32)
    base = tags[..., None, None] + np.arange(num * 2, dtype=np.float32).reshape(num, 2) / 8
    return replay.Targets(
        actions=jnp.asarray(np.sin(base)),
        values=jnp.asarray(tags[..., None] * 4 - np.arange(num, dtype=np.float32)),
        step=jnp.full(tags.shape, step, jnp.int32),
        valid=jnp.full(tags.shape, valid, bool),
    )


def play(seed, steps, capacity=C, num_envs=E, spec=None, end_probability=0.25):
    """Random episodes with the extra last row, environments of different lengths, wrap-around."""
    rng = np.random.default_rng(seed)
    state = replay.init(ROW, num_envs=num_envs, capacity=capacity, target_spec=spec)
    model = Model(num_envs, capacity)
    ended, tag = np.ones(num_envs, bool), 0
    speed = np.linspace(1.0, 0.5, num_envs)
    for _ in range(steps):
        mask = rng.random(num_envs) < speed
        lasts = ~ended & (rng.random(num_envs) < end_probability)
        tags = tag + np.arange(num_envs)
        tag += num_envs
        targets = None if spec is None else targets_for(tags)
        state = insert(state, row_batch(tags, ended, lasts), targets, mask)
        for env in np.flatnonzero(mask):
            model.insert(env, (tags[env], ended[env], lasts[env]))
        ended = np.where(mask, lasts, ended)
    return state, model


@pytest.mark.parametrize("steps", [0, 1, 2, 5, 7, 8, 9, 23])
def test_holds_what_the_list_holds(steps):
    state, model = play(steps, steps)
    index, mask = replay.refresh_index(state, 0, E * C)
    tags = np.asarray(replay.row_at(state, index)["tag"])[np.asarray(mask)]
    assert tags.tolist() == [row[0] for rows in model.rows for row in rows]
    assert int(replay.num_transitions(state)) == len(model.transitions())
    # The same sweep in chunks, with a traced start.
    chunked = jax.jit(functools.partial(replay.refresh_index, batch_size=4))
    seen = []
    for start in range(0, int(jnp.sum(state.size)), 4):
        index, mask = chunked(state, start)
        seen += np.asarray(replay.row_at(state, index)["tag"])[np.asarray(mask)].tolist()
    assert seen == tags.tolist()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("steps", [3, 6, 20])
def test_windows_match_the_list(seed, steps):
    state, model = play(seed, steps)
    out = sample(state, jax.random.key(seed), batch_size=B, length=T)
    starts = {(model.rows[e][k][0]): (e, k) for e, k in model.transitions()}
    tags, masks = np.asarray(out.rows["tag"]), np.asarray(out.mask)
    for b in range(B):
        if not masks[0, b]:
            assert not masks[:, b].any()
            continue
        wanted_tags, wanted_mask = model.window(*starts[tags[0, b]], T)
        assert tags[:, b].tolist() == wanted_tags
        assert masks[:, b].tolist() == wanted_mask
    np.testing.assert_array_equal(replay.row_at(state, out.index)["tag"], tags)


def test_windows_of_a_sampler_of_ones_own():
    """From every place of the storage: those of the list, and none where no row is held."""
    state, model = play(3, 20)
    start = replay.Index(*(jnp.asarray(x.ravel(), jnp.int32) for x in np.mgrid[:E, : C + 1]))
    found = replay.windows(state, start, length=T)
    rows, mask = np.asarray(found.rows["tag"]), np.asarray(found.mask)
    wanted = {model.rows[e][k][0]: model.window(e, k, T) for e, k in model.transitions()}
    got = {rows[0, b]: (rows[:, b].tolist(), mask[:, b].tolist()) for b in np.flatnonzero(mask[0])}
    assert got == wanted and not mask[:, np.asarray(start.slot) == C].any()


@pytest.mark.parametrize("steps", [2, 4, 7, 8, 15, 30])
def test_draws_cover_every_row_with_a_successor_exactly_once(steps):
    """The uniform integer maps one to one onto (env, offset): exactly equal probabilities."""
    state, model = play(steps + 50, steps)
    counts = jnp.maximum(state.size - 1, 0)
    total = int(counts.sum())
    env, offset = replay_storage.locate(counts, jnp.arange(total, dtype=jnp.int32))
    pairs = Counter(zip(np.asarray(env).tolist(), np.asarray(offset).tolist(), strict=True))
    wanted = [(e, k) for e, rows in enumerate(model.rows) for k in range(len(rows) - 1)]
    assert pairs == Counter(wanted)
    if total:
        good = np.asarray(replay_storage.is_transition(state, env, offset))
        assert {p for p, g in zip(pairs, good, strict=True) if g} == set(model.transitions())


def test_starts_are_uniform_in_distribution():
    state, model = play(3, 30)
    out = sample(state, jax.random.key(0), batch_size=8192, length=1)
    found = np.asarray(out.mask[0])
    assert found.mean() > 0.9  # a column is lost only when 4 draws all hit episode ends
    counts = Counter(np.asarray(out.rows["tag"][0])[found].tolist())
    assert set(counts) == {model.rows[e][k][0] for e, k in model.transitions()}
    expected = found.sum() / len(counts)
    chi2 = sum((n - expected) ** 2 / expected for n in counts.values())
    assert chi2 < len(counts) + 5 * np.sqrt(2 * len(counts))


@pytest.mark.parametrize("half_life", [None, 2.0])
def test_weights_of_ages_are_those_of_draws(half_life):
    """Over environments of different lengths, of which one holds a single row."""
    state = replay.init(ROW, num_envs=E, capacity=6)
    for tag in range(8):
        mask = np.array([True, tag < 3, tag < 1])
        state = insert(
            state, row_batch(10 * np.arange(E) + tag, [tag == 0] * E, [0] * E), mask=mask
        )
    weights = np.array([3.0, 0.0, 1.0, 0.5, 2.0, 7.0], np.float32)
    draw = functools.partial(replay_.sample, weight=lambda age: jnp.asarray(weights)[age])
    if half_life:
        weights, draw = 0.5 ** (np.arange(6) / half_life), replay_.by_age(half_life)
    draw = jax.jit(draw, static_argnames=("batch_size", "length"))
    out = draw(state, jax.random.key(0), batch_size=40_000, length=1)
    assert np.asarray(out.mask).all()
    counts = Counter(np.asarray(out.rows["tag"][0]).tolist())
    ages = {6: 0, 5: 1, 4: 2, 3: 3, 2: 4, 11: 0, 10: 1}  # by the tag of a transition's first row
    share = {tag: weights[age] for tag, age in ages.items()}
    total = sum(share.values())
    assert set(counts) == {tag for tag, x in share.items() if x}
    for tag, count in counts.items():
        assert abs(count / 40_000 - share[tag] / total) < 0.01, (tag, count)
    nothing = draw(
        replay.init(ROW, num_envs=E, capacity=6), jax.random.key(1), batch_size=4, length=1
    )
    assert not np.asarray(nothing.mask).any()


def test_a_row_sequence_cut_without_a_last_row_is_not_a_transition():
    state = replay.init(ROW, num_envs=1, capacity=6)
    for tag, first in [(0, 1), (1, 0), (10, 1), (11, 0)]:
        state = insert(state, row_batch([tag], [first], [0]))
    assert int(replay.num_transitions(state)) == 2
    out = sample(state, jax.random.key(0), batch_size=B, length=2)
    starts = np.asarray(out.rows["tag"][0])[np.asarray(out.mask[0])]
    assert set(starts.tolist()) == {0, 10}
    assert not np.asarray(out.mask[1])[np.asarray(out.rows["tag"][0]) == 0].any()


def test_empty_replay_is_masked_and_finite():
    state = replay.init(ROW, num_envs=E, capacity=C, target_spec=SPEC)
    out = sample(state, jax.random.key(0), batch_size=B, length=T)
    assert not np.asarray(out.mask).any()
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in jax.tree.leaves(out))
    _, index = replay.sample_rows(state, jax.random.key(1), batch_size=5)
    rows, stale = sample_stale(state, jax.random.key(1), 3, batch_size=5, exponent=1.0)
    assert (np.asarray(index.slot) == C).all() and (np.asarray(stale.slot) == C).all()
    assert (np.asarray(index.env) < E).all() and (np.asarray(stale.env) < E).all()
    assert np.isfinite(np.asarray(rows["obs"])).all()
    after = update_targets(state, stale, targets_for(np.zeros(5)))
    assert not np.asarray(after.targets.valid).any()
    # One row each: still no transition.
    state = insert(state, row_batch([1, 2, 3], [1, 1, 1], [0, 0, 0]))
    assert not np.asarray(sample(state, jax.random.key(0), batch_size=B, length=T).mask).any()


def test_targets_travel_with_their_rows():
    state, model = play(5, 20, spec=SPEC)
    out = sample(state, jax.random.key(2), batch_size=B, length=T)
    wanted = targets_for(np.asarray(out.rows["tag"]))
    for got, want in zip(jax.tree.leaves(out.targets), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(got, want)


def test_rows_inserted_without_targets_are_invalid_even_where_old_ones_were():
    state, _ = play(5, 20, spec=SPEC)
    index = replay.Index(jnp.arange(E), state.position)
    state = insert(state, row_batch([1, 2, 3], [0, 0, 0], [0, 0, 0]))
    assert not np.asarray(replay.targets_at(state, index).valid).any()
    assert (np.asarray(target_age(state, index, 10)) == replay.NEVER).all()


@settings(max_examples=20, deadline=None)
@given(
    picks=st.lists(st.integers(0, E * C - 1), min_size=12, max_size=12),
    mask=st.lists(st.booleans(), min_size=12, max_size=12),
    steps=st.sampled_from([2, 9, 20]),
)
def test_update_targets_round_trip(picks, mask, steps):
    """Writes exactly the named, unmasked, held rows; the last of duplicates wins, whole."""
    state, model = _played(steps)
    index = replay.Index(jnp.asarray(picks) // C, jnp.asarray(picks) % C)
    new = targets_for(1000 + np.arange(12), step=7)
    after = update_targets(state, index, new, jnp.asarray(mask))
    before = jax.tree.map(np.asarray, state.targets)
    want = jax.tree.map(np.array, before)
    held = np.asarray(replay_storage.holds(state, index))
    for i in range(12):
        if mask[i] and held[i]:
            for leaf, value in zip(jax.tree.leaves(want), jax.tree.leaves(new), strict=True):
                leaf[picks[i] // C, picks[i] % C] = value[i]
    for got, expected in zip(jax.tree.leaves(after.targets), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert held.sum() == sum(_held(model, state, p) for p in picks)


@functools.cache
def _played(steps):
    return play(steps, steps, spec=SPEC)


def _held(model, state, pick):
    env, slot = divmod(pick, C)
    size = len(model.rows[env])
    return (slot - int(state.position[env]) + size) % C < size


def test_masked_write_leaves_the_last_slot_alone():
    state, _ = play(1, 30, spec=SPEC)
    index = replay.Index(jnp.zeros(2, jnp.int32), jnp.asarray([C, -1]))
    after = update_targets(state, index, targets_for([99, 99]))
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)
    nothing = insert(state, row_batch([9] * E, [0] * E, [0] * E), None, jnp.zeros(E, bool))
    for got, want in zip(jax.tree.leaves(nothing), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(got, want)


def test_best_k_keeps_pairs_together():
    spec = replay.TargetSpec(num_actions=8, action_dim=2, keep=3)
    state = replay.init(ROW, num_envs=2, capacity=4, target_spec=spec)
    values = np.array([[3.0, -1, np.nan, 7, 5, 0, 2, -9], [1, 2, 3, 4, 5, 6, 7, 8]], np.float32)
    actions = np.stack([values / 10, -values / 10], -1)
    full = replay.Targets(actions, values, np.zeros(2, np.int32), np.ones(2, bool))
    state = insert(state, row_batch([0, 1], [1, 1], [0, 0]), full)
    index = replay.Index(jnp.arange(2), jnp.zeros(2, jnp.int32))
    got = replay.targets_at(state, index)
    np.testing.assert_array_equal(got.values, [[7, 5, 3], [8, 7, 6]])
    np.testing.assert_allclose(got.actions[..., 0], np.asarray(got.values) / 10, rtol=1e-6)
    np.testing.assert_allclose(got.actions[..., 1], -np.asarray(got.values) / 10, rtol=1e-6)
    again = replay.targets_at(update_targets(state, index, full), index)
    np.testing.assert_array_equal(again.values, got.values)


@pytest.mark.parametrize(("dtype", "bound"), [("int8", 1 / 254 + 1e-7), ("bfloat16", 2.0**-9)])
def test_storage_dtypes_bound_the_error(dtype, bound):
    spec = replay.TargetSpec(33, 2, values_dtype="bfloat16", actions_dtype=dtype)
    state = replay.init(ROW, num_envs=1, capacity=2, target_spec=spec)
    actions = np.linspace(-1, 1, 66, dtype=np.float32).reshape(1, 33, 2)
    actions[0, ::32] *= 1.0 + (dtype == "int8")  # stored as whole numbers, they are clipped
    values = np.linspace(-300, 300, 33, dtype=np.float32)[None]
    given_ = replay.Targets(actions, values, np.zeros(1, np.int32), np.ones(1, bool))
    state = insert(state, row_batch([0], [1], [0]), given_)
    got = replay.targets_at(state, _index(1))
    assert got.actions.dtype == got.values.dtype == jnp.float32
    assert np.abs(np.asarray(got.actions) - actions.clip(-1, 1)).max() <= bound
    assert np.abs(got.actions).max() == 1.0  # the ends are exact
    np.testing.assert_allclose(got.values, values, rtol=2.0**-8)


def test_whole_steps_of_the_quantised_range_are_stored_exactly():
    spec, steps = replay.TargetSpec(127, 2, actions_dtype="int8"), np.arange(-127, 127)
    state = replay.init(ROW, num_envs=1, capacity=2, target_spec=spec)
    actions = (steps / 127).astype(np.float32).reshape(1, 127, 2)
    rows = replay.Targets(actions, np.zeros((1, 127)), np.zeros(1, np.int32), np.ones(1, bool))
    state = insert(state, row_batch([0], [1], [0]), rows)
    got = replay.targets_at(state, _index(1)).actions
    np.testing.assert_allclose(np.asarray(got), actions, atol=1e-6)


def test_ages():
    state, _ = play(2, 12, spec=SPEC)
    index, mask = replay.refresh_index(state, 0, 6)
    state = update_targets(state, index, targets_for(np.arange(6), step=40), mask)
    assert (np.asarray(target_age(state, index, 45))[np.asarray(mask)] == 5).all()
    other = replay.Index(jnp.asarray([E - 1]), (state.position[E - 1 :] - 1) % C)
    assert np.asarray(target_age(state, other, 45)).tolist() == [45]
    # Targets of a later step have age zero.
    state = update_targets(state, other, targets_for([1], step=49))
    assert [int(target_age(state, other, step)[0]) for step in (44, 49, 52)] == [0, 0, 3]


def test_stale_rows_come_without_repetition_invalid_first_then_old_first():
    state = replay.init(ROW, num_envs=1, capacity=40, target_spec=SPEC)
    for tag in range(33):
        targets = targets_for([tag], step=tag, valid=tag % 11 != 0)  # 3 invalid among transitions
        state = insert(state, row_batch([tag], [tag == 0], [0]), targets)
    rows, index = sample_stale(state, jax.random.key(0), 33, batch_size=16, exponent=50.0)
    tags = np.asarray(rows["tag"])
    assert len(set(tags.tolist())) == 16  # 128 draws over 32 transitions hold 16 different ones
    assert set(tags[:3].tolist()) == {0, 11, 22}
    assert np.mean(tags[3:]) < 12  # a steep exponent takes the oldest of those drawn
    uniform, _ = sample_stale(state, jax.random.key(0), 33, batch_size=16, exponent=0.0)
    found = np.asarray(uniform["tag"]).tolist()
    assert len(set(found)) == 16 and set(found[:3]) == {0, 11, 22}
    np.testing.assert_array_equal(replay.row_at(state, index)["tag"], tags)


def test_a_stale_row_is_rather_repeated_than_none_taken():
    """Three transitions among episodes of one row: most draws find none, some find one again."""
    state = replay.init(ROW, num_envs=1, capacity=40, target_spec=SPEC)
    for tag in range(33):
        begins, ends = tag not in (5, 15, 25), tag not in (4, 14, 24)
        state = insert(state, row_batch([tag], [begins], [ends]), targets_for([tag], step=tag))
    rows, index = sample_stale(state, jax.random.key(0), 33, batch_size=16, exponent=1.0)
    assert (np.asarray(index.slot) < 40).all()
    assert set(np.asarray(rows["tag"]).tolist()) == {4, 14, 24}


def test_stale_probabilities_follow_the_power_law():
    state = replay.init(ROW, num_envs=1, capacity=5, target_spec=SPEC)
    for tag in range(5):
        state = insert(state, row_batch([tag], [tag == 0], [0]), targets_for([tag], step=tag))
    keys = jax.random.split(jax.random.key(3), 4096)
    draw = jax.vmap(lambda k: sample_stale(state, k, 4, batch_size=1, exponent=1.0)[0]["tag"])
    tags = np.asarray(draw(keys)).reshape(-1)
    weight = 5.0 - np.arange(4)
    # 8 uniform draws miss a row with probability 0.1, which flattens the law a little.
    np.testing.assert_allclose(
        np.bincount(tags, minlength=4) / 4096, weight / weight.sum(), atol=0.04
    )


def test_sample_rows_are_transitions():
    state, model = play(9, 25)
    rows, index = replay.sample_rows(state, jax.random.key(0), batch_size=256)
    found = np.asarray(index.slot) < C
    starts = {model.rows[e][k][0] for e, k in model.transitions()}
    assert set(np.asarray(rows["tag"])[found].tolist()) == starts


def test_a_whole_step_copies_no_storage():
    """insert, sample, a loss that reads targets, an update, stale rows, write-back, in a scan."""
    capacity = 4099

    def step(carry, key):
        state, scale = carry
        rows = jax.tree.map(jnp.asarray, row_batch([1] * E, [0] * E, [0] * E))
        state = replay.insert(state, rows, targets_for([2] * E), jnp.array([True, False, True]))
        sample_key, stale_key = jax.random.split(key)
        batch = replay.sample(state, sample_key, batch_size=8, length=T)
        scale = scale + jnp.mean(batch.targets.values) + jnp.mean(batch.rows["obs"])

        def refresh(state):
            _, index = replay.sample_stale(state, stale_key, 5, batch_size=4, exponent=1.0)
            new = targets_for([3] * 4, step=1)
            return replay.update_targets(state, index, new.replace(values=new.values * scale))

        state = jax.lax.cond(scale > 0, refresh, lambda s: s, state)
        return (state, scale), scale

    state = jax.eval_shape(
        lambda: replay.init(ROW, num_envs=E, capacity=capacity, target_spec=SPEC)
    )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 5))
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    run = jax.jit(lambda c, k: jax.lax.scan(step, c, k), donate_argnums=0)
    text = run.lower((state, scale), keys).compile().as_text()
    assert str(capacity) in text
    assert not re.findall(rf"\[{E},{capacity}[^\]]*\]\S* copy\(", text)
    alone = jax.jit(replay.insert, donate_argnums=0).lower(
        state, row_batch([1] * E, [0] * E, [0] * E)
    )
    assert not re.findall(rf"\[{E},{capacity}[^\]]*\]\S* copy\(", alone.compile().as_text())


def test_a_fresh_state_can_be_donated():
    state = replay.init(ROW, num_envs=E, capacity=C, target_spec=SPEC)
    rows = row_batch([1] * E, [1] * E, [0] * E)
    jax.jit(replay.insert, donate_argnums=0)(state, rows)
    assert state.data["tag"].is_deleted()


def test_experts_are_stored_beside_the_targets():
    state = replay.init(ROW, num_envs=2, capacity=3, target_spec=SPEC._replace(expert=True))
    expert = jnp.arange(8.0).reshape(2, 2, 2)
    new = targets_for([1, 2]).replace(expert=expert)
    state = insert(state, row_batch([1, 2], [1, 1], [0, 0]), new)
    index = replay.Index(jnp.arange(2), jnp.zeros(2, jnp.int32))
    np.testing.assert_array_equal(replay.targets_at(state, index).expert, expert)
    state = update_targets(state, index, new.replace(expert=-expert), jnp.array([False, True]))
    got = replay.targets_at(state, index).expert
    np.testing.assert_array_equal(got, [expert[0], -expert[1]])
    with pytest.raises(ValueError, match="expert is missing"):
        insert(state, row_batch([1, 2], [1, 1], [0, 0]), targets_for([1, 2]))
    with pytest.raises(ValueError, match="expert has shape"):
        wrong = new.replace(expert=expert[:, :, :1])
        insert(state, row_batch([1, 2], [1, 1], [0, 0]), wrong)
    plain = replay.init(ROW, num_envs=2, capacity=3, target_spec=SPEC)
    with pytest.raises(ValueError, match="expert is given"):
        insert(plain, row_batch([1, 2], [1, 1], [0, 0]), new)


@pytest.mark.parametrize("shards", [1, 3])
def test_chunks_of_a_sweep_and_leading_columns(shards):
    """Rows held are 7, 5 and 4; a chunk takes batch / shards of every shard's."""
    state = replay.init(ROW, num_envs=3, capacity=7, shards=shards)
    for t in range(8):
        mask = jnp.array([True, t < 5, t < 4])
        state = insert(state, row_batch([t] * 3, [t == 0] * 3, [0] * 3), None, mask)
    wanted = {1: {1: 16, 6: 3, 8: 2, 16: 1}, 3: {3: 7, 6: 4, 21: 1}}[shards]
    assert {n: int(replay.sweep_length(state, n)) for n in wanted} == wanted
    seen = Counter()
    for start in range(0, 6 * wanted[6], 6):
        index, mask = replay.refresh_index(state, start, 6)
        places = np.stack([index.env, index.slot], axis=1)[np.asarray(mask)]
        seen.update(map(tuple, places.tolist()))
        assert (np.asarray(index.slot)[~np.asarray(mask)] == 7).all()
    assert set(seen.values()) == {1} and len(seen) == 16
    columns = jnp.arange(24).reshape(2, 12)
    first = replay.leading_columns(state, columns, 6)
    of_shard = 12 // shards
    each = [np.arange(12)[i * of_shard :][: 6 // shards] for i in range(shards)]
    np.testing.assert_array_equal(first, np.stack([np.concatenate(each)] * 2) + [[0], [12]])
    if shards > 1:
        with pytest.raises(ValueError, match="batch of 4"):
            replay.leading_columns(state, columns, 4)


def test_the_smallest_and_largest_legal_sizes():
    state = _init(capacity=2, num_envs=1, target_spec=replay.TargetSpec(3, 1, keep=3))
    assert state.targets.values.shape == (1, 2, 3)
    assert _init(target_spec=replay.TargetSpec(3, 1, keep=1)).targets.values.shape == (2, 4, 1)
    assert _init(target_spec=replay.TargetSpec(1, 1)).targets.actions.shape == (2, 4, 1, 1)
    jax.eval_shape(lambda: _init(num_envs=1, capacity=2**31 - 1))
    assert replay.sample(state, jax.random.key(0), batch_size=1, length=1).mask.shape == (1, 1)
    assert _init(num_envs=4, shards=4).shards == 4


def test_bytes():
    spec = replay.TargetSpec(128, 4, keep=16, values_dtype="bfloat16", actions_dtype="int8")
    state = jax.eval_shape(lambda: replay.init(ROW, num_envs=2, capacity=8, target_spec=spec))
    wanted = {"rows": 4.0 + 8 + 1 + 1, "targets": 16 * 4 + 16 * 2 + 4.0 + 1}
    assert replay.bytes_per_transition(state) == wanted
    assert replay.bytes_per_transition(replay.init(ROW, num_envs=1, capacity=2))["targets"] == 0


def _init(**changes):
    return replay.init(ROW, **({"num_envs": 2, "capacity": 4} | changes))


def _insert(targets=None, mask=None, spec=SPEC, **rows):
    """Inserts a row that fits, but for what is given."""
    rows = row_batch([1, 2], [1, 1], [0, 0]) | rows
    return replay.insert(_init(target_spec=spec), rows, targets, mask)


def _index(num=2):
    return replay.Index(jnp.zeros(num, jnp.int32), jnp.zeros(num, jnp.int32))


_KEY = jax.random.key(0)
_FIT = targets_for([1, 2])
_SPECS = {
    "keep is 5": dict(num_actions=4, keep=5),
    "keep is 0": dict(num_actions=4, keep=0),
    "num_actions is 0": dict(num_actions=0),
    "action_dim is 0": dict(action_dim=0),
    "values_dtype": dict(values_dtype="int8"),
    "actions_dtype": dict(actions_dtype="f8"),
}
_MISFITS = {
    "actions": np.zeros((2, 3, 1)),
    "values": np.zeros((1, 3)),
    "step": np.zeros(3, np.int32),
    "valid": np.zeros((2, 1), bool),
}
_NO_BATCH = (
    lambda s: replay.sample(s, _KEY, batch_size=0, length=1),
    lambda s: replay.sample_rows(s, _KEY, batch_size=0),
    lambda s: replay.sample_stale(s, _KEY, 0, batch_size=0, exponent=1.0),
    lambda s: replay.refresh_index(s, 0, 0),
    lambda s: replay.sweep_length(s, 0),
)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: _init(capacity=1), "capacity is 1"),
        (lambda: _init(num_envs=0), "num_envs is 0"),
        # Abstractly, so that a missing check does not allocate them.
        (lambda: jax.eval_shape(lambda: _init(num_envs=2**16, capacity=2**15)), "lower capacity"),
        (lambda: _init(num_envs=4, shards=3), "3 shards cannot share"),
        (lambda: _init(shards=0), "shards is 0"),
        (lambda: replay.init({"is_first": True}, num_envs=1, capacity=2), "is_last"),
        (lambda: replay.init(ROW | {"is_last": ROW["obs"]}, num_envs=1, capacity=2), "is_last"),
        (lambda: replay.init(ROW | {"is_first": 0.0}, num_envs=1, capacity=2), "is_first.*float32"),
        *(
            (
                lambda of=of: _init(target_spec=replay.TargetSpec(**dict(SPEC._asdict(), **of))),
                match,
            )
            for match, of in _SPECS.items()
        ),
        *(
            (lambda draw=draw: draw(_init(target_spec=SPEC)), "batch_size is 0")
            for draw in _NO_BATCH
        ),
        (lambda: replay.sample(_init(), _KEY, batch_size=1, length=0), "length is 0"),
        (lambda: replay.sample(_init(), _KEY, batch_size=1, length=4), "length is 4"),
        (
            lambda: replay.update_targets(
                _init(target_spec=SPEC), _index(), _FIT, np.ones(3, bool)
            ),
            "mask is bool",
        ),
        *(
            (lambda name=name, x=x: _insert(_FIT.replace(**{name: x})), f"targets.{name} has shape")
            for name, x in _MISFITS.items()
        ),
        (lambda: _insert(targets_for([1])), "targets.actions has shape"),
        (lambda: _insert(targets_for([1, 2], num=2)), "give at least the 3"),
        (lambda: _insert(_FIT, spec=None), "target_spec"),
        (lambda: replay.sample_stale(_init(), _KEY, 0, batch_size=2, exponent=1.0), "target_spec"),
        (lambda: _insert(mask=np.ones(2)), "mask is float"),
        (lambda: _insert(tag=np.zeros(2, np.float32)), "tag.*float32"),
        (lambda: replay.insert(_init(), {"tag": np.zeros(2)}), "lack .*is_first.*obs"),
        (lambda: replay.insert(_init(), row_batch([1], [1], [0])), "bool.*\\[1\\]"),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(call, match):
    with pytest.raises(ValueError, match=match):
        call()
