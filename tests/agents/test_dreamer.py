"""Dreamer's agent: whole steps, settings, whole runs."""

from __future__ import annotations

import dataclasses
import functools
from fractions import Fraction
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dreamer as default
from configs import dreamerv3 as official
from mbx import returns
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import behaviour as losses
from mbx.agents.dreamer import glossary, rssm, types, update, world_model
from mbx.agents.dreamer import networks as nets
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
        draws = update.by_trajectory(update.draw_noise(config, key))
        return update.step_gradients(config, state, batch, carry, draws)

    return jax.jit(step)


@pytest.fixture(scope="module")
def step():
    return make_step(CONFIG)


def test_extreme_values_leave_losses_finite():
    logits = jnp.full((4, 1, 21), -100.0).at[..., -1].set(100.0)
    values, ones = nets.two_hot_mean(NET, logits), jnp.ones((4, 1))
    assert values[0, 0] > 4.8e8
    imagined = types.Imagined(None, jax.nn.one_hot(jnp.zeros((4, 1), int), 2), values, ones)
    found = program(losses.imagined_losses, CONFIG)(
        imagined, jnp.zeros((4, 1, 2)), values, logits, ones, returns.init_return_ema()
    )
    assert all(np.isfinite(x).all() for x in found.losses.values())


# Whole steps


def test_step_is_deterministic_finite_and_moves_every_group(step):
    state, data = trained(CONFIG), rows(jax.random.key(1))
    a, b = (step(state, data, jax.random.key(2)) for _ in range(2))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)
    for name in ("model", "actor", "critic"):
        grads = jax.tree.leaves(jax.device_get(a.grads[name]))
        assert all(np.isfinite(g).all() for g in grads) and any(g.any() for g in grads)
    assert step._cache_size() == 1
    metrics, probs = a.metrics, {}
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
    others = {"loss/image", "loss/barlow", "loss/infonce"}  # of images, and without a decoder
    told = {name for name in glossary.KEYS if "*" not in name} - others
    assert set(metrics) == told and all(np.isfinite(v) for v in metrics.values())
    assert a.result.losses["replay_value"].shape == (3, 2)


def test_behaviour_leaves_the_world_model_alone_in_the_smallest_shapes():
    """Its losses have no gradient in the world model, through which actions get theirs."""
    config = make_settings(
        dataclasses.replace(NET, factors=()),
        loss=dict(batch_size=1, batch_length=2),
        imagination=dict(horizon=1),
        actor=dict(gradient="reparam", entropy_coef=0.0),
    )
    state, data = trained(config), rows(jax.random.key(1), config)
    batch, carry = update.make_batch(config, data)
    noise = update.by_trajectory(update.draw_noise(config, jax.random.key(2)))

    def total(params):
        output = world_model.model_losses(config, params["model"], batch, carry, noise.posterior)
        result = losses.behaviour_losses(
            config, params, state.slow_critic, output, batch, state.ema, noise
        )
        return update.total_loss(config, result.losses), result.losses

    grads, found = jax.jit(jax.grad(total, has_aux=True))(state.params)
    assert {name: x.shape for name, x in found.items()} == dict(
        policy=(1, 2), value=(1, 2), replay_value=(1, 1)
    )
    assert not any(np.any(g) for g in jax.tree.leaves(grads["model"]))
    for name in ("actor", "critic"):
        assert all(np.any(g) for g in jax.tree.leaves(grads[name]))


def test_the_last_action_of_a_sequence_changes_no_loss(step):
    state, data = trained(CONFIG), rows(jax.random.key(1))
    moved, earlier = data["action"].at[-1].add(1.0), 1.0 - data["action"]
    a, b, c = (
        step(state, data | {"action": action}, jax.random.key(2))
        for action in (data["action"], moved, earlier)
    )
    for x, y in zip(jax.tree.leaves(a.grads), jax.tree.leaves(b.grads), strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.any(np.asarray(a.output.losses["vector"] != c.output.losses["vector"]))


def test_first_continue_is_the_replay_rows_own(step):
    state, data = trained(CONFIG), rows(jax.random.key(1))
    data["terminated"] = jnp.ones_like(data["terminated"])
    got = step(state, data, jax.random.key(2)).result.losses
    assert not np.any(np.asarray(got["policy"])) and not np.any(np.asarray(got["value"]))


def test_an_update_keeps_what_moved(monkeypatch):
    config = change(CONFIG, critic=dict(target_update_freq=2, tau=0.25))
    moved, grads = {"critic": {"w": jnp.full(2, 8.0)}}, {"critic": {"w": jnp.array([3.0, 4.0])}}
    output = SimpleNamespace(observed=SimpleNamespace(states="states"))
    result = SimpleNamespace(ema="moved", norms=None)
    step = update.Step(grads, moved, "moments", output, result, {"x": 1.0})
    monkeypatch.setattr(update, "step_gradients", lambda *given: step)
    zeros = {"w": jnp.zeros(2)}
    state = types.TrainState({"critic": zeros}, zeros, None, None, jnp.int32(1))
    new, metrics, states, _ = update.update_from_batch(config, state, None, None, None)
    assert (new.params, new.opt_state, new.ema, new.step) == (moved, "moments", "moved", 2)
    np.testing.assert_array_equal(new.slow_critic["w"], [2.0, 2.0])
    assert states == "states" and metrics == {"x": 1.0, "grad_norm/critic": 5.0}


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
        (dict(replay=dict(priority_share=0.6, recency_share=0.6)), "0.6 are more than 1 in sum"),
        (dict(replay=dict(priority_zero=False)), "priority_zero=False has no effect.*_share"),
        (dict(replay=dict(recency_exponent=2.0)), "recency_exponent=2.0 has no effect.*_share"),
        (
            dict(replay=dict(priority_share=1.0, priority_signal="td")),
            "replay.priority_signal='td' needs imagination.rows=0, not 8",
        ),
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
