"""The TD-MPC agent's own parts: planner targets, masks, samples, reanalyze."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import distributions, replay
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import losses, value_targets
from mbx.agents.tdmpc.agent import make_agent
from mbx.agents.tdmpc.losses import value_losses
from mbx.agents.tdmpc.types import Noise
from mbx.agents.tdmpc.update import draw, init_state, update_from_batch, weigh_plans
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import (
    SPEC,
    A,
    B,
    N,
    T,
    changed,
    loud,
    make_batch,
    make_model,
    make_settings,
    make_world,
    replaced,
    weighed,
)
from tests.helpers import in_programs, program

dist = in_programs(distributions)

SILENT = Noise(None, None, None, None)


@pytest.fixture(scope="module")
def setting():
    settings = make_settings()
    model = make_model(settings)
    state = program(init_state, settings, model)(jax.random.key(0))
    state = state.replace(params=loud(state.params), target_value=loud(state.target_value, 8))
    update = jax.jit(lambda s, b, d: update_from_batch(settings, model, s, b, d))
    return settings, model, state, update, draw(settings, model, jax.random.key(1))


def test_runs_of_different_lengths_are_one_program_unless_a_schedule_asks(setting):
    settings, model, state, _, noise = setting

    def program(num, **loss):
        own = replaced(settings, loss=loss, train=dict(steps=2000 + num))
        update = functools.partial(update_from_batch, own, model)
        return str(jax.make_jaxpr(update)(state, make_batch(), noise))

    assert program(5) == program(9)
    fields = dict(encoder_consistency_coef=1.0, encoder_consistency_warmup=0.5)
    assert program(5, **fields) != program(9, **fields)


def test_nothing_behind_the_mask_counts(setting):
    _, _, state, update, noise = setting
    mask = jnp.ones((T, B)).at[1, 2].set(0.0)
    one = make_batch(mask=mask)
    other = one._replace(
        obs=one.obs.at[2, 2].set(9.0),
        reward=one.reward.at[1, 2].set(1e3),
        action=one.action.at[1, 2].set(0.7),
        plan_actions=one.plan_actions.at[2, 2].set(-0.9),
        plan_values=one.plan_values.at[2, 2].set(50.0),
    )
    a, b = update(state, one, noise), update(state, other, noise)
    assert not changed(a[0].params, b[0].params)


def test_invalid_targets_are_ignored_by_value_and_policy(setting):
    _, _, state, update, noise = setting
    valid = jnp.ones((T + 1, B), bool).at[0, 1].set(False)
    one = make_batch(plan_valid=valid)
    other = one._replace(
        plan_actions=one.plan_actions.at[0, 1].set(0.5),
        plan_values=one.plan_values.at[0, 1].set(-70.0),
    )
    a, b = update(state, one, noise), update(state, other, noise)
    assert not changed(a[0].params, b[0].params)
    assert changed(update(state, make_batch(), noise)[0].params, a[0].params)


def test_q_critic_bootstraps_with_planner_actions_and_falls_back_to_the_policy():
    settings = make_settings(model=dict(critic="q"), loss=dict(value_weighting="uniform"))
    model = make_model(settings)
    params = loud(model.init(jax.random.key(0)))
    batch = make_batch()
    z = model.encode(params, batch.obs)
    noise = draw(settings, model, jax.random.key(3))

    @functools.partial(jax.jit, static_argnums=1)
    def targets(batch, value_target="planner"):
        own = replaced(settings, loss=dict(value_target=value_target))
        given = own, model, params, params["value"], z, batch, noise
        return value_targets.q_targets(value_targets.Inputs(*given)).samples[0, ..., 0]

    stored, sampled = targets(batch), targets(batch, "td")
    valid = jnp.ones((T + 1, B), bool).at[1, 0].set(False)
    mixed = targets(batch._replace(plan_valid=valid))
    np.testing.assert_allclose(mixed[0, 0], sampled[0, 0], rtol=1e-5)
    np.testing.assert_allclose(mixed[0, 1:], stored[0, 1:], rtol=1e-5)
    ended = targets(batch._replace(terminated=jnp.ones((T, B))))
    np.testing.assert_allclose(ended, batch.reward, rtol=1e-6)


def test_value_actions_options():
    batch = make_batch()
    weights = jax.nn.softmax(batch.plan_values)

    def chosen(weighting):
        settings = make_settings(loss=dict(value_weighting=weighting, value_best_n=2))
        return value_targets.value_actions(settings, batch, weights)

    actions, w = chosen("weighted")
    assert actions is batch.plan_actions and w is weights
    actions, w = chosen("uniform")
    np.testing.assert_allclose(w, 1 / N)
    actions, w = chosen("best_n")
    assert actions.shape == (T + 1, B, 2, A)
    np.testing.assert_allclose(w, 0.5)
    best = np.argsort(-np.asarray(batch.plan_values[0, 0]))[:2]
    np.testing.assert_array_equal(actions[0, 0], batch.plan_actions[0, 0][best])


@pytest.mark.parametrize("value_target", ["planner", "td"])
def test_values_can_learn_in_the_last_state_of_a_window_as_well(value_target):
    settings = make_settings(
        loss=dict(value_target=value_target, value_last_state=True, td_rollouts=3, td_horizon=2)
    )
    model = make_model(settings)
    state = program(init_state, settings, model)(jax.random.key(0))
    state = state.replace(params=loud(state.params), target_value=loud(state.target_value, 8))
    # Window 1 leaves its episode after a step, window 2 ends by itself in the last.
    mask = jnp.ones((T, B)).at[1, 1].set(0.0)
    batch = make_batch(mask=mask, terminated=jnp.zeros((T, B)).at[1, 2].set(1.0))
    noise = program(draw, settings, model)(jax.random.key(1))
    z = model.encode(state.params, batch.obs)
    weights = weigh_plans(settings, batch.plan_values)
    make = program(value_targets.value_targets, settings, model)
    target, _ = make(state, z, batch, noise, weights)
    counts = losses.target_mask(settings, "v", batch)
    assert target.samples.shape[1:3] == counts.shape == (T + 1, B)
    np.testing.assert_array_equal(counts[:T], mask)
    np.testing.assert_array_equal(counts[T], [1.0, 0.0, 0.0, 1.0])
    # The states before are what they are without it, the last is as any other.
    fewer = replaced(settings, loss=dict(value_last_state=False))
    rolled = noise.rollout_eps if value_target == "td" else None
    short = noise if rolled is None else noise._replace(rollout_eps=rolled[:, :T])
    make = program(value_targets.value_targets, fewer, model)
    before, _ = make(state, z, batch, short, weights)
    np.testing.assert_allclose(target.samples[:, :T], before.samples, rtol=1e-4, atol=1e-5)
    late = noise if rolled is None else noise._replace(rollout_eps=rolled[:, 1:])
    shifted = jax.tree.map(
        lambda x: x if x is None or x.shape[0] == T else jnp.concatenate([x[1:], x[:1]]), batch
    )
    after, _ = make(
        state,
        jnp.concatenate([z[1:], z[:1]]),
        shifted,
        late,
        jnp.concatenate([weights[1:], weights[:1]]),
    )
    np.testing.assert_allclose(target.samples[:, T], after.samples[:, T - 1], rtol=1e-4, atol=1e-5)
    zs = jax.random.normal(jax.random.key(2), (T + 1, 1, B, 8))
    params, bins = state.params, np.linspace(-10.0, 10.0, 11)
    ours = program(value_losses, settings, model)(
        params, zs, batch, (target, None), weighed(mask=counts), noise
    )["value"]
    logits = np.asarray(jax.nn.log_softmax(model.value(params["value"], zs[:, 0])))
    codes = np.asarray(target.two_hot(jnp.asarray(bins)))[0]
    cross_entropy = -(codes * logits).sum(-1).mean(0)
    each = (cross_entropy * counts).sum(1) / np.asarray(counts).sum(1)
    np.testing.assert_allclose(ours, np.mean(0.5 ** np.arange(T + 1) * each), rtol=1e-4)


@pytest.mark.parametrize(
    ("sections", "stored"),
    [
        ({}, True),
        (dict(model=dict(critic="q"), loss=dict(value_target="td", policy_loss="svg")), False),
        (dict(training_planner=dict(enabled=False)), False),
    ],
)
def test_targets_are_stored_where_a_loss_reads_them(sections, stored):
    assert bool(make_agent(make_settings(**sections), SPEC).store) == stored


def test_images_are_learned_from_shifted(monkeypatch):
    monkeypatch.setattr(agents, "update_from_batch", lambda s, m, state, batch, noise: (0, batch))
    settings = make_settings(loss=dict(value_target="td", policy_loss="svg"))
    model = make_world_model(make_world(settings, obs_shape=(64, 64, 3)))
    rising = jnp.arange(64, dtype=jnp.uint8)[:, None, None]
    images = jnp.broadcast_to(rising, (T + 1, B, 64, 64, 3))
    rows = dict(obs=images, action=jnp.zeros((T + 1, B, A)), reward=jnp.zeros((T + 1, B)))
    sample = replay.Sample(rows | dict(terminated=rows["reward"]), None, jnp.ones((T, B)), None)
    _, batch = agents.learn(settings, model, None, sample, jax.random.key(1))
    tops = np.unique(batch.obs[:, :, 30, 30])
    assert tops.size > 1 and tops.min() >= 27 and tops.max() <= 33
