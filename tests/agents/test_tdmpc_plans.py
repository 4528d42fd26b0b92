"""What the options of TD-MPC's planners compute, against NumPy on a model of closed form."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import mppi, planners, replay
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import planning
from mbx.agents.tdmpc.types import ActorState, KeptPlan
from mbx.fast import collectives
from mbx.types import streams
from tests.agents.tdmpc_helpers import (
    CLOSE,
    A,
    B,
    N,
    T,
    array,
    ensemble,
    std,
    train_state,
)
from tests.helpers import PARTS, in_parts


@pytest.mark.parametrize("name", ["planner", "training_planner"])
@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize(
    ("std_coef", "pick", "how"),
    [(0.7, np.max, "mean"), (-0.7, np.min, "min"), (0.0, np.mean, "mean"), (0.0, np.mean, "min")],
)
def test_the_score_of_a_plan(name, aggregate, std_coef, pick, how):
    own = dict(std_coef=std_coef, aggregate=aggregate, disagreement=0.3, discount=0.95)
    own |= dict(value_reduction=how)
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
            if how == "min":
                values = values.min(0)[None]
            spread = np.sqrt(variance + (factor * std(values)) ** 2)
            each.append(total + factor * values.mean(0) + std_coef * spread)
        heads.append((np.mean(each, axis=0) if aggregate else each[-1], state))
    latents = np.stack([state for _, state in heads]).var(axis=0).mean(axis=-1)
    expected = pick([value for value, _ in heads], axis=0) + 0.3 * latents
    np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("states", "alike", "out"),
    [(1, False, 1), (1, True, 1), (PARTS, False, None), (PARTS, True, 0)],
)
def test_devices_divide_candidates_or_states_that_are_not_divided(monkeypatch, states, alike, out):
    """Each scores its own, with its own noise, and they come back in their order."""
    settings, model, toy = ensemble()
    z, actions = array(states, 2), np.clip(array(states, 2 * PARTS, 2, A), -1, 1)
    score = planning.score_function(settings, model, toy.params(), jnp.asarray(z), settings.planner)
    asked = jax.random.key(0), jnp.asarray(actions)
    whole, divided = jax.jit(score)(*asked), []

    def apart(function, axes, *args, out):
        divided.append(out)
        return jnp.concatenate(list(in_parts(function, axes, *args)), axis=out)

    monkeypatch.setattr(collectives, "num_devices", lambda: PARTS)
    monkeypatch.setattr(collectives, "shard_map", apart)
    with collectives.replicated_states(alike):
        np.testing.assert_allclose(jax.jit(lambda *x: score(*x))(*asked), whole, **CLOSE)
    assert divided == ([] if out is None else [out])


@pytest.fixture
def planned(monkeypatch):
    """What the planner is asked for, without planning; and the planner that scores."""
    calls = []

    def plan(key, score, mean, std, **rest):
        calls.append(dict(rest, key=key, mean=mean, std=std))
        lead = (mean.shape[0], rest["config"].num_samples)
        chosen, action = jnp.full(mean[:, 0].shape, 0.25), jnp.full(mean[:, 0].shape, 0.75)
        values, actions = jnp.zeros(lead), jnp.zeros((*lead, *mean.shape[1:]))
        return mppi.Plan(action, mean + 0.5, std, actions, values, chosen)

    def score_function(settings, model, params, z, planner):
        calls.append(dict(planner=planner))

    monkeypatch.setitem(planners._KNOWN, "mppi", planners.Planner(plan))
    monkeypatch.setattr(planning, "score_function", score_function)

    def gathered():
        return functools.reduce(dict.__or__, calls)

    return gathered


def test_evaluations_have_their_own_optimism_and_choice(planned):
    own = dict(
        std_coef=1.0,
        evaluation_std_coef=-2.0,
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
    assert (call["config"].selection, call["config"].action_noise) == ("sample", 0.7)
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
    train = train_state(toy.params(), 3)
    given = settings, model, train
    agents.act(
        *given, jnp.asarray(before), jnp.asarray(z), jnp.zeros(B, bool), jax.random.key(0), False
    )
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
        training_planner=own,
        loss=dict(policy_loss="kl", expert_mean=how, expert_source="acting"),
    )
    train = train_state(toy.params(), 3)
    obs, key, no = jnp.ones((B, 2)), jax.random.key(0), jnp.zeros(B, bool)
    made = agents.targets(settings, model, train, None, obs, key)
    np.testing.assert_allclose(made.expert[:, 0], np.full((B, A), mean))  # a plan's mean is 0.5
    np.testing.assert_allclose(made.expert[:, 1], np.full((B, A), 1.5))
    assert (made.step == 3).all()
    actor = ActorState(jnp.zeros((B, 3, A)), jnp.zeros((B, 2, A)), no)
    action, actor = agents.act(settings, model, train, actor, obs, no, key, False)
    np.testing.assert_allclose(actor.gaussian[:, 0], np.full((B, A), mean))
    np.testing.assert_allclose(actor.gaussian[:, 1], np.full((B, A), settings.planner.max_std))
    assert actor.planned.all() and (action == 0.75).all()


def test_without_stored_plans_samples_of_the_policy_are_scored_in_every_update(monkeypatch):
    monkeypatch.setattr(agents, "update_from_batch", lambda s, m, state, batch, noise: (0, batch))
    settings, model, toy = ensemble(training_planner=dict(enabled=False, num_samples=N))
    obs, key, zeros = jnp.asarray(array(T + 1, B, 3)), jax.random.key(2), jnp.zeros((T + 1, B))
    last = jnp.zeros((T + 1, B), bool).at[2, 1].set(True)
    rows = dict(obs=obs, action=jnp.zeros((T + 1, B, A)), reward=zeros, terminated=zeros)
    sample = replay.Sample(rows | dict(is_last=last), None, jnp.ones((T, B)), None)
    learn = jax.jit(functools.partial(agents.learn, settings, model))
    _, new = learn(train_state(toy.params()), sample, key)
    z = np.asarray(obs)[..., :2].reshape(-1, 2)
    keys = streams(streams(key, "draw", "shift", "plan")["plan"], "policy", "plan")
    actions = rolled(toy, z, np.asarray(jax.random.normal(keys["policy"], (1, len(z), N, A))))
    actions = actions[:, :, 0]
    np.testing.assert_allclose(new.plan_actions, actions.reshape(T + 1, B, N, A), **CLOSE)
    reward = toy.rewards(z[:, None], actions).mean(0)
    steps = toy.step(z[:, None], actions)
    after = [toy.alive(state) * toy.values(state).mean(0) for state in steps]
    expected = reward + 0.9 * np.mean(after, axis=0)
    np.testing.assert_allclose(new.plan_values, expected.reshape(T + 1, B, N), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(new.plan_valid, ~last)


def following(reuse, evaluate=True):
    """(settings, a step of `follow_or_plan`, the plan that it would make, the toy model)."""
    own = dict(horizon=3, num_samples=8, action_noise=0.5, reuse=reuse)
    settings, model, toy = ensemble(planner=own)
    params = toy.params()

    def follow(z, kept, first, key=0):
        first = jnp.asarray(first) & jnp.ones(len(z), bool)
        how = dict(evaluate=evaluate, step=0, see=None)
        given = settings, model, params, jnp.asarray(z), kept, first, jax.random.key(key)
        return planning.follow_or_plan(*given, **how)

    def plan(z, mean, key=0):
        how = dict(evaluate=evaluate, step=0)
        given = settings, model, params, jnp.asarray(z), mean, jax.random.key(key)
        return planning.plan_to_act(*given, **how)

    return settings, follow, plan, toy


def kept_plan(expected, left=2):
    mean, std = (jnp.asarray(np.clip(array(len(expected), 3, A), -0.9, 0.9)) for _ in range(2))
    left = jnp.full(len(expected), left, jnp.int32)
    return KeptPlan(mean, abs(std), jnp.asarray(expected), left)


def test_a_plan_that_holds_is_followed_to_its_end():
    _, follow, plan, toy = following(1e9)
    z = array(2, 2)
    kept = kept_plan(z + 1.0)
    made = plan(z, jnp.zeros_like(kept.mean))
    action, kept = follow(z, kept, True)
    np.testing.assert_array_equal(action, made.action)
    expected = 0.9 * z + toy.gain[0] * np.asarray(made.mean[:, 0])
    for t in (1, 2):
        np.testing.assert_allclose(kept.expected, expected, rtol=1e-5)
        action, kept = follow(array(2, 2), kept, False, key=t)  # wherever it comes to
        np.testing.assert_array_equal(action, made.mean[:, t])
        expected = 0.9 * expected + toy.gain[0] * np.asarray(action)
    assert not kept.left.any()
    z = array(2, 2)
    np.testing.assert_array_equal(
        follow(z, kept, False, key=3)[0], plan(z, jnp.zeros_like(kept.mean), key=3).action
    )


def test_a_plan_holds_within_a_distance():
    _, follow, plan, _ = following(0.5)
    expected = array(4, 2)
    z = expected + np.float32([[0.3, 0.39], [0.3, 0.41], [-0.49, 0.0], [0.0, 0.1]])
    kept = kept_plan(expected)
    first = [False, False, False, True]
    action, after = follow(z, kept, first)
    made = plan(z, mppi.warm_start(kept.mean, jnp.asarray(first)))
    holds = np.array([True, False, True, False])
    wanted = np.where(holds[:, None], kept.mean[:, 1], made.action)
    np.testing.assert_array_equal(action, wanted)
    np.testing.assert_array_equal(after.left, np.where(holds, 1, 2))
    np.testing.assert_array_equal(
        after.std[:, 0], np.where(holds[:, None], kept.std[:, 1], made.std[:, 0])
    )


def test_training_explores_around_a_plan_that_is_followed():
    _, follow, _, _ = following(1e9, evaluate=False)
    z = array(500, 2)
    kept = kept_plan(z + 1.0)
    kept = kept.replace(mean=0.1 * kept.mean, std=0.1 * kept.std)
    action, _ = follow(z, kept, False)
    off = np.asarray((action - kept.mean[:, 1]) / kept.std[:, 1])
    assert abs(off.mean()) < 0.05 and abs(off.std() - 0.5) < 0.05
