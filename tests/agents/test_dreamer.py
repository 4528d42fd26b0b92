"""Dreamer's behaviour learning and its agent: returns by hand, pitfalls, whole runs."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dreamer as default
from configs import dreamerv3 as official
from mbx import returns
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import behaviour as losses
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer import optimizers, policy, rssm, types, update, world_model
from mbx.agents.dreamer.settings import Settings
from mbx.settings import from_dict
from mbx.training import build, run
from mbx.training.checkpoint import Checkpointer
from mbx.training.job import fresh_state, prepare
from mbx.training.state import make_schedule
from mbx.types import EnvSpec
from tests.agents import dreamer_helpers as helpers
from tests.agents.dreamer_helpers import change, make_settings
from tests.helpers import program

NET = dataclasses.replace(helpers.NET, vector_dim=3, factors=(2,))
CONFIG = make_settings(
    NET,
    loss=dict(batch_size=2, batch_length=4, free_nats=0.3),  # of 8 rows 5 lie below it
    imagination=dict(horizon=3),
    critic=dict(gamma=0.9),
)
GAMMA = 0.9


def rows(key, config=CONFIG):
    """batch_length + 1 replay rows [T + 1, B, ...], an episode's end in the middle of one."""
    net, shape = config.model, (config.loss.batch_length + 1, config.loss.batch_size)
    keys = jax.random.split(key, 3)
    action = jax.random.normal(keys[1], (*shape, net.action_dim))
    no = jnp.zeros(shape, bool)
    middle = shape[0] // 2
    last = no.at[middle, 0].set(True) if shape[0] > 2 else no
    return dict(
        obs=jax.random.normal(keys[0], (*shape, 3)),
        action=rssm.mode_one_hot(action) if net.discrete else jnp.tanh(action),
        reward=jax.random.normal(keys[2], shape),
        is_first=jnp.roll(last, 1, axis=0),
        is_last=last,
        terminated=last,
    )


def trained(config, key=0):
    """A train state whose zero-initialised heads are not zero."""
    state = program(dreamer.init_state, config)(jax.random.key(key))
    rng = np.random.default_rng(99)
    params = jax.tree.map(
        lambda x: (np.asarray(x) + 0.1 * rng.normal(size=x.shape)).astype(x.dtype), state.params
    )
    return state.replace(params=params, slow_critic=params["critic"])


def make_step(config):
    def step(state, rows, key):
        batch, carry = update.make_batch(config, rows)
        carry = carry or rssm.initial(
            config.model, state.params["model"]["rssm"], (config.loss.batch_size,)
        )
        draws = update.by_trajectory(update.draw_noise(config, key))
        return update.step_gradients(config, state, batch, carry, draws)

    return jax.jit(step)


@pytest.fixture(scope="module")
def step():
    return make_step(CONFIG)


def behaviour(config, rewards, continues, values, **changes):
    """`losses.behaviour` with a uniform policy and an untrained critic."""
    lead = rewards.shape
    given = dict(
        policy_out=jnp.zeros((*lead, 2)),
        actions=jnp.zeros((*lead, 2)).at[..., 0].set(1.0),
        rewards=rewards,
        continues=continues,
        values=values,
        value_logits=jnp.zeros((*lead, 21)),
        slow_values=jnp.zeros(lead),
        ema=returns.init_return_ema(),
    )
    return program(losses.imagined_losses, config)(**(given | changes))


def column(*numbers):
    return jnp.asarray(numbers, jnp.float32)[:, None]


# Returns and weights: indices


def test_chain_of_three_states_by_hand():
    """s0 -> s1 (reward 1) -> s2 (reward 2, terminal); true values 1 + 2 g, 2, 0."""
    values = column(1.0 + 2.0 * GAMMA, 2.0, 0.0)
    for lambda_ in (0.0, 0.5, 1.0):
        config = change(CONFIG, critic=dict(lambda_=lambda_))
        got = behaviour(config, column(9.0, 1.0, 2.0), column(1.0, 1.0, 0.0), values)
        np.testing.assert_allclose(got.returns[:, 0], [1.0 + 2.0 * GAMMA, 2.0], rtol=1e-6)
        replayed = returns.replay_lambda_returns(
            column(0.0, 1.0, 2.0),
            column(0.0, 0.0, 1.0),
            column(0.0, 0.0, 1.0),
            values,
            GAMMA,
            lambda_,
        )
        np.testing.assert_allclose(replayed, got.returns, rtol=1e-6)


def test_dreams_from_terminal_rows_weigh_nothing():
    ones = jnp.ones((4, 2))
    continues = ones.at[0, 1].set(0.0)
    got = behaviour(CONFIG, ones, continues, ones)
    assert np.all(got.actor[:, 1] == 0.0) and np.all(got.critic[:, 1] == 0.0)
    assert np.all(got.actor[:, 0] != 0.0) and np.all(got.critic[:, 0] > 0.0)


def test_continue_stops_the_bootstrap_and_weights_what_follows():
    ones, values = jnp.ones((4, 1)), column(5.0, 5.0, 5.0, 5.0)
    got = behaviour(CONFIG, ones, column(1.0, 1.0, 0.0, 1.0), values)
    assert got.returns[1, 0] == 1.0  # the episode ends at state 2: its reward alone
    assert np.all(got.actor[2:] == 0.0)
    np.testing.assert_allclose(got.metrics["discount_min"], 0.0)
    on = behaviour(CONFIG, ones, ones, values)
    np.testing.assert_allclose(on.returns[-1, 0], 1.0 + GAMMA * 5.0, rtol=1e-6)


def test_replay_rows_that_are_ends_weigh_nothing():
    no, end = jnp.zeros((4, 1), bool), column(0.0, 1.0, 0.0, 0.0) > 0
    batch = types.Batch({}, None, column(0.0, 1.0, 0.0, 1.0), no, end, end)
    annotations = column(2.0, 2.0, 2.0, 2.0)
    loss = program(losses.replay_critic, CONFIG)(
        jnp.zeros((4, 1, 21)), jnp.zeros((4, 1)), annotations, batch
    )
    assert loss.shape == (3, 1)
    assert loss[1, 0] == 0.0 and np.all(loss[np.array([0, 2]), 0] > 0.0)


# ReturnEMA, critic regulariser, policies


def test_return_ema_moves_before_use_and_normalises_the_actor_alone():
    rewards, ones = jax.random.normal(jax.random.key(0), (4, 50)) * 10.0, jnp.ones((4, 50))
    warm = returns.ReturnEMA(jnp.float32(-100.0), jnp.float32(100.0))
    cold, hot = (
        behaviour(CONFIG, rewards, ones, ones, ema=e) for e in (returns.init_return_ema(), warm)
    )
    np.testing.assert_array_equal(cold.critic, hot.critic)
    np.testing.assert_array_equal(cold.returns, hot.returns)
    np.testing.assert_allclose(hot.metrics["ema_invscale"], hot.ema.high - hot.ema.low)
    assert np.mean(np.abs(hot.actor)) < 0.1 * np.mean(np.abs(cold.actor))
    same = behaviour(CONFIG, ones, ones, ones * 10.0, ema=returns.init_return_ema())
    assert same.metrics["ema_invscale"] == 1.0


def test_converged_advantages_do_not_see_the_scale_of_rewards():
    rewards, ones = jax.random.normal(jax.random.key(1), (4, 50)) * 10.0, jnp.ones((4, 50))
    values = jax.random.normal(jax.random.key(2), (4, 50))
    steady = change(CONFIG, actor=dict(return_decay=0.0))
    logits = jax.random.normal(jax.random.key(3), (4, 50, 21))  # uniform ones would not tell
    small = behaviour(steady, rewards, ones, values, value_logits=logits)
    large = behaviour(steady, 7.0 * rewards, ones, 7.0 * values, value_logits=logits)
    np.testing.assert_allclose(small.metrics["adv_std"], large.metrics["adv_std"], rtol=1e-4)
    assert not np.allclose(small.critic, large.critic)


def test_critic_loss_has_both_terms_with_weight_one():
    ones = jnp.ones((4, 1))
    logits = jax.random.normal(jax.random.key(0), (4, 1, 21))
    whole = behaviour(CONFIG, ones, ones, ones, value_logits=logits, slow_values=3.0 * ones)
    plain = change(CONFIG, critic=dict(regularizer=0.0))
    main = behaviour(plain, ones, ones, ones, value_logits=logits, slow_values=3.0 * ones)
    weights = returns.discount_weights(ones, GAMMA)[:-1]
    added = weights * nets.two_hot_loss(NET, logits[:-1], 3.0 * ones[:-1])
    np.testing.assert_allclose(whole.critic - main.critic, added, rtol=1e-5)


def test_extreme_values_leave_losses_finite():
    logits = jnp.full((4, 1, 21), -100.0).at[..., -1].set(100.0)
    values = nets.two_hot_mean(NET, logits)
    assert values[0, 0] > 4.8e8
    got = behaviour(CONFIG, values, jnp.ones((4, 1)), values, value_logits=logits)
    assert np.all(np.isfinite(got.critic)) and np.all(np.isfinite(got.actor))


def test_reinforce_scores_the_unclipped_sample_and_sums_entropy_over_dimensions():
    net = dataclasses.replace(NET, action_dim=3, factors=())
    out = jnp.concatenate([jnp.full((1, 3), 2.0), jnp.full((1, 3), 3.0)], axis=-1)
    action = policy.sample(net, out, jnp.full((1, 3), 2.5))
    assert np.all(action > 1.0)
    inside = policy.log_prob(net, out, jnp.ones((1, 3)))
    assert policy.log_prob(net, out, action)[0] < inside[0]
    one = policy.entropy(dataclasses.replace(net, action_dim=1), out[:, ::3])
    np.testing.assert_allclose(policy.entropy(net, out), 3.0 * one, rtol=1e-6)


# Whole steps


def test_heads_start_at_exactly_zero():
    state = program(dreamer.init_state, CONFIG)(jax.random.key(0))
    features = jax.random.normal(jax.random.key(1), (5, NET.feature_dim))
    for params in (state.params["critic"], state.params["model"]["reward"], state.slow_critic):
        for space in ("symlog", "raw"):
            net = dataclasses.replace(NET, bins_space=space)
            read = jax.jit(lambda p, x, net=net: nets.two_hot_mean(net, nets.head(p, x)))
            assert not np.any(np.asarray(read(params, features)))


def test_zero_kernels_move_and_a_first_update_has_the_size_of_the_rate():
    solver = optimizers.make("laprop", 1e-3, clip=0.3, eps=1e-20)
    params, grads = {"w": jnp.zeros((3, 3))}, {"w": jnp.full((3, 3), 1e-9)}
    updates, _ = solver.update(grads, solver.init(params), params)
    np.testing.assert_allclose(updates["w"], -1e-3, rtol=1e-3)
    warm = optimizers.make("laprop", 1e-3, clip=0.3, eps=1e-20, warmup=10)
    updates, _ = warm.update(grads, warm.init(params), params)
    assert not np.any(np.asarray(updates["w"]))


def test_step_is_deterministic_finite_and_moves_every_group(step):
    state, data = trained(CONFIG), rows(jax.random.key(1))
    a, b = (step(state, data, jax.random.key(2)) for _ in range(2))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    grads = jax.device_get(a.grads)
    for name in ("model", "actor", "critic"):
        assert np.all([np.all(np.isfinite(g)) for g in jax.tree.leaves(grads[name])])
        assert np.any([np.any(g) for g in jax.tree.leaves(grads[name])])
    step(state, data, jax.random.key(3))
    assert step._cache_size() == 1
    names = (
        "replay_critic_loss value_reg_loss entropy lambda_mean lambda_std lambda_p05 "
        "lambda_p95 ema_offset ema_invscale discount_mean discount_min adv_mean adv_std "
        "target_critic_mean actor_loss critic_loss"
    )
    metrics = a.metrics
    probs = {}
    for name in ("posterior", "prior"):  # summed over latents, a mean over rows; by hand
        logits = np.asarray(getattr(a.output.observed, name), np.float64)
        p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        probs[name] = p = 0.99 * p + 0.01 / NET.classes
        entropy = -(p * np.log(p)).sum((-2, -1)).mean()
        np.testing.assert_allclose(metrics[f"{name}_entropy"], entropy, rtol=1e-4)
    p, q = probs["posterior"], probs["prior"]
    kl = (p * np.log(p / q)).sum((-2, -1))
    np.testing.assert_allclose(metrics["kl"], kl.mean(), rtol=1e-4)
    clipped = (kl < CONFIG.loss.free_nats).mean()
    assert 0.0 < clipped < 1.0 and metrics["kl_clipped"] == pytest.approx(clipped)
    assert set(names.split()) <= set(metrics) and all(np.isfinite(v) for v in metrics.values())
    assert a.terms["replay_value"].shape == (3, 2)


def test_behaviour_leaves_the_world_model_alone():
    """Its losses have no gradient in the world model, through which actions get theirs."""
    net = dataclasses.replace(NET, factors=())
    config = change(dataclasses.replace(CONFIG, model=net), actor=dict(gradient="reparam"))
    state, data = trained(config), rows(jax.random.key(1), config)
    batch, _ = update.make_batch(config, data)
    noise = update.by_trajectory(update.draw_noise(config, jax.random.key(2)))

    def total(params):
        carry = rssm.initial(net, params["model"]["rssm"], (config.loss.batch_size,))
        output = world_model.model_losses(config, params["model"], batch, carry, noise.posterior)
        terms, _ = losses.behaviour_losses(
            config, params, state.slow_critic, output, batch, state.ema, noise
        )
        return update.behaviour_sum(config, terms)

    grads = jax.jit(jax.grad(total))(state.params)
    assert not any(np.any(g) for g in jax.tree.leaves(grads["model"]))
    for name in ("actor", "critic"):
        assert all(np.any(g) for g in jax.tree.leaves(grads[name]))


def test_the_last_action_of_a_sequence_changes_no_loss(step):
    state, data = trained(CONFIG), rows(jax.random.key(1))
    moved = dict(data, action=data["action"].at[-1].add(1.0))
    a, b = (step(state, d, jax.random.key(2)) for d in (data, moved))
    for x, y in zip(jax.tree.leaves(a.grads), jax.tree.leaves(b.grads), strict=True):
        np.testing.assert_array_equal(x, y)
    earlier = dict(data, action=1.0 - data["action"])
    c = step(state, earlier, jax.random.key(2))
    assert np.any(np.asarray(a.output.losses["dynamics"] != c.output.losses["dynamics"])) or np.any(
        np.asarray(a.output.losses["vector"] != c.output.losses["vector"])
    )


def test_first_continue_is_the_replay_rows_own(step):
    state, data = trained(CONFIG), rows(jax.random.key(1))
    data["terminated"] = jnp.ones_like(data["terminated"])
    got = step(state, data, jax.random.key(2))
    assert not np.any(np.asarray(got.terms["policy"])) and not np.any(
        np.asarray(got.terms["value"])
    )


def test_continuous_actors_learn_through_the_model_and_smallest_shapes_work():
    net = dataclasses.replace(NET, factors=())
    config = make_settings(
        net,
        loss=dict(batch_size=1, batch_length=2),
        imagination=dict(horizon=1),
        actor=dict(gradient="reparam", entropy_coef=0.0),
    )
    state = trained(config)
    got = make_step(config)(state, rows(jax.random.key(1), config), jax.random.key(2))
    assert got.terms["policy"].shape == (1, 2) and got.terms["replay_value"].shape == (1, 1)
    assert any(np.any(g) for g in jax.tree.leaves(got.grads["actor"]))


def test_slow_critic_moves_at_its_cadence():
    config = change(CONFIG, critic=dict(target_update_freq=2, tau=0.25))
    critic, slow = {"w": jnp.ones(2)}, {"w": jnp.zeros(2)}
    assert not np.any(np.asarray(update.move_slow_critic(config, critic, slow, jnp.int32(1))["w"]))
    np.testing.assert_allclose(
        update.move_slow_critic(config, critic, slow, jnp.int32(2))["w"], 0.25
    )
    state = dreamer.init_state(config, jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state.slow_critic, state.params["critic"])


# Settings and runs


DISCRETE = EnvSpec("x", (4,), jnp.float32, 2, 10, 1, True)
CONTINUOUS = DISCRETE._replace(discrete=False)


@pytest.mark.parametrize(
    "sections, match",
    [
        (dict(loss=dict(continue_discount=True)), "loss.continue_discount=True.*use 'soft'"),
        (dict(critic=dict(replay_gradient=True)), "replay_gradient=True.*loss.updates='joint'"),
        (dict(critic=dict(replay_loss="none", replay_coef=0.1)), "replay_coef=0.1 has no effect"),
        (dict(critic=dict(gamma=1.0)), "critic.gamma=1.0: choose less"),
        (dict(imagination=dict(horizon=0)), "imagination.horizon=0: give at least 1"),
        (dict(imagination=dict(rows=33)), "imagination.rows=33: choose 0 or"),
        (dict(imagination=dict(rows=1)), "imagination.rows=1: choose 0 or"),
        (dict(replay=dict(fresh=17)), "replay.fresh=17: choose at most loss.batch_size=16"),
        (dict(replay=dict(capacity=100)), "loss.batch_length=32 .* replay.capacity gives 25"),
        (dict(critic=dict(replay_loss="yes")), "critic.replay_loss='yes': choose one of"),
        (dict(model=dict(min_std=2.0)), "model.min_std=2.0 is more than model.max_std=1.0"),
        (dict(model=dict(deter=30)), "model.deter=30: choose a multiple of model.blocks=4"),
        (dict(optimizer=dict(clips=(1.0, 2.0))), "clips=.*give three numbers"),
        (dict(actor=dict(return_percentiles=(95.0, 5.0))), "return_percentiles"),
    ],
)
def test_mistakes_are_refused_by_name(sections, match):
    with pytest.raises(ValueError, match=match):
        from_dict(Settings(), sections)


def test_what_does_not_fit_the_task_is_refused():
    with pytest.raises(ValueError, match="actor.gradient='reparam' needs continuous actions"):
        dreamer.resolve(change(Settings(), actor=dict(gradient="reparam")), DISCRETE)


def test_configurations_say_what_they_promise():
    def resolved(config, spec):
        return dreamer.resolve(from_dict(Settings(), config.get_config().to_dict()), spec)

    ours, theirs = resolved(default, DISCRETE), resolved(official, CONTINUOUS)
    how = (ours.imagination.continues, ours.imagination.first_continue, ours.loss.updates)
    assert how == ("hard", "real", "sequential")
    assert ours.actor.gradient == "reinforce" and ours.critic.replay_loss == "aligned"
    assert resolved(default, CONTINUOUS).actor.gradient == "reparam"
    assert theirs.loss.continue_discount and theirs.replay.context and theirs.critic.replay_gradient
    assert theirs.model.bins_space == "raw" and theirs.optimizer.name == "laprop"
    images = resolved(default, DISCRETE._replace(obs_shape=(10, 10, 4))).model
    assert images.image_shape == (10, 10, 4) and images.image_scale == 1.0
    free = dreamer.resolve(
        change(Settings(), model=dict(size="1m", deter=64, policy_layers=2, bin_max=5.0)), DISCRETE
    ).model
    assert (free.deter, free.hidden, free.policy_layers) == (64, 64, 2)
    np.testing.assert_allclose(nets.value_bins(free)[jnp.array([0, -1])], [-5.0, 5.0])


def test_settings_load_without_jax():
    code = "import sys, mbx.agents.dreamer.settings; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_seed_phase_too_short_for_sequences_is_refused():
    short = default.get_config().to_dict()
    short["train"]["seed_steps"] = 131  # 33 rows in each of four environments are needed
    with pytest.raises(ValueError, match="seed_steps=131 .* need 132"):
        make_schedule(build.read(short).for_task(DISCRETE), DISCRETE)
    short["train"]["seed_steps"] = 132
    assert make_schedule(build.read(short).for_task(DISCRETE), DISCRETE).ratio == Fraction(1, 8)


def tiny_run(**train):
    """configs/dreamerv3.py, stored latents included, small enough to compile in seconds."""
    config = official.get_config()
    config.env.update(name="gymnax:CartPole-v1", num_envs=2)
    config.model.update(size="tiny", num_bins=21)
    config.loss.update(batch_size=2, batch_length=4)
    config.imagination.horizon = 2
    config.replay.capacity = 200
    config.train.update(steps=40, seed_steps=16, log_interval=20, train_ratio=1.0)
    config.eval.update(episodes=2, interval=0)
    config.env.episode_length = 8
    config.checkpoint.interval = 20
    config.train.update(train)
    return config


@pytest.mark.slow
def test_a_resumed_run_equals_the_whole_one(tmp_path):
    whole, half = str(tmp_path / "whole"), str(tmp_path / "half")
    run.train(tiny_run().to_dict(), whole)
    run.train(tiny_run(steps=20).to_dict(), half)
    run.train(tiny_run().to_dict() | {"resume": True}, half)
    states = []
    for workdir in (whole, half):
        parts = prepare(tiny_run().to_dict())
        shape = jax.eval_shape(functools.partial(fresh_state, parts), jax.random.key(0))
        states.append(Checkpointer(workdir).restore(shape)[0])
    assert int(states[0].train.step) > 0
    data = states[0].replay.data
    written = np.any(np.asarray(data["deter"]) != 0.0, axis=-1)
    assert written.sum() > 10  # stored when acting, or written back after an update
    for a, b in zip(*(jax.tree.leaves(s) for s in states), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)
