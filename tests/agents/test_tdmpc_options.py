"""What each option of the TD-MPC agent computes, against NumPy on a model of closed form."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import replay, returns
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import losses as model_loss
from mbx.agents.tdmpc import policies, value_targets
from mbx.agents.tdmpc import reanalyze as again
from mbx.agents.tdmpc import update as updates
from mbx.agents.tdmpc.scoring import score_function
from mbx.agents.tdmpc.types import Noise, PolicyInputs, Scales
from mbx.agents.tdmpc.update import encoder_rate, learning_rates, make_optimizers
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import (
    SPEC,
    A,
    B,
    N,
    T,
    array,
    changed,
    empty_replay,
    ensemble,
    make_batch,
    make_model,
    make_settings,
    make_world,
    policy_loss,
    replaced,
    row,
    std,
    toy_model,
    train_state,
    weighed,
)
from tests.helpers import program

# -------------------------------------------------------------------------------------------------
# Reanalyze


def written(obs):
    """Targets that say which observation they were made for."""
    first = obs[..., 0]
    numbers = jnp.reshape(jnp.arange(N) * 0.01, (*[1] * first.ndim, N))
    values = first[..., None] + numbers
    actions = jnp.broadcast_to(first[..., None, None], (*first.shape, N, A))
    return actions, values


def fake_targets(train, actor, obs, key):
    actions, values = written(obs)
    step = jnp.full(obs.shape[:1], train.step, jnp.int32)
    return replay.Targets(actions, values, step, jnp.ones(obs.shape[:1], bool), None)


def filled(settings, episodes=2, length=6):
    """A replay of two environments whose rows hold their number as observation."""
    spec = replay.TargetSpec(N, A, None, "float32", "float32", False)
    example = agents.example_row(toy_model(settings))
    buffer = replay.init(example, num_envs=2, capacity=2 * episodes * length, target_spec=spec)
    insert = jax.jit(replay.insert)
    stale = replay.Targets(
        jnp.zeros((2, N, A)), jnp.full((2, N), -5.0), jnp.zeros(2, jnp.int32), jnp.ones(2, bool)
    )
    for i in range(episodes * length):
        obs = jnp.stack([jnp.full(3, i / 100.0), jnp.full(3, 0.5 + i / 100.0)])
        place = i % length
        buffer = insert(buffer, row(obs, first=place == 0, last=place == length - 1), stale)
    return buffer


def check_rows(buffer, new, step):
    """Every row planned for holds what was planned for it; returns which those are, `[E, C]`."""
    touched = np.asarray(new.targets.step == step)
    actions, values = written(np.asarray(buffer.data["obs"]))
    stored = np.sort(np.asarray(new.targets.values), axis=-1)
    np.testing.assert_allclose(stored[touched], np.sort(values, axis=-1)[touched], atol=1e-6)
    np.testing.assert_allclose(
        np.asarray(new.targets.actions)[touched], np.asarray(actions)[touched], atol=1e-6
    )
    same = np.asarray(new.targets.values)[~touched]
    np.testing.assert_array_equal(same, np.asarray(buffer.targets.values)[~touched])
    assert not touched[np.asarray(buffer.data["is_last"])].any()
    return touched


TRAIN = train_state(None, 8)


@pytest.mark.parametrize("how", ["stale", "uniform", "sweep"])
def test_a_pass_writes_to_the_rows_it_planned_for(how):
    settings = make_settings(reanalyze=dict(batch_size=6, stale_exponent=float(how == "stale")))
    new = buffer = filled(settings)
    run = jax.jit(functools.partial(again.reanalyze, settings, fake_targets))
    chunks = range(4) if how == "sweep" else [-1]
    for chunk in chunks:
        new, metrics = run(TRAIN, new, jax.random.key(5), jnp.int32(chunk))
        np.testing.assert_allclose(metrics["reanalyze/share"], 5 / 20, rtol=0.5)
        assert float(metrics["reanalyze/age"]) == 8.0
    touched = check_rows(buffer, new, 8)
    assert touched.sum() == 20 if how == "sweep" else 0 < touched.sum() <= 6


@pytest.mark.parametrize("due", [True, False])
def test_the_batch_about_to_be_learned_from_is_planned_for_row_by_row(monkeypatch, due):
    settings = make_settings(reanalyze=dict(current_batch=True, batch_size=6, interval=4))
    buffer, train = filled(settings), TRAIN.replace(step=jnp.int32(8 if due else 9))

    def learn(settings, model, train, sample, key):
        return train, dict(sample=sample)

    monkeypatch.setattr(agents, "learn", learn)
    given = settings, toy_model(settings), fake_targets, replay.sample
    update = jax.jit(functools.partial(agents.update, *given))
    _, new, metrics = update(train, buffer, jax.random.key(1))
    touched, sample = check_rows(buffer, new, int(train.step)), metrics["sample"]
    assert touched.any() == due
    if due:  # the first two windows, as they are inside their episodes
        values = written(np.asarray(sample.rows["obs"]))[1]
        inside = np.concatenate([np.ones((1, B), bool), np.asarray(sample.mask)])
        planned = inside & ~np.asarray(sample.rows["is_last"])
        planned[:, 2:] = False
        fresh = np.sort(np.asarray(sample.targets.values), axis=-1)
        np.testing.assert_allclose(fresh[planned], np.sort(values, axis=-1)[planned], atol=1e-6)
    # It learns from what was written; passes are logged where they are made, and only there.
    read = replay.targets_at(new, sample.index)
    jax.tree.map(np.testing.assert_array_equal, sample.targets, read)
    passed = {name: metrics[f"reanalyze/{name}"] for name in ("age", "value_change", "share")}
    assert all(float(x.count) == due for x in passed.values())
    assert float(passed["age"].total) == (8 if due else 0)


def test_a_pass_compares_rows_that_had_a_value():
    """Of four rows one has no plan, one does not count, one was stored without a value."""

    def targets(step, values, valid):
        actions = jnp.zeros((4, 2, 2))
        return replay.Targets(actions, jnp.array(values), jnp.array(step), jnp.array(valid))

    nan = float("nan")
    values = [[1.0, 5.0], [9.0, 9.0], [nan, nan], [7.0, 7.0]]
    old = targets([1, 2, 3, 4], values, [True, False, True, True])
    new = targets([8] * 4, [[2.0, 3.0], [0.0, 0.0], [4.0, 4.0], [0.0, 0.0]], [True] * 4)
    mask = jnp.array([True, True, True, False])
    found = program(again.pass_metrics)(filled(make_settings()), old, new, mask)
    np.testing.assert_allclose(found["reanalyze/age"], (7 + 5) / 2)
    np.testing.assert_allclose(found["reanalyze/value_change"], 2.0)
    np.testing.assert_allclose(found["reanalyze/share"], 3 / 20, rtol=1e-6)


# -------------------------------------------------------------------------------------------------
# Value targets


def targets_of(settings, model, toy, batch, noise, **state):
    full = train_state(toy.params(), target_value=toy.params()["value"], **state)
    make = program(value_targets.value_targets, settings, model)
    return make(full, batch.obs[..., :2], batch, noise, None)


def test_td_targets_of_ensembles_in_the_model():
    """Two steps of the policy in the model: local bootstraps, the worst head, pessimism."""
    loss = dict(
        value_target="td",
        value_reduction="local",
        td_horizon=2,
        td_rollouts=3,
        td_std_coef=-0.5,
        td_dynamics_reduction="from_std_coef",
    )
    settings, model, toy = ensemble(loss=loss)
    batch, eps = make_batch(obs=jnp.asarray(array(T + 1, B, 3))), array(2, T, B, 3, A)
    noise = Noise(None, None, None, None, rollout_eps=jnp.asarray(eps))
    target, _ = targets_of(settings, model, toy, batch, noise)
    z, heads = np.asarray(batch.obs)[:T, :, None, :2], []
    for gain in toy.gain:
        state, total, alive = z, 0.0, 1.0
        for t in range(2):
            action = toy.act(state, eps[t])
            total = total + 0.9**t * alive * toy.rewards(state, action)
            state = 0.9 * state + gain * action
            alive = alive * toy.alive(state)
        reward = total.mean(0) - 0.5 * std(total)
        heads.append(reward + 0.81 * alive * toy.values(state))
    np.testing.assert_allclose(target.samples, np.min(heads, axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", [0, 1])
def test_targets_may_follow_one_dynamics_head(head):
    settings, model, toy = ensemble(
        loss=dict(value_target="td", td_rollouts=1, td_all_dynamics=False, value_reduction="min")
    )
    batch, eps = make_batch(obs=jnp.asarray(array(T + 1, B, 3))), array(1, T, B, 1, A)
    noise = Noise(
        None, None, None, None, rollout_eps=jnp.asarray(eps), dynamics_head=jnp.int32(head)
    )
    target, _ = targets_of(settings, model, toy, batch, noise)
    z = np.asarray(batch.obs)[:T, :, None, :2]
    action = toy.act(z, eps[0])
    state = toy.step(z, action)[head]
    expected = toy.rewards(z, action).mean(0) + 0.9 * toy.alive(state) * toy.values(state).min(0)
    np.testing.assert_allclose(target.samples[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.parametrize("critic", ["q", "v"])
def test_the_policy_of_targets_and_the_discounts_of_auxiliary_values(critic, ema):
    loss = dict(
        value_target="td", td_rollouts=1, td_ema_policy=ema, aux_gammas=(0.5, 0.8), num_heads=1
    )
    sizes = dict(critic=critic, num_dynamics=1, num_rewards=1, num_values=1)
    settings, model, toy = ensemble(model=sizes, loss=loss)
    terminated = jnp.zeros((T, B)).at[1, 2].set(1.0)
    batch = make_batch(obs=jnp.asarray(array(T + 1, B, 3)), terminated=terminated)
    eps = array(T, B, A)
    noise = Noise(
        jnp.asarray(eps), None, None, None, rollout_eps=jnp.asarray(eps)[None, :, :, None]
    )
    slow = dict(toy.params()["policy"], mean=jnp.asarray(toy.mean + 0.4, jnp.float32))
    target, aux = targets_of(
        settings,
        model,
        toy,
        batch,
        noise,
        target_policy=slow,
        target_aux=dict(w=jnp.asarray(toy.aux_w, jnp.float32)),
    )
    shift, obs = (0.4 if ema else 0.0), np.asarray(batch.obs)[..., :2]
    if critic == "q":
        action, state = toy.act(obs[1:], eps, shift), obs[1:]
        reward, alive = np.asarray(batch.reward), 1.0 - np.asarray(terminated)
        q = [toy.values(state, action, w)[:, :, :] for w in (toy.value_w, toy.aux_w)]
    else:
        action = toy.act(obs[:T], eps, shift)
        reward, state = toy.rewards(obs[:T], action)[0], toy.step(obs[:T], action)[0]
        alive = toy.alive(state)
        q = [toy.values(state, None, w) for w in (toy.value_w, toy.aux_w)]
    np.testing.assert_allclose(
        target.samples[0, ..., 0], reward + 0.9 * alive * q[0][0], rtol=1e-4, atol=1e-5
    )
    gammas = np.array([0.5, 0.8])[:, None, None]
    np.testing.assert_allclose(aux, reward + gammas * alive * q[1], rtol=1e-4, atol=1e-5)


def test_a_learner_that_normalises_sees_what_one_of_normalised_observations_does(monkeypatch):
    """Two updates; the batch's own statistics count in its update, and no optimiser moves them."""

    def learn_model(settings, model, state, batch, z, *rest):
        return state, z[:, None], {}

    def learn_policy(settings, model, state, inputs, noise):
        return state, dict(zs=inputs.zs)

    monkeypatch.setattr(updates, "learn_model", learn_model)
    monkeypatch.setattr(updates, "learn_policy", learn_policy)
    on, off = (make_settings(model=dict(normalize_observations=x)) for x in (True, False))
    model, plain = (make_model(settings) for settings in (on, off))
    state, rows = updates.init_state(on, model, jax.random.key(0)), np.zeros((0, 3))
    step = jax.jit(functools.partial(updates.update_from_batch, on, model))
    noise = updates.draw(on, model, jax.random.key(1))
    for number in range(2):
        obs = array(T + 1, B, 3) * [0.1, 1.0, 5.0] + [0.0, number, 2.0]
        rows = np.concatenate([rows, obs.reshape(-1, 3)])
        state, metrics = step(state, make_batch(obs=jnp.asarray(obs, jnp.float32)), noise)
        known = state.params["statistics"]
        np.testing.assert_allclose(known["mean"], rows.mean(0), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(known["variance"], rows.var(0), rtol=1e-4)
        assert known["count"] == number + 1
        normal = (obs - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-4)
        wanted = plain.encode(state.params, jnp.asarray(normal, jnp.float32))
        np.testing.assert_allclose(metrics["zs"], wanted, rtol=1e-4, atol=1e-5)
    assert "statistics" not in updates._trained(state.params)


def test_every_loss_has_its_coefficient_and_values_rest_where_they_are_not_due():
    coefs = dict(consistency=2.0, encoder_consistency=3.0, reward=5.0, value=7.0, termination=13.0)
    named = {f"{name}_coef": coef for name, coef in coefs.items()}
    settings = make_settings(loss=named | dict(aux_coef=11.0))
    for name, coef in (coefs | dict(aux_value=11.0)).items():
        due = 0.5 if name in ("value", "aux_value") else 1.0
        assert model_loss.total_loss(settings, {name: 10.0}) == 10.0 * coef
        assert model_loss.total_loss(settings, {name: 10.0}, 0.5) == 10.0 * coef * due


def test_target_networks_follow_at_their_rates():
    settings, zero = make_settings(optimizer=dict(tau=0.25, policy_tau=0.5)), jnp.float32(0.0)
    params = dict.fromkeys(("value", "aux_value", "policy"), jnp.float32(8.0))
    state = train_state(params, 3, target_value=zero, target_aux=zero, target_policy=zero)
    new = updates.move_targets(settings, state)
    assert (new.target_value, new.target_aux, new.target_policy, new.step) == (2.0, 2.0, 4.0, 4)


def test_the_weight_of_a_windows_steps():
    weight = make_settings(loss=dict(final_rho=0.343, horizon=3)).loss.time_weight
    assert weight == pytest.approx(0.7)
    assert make_settings(loss=dict(rho=0.7, horizon=3)).loss.time_weight == 0.7


# -------------------------------------------------------------------------------------------------
# Policy losses


def fixed_unit(value):
    """Scales of the policy losses; with tau = 0 the unit of values stays `value`."""
    one = returns.init_running_scale()
    unit = returns.RunningScale(jnp.float32(value))
    return Scales(unit, one, one, returns.init_return_ema())


@pytest.mark.parametrize(
    ("std_coef", "pick", "entropy_scale", "coef"),
    [(0.7, np.max, "value", 1.0), (-0.7, np.min, "none", 1.0), (0.0, np.mean, "value", 0.25)],
)
@pytest.mark.parametrize("how", ["mean", "min"])
def test_svg_follows_the_ensembles_with_its_own_optimism(std_coef, pick, entropy_scale, coef, how):
    """The entropy bonus is in the unit of values, 2 here, or of the loss."""
    loss = dict(policy_loss="svg", policy_std_coef=std_coef, entropy_coef=0.02, policy_coef=coef)
    loss |= dict(policy_reduction=how)
    settings, model, toy = ensemble(
        loss=loss | dict(entropy_scale=entropy_scale), optimizer=dict(tau=0.0)
    )
    zs, eps = array(T + 1, B, 2), array(T + 1, B, A)
    inputs = PolicyInputs(jnp.asarray(zs), weighed(T + 1, B), jnp.asarray(eps), None)
    params = toy.params()
    ours, _ = program(policy_loss, settings, model)(
        params["policy"], params, None, inputs, fixed_unit(2.0)
    )
    entropy = A * (0.5 * eps**2 + toy.log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
    bonus = 0.02 * entropy / (2.0 if entropy_scale == "value" else 1.0)
    each = -svg_value(toy, zs, eps, std_coef, pick, how=how) / 2.0 - bonus
    expected = coef * np.mean(0.5 ** np.arange(T + 1) * each.mean(1))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


def svg_value(toy, zs, eps, std_coef, pick, shift=0.0, how="mean"):
    action = toy.act(zs, eps, shift)
    rewards, heads = toy.rewards(zs, action), []
    for state in toy.step(zs, action):
        values, factor = toy.values(state), 0.9 * toy.alive(state)
        values = values.min(0)[None] if how == "min" else values
        spread = std(rewards) + factor * std(values)
        heads.append(rewards.mean(0) + factor * values.mean(0) + std_coef * spread)
    return pick(heads, axis=0)


@pytest.mark.parametrize(
    ("policy", "jacobian", "power"),
    [
        ("tanh_mean", 0.0, 1.0),
        ("tanh_mean", 0.0, 0.5),
        ("squashed", 0.0, 2.0),
        ("squashed", 0.4, 0.0),
    ],
)
def test_the_entropy_bonus_grows_with_a_power_of_the_action_dims(policy, jacobian, power):
    """And counts a share of the tanh's Jacobian; of the dims that a task has, where not of all."""
    loss = dict(entropy_action_dim_power=power, jacobian=jacobian)
    settings = make_settings(model=dict(policy=policy), loss=loss)
    model = SimpleNamespace(config=SimpleNamespace(policy=policy, action_dim=3))
    mean, log_std, eps = array(B, 3), -0.5 + array(B, 3), array(B, 3)
    each = -0.5 * eps**2 - log_std - 0.5 * np.log(2 * np.pi)
    each = each - jacobian * np.log(1.0 - np.tanh(mean + np.exp(log_std) * eps) ** 2 + 1e-6)
    entropy = policies.policy_entropy(settings, model, mean, log_std, eps)
    np.testing.assert_allclose(entropy, -(3.0**power) * each.sum(-1), rtol=1e-4)
    if not jacobian:  # of a dim that there is not neither mean nor deviation are predicted
        mask = np.array([1.0, 0.0, 1.0])
        masked = policies.policy_entropy(settings, model, mean, log_std * mask, eps, mask[None])
        each = mask * each - 0.5 * np.log(2 * np.pi) * (1.0 - mask)
        np.testing.assert_allclose(masked, -(2.0**power) * each.sum(-1), rtol=1e-4)


@pytest.mark.parametrize(("entropy_scale", "unit"), [("none", 1.0), ("value", 2.0)])
def test_the_optimist_is_optimistic_and_its_entropy_counts_more(entropy_scale, unit):
    loss = dict(entropy_coef=0.01, entropy_scale=entropy_scale)
    settings, model, toy = ensemble(
        loss=dict(loss, policy_loss="svg", optimist=True), optimizer=dict(tau=0.0)
    )
    zs, eps = array(T + 1, B, 2), array(T + 1, B, A)
    inputs = PolicyInputs(jnp.asarray(zs), weighed(T + 1, B), jnp.asarray(eps), None)
    params = toy.params()
    own = policies.policy_of(settings, model, params, params["policy"], inputs)
    ours, _ = policies.optimist_loss(own, fixed_unit(2.0))
    entropy = A * (0.5 * eps**2 + toy.log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
    each = -svg_value(toy, zs, eps, 1.0, np.max) / 2.0 - 100.0 * 0.01 / unit * entropy
    np.testing.assert_allclose(ours, np.mean(0.5 ** np.arange(T + 1) * each.mean(1)), rtol=1e-4)


@pytest.mark.parametrize(
    ("policy_loss", "value_scale"), [("kl", "running"), ("kl", "return_ema"), ("svg", "return_ema")]
)
def test_the_optimists_unit_of_values_follows_values(policy_loss, value_scale):
    """The policy's where SVG moves the unit, once; else the optimist's."""
    own = dict(policy_loss=policy_loss, value_scale=value_scale, value_target="td")
    settings, model, toy = ensemble(loss=own | dict(optimist=True, entropy_coef=0.0))
    params, zs, eps = toy.params(), array(T + 1, B, 2), array(2, T + 1, B, A)
    params["optimist"] = dict(params["policy"], mean=params["policy"]["mean"] + 0.4)
    _, optimizer = make_optimizers(settings, model.config)
    moments, unit = optimizer.init(params["policy"]), returns.init_running_scale()
    state = train_state(
        params,
        policy_opt_state=moments,
        optimist_opt_state=moments,
        scale=unit,
        kl_scale=unit,
        trust_scale=unit,
        return_ema=returns.ReturnEMA(-1.0, 4.0),
    )
    rows, expert = weighed(T + 1, B), jnp.ones((T + 1, B, 2, A))
    inputs = PolicyInputs(jnp.asarray(zs), rows, jnp.asarray(eps[0]), None, plans=rows)
    noise = Noise(None, None, None, None, optimist_eps=jnp.asarray(eps[1]))
    learn = functools.partial(updates.learn_policy, settings, model)
    new, metrics = jax.jit(learn)(state, inputs._replace(expert=expert), noise)
    optimists = svg_value(toy, zs, eps[1], 1.0, np.max, 0.4)
    moving = svg_value(toy, zs, eps[0], 0.0, np.mean) if policy_loss == "svg" else optimists
    low, high = np.percentile(moving[0], [5.0, 95.0])
    if value_scale == "running":
        unit = 1.0 + 0.01 * (max(high - low, 1.0) - 1.0)
        np.testing.assert_allclose(new.scale.value, unit, rtol=1e-4)
        assert unit > 1.0
    else:
        unit = (0.99 * 4.0 + 0.01 * high) - (0.99 * -1.0 + 0.01 * low)
        np.testing.assert_allclose(new.return_ema.high - new.return_ema.low, unit, rtol=1e-4)
    expected = np.mean(0.5 ** np.arange(T + 1) * -optimists.mean(axis=1) / unit)
    np.testing.assert_allclose(metrics["loss/optimist"], expected, rtol=1e-3)
    assert changed(params["optimist"], new.params["optimist"])


def test_a_mixture_of_losses_has_one_entropy_bonus():
    settings, model, toy = ensemble(optimizer=dict(tau=0.0))
    draws, shapes = np.random.default_rng(0), ((T + 1, B, 2), (T + 1, B, A), (T, B, A))
    z, noise, behaviour = (jnp.asarray(draws.normal(size=x), jnp.float32) for x in shapes)
    inputs = PolicyInputs(z, weighed(T + 1, B), noise, None, behaviour=behaviour)
    params = toy.params()

    def loss(terms, entropy_coef=0.02):
        own = replaced(settings, loss=dict(policy_loss=terms, entropy_coef=entropy_coef))
        given = params["policy"], params, None, inputs, fixed_unit(2.0)
        return float(policy_loss(own, model, *given)[0])

    assert abs(loss("svg:2") - loss("svg:2", 0.0)) > 1e-3
    assert loss("svg:2+bc:0.5") == pytest.approx(loss("svg:2") + loss("bc:0.5", 0.0), rel=1e-5)


def test_the_trust_region_holds_the_policy_back():
    settings, model, toy = ensemble(
        loss=dict(policy_loss="svg", trust_region_coef=3.0, policy_coef=0.5),
        optimizer=dict(tau=0.0),
    )
    inputs = PolicyInputs(
        jnp.asarray(array(T + 1, B, 2)), weighed(T + 1, B), jnp.zeros((T + 1, B, A)), None
    )
    params = toy.params()
    ema = dict(params["policy"], log_std=params["policy"]["log_std"] + 0.3)

    def loss(settings):
        return policy_loss(settings, model, params["policy"], params, ema, inputs, fixed_unit(1.0))

    (held, (_, metrics)), free = (
        loss(settings),
        loss(replaced(settings, loss=dict(trust_region_coef=0.0)))[0],
    )
    # KL of N(m, s e^0.3) from N(m, s), two dimensions; time weights average to their mean.
    kl = 2 * (0.5 * (np.exp(0.6) - 1.0) - 0.3)
    np.testing.assert_allclose(metrics["trust"], kl, rtol=1e-4)
    np.testing.assert_allclose(
        held - free, 0.5 * 3.0 * kl * np.mean(0.5 ** np.arange(T + 1)), rtol=1e-3
    )


# -------------------------------------------------------------------------------------------------
# Optimisers


def steps_of(settings, num=1):
    """First updates of model and policy under a constant gradient of 1, by component."""
    world = make_world(settings)
    model, policy = make_optimizers(settings, world)
    one = jnp.full((3,), 2.0)
    params = {name: dict(w=one) for name in ("encoder", "termination", "task")}
    heads = ("dynamics", "reward", "value", "aux_value")
    params |= {name: dict(main=dict(w=one), prior=dict(w=one)) for name in heads}
    grads = jax.tree.map(jnp.ones_like, params)
    state, found = model.init(params), []
    update = jax.jit(model.update)
    for _ in range(num):
        updates, state = update(grads, state, params)
        found.append(jax.tree.map(lambda x: float(x[0]), updates))
    updates, _ = policy.update(dict(w=one), policy.init(dict(w=one)), dict(w=one))
    return found, float(updates["w"][0])


LR = 1e-3


@pytest.mark.parametrize("scaled", [False, True])
def test_every_component_has_its_learning_rate(scaled):
    """Adam's first step is the rate, whatever the gradient."""
    settings = make_settings(
        model=dict(num_dynamics=2, num_rewards=3, num_values=4),
        loss=dict(aux_gammas=(0.5, 0.8)),
        optimizer=dict(
            learning_rate=LR, encoder_lr_scale=0.3, policy_lr_scale=2.0, ensemble_lr_scaling=scaled
        ),
    )
    (updates,), policy = steps_of(settings)
    factors = dict(dynamics=2.0, reward=3.0, value=4 / 5, aux_value=2 / 5)
    for name, factor in factors.items():
        rate = LR * (factor if scaled else 1.0)
        np.testing.assert_allclose(updates[name]["main"]["w"], -rate, rtol=1e-3, err_msg=name)
        assert updates[name]["prior"]["w"] == 0.0
    np.testing.assert_allclose(updates["encoder"]["w"], -0.3 * LR, rtol=1e-3)
    np.testing.assert_allclose(updates["termination"]["w"], -LR, rtol=1e-3)
    np.testing.assert_allclose(policy, -2.0 * LR, rtol=1e-3)


def test_weight_decay_pulls_all_but_priors_to_zero():
    settings = make_settings(
        optimizer=dict(learning_rate=LR, policy_lr_scale=1.0, weight_decay=0.1)
    )
    (updates,), policy = steps_of(settings)
    np.testing.assert_allclose(updates["reward"]["main"]["w"], -LR * (1 + 0.1 * 2.0), rtol=1e-3)
    np.testing.assert_allclose(updates["encoder"]["w"], -0.3 * LR * 1.2, rtol=1e-3)
    np.testing.assert_allclose(policy, -LR * 1.2, rtol=1e-3)
    assert updates["reward"]["prior"]["w"] == 0.0


def test_the_encoders_rate_steps_at_its_share_of_the_run():
    settings = make_settings(
        train=dict(steps=8, seed_steps=0, pretrain_updates=0, utd_ratio=0.5),
        optimizer=dict(learning_rate=LR, encoder_lr_step_at=0.5, encoder_lr_step_scale=0.1),
    )
    assert settings.total_updates() == 4
    found, _ = steps_of(settings, num=4)
    rates = [-x["encoder"]["w"] / (0.3 * LR) for x in found]
    np.testing.assert_allclose(rates, [1.0, 1.0, 0.1, 0.1], rtol=1e-2)
    np.testing.assert_allclose([-x["termination"]["w"] / LR for x in found], 1.0, rtol=1e-2)
    constant = replaced(settings, optimizer=dict(encoder_lr_step_at=1.0))
    assert encoder_rate(constant) == pytest.approx(0.3 * LR)
    assert learning_rates(settings, make_world(settings)) == {"model": LR}


@pytest.mark.parametrize("last", [1e-4, 4e-3, LR])
def test_the_models_rates_move_on_a_line_and_stay(last):
    """Adam's first step is the rate; what is left of it goes by the updates that were made."""
    falls = dict(lr_decay_start=2, lr_decay_updates=8)
    settings = make_settings(optimizer=dict(learning_rate=LR, final_learning_rate=last, **falls))
    model = toy_model(settings)
    params = {name: dict(w=jnp.zeros((3,))) for name in ("encoder", "reward", "policy")}
    optimizer, _ = make_optimizers(settings, model.config)
    trained = {name: params[name] for name in ("encoder", "reward")}
    grads = jax.tree.map(jnp.ones_like, trained)
    state = train_state(params, opt_state=optimizer.init(trained))
    move = jax.jit(lambda state: updates.step_model(settings, model, state, grads).params)
    for step, share in [(0, 0), (2, 0), (4, 0.25), (8, 0.75), (10, 1), (11, 1), (10**6, 1)]:
        new = move(state.replace(step=jnp.int32(step)))
        rate = (1.0 - share) * LR + share * last
        np.testing.assert_allclose(-new["reward"]["w"], rate, rtol=1e-3)
        np.testing.assert_allclose(-new["encoder"]["w"], 0.3 * rate, rtol=1e-3)
        assert (new["policy"]["w"] == 0.0).all()


def test_gradients_are_clipped_by_their_common_norm():
    settings = make_settings(optimizer=dict(grad_clip_norm=0.5))
    model, _ = make_optimizers(settings, make_world(settings))
    grads = dict(encoder=dict(w=jnp.full((4,), 3.0)), reward=dict(w=jnp.full((4,), 4.0)))
    _, state = model.update(grads, model.init(grads), grads)
    moments = optax.tree.get(state, "mu")
    clipped = jax.tree.map(lambda x: x / 0.1, moments)
    np.testing.assert_allclose(optax.tree.norm(clipped), 0.5, rtol=1e-5)
    assert SPEC.action_dim == A


@pytest.mark.parametrize("dims", [6, 4])
def test_the_logged_entropy_and_std_are_those_by_hand(dims):
    """Of a Gaussian in six dims, or of a task that has four of them, whatever power of A the bonus
    is multiplied by."""
    settings = make_settings(loss=dict(policy_loss="bc", entropy_action_dim_power=2.0))
    model = make_world_model(dataclasses.replace(make_world(settings), action_dim=6))
    mask, shape = jnp.arange(6) < dims, (T + 1, 500)
    gaussian = jnp.zeros((*shape, 6)), jnp.log(0.5) * jnp.broadcast_to(mask, (*shape, 6))
    model = model._replace(policy=lambda params, z: jax.tree.map(lambda x: x[: len(z)], gaussian))
    if dims < 6:
        model = model._replace(action_mask=lambda z: jnp.broadcast_to(mask * 1.0, (len(z), 500, 6)))
    eps = np.random.default_rng(0).normal(size=(*shape, 6))
    eps /= np.sqrt((eps**2).mean(axis=(0, 1)))
    inputs = PolicyInputs(
        jnp.zeros((*shape, 8)),
        weighed(*shape),
        jnp.asarray(eps),
        None,
        behaviour=jnp.zeros((T, 500, 6)),
    )
    scales = fixed_unit(1.0)
    _, (_, metrics) = policy_loss(settings, model, {}, {}, None, inputs, scales)
    nats = dims * (0.5 * np.log(2 * np.pi * np.e) + np.log(0.5))
    np.testing.assert_allclose(np.mean(metrics["entropy"]), nats, rtol=1e-4)
    np.testing.assert_allclose(np.mean(metrics["std"]), 0.5, rtol=1e-5)


def test_a_custom_reduction_over_value_heads_is_that_of_targets_plans_and_svg():
    settings, model, toy = ensemble(model=dict(num_dynamics=1, num_rewards=1, episodic="False"))
    model, params = model._replace(reduce_values=lambda values: values.min(0)), toy.params()
    z, action = array(B, 2), array(B, N, A).clip(-1.0, 1.0)
    after = toy.step(z[:, None], action)[0]
    wanted = toy.rewards(z[:, None], action)[0] + 0.9 * toy.values(after).min(0)
    assert not np.allclose(toy.values(after).min(0), toy.values(after).mean(0))
    silent = Noise(None, None, None, None)
    x = value_targets.Inputs(settings, model, params, params["value"], None, None, silent)
    found = value_targets.v_targets(x, jnp.asarray(z), jnp.asarray(action))
    np.testing.assert_allclose(found[0], wanted, rtol=1e-4, atol=1e-5)
    plan = score_function(settings, model, params, jnp.asarray(z), settings.planner)
    found = plan(jax.random.key(0), jnp.asarray(action)[:, :, None])
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
    own = policies.policy_value(
        settings, model, params, jnp.asarray(z), jnp.asarray(action[:, 0]), None
    )
    np.testing.assert_allclose(own, wanted[:, 0], rtol=1e-4, atol=1e-5)


def test_a_custom_sampler_chooses_the_windows_that_are_learned_from():
    settings, calls = make_settings(), []

    def newest(state, key, *, batch_size, length):
        calls.append((batch_size, length))
        return replay.sample(state, key, batch_size=batch_size, length=length)

    agent = agents.make_agent(settings, SPEC, sample=newest)
    train = jax.eval_shape(agent.init, jax.random.key(0))
    held = jax.eval_shape(lambda: empty_replay(agent, 2, 40))
    jax.eval_shape(agent.update, train, held, jax.random.key(1))
    assert calls == [(B, T)]


def test_a_half_life_draws_by_age(monkeypatch):
    asked = []
    monkeypatch.setattr(replay, "by_age", lambda life: asked.append(life) or replay.sample)
    for life in (0.0, 50.0):
        agents.make_agent(make_settings(replay=dict(half_life=life)), SPEC)
    assert asked == [50.0]
