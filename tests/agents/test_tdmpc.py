"""The TD-MPC agent's own parts: planner targets, masks, legacy path, refresh."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import distributions as dist
from mbx import mppi, replay
from mbx.agents.tdmpc import agent as tdmpc
from mbx.agents.tdmpc import model_loss as losses
from mbx.agents.tdmpc import planning, value_targets
from mbx.agents.tdmpc import policy_loss as policies
from mbx.world_model import WorldModelConfig, make_world_model
from tests.helpers import compiled

T, B, N, A = 2, 4, 5, 2
OUTLOOK = planning.Outlook(discount=0.9, num_heads=2)


def make_config(**overrides) -> tdmpc.TDMPCConfig:
    world = WorldModelConfig(
        obs_shape=(3,),
        action_dim=A,
        enc_dim=8,
        mlp_dim=8,
        latent_dim=8,
        num_values=2,
        num_bins=11,
        critic=overrides.pop("critic", "v"),
        policy="tanh_mean",
        episodic=overrides.pop("episodic", False),
        dropout=0.0,
    )
    planner = mppi.MPPIConfig(2, 8, 3)
    fields = dict(
        world=world,
        discount=0.9,
        planner=planner,
        training_planner=mppi.MPPIConfig(2, N, 3, temperature_mode="divide"),
        horizon=T,
        num_proposals=2,
        batch_size=B,
        reanalyze_batch=6,
        value_weighting="weighted",
        value_reduction="mean",
    )
    return tdmpc.TDMPCConfig(**{**fields, **overrides})


def make_batch(key=0, **overrides) -> losses.Batch:
    keys = jax.random.split(jax.random.key(key), 5)
    batch = losses.Batch(
        obs=jax.random.normal(keys[0], (T + 1, B, 3)),
        action=jax.random.uniform(keys[1], (T, B, A), minval=-1.0),
        reward=jax.random.normal(keys[2], (T, B)),
        terminated=jnp.zeros((T, B)),
        mask=jnp.ones((T, B)),
        target_actions=jax.random.uniform(keys[3], (T + 1, B, N, A), minval=-1.0),
        target_values=jax.random.normal(keys[4], (T + 1, B, N)),
        target_valid=jnp.ones((T + 1, B), bool),
    )
    return batch._replace(**overrides)


@jax.jit
def loud(tree, key=7):
    """Parameters with nothing zero in them, so that every path shows."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(key), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy)


@pytest.fixture(scope="module")
def setting():
    config = make_config()
    model = compiled(make_world_model(config.world))
    state = tdmpc.init_state(config, model, jax.random.key(0))
    state = state.replace(params=loud(state.params), target_value=loud(state.target_value, 8))
    update = jax.jit(lambda s, b, d: tdmpc.update_from_batch(config, model, s, b, d))
    return config, model, state, update, tdmpc.draw(config, jax.random.key(1), B)


def changed(before, after) -> bool:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


def test_an_update_moves_everything_it_should(setting):
    _, _, state, update, draws = setting
    new, metrics = update(state, make_batch(), draws)
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
    config, model, state, _, draws = setting

    def program(num, **fields):
        own = dataclasses.replace(config, total_updates=num, **fields)
        update = jax.jit(lambda s, b, d: tdmpc.update_from_batch(own, model, s, b, d))
        return update.lower(state, make_batch(), draws).as_text()

    assert program(5) == program(9)
    fields = dict(encoder_consistency_coef=1.0, encoder_consistency_warmup=0.5)
    assert program(5, **fields) != program(9, **fields)


def test_nothing_behind_the_mask_counts(setting):
    _, _, state, update, draws = setting
    mask = jnp.ones((T, B)).at[1, 2].set(0.0)
    one = make_batch(mask=mask)
    other = one._replace(
        obs=one.obs.at[2, 2].set(9.0),
        reward=one.reward.at[1, 2].set(1e3),
        action=one.action.at[1, 2].set(0.7),
        target_actions=one.target_actions.at[2, 2].set(-0.9),
        target_values=one.target_values.at[2, 2].set(50.0),
    )
    a, b = update(state, one, draws), update(state, other, draws)
    assert not changed(a[0].params, b[0].params)


def test_invalid_targets_are_ignored_by_value_and_policy(setting):
    _, _, state, update, draws = setting
    valid = jnp.ones((T + 1, B), bool).at[0, 1].set(False)
    one = make_batch(target_valid=valid)
    other = one._replace(
        target_actions=one.target_actions.at[0, 1].set(0.5),
        target_values=one.target_values.at[0, 1].set(-70.0),
    )
    a, b = update(state, one, draws), update(state, other, draws)
    assert not changed(a[0].params, b[0].params)
    assert changed(update(state, make_batch(), draws)[0].params, a[0].params)


def test_one_cross_entropy_with_the_mean_target_is_the_mean_of_cross_entropies():
    bins = dist.bins(-3.0, 3.0, 11)
    keys = jax.random.split(jax.random.key(0), 3)
    logits = jax.random.normal(keys[0], (4, 11))
    samples = 5.0 * jax.random.normal(keys[1], (4, N))
    weights = jax.nn.softmax(jax.random.normal(keys[2], (4, N)))
    many = dist.two_hot_cross_entropy(jnp.broadcast_to(logits[:, None], (4, N, 11)), samples, bins)
    mean_target = jnp.sum(weights[..., None] * dist.two_hot(samples, bins), axis=-2)
    once = -jnp.sum(mean_target * jax.nn.log_softmax(logits), axis=-1)
    np.testing.assert_allclose(once, jnp.sum(weights * many, axis=-1), rtol=1e-5)


def test_v_targets_follow_the_formula_and_the_models_own_termination():
    config = make_config(episodic=True)
    model = compiled(make_world_model(config.world))
    params = loud(model.init(jax.random.key(0)))
    z = model.encode(params, jax.random.normal(jax.random.key(1), (B, 3)))
    actions = jax.random.uniform(jax.random.key(2), (B, N, A), minval=-1.0)
    draws = losses.Draws(None, None, None, None)

    def made(config):
        once = jax.jit(
            lambda p, z, a: value_targets.v_targets(model, p, p["value"], z, a, draws, config)
        )
        return once(params, z, actions)[0]

    ours = made(config)

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
    softer = made(dataclasses.replace(config, termination="soft"))
    assert not np.allclose(ours, softer)


def test_q_critic_bootstraps_with_planner_actions_and_falls_back_to_the_policy():
    config = make_config(critic="q", value_weighting="uniform")
    model = compiled(make_world_model(config.world))
    params = loud(model.init(jax.random.key(0)))
    batch = make_batch()
    z_next = model.encode(params, batch.obs[1:])
    draws = tdmpc.draw(config, jax.random.key(3), B)
    weights = jnp.full((T + 1, B, N), 1.0 / N)

    @jax.jit
    def targets(batch, weights):
        return value_targets.q_targets(
            model, params, params["value"], z_next, batch, draws, config, weights
        )[0]

    planned, sampled = targets(batch, weights), targets(batch, None)
    valid = jnp.ones((T + 1, B), bool).at[1, 0].set(False)
    mixed = targets(batch._replace(target_valid=valid), weights)
    np.testing.assert_allclose(mixed[0, 0], sampled[0, 0], rtol=1e-5)
    np.testing.assert_allclose(mixed[0, 1:], planned[0, 1:], rtol=1e-5)
    ended = targets(batch._replace(terminated=jnp.ones((T, B))), weights)
    np.testing.assert_allclose(ended, batch.reward, rtol=1e-6)


def test_value_actions_options():
    batch = make_batch()
    weights = jax.nn.softmax(batch.target_values)
    actions, w = value_targets.value_actions(batch, "weighted", weights, 2)
    assert actions is batch.target_actions and w is weights
    actions, w = value_targets.value_actions(batch, "uniform", weights, 2)
    np.testing.assert_allclose(w, 1 / N)
    actions, w = value_targets.value_actions(batch, "best_n", weights, 2)
    assert actions.shape == (T + 1, B, 2, A)
    np.testing.assert_allclose(w, 0.5)
    best = np.argsort(-np.asarray(batch.target_values[0, 0]))[:2]
    np.testing.assert_array_equal(actions[0, 0], batch.target_actions[0, 0][best])


@pytest.mark.parametrize("scale", ["none", "range", "state"])
def test_planner_weights(scale):
    values = jnp.array([[1.0, 2.0, 4.0], [100.0, 200.0, 400.0]])
    weights = value_targets.planner_weights(
        values, temperature=0.5, scale=10.0, advantage_scale=scale
    )
    np.testing.assert_allclose(weights.sum(-1), 1.0, rtol=1e-6)
    if scale == "state":  # does not depend on the unit of the reward
        np.testing.assert_allclose(weights[0], weights[1], rtol=1e-4)
    divisor = dict(none=0.5, range=5.0).get(scale)
    if divisor:
        np.testing.assert_allclose(weights, jax.nn.softmax(values / divisor), rtol=1e-5)


@pytest.mark.parametrize("scale", ["none", "state"])
def test_the_temperature_leaves_the_effective_samples_asked_for(setting, scale):
    config = dataclasses.replace(setting[0], awr_effective_samples=2.0, advantage_scale=scale)
    batch = make_batch()
    values = 60.0 + batch.target_values * jnp.array([0.01, 0.02, 0.05, 5.0])[None, :, None]
    values = values.at[0, 0, 0].add(1e4)  # of a row whose targets do not count
    valid = jnp.ones((T + 1, B), bool).at[0, 0].set(False)
    batch = batch._replace(target_values=values, target_valid=valid)
    weights, _ = tdmpc.weigh_actions(config, (setting[2].scale, None), batch)
    each = 1.0 / np.square(np.asarray(weights, np.float64)).sum(-1)
    np.testing.assert_allclose(each[np.asarray(valid)].mean(), 2.0, rtol=1e-3)
    # One temperature for all: states where actions matter more have fewer.
    gap = each[1:, 0].mean() - each[1:, 3].mean()
    assert gap > 1.0 if scale == "none" else abs(gap) < 0.5


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(awr_effective_samples=5.0), "5 planner actions"),
        (dict(awr_effective_samples=3.0, keep_targets=2), "2 planner actions"),
        (dict(awr_effective_samples=1.0), "between 1 and that"),
        (dict(awr_effective_samples=2.0, advantage_scale="range"), "has no effect"),
        (dict(entropy_scale="value"), "name svg first"),
        (dict(entropy_scale="value", policy_loss="awr:1+svg:1"), "name svg first"),
    ],
)
def test_what_does_not_go_with_the_policy_loss_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        make_config(**overrides)


def test_the_entropy_bonus_can_be_in_the_units_of_values(setting):
    _, model, state, _, draws = setting
    zs = jax.lax.stop_gradient(model.encode(state.params, make_batch().obs))
    inputs = policies.PolicyInputs(zs, jnp.ones((T + 1, B)), draws.policy_eps, None)
    scales = policies.Scales(None, state.kl_scale, state.trust_scale)

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def loss(how, divisor):
        config = make_config(policy_loss="svg", entropy_scale=how)
        return policies.policy_loss(
            state.params["policy"],
            model,
            state.params,
            None,
            inputs,
            scales,
            lambda kept, values: (jnp.float32(divisor), kept),
            config,
            0.1,
        )[0]

    # Divided as a whole: the loss at scale 8 is an eighth of that at 1.
    assert float(loss("none", 8.0)) != pytest.approx(float(loss("none", 1.0)) / 8.0, rel=0.01)
    assert float(loss("value", 8.0)) == pytest.approx(float(loss("none", 1.0)) / 8.0, rel=1e-5)


def test_awr_moves_the_policy_to_the_better_action(setting):
    config, model, state, _, draws = setting
    zs = jax.lax.stop_gradient(model.encode(state.params, make_batch().obs))
    good, bad = jnp.array([0.6, -0.4]), jnp.array([-0.6, 0.4])
    actions = jnp.broadcast_to(jnp.stack([good, bad]), (T + 1, B, 2, A))
    batch = make_batch(target_actions=actions)
    weights = jnp.broadcast_to(jnp.array([0.99, 0.01]), (T + 1, B, 2))

    def loss(policy):
        inputs = policies.PolicyInputs(
            zs,
            jnp.ones((T + 1, B)),
            draws.policy_eps,
            None,
            batch.target_actions,
            weights,
            batch.target_valid,
        )
        scales = policies.Scales(None, state.kl_scale, state.trust_scale)
        return policies.policy_loss(
            policy, model, state.params, None, inputs, scales, None, config, config.entropy_coef
        )[0]

    policy = model.init(jax.random.key(0))["policy"]
    adam = optax.adam(0.01)

    @jax.jit
    def step(policy, moments):
        updates, moments = adam.update(jax.grad(loss)(policy), moments)
        return optax.apply_updates(policy, updates), moments

    moments = adam.init(policy)
    for _ in range(300):
        policy, moments = step(policy, moments)
    mean = jnp.tanh(model.policy({**state.params, "policy": policy}, zs)[0])
    assert np.abs(np.asarray(mean) - np.asarray(good)).mean() < 0.25


def test_one_round_of_the_training_planner_is_the_raw_policy(setting):
    config, model, state, _, _ = setting
    z = model.encode(state.params, jnp.ones((B, 3)))
    key = jax.random.key(5)
    once = dataclasses.replace(config.training_planner, iterations=1)
    plan = planning.plan_targets(model, state.params, z, key, config=once, outlook=OUTLOOK)
    actions, values = plan.actions, plan.values
    mean, log_std = model.policy(state.params, z)
    eps = jax.random.normal(jax.random.split(key)[0], (B, N, A))
    expected = model.act(mean[:, None], log_std[:, None], eps)
    np.testing.assert_allclose(actions, expected, rtol=1e-6)
    draws = losses.Draws(None, None, None, None)
    look = value_targets.v_targets(
        model, state.params, state.params["value"], z, actions, draws, config
    )[0]
    np.testing.assert_allclose(values, look, rtol=2e-3, atol=2e-4)


def test_more_rounds_raise_the_values(setting):
    config, model, state, _, _ = setting
    z = model.encode(state.params, jax.random.normal(jax.random.key(0), (32, 3)))

    def mean_value(rounds):
        planner = mppi.MPPIConfig(rounds, 32, 8, temperature=0.5, temperature_mode="divide")
        return planning.plan_targets(
            model, state.params, z, jax.random.key(1), config=planner, outlook=OUTLOOK
        ).values.mean()

    assert mean_value(1) < mean_value(3)


@pytest.fixture(scope="module")
def agent_and_replay():
    agent = tdmpc.make_agent(make_config(stale_exponent=1.0))
    train = agent.init(jax.random.key(0))
    buffer = replay.init(agent.example_row(), num_envs=2, capacity=10, target_spec=agent.store.spec)
    no = jnp.zeros(2, bool)
    for i in range(5):
        obs = jax.random.normal(jax.random.key(i), (2, 3))
        row = dict(
            obs=obs,
            action=jnp.zeros((2, A)),
            reward=jnp.ones(2),
            is_first=no | (i == 0),
            is_last=no | (i == 4),
            terminated=no,
        )
        targets = None if i == 4 else agent.store.targets(train, None, obs, jax.random.key(10 + i))
        buffer = replay.insert(buffer, row, targets)
    return agent, train, buffer


def test_refresh_rewrites_targets_with_todays_model(agent_and_replay):
    agent, train, buffer = agent_and_replay
    train = train.replace(step=jnp.int32(9), params=loud(train.params))
    new, metrics = jax.jit(agent.store.reanalyze)(train, buffer, jax.random.key(1), jnp.int32(-1))
    refreshed = np.asarray(new.targets.step == 9)
    assert refreshed.sum() > 0 and not refreshed[np.asarray(buffer.data["is_last"])].any()
    assert float(metrics["reanalyze/age"]) == 9.0 and float(metrics["reanalyze/share"]) > 0
    untouched = ~refreshed
    np.testing.assert_array_equal(
        np.asarray(new.targets.values)[untouched], np.asarray(buffer.targets.values)[untouched]
    )


@pytest.mark.parametrize(("step", "due"), [(4, True), (5, False)])
def test_the_learner_renews_the_targets_of_its_own_batch(agent_and_replay, step, due):
    _, train, buffer = agent_and_replay
    agent = tdmpc.make_agent(make_config(reanalyze_current=2, reanalyze_batch=4, horizon=1))
    train = train.replace(step=jnp.int32(step), params=loud(train.params))
    learned, new, metrics = jax.jit(agent.update)(train, buffer, jax.random.key(1))
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


def test_acting_is_noisy_in_training_and_bounded(agent_and_replay):
    agent, train, _ = agent_and_replay
    obs, first = jnp.ones((3, 3)), jnp.ones(3, bool)
    act = jax.jit(agent.act, static_argnums=5)
    actor = agent.init_actor(3)
    a, carried = act(train, actor, obs, first, jax.random.key(0), False)
    b, _ = act(train, actor, obs, first, jax.random.key(0), True)
    assert a.shape == (3, A) and np.abs(a).max() <= 1 and carried.shape == (3, 3, A)
    same, _ = act(train, actor, obs, first, jax.random.key(0), True)
    np.testing.assert_array_equal(b, same)


def test_td_mpc2_stores_no_targets_and_legacy_makes_them_afresh():
    plain = make_config(critic="q", value_target="td", policy_loss="svg")
    agent = tdmpc.make_agent(plain)
    assert agent.store is None
    legacy = tdmpc.make_agent(make_config(stored_targets=False))
    assert legacy.store is None
    buffer = replay.init(legacy.example_row(), num_envs=1, capacity=10)
    no = jnp.zeros(1, bool)
    for i in range(6):
        row = dict(
            obs=jnp.full((1, 3), 0.1 * i),
            action=jnp.zeros((1, A)),
            reward=jnp.ones(1),
            is_first=no | (i == 0),
            is_last=no,
            terminated=no,
        )
        buffer = replay.insert(buffer, row)
    train = legacy.init(jax.random.key(0))
    new, _, metrics = jax.jit(legacy.update)(train, buffer, jax.random.key(1))
    assert changed(train.params["policy"], new.params["policy"])
    assert np.isfinite(float(metrics["loss/policy"]))


def test_images_train_through_the_conv_encoder():
    world = WorldModelConfig(
        obs_shape=(64, 64, 3),
        action_dim=1,
        mlp_dim=8,
        num_channels=2,
        num_values=2,
        num_bins=11,
        critic="v",
        policy="tanh_mean",
    )
    config = dataclasses.replace(make_config(), world=world, horizon=1, batch_size=2)
    agent = tdmpc.make_agent(config)
    buffer = replay.init(agent.example_row(), num_envs=1, capacity=6, target_spec=agent.store.spec)
    train, no = jax.jit(agent.init)(jax.random.key(0)), jnp.zeros(1, bool)
    make = jax.jit(agent.store.targets)
    for i in range(4):
        obs = jax.random.randint(jax.random.key(i), (1, 64, 64, 3), 0, 256).astype(jnp.uint8)
        row = dict(
            obs=obs,
            action=jnp.zeros((1, 1)),
            reward=jnp.ones(1),
            is_first=no | (i == 0),
            is_last=no,
            terminated=no,
        )
        buffer = replay.insert(buffer, row, make(train, None, obs, jax.random.key(i)))
    new, _, _ = jax.jit(agent.update)(train, buffer, jax.random.key(1))
    assert changed(train.params["encoder"], new.params["encoder"])


def test_return_ema_scales_the_svg_loss():
    config = make_config(critic="q", value_target="td", policy_loss="svg", value_scale="return_ema")
    model = compiled(make_world_model(config.world))
    state = tdmpc.init_state(config, model, jax.random.key(0))
    state = state.replace(params=loud(state.params))
    draws = tdmpc.draw(config, jax.random.key(1), B)
    update = jax.jit(lambda s, b, d: tdmpc.update_from_batch(config, model, s, b, d))
    new, metrics = update(state, make_batch(), draws)
    assert changed(state.return_ema, new.return_ema)
    assert not changed(state.scale, new.scale) and float(metrics["policy/scale"]) >= 1.0
