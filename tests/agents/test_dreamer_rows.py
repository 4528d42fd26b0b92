"""Dreamer and the replay: contexts, stored latents, newest rows, faults."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx import replay_sequences as sequences
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import behaviour, rssm, types, update
from mbx.agents.dreamer.settings import Settings
from mbx.envs.base import Timestep
from mbx.settings import from_dict
from mbx.training import loop
from mbx.training.state import Schedule, init_state
from tests.agents.dreamer_helpers import CONTEXT, NET, SPEC, change, moved
from tests.helpers import program


@pytest.mark.parametrize("context", [False, True])
def test_a_batch_begins_like_an_episode_unless_latents_are_stored(context):
    """Rows 1..T, the actions before them, and the state before row 1."""
    shape, key = (4, 2), jax.random.key(0)
    rows = dict(
        obs=jax.random.normal(key, (*shape, 2)),
        action=jax.random.normal(key, (*shape, 2)),
        reward=jnp.arange(8.0).reshape(shape),
        is_first=jnp.zeros(shape, bool).at[2, 0].set(True),
        is_last=jnp.zeros(shape, bool).at[1, 0].set(True),
        terminated=jnp.zeros(shape, bool).at[1, 0].set(True),
        deter=jnp.arange(64.0).reshape(*shape, 8),
        stoch=jnp.arange(16).reshape(*shape, 2) % 4,
    )
    batch, carry = update.make_batch(change(CONTEXT, replay=dict(context=context)), rows)
    np.testing.assert_array_equal(batch.action, rows["action"][:3])
    np.testing.assert_array_equal(batch.obs["vector"], rows["obs"][1:])
    np.testing.assert_array_equal(batch.reward, rows["reward"][1:])
    np.testing.assert_array_equal(batch.is_last, rows["is_last"][1:])
    begins = np.array([[not context] * 2, [1, 0], [0, 0]], bool)
    np.testing.assert_array_equal(carry.deter, rows["deter"][0] * context)
    np.testing.assert_array_equal(jnp.argmax(carry.stoch, -1), rows["stoch"][0] * context)
    np.testing.assert_array_equal(batch.is_first, begins)


def filled(shards, num_envs=4, steps=60, capacity=64, settings=CONTEXT):
    """Rows of random numbers; an episode ends every eleventh row."""
    row = dreamer.example_row(settings)
    state = replay.init(row, num_envs=num_envs, capacity=capacity, shards=shards)

    def insert(state, t):
        key = jax.random.fold_in(jax.random.key(0), t)
        number = jnp.full(num_envs, t, jnp.float32)
        rows = {n: jnp.zeros((num_envs, *x.shape), x.dtype) for n, x in row.items()}
        rows |= dict(
            obs=jnp.stack([number, jnp.arange(num_envs) + 0.0], -1),
            action=jax.random.uniform(key, (num_envs, 2), minval=-1.0),
            is_first=jnp.broadcast_to(t % 11 == 0, num_envs),
            is_last=jnp.broadcast_to(t % 11 == 10, num_envs),
            reward=jnp.sin(number),
        )
        return replay.insert(state, rows), None

    return jax.jit(lambda s: jax.lax.scan(insert, s, jnp.arange(steps))[0])(state)


def test_rows_are_consecutive_and_cross_episodes():
    state = filled(1, num_envs=2, steps=30, capacity=20)
    rows = sequences.sample(state, jax.random.key(0), batch_size=400, length=12).rows
    obs = np.asarray(rows["obs"])
    assert obs.shape == (12, 400, 2) and np.all(np.diff(obs, axis=0) == [1.0, 0.0])
    assert np.all(np.any(np.asarray(rows["is_last"]), axis=0))
    starts, counts = np.unique(obs[0] @ [1.0, 100.0], return_counts=True)
    # Rows 10..29 are held: 9 starts in each of two environments, all about equally often.
    np.testing.assert_array_equal(starts, np.r_[10:19, 110:119])
    assert counts.min() > 5 and counts.max() < 45


def test_a_row_sampled_twice_is_written_once():
    index = replay.Index(jnp.zeros(2, jnp.int32), jnp.full(2, 4, jnp.int32))
    deter = jnp.broadcast_to(jnp.array([[1.0], [2.0]]), (2, 8))
    after = sequences.write(filled(1), index, {"deter": deter})
    np.testing.assert_array_equal(after.data["deter"][0, 4], [2.0] * 8)


def test_a_length_out_of_range_is_refused():
    with pytest.raises(ValueError, match="length is 65 with a capacity of 64"):
        sequences.sample(filled(1), jax.random.key(0), batch_size=4, length=65)


def selected(settings, state, key, length):
    """The sequences that an update learns from."""
    rules = update.selection(settings)
    select = functools.partial(sequences.select, rules=rules, batch_size=2, length=length)
    return jax.jit(select)(state, key)[0]


@jax.jit
def follows(params, before, action, after):
    """Whether latents are those that the model gets to from others by an action."""
    stoch = jax.nn.one_hot(before["stoch"], NET.classes)
    part = rssm.action_input(NET, params["model"]["rssm"], action)
    deter = rssm.recur(NET, params["model"]["rssm"], types.State(before["deter"], stoch), part)
    return jnp.all(jnp.abs(deter - after["deter"]) < 1e-5, axis=-1)


def test_latents_are_written_back_to_the_rows_they_belong_to():
    """Every row but the first has the latents that follow from those stored with the row before."""
    state = filled(shards=2)
    train = program(dreamer.init_state, CONTEXT)(jax.random.key(0))
    train = train.replace(params=moved(train.params))
    key = jax.random.key(7)
    train, after, metrics = jax.jit(update.make_update(CONTEXT))(train, state, key)
    assert all(np.isfinite(value) for value in metrics.values())
    index = selected(CONTEXT, state, jax.random.split(key)[0], 6).index  # the rows of the update
    rows = replay.row_at(after, index)
    begins = np.asarray(rows["is_first"])
    latents = {name: rows[name] for name in ("deter", "stoch")}
    before, after_it = (jax.tree.map(lambda x, i=i: x[i], latents) for i in (slice(5), slice(1, 6)))
    carried = np.asarray(follows(train.params, before, rows["action"][:5], after_it))
    assert begins[1:].sum() < 3 and np.all(carried[~begins[1:]])
    zero = np.asarray(after.data["deter"] == 0.0).all(-1)
    assert (~zero).sum() == 10  # five rows each of two sequences, and no other row
    for name in ("obs", "action", "reward", "is_first"):
        np.testing.assert_array_equal(after.data[name], state.data[name])


@pytest.mark.parametrize("shards", [1, 2])
def test_parts_of_a_sequence_are_learned_from_in_turn_with_the_state_carried_on(
    monkeypatch, shards
):
    """With a learner that adds every row's number to its state, and counts. The rows' priorities
    are learned as well, and belong to the same rows."""

    def learner(settings, train, batch, carry, noise):
        seen = batch.obs["vector"][..., :1]
        deter = carry.deter[None] + jnp.cumsum(seen, axis=0)
        shape = (*deter.shape[:2], NET.stoch, NET.classes)
        told = {"first": jnp.mean(seen[0]), "draw": noise.posterior[0, 0, 0]}
        state = types.State(deter, jnp.broadcast_to(carry.stoch[None], shape))
        return train + 1, told, state, 1.0 + seen[..., 0]

    monkeypatch.setattr(update, "update_from_batch", learner)
    settings = change(CONTEXT, loss=dict(batch_length=2, parts=3), replay=dict(priority_share=0.5))
    state, key = filled(shards, settings=settings), jax.random.key(3)
    train, after, metrics = jax.jit(update.make_update(settings))(jnp.int32(0), state, key)
    sample_key, draw_key = jax.random.split(key)
    sample = selected(settings, state, sample_key, 7)
    seen = np.asarray(sample.rows["obs"])[1:, :, :1]
    expected = np.asarray(sample.rows["deter"])[:1] + np.cumsum(seen, axis=0)
    stored = replay.row_at(after, jax.tree.map(lambda x: x[1:], sample.index))["deter"]
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    inverse = replay.row_at(after, sample.index)["priority_inverse"]
    np.testing.assert_allclose(inverse[1:], 1.0 / (1.0 + seen[..., 0]), rtol=1e-6)
    assert np.all(np.isin(inverse[0], [0.0, np.float32(1e30)]))  # the row before them
    written = np.asarray(after.data["deter"] != state.data["deter"]).any(-1)
    assert written.sum() == 12  # six rows each of two sequences, and no other row
    for name in ("obs", "action", "reward", "is_first"):
        np.testing.assert_array_equal(after.data[name], state.data[name])
    assert int(train) == 3
    np.testing.assert_allclose(metrics["first"], seen[::2].mean(), rtol=1e-6)
    keys = jax.random.split(draw_key, 3)  # every part has draws of its own
    draws = [update.draw_noise(settings, part).posterior[0, 0, 0] for part in keys]
    np.testing.assert_allclose(metrics["draw"], np.mean(draws), rtol=1e-6)


def test_what_parts_of_a_sequence_need():
    loss = dict(batch_size=16, batch_length=64, parts=2)
    settings = change(Settings(), train=dict(train_ratio=1024.0), loss=loss)
    assert settings.updates_per_step() == 0.5  # of two learner steps each
    assert settings.rows_before_learning() == 129 * settings.env.num_envs
    needed = 129 * settings.env.num_envs
    from_dict(Settings(), dict(loss=loss, replay=dict(capacity=needed)))
    told = "loss.batch_length=64 in loss.parts=2 parts needs one row more .* gives 128: raise it"
    with pytest.raises(ValueError, match=told):
        from_dict(Settings(), dict(loss=loss, replay=dict(capacity=needed - 1)))


def test_latents_of_the_seed_phase_follow_from_the_actions_taken():
    settings = change(CONTEXT, replay=dict(online=False))
    agent = dreamer.build_agent(settings)

    class Environment:  # as much of one as a state is made from
        num_envs, spec = 2, SPEC

    schedule = Schedule(100, 0, 0.0, 0, 0)
    obs = jax.random.normal(jax.random.key(1), (6, 2, 2))
    state = init_state(agent, Environment, key=jax.random.key(0), capacity=9, host_obs=obs[0])
    select_action = jax.jit(loop.make_select_action(agent, schedule, 2, SPEC))
    no, zero = jnp.zeros(2, bool), jnp.zeros(2)
    for t in range(5):
        action, actor, _ = select_action(state, jax.random.key(t))
        step = Timestep(obs[t + 1], obs[t + 1], zero, no, no, zero, zero, no)
        state, _ = program(loop.store, agent)(state, action, actor, None, step)
    rows = {name: x[:, :5].swapaxes(0, 1) for name, x in state.replay.data.items()}
    assert np.all(np.abs(rows["action"]) > 0.0)
    before, after = ({n: rows[n][i] for n in ("deter", "stoch")} for i in (slice(4), slice(1, 5)))
    assert np.all(follows(state.train.params, before, rows["action"][:4], after))


def test_nothing_of_a_fault_is_learned_from():
    """A step that gave NaN leaves finite rows, of which none is learned across the break."""
    agent = dreamer.build_agent(CONTEXT)

    class Environment:
        num_envs, spec = 2, SPEC

    obs = jnp.ones((2, 2))
    state = init_state(agent, Environment, key=jax.random.key(0), capacity=9, host_obs=obs)
    no, zero = jnp.zeros(2, bool), jnp.zeros(2)
    for t in range(7):
        fault = jnp.array([t == 3, False])
        final = jnp.where(fault[:, None], jnp.nan, obs)
        step = Timestep(obs, final, zero + 1.0, no, fault, zero, zero, fault)
        action = jnp.full((2, 2), 0.1)
        state, _ = program(loop.store, agent)(state, action, dreamer.init_actor(NET, 2), None, step)
    data = jax.device_get(state.replay.data)
    assert all(np.all(np.isfinite(x)) for x in data.values() if x.dtype == np.float32)
    assert data["is_first"][0, 4] and not np.any(np.asarray(data["is_last"]))
    assert data["reward"][0, 4] == 0.0  # that of the fault is not the next episode's
    columns = {name: x[:1, 1:7].swapaxes(0, 1) for name, x in data.items()}
    batch, _ = update.make_batch(change(CONTEXT, loss=dict(batch_size=1)), columns)
    logits = jax.random.normal(jax.random.key(0), (5, 1, 21))
    losses = [
        program(behaviour.replay_critic, CONTEXT)(logits, jnp.zeros((5, 1)), values, batch)
        for values in (jnp.ones((5, 1)), jnp.ones((5, 1)).at[2:].set(50.0))
    ]
    # The break is before batch row 2: row 1 has no target, and none before it sees what follows.
    assert losses[0][1, 0] == 0.0 and losses[0][0, 0] > 0.0
    np.testing.assert_array_equal(losses[0][:2], losses[1][:2])
    assert losses[0][2, 0] != losses[1][2, 0]
