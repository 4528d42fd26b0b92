"""The TD-MPC agent's own parts: planner targets, masks, samples, reanalyze."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import distributions, replay
from mbx.agents.tdmpc import losses, reanalyze, value_targets
from mbx.agents.tdmpc.agent import make_agent
from mbx.agents.tdmpc.losses import value_losses
from mbx.agents.tdmpc.types import Noise, PolicyInputs, Scales
from mbx.agents.tdmpc.update import draw, init_state, update_from_batch, weigh_plans
from tests.agents.tdmpc_helpers import (
    SPEC,
    A,
    B,
    N,
    T,
    changed,
    empty_replay,
    loud,
    make_batch,
    make_model,
    make_settings,
    policy_loss,
    replaced,
    row,
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


def test_an_update_moves_everything_it_should(setting):
    _, _, state, update, noise = setting
    assert noise.policy_eps.shape == (T + 1, B, A)  # one draw a state: fewer would be broadcast
    new, metrics = update(state, make_batch(), noise)
    for name in state.params:
        assert changed(state.params[name], new.params[name]), name
    assert changed(state.target_value, new.target_value) and int(new.step) == 1
    assert all(np.isfinite(float(v)) for v in metrics.values())
    expected = jax.tree.map(
        lambda t, p: 0.99 * t + 0.01 * p, state.target_value, new.params["value"]
    )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        new.target_value,
        expected,
    )


def test_runs_of_different_lengths_are_one_program_unless_a_schedule_asks(setting):
    settings, model, state, _, noise = setting

    def program(num, **loss):
        own = replaced(settings, loss=loss, train=dict(steps=2000 + num))
        update = jax.jit(lambda s, b, d: update_from_batch(own, model, s, b, d))
        return update.lower(state, make_batch(), noise).as_text()

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


def test_v_targets_follow_the_formula_and_the_models_own_termination():
    settings = make_settings(model=dict(episodic="True"))
    model = make_model(settings)
    params = loud(model.init(jax.random.key(0)))
    z = model.encode(params, jax.random.normal(jax.random.key(1), (B, 3)))
    actions = jax.random.uniform(jax.random.key(2), (B, N, A), minval=-1.0)

    def made(settings):
        once = jax.jit(
            lambda p, z, a: value_targets.v_targets(
                value_targets.Inputs(settings, model, p, p["value"], None, None, SILENT), z, a
            )
        )
        return once(params, z, actions)[0]

    ours = made(settings)

    @jax.jit
    def formula(z, action):
        z_next = model.step(params, z[None], action)[0]
        value = model.decode(model.value(params["value"], z_next)).mean()
        alive = jax.nn.sigmoid(model.termination(params, z_next)) <= 0.5
        return model.decode(model.reward(params, z[None], action))[0, 0] + 0.9 * alive * value

    for b in range(B):
        for n in range(N):
            expected = formula(z[b], actions[b, n])
            np.testing.assert_allclose(ours[b, n], expected, rtol=2e-3, atol=2e-4)
    softer = made(replaced(settings, loss=dict(termination="soft")))
    assert not np.allclose(ours, softer)


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


def test_value_targets_can_weigh_planner_actions_with_a_temperature_of_their_own():
    own = dict(awr_temperature=0.5, value_temperature=2.0, value_weighting="weighted")
    plans = make_batch().plan_values
    policys, values = weigh_plans(make_settings(loss=own), plans)
    raw = np.asarray(plans, np.float64)
    for weights, temperature in ((policys, 0.5), (values, 2.0)):
        expected = np.exp(raw / temperature)
        expected /= expected.sum(-1, keepdims=True)
        np.testing.assert_allclose(weights, expected, rtol=1e-5)
    policys, values = weigh_plans(make_settings(loss=own | {"value_temperature": 0.0}), plans)
    np.testing.assert_array_equal(policys, values)


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
    _, weights = weigh_plans(settings, batch.plan_values)
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


def test_policy_coef_weighs_the_whole_loss_of_the_policy(setting):
    settings, model, state, _, noise = setting
    zs = jax.lax.stop_gradient(model.encode(state.params, make_batch().obs))
    inputs = PolicyInputs(zs, weighed(T + 1, B), noise.policy_eps, None)
    scales = Scales(state.scale, state.kl_scale, state.trust_scale, None)

    def loss(coef):
        own = make_settings(
            loss=dict(policy_loss="svg", policy_coef=coef, trust_region_coef=0.5, entropy_coef=0.1)
        )
        policy, target = state.params["policy"], loud(state.params["policy"], 5)
        of_policy = program(policy_loss, own, model)
        return of_policy(policy, state.params, target, inputs, scales)[0]

    np.testing.assert_allclose(loss(0.25), 0.25 * loss(1.0), rtol=1e-6)


def test_the_entropy_bonus_can_be_in_the_units_of_values(setting):
    _, model, state, _, noise = setting
    zs = jax.lax.stop_gradient(model.encode(state.params, make_batch().obs))
    inputs = PolicyInputs(zs, weighed(T + 1, B), noise.policy_eps, None)

    @functools.partial(jax.jit, static_argnums=0)
    def loss(how, unit):
        own = make_settings(
            loss=dict(policy_loss="svg", entropy_scale=how, entropy_coef=0.1),
            optimizer=dict(tau=0.0),  # the unit stays what it is
        )
        scales = Scales(state.scale.replace(value=unit), None, None, None)
        policy = state.params["policy"]
        return policy_loss(own, model, policy, state.params, None, inputs, scales)[0]

    # Divided as a whole: the loss at scale 8 is an eighth of that at 1.
    assert float(loss("none", 8.0)) != pytest.approx(float(loss("none", 1.0)) / 8.0, rel=0.01)
    assert float(loss("value", 8.0)) == pytest.approx(float(loss("none", 1.0)) / 8.0, rel=1e-5)


@pytest.fixture(scope="module")
def agent_and_replay():
    agent = make_agent(make_settings(reanalyze=dict(stale_exponent=1.0)), SPEC)
    train = jax.jit(agent.init)(jax.random.key(0))
    buffer, make, insert = (
        empty_replay(agent, num_envs=2, capacity=10),
        jax.jit(agent.store.targets),
        jax.jit(replay.insert),
    )
    for i in range(5):
        obs = jax.random.normal(jax.random.key(i), (2, 3))
        targets = None if i == 4 else make(train, None, obs, jax.random.key(10 + i))
        buffer = insert(buffer, row(obs, first=i == 0, last=i == 4), targets)
    return agent, train, buffer


@pytest.fixture(scope="module")
def renewing():
    """An update, compiled, that makes the targets of its own batch anew every second time."""
    passes = dict(current_batch=True, interval=2, batch_size=4)
    agent = make_agent(make_settings(reanalyze=passes, loss=dict(horizon=1)), SPEC)
    return jax.jit(agent.update)


@pytest.mark.parametrize(("step", "due"), [(4, True), (5, False)])
def test_the_learner_renews_the_targets_of_its_own_batch(agent_and_replay, renewing, step, due):
    _, train, buffer = agent_and_replay
    train = train.replace(step=jnp.int32(step), params=loud(train.params))
    learned, new, metrics = renewing(train, buffer, jax.random.key(3))
    assert int(learned.step) == step + 1
    renewed = np.asarray(new.targets.step == step)
    old = np.asarray(buffer.targets.step)
    np.testing.assert_array_equal(np.asarray(new.targets.step)[~renewed], old[~renewed])
    np.testing.assert_array_equal(
        np.asarray(new.targets.values)[~renewed], np.asarray(buffer.targets.values)[~renewed]
    )
    assert 0 < renewed.sum() <= 4 if due else not renewed.any()
    assert not renewed[np.asarray(buffer.data["is_last"])].any()
    # What is learned from is what was written: fresh rows are one update old, the others older.
    age = float(metrics["targets/age"])
    assert (age < step + 1) == due and age > 0.0
    # Passes are logged where they are made, and only there.
    passed = {name: x for name, x in metrics.items() if name.startswith("reanalyze/")}
    assert {name.removeprefix("reanalyze/") for name in passed} == {"age", "value_change", "share"}
    assert all(float(x.count) == due for x in passed.values())
    assert float(passed["reanalyze/age"].total) == (step if due else 0)
    # With this key no row is drawn twice.
    share = renewed.sum() / int(replay.num_transitions(buffer))
    np.testing.assert_allclose(passed["reanalyze/share"].total, share, rtol=1e-6)
    best = [np.asarray(x.targets.values)[renewed].max(axis=-1) for x in (new, buffer)]
    expected = np.abs(best[0] - best[1]).mean() if due else 0.0
    np.testing.assert_allclose(passed["reanalyze/value_change"].total, expected, rtol=1e-4)


def test_a_pass_compares_rows_that_had_a_value(agent_and_replay):
    """Of four rows one has no plan, one does not count, one was stored without a value."""
    buffer = agent_and_replay[2]

    def targets(step, values, valid):
        actions = jnp.zeros((4, 2, 2))
        return replay.Targets(actions, jnp.array(values), jnp.array(step), jnp.array(valid))

    nan = float("nan")
    values = [[1.0, 5.0], [9.0, 9.0], [nan, nan], [7.0, 7.0]]
    old = targets([1, 2, 3, 4], values, [True, False, True, True])
    new = targets([8] * 4, [[2.0, 3.0], [0.0, 0.0], [4.0, 4.0], [0.0, 0.0]], [True] * 4)
    mask = jnp.array([True, True, True, False])
    found = program(reanalyze.pass_metrics)(buffer, old, new, mask)
    np.testing.assert_allclose(found["reanalyze/age"], (7 + 5) / 2)
    np.testing.assert_allclose(found["reanalyze/value_change"], 2.0)
    rows = int(replay.num_transitions(buffer))
    np.testing.assert_allclose(found["reanalyze/share"], 3 / rows, rtol=1e-6)


def test_a_sweep_refreshes_every_transition(agent_and_replay):
    agent, train, buffer = agent_and_replay
    train = train.replace(step=jnp.int32(5))
    sweep = jax.jit(agent.store.reanalyze)
    for chunk in range(-(-int(buffer.size.sum()) // agent.store.batch_size)):
        buffer, _ = sweep(train, buffer, jax.random.key(chunk), jnp.int32(chunk))
    for e in range(2):
        n = int(buffer.size[e])
        last = np.asarray(buffer.data["is_last"][e, :n])
        steps = np.asarray(buffer.targets.step[e, :n])
        assert (steps[~last] == 5).all() and not np.asarray(buffer.targets.valid[e, :n])[last].any()


def test_td_mpc2_stores_no_targets_and_samples_are_made_in_every_update():
    plain = dict(value_target="td", policy_loss="svg")
    agent = make_agent(make_settings(model=dict(critic="q"), loss=plain), SPEC)
    assert agent.store is None
    sampled = make_agent(make_settings(training_planner=dict(enabled=False)), SPEC)
    assert sampled.store is None
    buffer = empty_replay(sampled, num_envs=1, capacity=10)
    for i in range(6):
        buffer = replay.insert(buffer, row(jnp.full((1, 3), 0.1 * i), first=i == 0))
    train = jax.jit(sampled.init)(jax.random.key(0))
    new, _, metrics = jax.jit(sampled.update)(train, buffer, jax.random.key(1))
    assert changed(train.params["policy"], new.params["policy"])
    assert np.isfinite(float(metrics["loss/policy"]))


def test_images_train_through_the_conv_encoder():
    settings = make_settings(loss=dict(horizon=1, batch_size=2))
    image = SPEC._replace(obs_shape=(64, 64, 3), obs_dtype=jnp.uint8, action_dim=1)
    agent = make_agent(settings, image)
    buffer = empty_replay(agent, num_envs=1, capacity=6)
    train, make = jax.jit(agent.init)(jax.random.key(0)), jax.jit(agent.store.targets)
    for i in range(4):
        obs = jax.random.randint(jax.random.key(i), (1, 64, 64, 3), 0, 256).astype(jnp.uint8)
        new = row(obs, jnp.zeros((1, 1)), first=i == 0)
        buffer = replay.insert(buffer, new, make(train, None, obs, jax.random.key(i)))
    new, _, _ = jax.jit(agent.update)(train, buffer, jax.random.key(1))
    assert changed(train.params["encoder"], new.params["encoder"])


def test_return_ema_scales_the_svg_loss():
    settings = make_settings(
        model=dict(critic="q"),
        loss=dict(value_target="td", policy_loss="svg", value_scale="return_ema"),
    )
    model = make_model(settings)
    state = program(init_state, settings, model)(jax.random.key(0))
    state = state.replace(params=loud(state.params))
    noise = program(draw, settings, model)(jax.random.key(1))
    update = jax.jit(lambda s, b, d: update_from_batch(settings, model, s, b, d))
    new, metrics = update(state, make_batch(), noise)
    assert changed(state.return_ema, new.return_ema)
    assert not changed(state.scale, new.scale) and float(metrics["policy/scale"]) >= 1.0
