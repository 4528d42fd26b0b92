"""What each option of the TD-MPC agent computes, against NumPy on a model of closed form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import mppi, replay, returns
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import planning, value_targets
from mbx.agents.tdmpc import policy_loss as policies
from mbx.agents.tdmpc import reanalyze as again
from mbx.agents.tdmpc.types import Noise, PolicyInputs, Scales, TrainState, ValueScales
from mbx.agents.tdmpc.update import encoder_rate, learning_rates, make_optimizers
from mbx.keys import streams
from tests.agents.tdmpc_helpers import (
    SPEC,
    A,
    B,
    N,
    T,
    Toy,
    make_batch,
    make_settings,
    make_world,
    replaced,
    row,
    toy_model,
)

CLOSE = dict(rtol=2e-5, atol=2e-6)
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def ensemble(**sections):
    """Settings of ensembles with their toy model and its NumPy twin."""
    model = dict(num_dynamics=2, num_rewards=3, num_values=3, episodic="True")
    loss = dict(num_heads=3, termination="soft") | sections.pop("loss", {})
    settings = make_settings(model=model | sections.pop("model", {}), loss=loss, **sections)
    return settings, toy_model(settings), Toy(settings)


def std(x):
    return x.std(axis=0, ddof=1)


# -------------------------------------------------------------------------------------------------
# Plans


@pytest.mark.parametrize("name", ["planner", "training_planner"])
@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize(("std_coef", "pick"), [(0.7, np.max), (-0.7, np.min), (0.0, np.mean)])
def test_the_score_of_a_plan(name, aggregate, std_coef, pick):
    own = dict(std_coef=std_coef, aggregate=aggregate, disagreement=0.3, discount=0.95)
    settings, model, toy = ensemble(**{name: own})
    z, actions = array(B, 2), np.clip(array(B, N, 2, A), -1, 1)
    score = planning.score_function(
        settings, model, toy.params(), jnp.asarray(z), getattr(settings, name)
    )
    ours = score(jax.random.key(0), jnp.asarray(actions))
    heads = []
    for gain in toy.gain:
        state, total, variance, factor, each = z[:, None], 0.0, 0.0, 1.0, []
        for t in range(2):
            rewards = toy.rewards(state, actions[:, :, t])
            total = total + factor * rewards.mean(0)
            variance = variance + (factor * std(rewards)) ** 2
            state = 0.9 * state + gain * actions[:, :, t]
            factor = factor * 0.95 * toy.alive(state)
            values = toy.values(state)
            spread = np.sqrt(variance + (factor * std(values)) ** 2)
            each.append(total + factor * values.mean(0) + std_coef * spread)
        heads.append((np.mean(each, axis=0) if aggregate else each[-1], state))
    latents = np.stack([state for _, state in heads]).var(axis=0).mean(axis=-1)
    expected = pick([value for value, _ in heads], axis=0) + 0.3 * latents
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.fixture
def planned(monkeypatch):
    """What `mppi.plan` is asked for, without planning; and the planner that scores."""
    calls = []

    def plan(key, score, mean, std, **rest):
        calls.append(dict(rest, key=key, mean=mean, std=std))
        lead = (mean.shape[0], rest["config"].num_samples)
        chosen, action = jnp.full(mean[:, 0].shape, 0.25), jnp.full(mean[:, 0].shape, 0.75)
        values, actions = jnp.zeros(lead), jnp.zeros((*lead, *mean.shape[1:]))
        return mppi.Plan(action, mean + 0.5, std, actions, values, chosen)

    def score_function(settings, model, params, z, planner):
        calls.append(dict(planner=planner))

    monkeypatch.setattr(planning.mppi, "plan", plan)
    monkeypatch.setattr(planning, "score_function", score_function)

    def gathered():
        return functools.reduce(dict.__or__, calls)

    return gathered


def test_evaluations_have_their_own_optimism_and_choice(planned):
    own = dict(
        std_coef=1.0,
        evaluation_std_coef=-2.0,
        selection="best",
        evaluation_selection="mean",
        action_noise=0.7,
        num_proposals=0,
    )
    settings, model, toy = ensemble(planner=own)
    args = (
        settings,
        model,
        toy.params(),
        jnp.ones((B, 2)),
        jnp.zeros((B, 3, A)),
        jax.random.key(0),
    )
    planning.plan_to_act(*args)
    call = planned()
    assert call["planner"].std_coef == 1.0
    assert (call["config"].selection, call["config"].action_noise) == ("best", 0.7)
    planning.plan_to_act(*args, evaluate=True)
    call = planned()
    assert call["planner"].std_coef == -2.0
    assert (call["config"].selection, call["config"].action_noise) == ("mean", 0.0)


def test_the_training_planner_scores_by_its_own_settings(planned):
    settings, model, toy = ensemble(
        training_planner=dict(std_coef=-0.5, aggregate=True, disagreement=-0.1, discount=0.8)
    )
    planning.plan_targets(settings, model, toy.params(), jnp.ones((B, 2)), jax.random.key(0))
    assert planned()["planner"] == settings.training_planner


def rolled(toy, z, eps, shift=0.0):
    """Actions of the policy along the first head's latents: `[B, P, T, A]`."""
    state, actions = z[:, None], []
    for noise in eps:
        actions.append(toy.act(state, noise, shift))
        state = 0.9 * state + toy.gain[0] * actions[-1]
    return np.stack(actions, axis=2)


def test_proposals_are_the_policys_trajectories_and_noise_on_them(planned):
    settings, model, toy = ensemble(planner=dict(num_proposals=4, proposal_noise=0.3))
    z, key = array(B, 2), jax.random.key(3)
    mean = jnp.asarray(array(B, 3, A))
    planning.plan_to_act(settings, model, toy.params(), jnp.asarray(z), mean, key)
    keys = streams(key, "proposals", "proposal_noise", "plan")
    proposals = rolled(toy, z, np.asarray(jax.random.normal(keys["proposals"], (3, B, 4, A))))
    noise = np.asarray(jax.random.normal(keys["proposal_noise"], proposals.shape))
    call = planned()
    np.testing.assert_allclose(
        call["proposals"], np.clip(proposals + 0.3 * noise, -1.0, 1.0), **CLOSE
    )
    np.testing.assert_array_equal(call["mean"], mean)
    np.testing.assert_array_equal(call["std"], np.full(mean.shape, settings.planner.max_std))


@pytest.mark.parametrize("search", ["policy", "acting"])
def test_half_of_the_training_planners_samples_of_policies_are_the_optimists(planned, search):
    own = dict(search=search, num_samples=6, num_proposals=4, horizon=2)
    settings, model, toy = ensemble(training_planner=own)
    z, key = array(B, 2), jax.random.key(3)
    params = toy.params()
    params["optimist"] = dict(params["policy"], mean=params["policy"]["mean"] + 0.4)
    planning.plan_targets(settings, model, params, jnp.asarray(z), key)
    num = 6 if search == "policy" else 4
    eps = np.asarray(jax.random.normal(streams(key, "policy", "plan")["policy"], (2, B, num, A)))
    half = num // 2
    expected = [rolled(toy, z, eps[:, :, :half]), rolled(toy, z, eps[:, :, half:], shift=0.4)]
    name = "initial" if search == "policy" else "proposals"
    np.testing.assert_allclose(planned()[name], np.concatenate(expected, axis=1), **CLOSE)


def test_an_acting_search_starts_as_the_acting_planner_without_warm_start(planned):
    own = dict(search="acting", horizon=2, num_samples=12, num_proposals=3, max_std=1.5)
    more = dict(extra_iterations=4, extra_iterations_action_dim=2, proposal_log_std=(-1.0, 0.5))
    settings, model, toy = ensemble(training_planner=own | more)
    z, key = array(B, 2), jax.random.key(4)
    planning.plan_targets(settings, model, toy.params(), jnp.asarray(z), key)
    call = planned()
    np.testing.assert_array_equal(call["mean"], np.zeros((B, 2, A)))
    np.testing.assert_array_equal(call["std"], np.full((B, 2, A), 1.5))
    assert "initial" not in call and call["config"].action_noise == 0.0
    assert call["config"].rounds(2) == 2 + 4 and call["config"].rounds(1) == 2
    # Wider policies: the model's bounds are -10 and 2.
    toy.log_std = -1.0 + 1.5 * (toy.log_std + 10.0) / 12.0
    eps = jax.random.normal(streams(key, "policy", "plan")["policy"], (2, B, 3, A))
    np.testing.assert_allclose(call["proposals"], rolled(toy, z, np.asarray(eps)), **CLOSE)


def test_a_policy_search_starts_with_its_samples(planned):
    settings, model, toy = ensemble(training_planner=dict(horizon=2, num_samples=6))
    z, key = array(B, 2), jax.random.key(4)
    planning.plan_targets(settings, model, toy.params(), jnp.asarray(z), key)
    call, mean = planned(), np.tanh(0.1 * z + toy.mean)
    eps = jax.random.normal(streams(key, "policy", "plan")["policy"], (2, B, 6, A))
    np.testing.assert_allclose(call["initial"], rolled(toy, z, np.asarray(eps)), **CLOSE)
    assert "proposals" not in call
    np.testing.assert_allclose(call["mean"], np.stack([mean, mean], axis=1), **CLOSE)
    np.testing.assert_allclose(
        call["std"], np.broadcast_to(np.exp(toy.log_std), (B, 2, A)), **CLOSE
    )


def test_early_plans_start_from_a_share_of_the_policys_gaussian(planned):
    settings, model, toy = ensemble(
        planner=dict(num_proposals=0, prior_start=2, prior_updates=4, horizon=2)
    )
    z, before = array(B, 2), array(B, 2, A)
    train = TrainState(toy.params(), *[None] * 10, jnp.int32(3))
    act = agents.make_act(settings, model)
    act(train, jnp.asarray(before), jnp.asarray(z), jnp.zeros(B, bool), jax.random.key(0), False)
    first = np.tanh(0.1 * z + toy.mean)
    second = np.tanh(0.1 * (0.9 * z + toy.gain[0] * first) + toy.mean)
    start = np.stack([before[:, 1], np.zeros((B, A))], axis=1)  # warm start, shifted
    share = 1.0 - (3 - 2) / 4
    expected = share * np.stack([first, second], axis=1) + (1.0 - share) * start
    call = planned()
    np.testing.assert_allclose(call["mean"], expected, **CLOSE)
    spread = share * np.exp(toy.log_std) + (1.0 - share) * settings.planner.max_std
    np.testing.assert_allclose(call["std"], np.broadcast_to(spread, (B, 2, A)), **CLOSE)


@pytest.mark.parametrize(("how", "mean"), [("chosen", 0.25), ("final", 0.5)])
def test_an_expert_is_the_planners_choice_or_its_final_mean(planned, how, mean):
    own = dict(search="acting", max_std=1.5, num_proposals=0)
    settings, model, toy = ensemble(
        training_planner=own, loss=dict(policy_loss="kl", expert_mean=how)
    )
    make = agents.make_targets(settings, model)
    train = TrainState(toy.params(), *[None] * 10, jnp.int32(3))
    made = make(train, None, jnp.ones((B, 2)), jax.random.key(0))
    np.testing.assert_allclose(made.expert[:, 0], np.full((B, A), mean))  # a plan's mean is 0.5
    np.testing.assert_allclose(made.expert[:, 1], np.full((B, A), 1.5))
    assert (made.step == 3).all()


def test_without_stored_plans_samples_of_the_policy_are_scored_in_every_update():
    settings, model, toy = ensemble(training_planner=dict(enabled=False, num_samples=N))
    train = TrainState(toy.params(), *[None] * 10, jnp.int32(0))
    batch, key = make_batch(obs=jnp.asarray(array(T + 1, B, 3))), jax.random.key(2)
    new = agents.plan_batch(settings, model, train, batch, key)
    z = np.asarray(batch.obs)[..., :2].reshape(-1, 2)
    eps = jax.random.normal(streams(key, "policy", "plan")["policy"], (1, len(z), N, A))
    actions = rolled(toy, z, np.asarray(eps))[:, :, 0]
    np.testing.assert_allclose(new.plan_actions, actions.reshape(T + 1, B, N, A), **CLOSE)
    reward = toy.rewards(z[:, None], actions).mean(0)
    steps = toy.step(z[:, None], actions)
    after = [toy.alive(state) * toy.values(state).mean(0) for state in steps]
    expected = reward + 0.9 * np.mean(after, axis=0)
    np.testing.assert_allclose(new.plan_values, expected.reshape(T + 1, B, N), rtol=1e-4, atol=1e-5)
    assert new.plan_valid.all()


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


TRAIN = TrainState(*[None] * 11, jnp.int32(8))


@pytest.mark.parametrize("how", ["stale", "uniform", "slices", "sweep"])
def test_a_pass_writes_to_the_rows_it_planned_for(how):
    own = dict(batch_size=6, stale_exponent=1.0 if how == "stale" else 0.0, slices=how == "slices")
    settings = make_settings(reanalyze=own)
    buffer = filled(settings)
    chunk = jnp.int32(1 if how == "sweep" else -1)
    run = jax.jit(again.make_reanalyze(settings, fake_targets))
    new, metrics = run(TRAIN, buffer, jax.random.key(5), chunk)
    touched = check_rows(buffer, new, 8)
    assert touched.any() and float(metrics["reanalyze/age"]) == 8.0
    np.testing.assert_allclose(metrics["reanalyze/share"] * 20, touched.sum(), rtol=0.5)
    if how == "slices":  # two windows of three rows, the episodes' ends left out
        for line, first in zip(touched, (0.0, 0.5), strict=True):
            rows = np.flatnonzero(line)
            runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1) if rows.size else []
            assert all(len(one) >= 2 or (one[0] + 1) % 6 == 5 for one in runs), (first, rows)
        assert touched.sum() >= 3


@pytest.mark.parametrize("due", [True, False])
def test_the_batch_about_to_be_learned_from_is_planned_for_row_by_row(due):
    settings = make_settings(reanalyze=dict(current_batch=True, batch_size=6, interval=4))
    buffer = filled(settings)
    train = TRAIN.replace(step=jnp.int32(8 if due else 9))

    @jax.jit
    def run(train, buffer):
        sample = replay.sample(buffer, jax.random.key(1), batch_size=B, length=T)
        return sample, again.reanalyze_batch(
            settings, fake_targets, train, buffer, sample, jax.random.key(2)
        )

    before, (new, after, _) = run(train, buffer)
    touched = check_rows(buffer, new, int(train.step))
    assert touched.any() == due
    if due:  # the first two windows, as they are inside their episodes
        values = written(np.asarray(before.rows["obs"]))[1]
        inside = np.concatenate([np.ones((1, B), bool), np.asarray(before.mask)])
        planned = inside & ~np.asarray(before.rows["is_last"])
        planned[:, 2:] = False
        fresh = np.sort(np.asarray(after.targets.values), axis=-1)
        np.testing.assert_allclose(fresh[planned], np.sort(values, axis=-1)[planned], atol=1e-6)


# -------------------------------------------------------------------------------------------------
# Value targets


def targets_of(settings, model, toy, batch, noise, **state):
    own = dict(params=toy.params(), target_value=toy.params()["value"]) | state
    full = TrainState(**{name: own.get(name) for name in TrainState.__dataclass_fields__})
    return value_targets.value_targets(
        settings, model, full, batch.obs[..., :2], batch, noise, None
    )


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
    return Scales(ValueScales(unit, returns.init_return_ema()), one, one)


@pytest.mark.parametrize(("std_coef", "pick"), [(0.7, np.max), (-0.7, np.min), (0.0, np.mean)])
def test_svg_follows_the_ensembles_with_its_own_optimism(std_coef, pick):
    loss = dict(policy_loss="svg", policy_std_coef=std_coef, entropy_coef=0.02)
    settings, model, toy = ensemble(loss=loss, optimizer=dict(tau=0.0))
    zs, eps = array(T + 1, B, 2), array(T + 1, B, A)
    inputs = PolicyInputs(jnp.asarray(zs), jnp.ones((T + 1, B)), jnp.asarray(eps), None)
    params = toy.params()
    ours, _ = policies.policy_loss(
        settings, model, params["policy"], params, None, inputs, fixed_unit(2.0)
    )
    entropy = A * (0.5 * eps**2 + toy.log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
    each = -svg_value(toy, zs, eps, std_coef, pick) / 2.0 - 0.02 * entropy
    expected = np.mean(0.5 ** np.arange(T + 1) * each.mean(1))
    np.testing.assert_allclose(ours, expected, rtol=1e-4)


def svg_value(toy, zs, eps, std_coef, pick, shift=0.0):
    action = toy.act(zs, eps, shift)
    rewards, heads = toy.rewards(zs, action), []
    for state in toy.step(zs, action):
        values, factor = toy.values(state), 0.9 * toy.alive(state)
        spread = std(rewards) + factor * std(values)
        heads.append(rewards.mean(0) + factor * values.mean(0) + std_coef * spread)
    return pick(heads, axis=0)


def test_means_are_over_the_actions_that_a_task_has():
    x, mask = np.array([[1.0, 2.0, 6.0], [4.0, 5.0, 6.0]]), np.array([[1.0, 1.0, 0.0], [0, 0, 1]])
    np.testing.assert_allclose(policies.mean_over_actions(jnp.asarray(x)), [3.0, 5.0])
    masked = policies.mean_over_actions(jnp.asarray(x), jnp.asarray(mask))
    np.testing.assert_allclose(masked, [1.5, 6.0])
    wanted = jnp.asarray(x + np.array([1.0, 2.0, 3.0]))
    cloned = policies.cloning(jnp.asarray(x), wanted, jnp.asarray(mask))
    np.testing.assert_allclose(cloned, [2.5, 9.0], rtol=1e-6)


def test_the_optimist_is_optimistic_and_its_entropy_counts_more():
    loss = dict(optimist_std_coef=0.6, optimist_entropy_scale=50.0, entropy_coef=0.01)
    settings, model, toy = ensemble(
        loss=dict(loss, policy_loss="svg", optimist=True), optimizer=dict(tau=0.0)
    )
    zs, eps = array(T + 1, B, 2), array(T + 1, B, A)
    inputs = PolicyInputs(jnp.asarray(zs), jnp.ones((T + 1, B)), jnp.asarray(eps), None)
    params = toy.params()
    ours, _ = policies.optimist_loss(
        settings, model, params["policy"], params, inputs, fixed_unit(2.0).value
    )
    entropy = A * (0.5 * eps**2 + toy.log_std + 0.5 * np.log(2 * np.pi)).sum(-1)
    each = -svg_value(toy, zs, eps, 0.6, np.max) / 2.0 - 50.0 * 0.01 * entropy
    np.testing.assert_allclose(ours, np.mean(0.5 ** np.arange(T + 1) * each.mean(1)), rtol=1e-4)


def test_the_trust_region_holds_the_policy_back():
    settings, model, toy = ensemble(
        loss=dict(policy_loss="svg", trust_region_coef=3.0), optimizer=dict(tau=0.0)
    )
    inputs = PolicyInputs(
        jnp.asarray(array(T + 1, B, 2)), jnp.ones((T + 1, B)), jnp.zeros((T + 1, B, A)), None
    )
    params = toy.params()
    ema = dict(params["policy"], log_std=params["policy"]["log_std"] + 0.3)

    def loss(settings):
        return policies.policy_loss(
            settings, model, params["policy"], params, ema, inputs, fixed_unit(1.0)
        )

    (held, (_, metrics)), free = (
        loss(settings),
        loss(replaced(settings, loss=dict(trust_region_coef=0.0)))[0],
    )
    # KL of N(m, s e^0.3) from N(m, s), two dimensions; time weights average to their mean.
    kl = 2 * (0.5 * (np.exp(0.6) - 1.0) - 0.3)
    kl = kl * np.mean(0.5 ** np.arange(T + 1))
    np.testing.assert_allclose(metrics["trust"], kl, rtol=1e-4)
    np.testing.assert_allclose(held - free, 3.0 * kl, rtol=1e-3)


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
    settings = make_settings(optimizer=dict(learning_rate=LR, weight_decay=0.1))
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


def test_gradients_are_clipped_by_their_common_norm():
    settings = make_settings(optimizer=dict(grad_clip_norm=0.5))
    model, _ = make_optimizers(settings, make_world(settings))
    grads = dict(encoder=dict(w=jnp.full((4,), 3.0)), reward=dict(w=jnp.full((4,), 4.0)))
    _, state = model.update(grads, model.init(grads), grads)
    moments = optax.tree.get(state, "mu")
    clipped = jax.tree.map(lambda x: x / 0.1, moments)
    np.testing.assert_allclose(optax.tree.norm(clipped), 0.5, rtol=1e-5)
    assert SPEC.action_dim == A
