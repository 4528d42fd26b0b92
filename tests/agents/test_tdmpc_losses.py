"""Experts, units of values, trust region, distillation, lambda targets; what is refused."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import returns
from mbx import settings as declared
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import policies
from mbx.agents.tdmpc.agent import make_agent, world_config
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import ActorState, PolicyInputs, Scales
from mbx.agents.tdmpc.update import draw, policy_due
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import (
    SPEC,
    A,
    B,
    T,
    array,
    ensemble,
    loud,
    make_model,
    make_settings,
    make_world,
    policy_loss,
    replaced,
    train_state,
    variant,
    weighed,
)
from tests.helpers import program


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("target", ["td", "lambda"])
def test_the_acting_planners_expert_is_what_is_stored(target):
    """Without a second plan where no loss reads more, unless one copy only had random actions."""
    loss = dict(policy_loss="kl", expert_source="acting", value_target=target)
    settings, model, toy = ensemble(loss=loss)
    train, gaussian = train_state(toy.params(), 7), jnp.asarray(array(2, 2, A))
    make = jax.jit(functools.partial(agents.targets, settings, model, train))

    def made(*planned):
        actor = ActorState(jnp.zeros((2, 3, A)), gaussian, jnp.array(planned))
        return make(actor, jnp.ones((2, 3)), jax.random.key(2))

    planned, one, acted = made(False, False), made(True, False), made(True, True)
    for name in ("expert", "actions", "values", "step", "valid"):
        old, new = getattr(planned, name), getattr(acted, name)
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert acted.valid.all() and (acted.step == 7).all() and np.isfinite(planned.values).all()
    np.testing.assert_array_equal(acted.expert, gaussian)
    np.testing.assert_array_equal(one.expert, [gaussian[0], planned.expert[1]])
    np.testing.assert_array_equal(one.values, planned.values)
    if target == "td":
        assert np.isnan(acted.values).all()
        shown = np.broadcast_to(gaussian[:, :1], acted.actions.shape)
        np.testing.assert_array_equal(acted.actions, shown)
    else:  # a loss reads the training planner's actions and values
        np.testing.assert_array_equal(acted.values, planned.values)
        np.testing.assert_array_equal(acted.actions, planned.actions)


@pytest.mark.parametrize(
    ("target", "policy", "alone"),
    [
        ("td", "kl", True),
        ("td", "kl:1+awr:1", False),
        ("td", "svg", False),
        ("planner", "kl", False),
        ("lambda", "kl", False),
    ],
)
def test_which_losses_read_the_expert_alone(target, policy, alone):
    loss = dict(value_target=target, policy_loss=policy, value_weighting="uniform")
    assert make_settings(loss=loss).reads_expert_alone is alone


def test_the_policy_rests_in_pretraining_where_it_should():
    settings = make_settings(train=dict(pretrain_updates=2, pretrain_policy=False))
    due = [policy_due(settings, jnp.int32(step)) for step in range(4)]
    assert due == [False, False, True, True]
    assert policy_due(replaced(settings, train=dict(pretrain_policy=True)), jnp.int32(0)) is None


@pytest.mark.parametrize("policy", ["tanh_mean", "squashed"])
def test_the_trust_region_is_the_kl_from_the_ema_policy(policy):
    settings = make_settings(model=dict(policy=policy), loss=dict(rho=0.7))
    model = make_model(settings)
    rng = np.random.default_rng(0)
    mean, log_std, old_mean, old_log_std = rng.normal(size=(4, T + 1, B, 2))
    inputs = PolicyInputs(None, None, None, None)
    own = policies.Policy(settings, model, {}, jnp.asarray(mean), jnp.asarray(log_std), inputs)
    scales = Scales(None, None, returns.RunningScale(jnp.float32(3.0)), None)
    ours, new = policies.trust_region(own, jnp.asarray(old_mean), jnp.asarray(old_log_std), scales)
    if policy == "tanh_mean":
        mean, old_mean = np.tanh(mean), np.tanh(old_mean)
    ratio = np.exp(2 * (old_log_std - log_std))
    gap = (old_mean - mean) ** 2 / np.exp(2 * log_std)
    kl = (0.5 * (ratio + gap - 1.0) + log_std - old_log_std).sum(-1)
    low, high = np.percentile(kl[0], [5, 95])
    unit = 3.0 + 0.01 * (max(high - low, 1.0) - 3.0)
    np.testing.assert_allclose(new.trust_scale.value, unit, rtol=1e-5)
    np.testing.assert_allclose(ours, kl / unit, rtol=1e-4)


@pytest.mark.parametrize("critic", ["q", "v"])
def test_the_policy_learns_from_values_with_dropout(critic):
    """As the reference, whose values are in training mode there; by hand, with the heads' mask."""
    settings = make_settings(
        model=dict(critic=critic, dropout=0.5),
        loss=dict(policy_loss="svg", entropy_coef=0.0, value_target="td"),
        optimizer=dict(tau=0.0),
    )
    model = make_model(settings)
    params = loud(model.init(jax.random.key(0)))
    noise = draw(settings, model, jax.random.key(1))
    assert noise.policy_dropout is not None
    zs = jax.random.normal(jax.random.key(2), (T + 1, B, 8))
    inputs = PolicyInputs(zs, weighed(T + 1, B), noise.policy_eps, None, noise.policy_dropout)
    unit = returns.init_running_scale()
    scales = Scales(unit, unit, unit, returns.init_return_ema())
    of_policy = program(policy_loss, settings, model)
    loss = of_policy(params["policy"], params, None, inputs, scales)[0]
    action = model.act(*model.policy(params, zs), noise.policy_eps)
    z, reward = zs, 0.0
    if critic == "v":
        reward = model.decode(model.reward(params, zs[None], action))[0, 0]
        z = model.step(params, zs[None], action)  # `[1, S, B, L]`, as the one head's
    logits = model.value(params["value"], z, action if critic == "q" else None, inputs.dropout)
    value = jnp.mean(model.decode(logits), axis=0)
    value = value if critic == "q" else reward + 0.9 * value[0]
    expected = -np.mean(0.5 ** np.arange(T + 1) * np.asarray(value).mean(axis=1))
    np.testing.assert_allclose(loss, expected, rtol=1e-3, atol=1e-4)
    still = of_policy(params["policy"], params, None, inputs._replace(dropout=None), scales)[0]
    assert abs(float(still - loss)) > 1e-2
    silent = make_settings(model=dict(dropout=0.0), loss=dict(policy_loss="svg", optimist=True))
    noise = draw(silent, make_model(silent), jax.random.key(1))
    assert noise.dropout is noise.policy_dropout is noise.optimist_dropout is None


@pytest.mark.parametrize(("forward", "least"), [(False, 1.0), (True, 0.01)])
def test_distillation_is_the_kl_in_units_of_its_range(forward, least):
    own = dict(policy_loss="kl", kl_forward=forward, kl_scale_min=least)
    settings = make_settings(loss=own)
    rng = np.random.default_rng(0)
    mean, log_std = 0.05 * rng.normal(size=(2, T + 1, B, 2))
    expert = np.stack([0.1 * rng.normal(size=mean.shape), 0.5 + rng.random(mean.shape)], axis=-2)
    mask, valid = np.ones((T + 1, B)), np.ones((T + 1, B))
    mask[1, 2], valid[1, 3], valid[0, 1] = 0.0, 0.0, 0.0
    expert[1, 3] = 0.0  # there is none
    plans = weighed(mask=mask * valid)
    inputs = PolicyInputs(None, None, None, None, plans=plans, expert=jnp.asarray(expert))
    scales = Scales(None, returns.RunningScale(jnp.float32(2.0)), None, None)
    model = make_world_model(make_world(settings))
    own = policies.Policy(settings, model, {}, jnp.asarray(mean), jnp.asarray(log_std), inputs)
    ours, states, new, _ = policies.distil(own, scales)
    one = (np.tanh(mean), np.exp(log_std))
    two = (expert[..., 0, :], np.maximum(expert[..., 1, :], policies.EXPERT_LEAST))
    (m1, s1), (m2, s2) = (two, one) if forward else (one, two)
    kl = (np.log(s2 / s1) + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5).mean(-1)
    low, high = np.percentile(kl[0] * valid[0], [5, 95])
    assert 0.01 < high - low < 1.0
    unit = 2.0 + 0.01 * (max(high - low, least) - 2.0)
    np.testing.assert_allclose(new.kl_scale.value, unit, rtol=1e-6)
    np.testing.assert_allclose(ours, kl[:-1] / unit, rtol=1e-4)
    np.testing.assert_array_equal(states.mask, (mask * valid)[:-1])


def test_priors_differ_from_head_to_head():
    params = jax.jit(make_world_model(make_world(variant("ensemble"))).init)(jax.random.key(0))
    for name in ("dynamics", "reward", "value"):
        prior = np.asarray(params[name]["prior"]["layer_0"]["kernel"])
        assert 0.7 < prior[0].std() / np.sqrt(2.0 / sum(prior.shape[1:])) < 1.3
        assert not np.array_equal(prior[0], prior[1])


def flags(text):
    """Nested settings of a command line's text."""
    usual = {one.name: one.default for one in declared.describe(Settings())}
    values: dict = {}
    for part in text.split():
        name, _, value = part.partition("=")
        declared.put(values, name, declared.parse(value, usual[name]))
    return values


EXPONENTIAL = "loss.entropy_schedule=exponential loss.entropy_coef_end"
BOUNDS = "training_planner.search=acting training_planner.proposal_log_std"
NO_BOUNDS = r"proposal_log_std=.*: give a lowest and a highest value"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{EXPONENTIAL}=0", "entropy_coef_end=0 .*linear"),
        (f"{EXPONENTIAL}=0.1 loss.entropy_coef=0", "entropy_coef=0 .*linear"),
        ("loss.policy_loss=kl training_planner.enabled=False", "training_planner.enabled"),
        (
            "loss.policy_loss=svg:1+kl:1 model.policy=squashed",
            "Gaussian of actions.*choose 'tanh_mean'",
        ),
        ("loss.aux_gammas=(1.5,)", "aux_gammas"),
        ("loss.value_target=td loss.td_horizon=0", "td_horizon=0"),
        ("model.num_dynamics=3", "batch_size=128 is not divisible .*num_dynamics=3"),
        ("replay.keep_targets=64", "keep_targets=64 exceeds .*num_samples=32: lower"),
        ("loss.value_best_n=50", "value_best_n=50 exceeds the 8 planner actions"),
        ("model.num_bins=1", "num_bins=1.*at least 2"),
        ("model.bin_min=11", "bin_min=11.0 exceeds model.bin_max=10.0: lower it"),
        ("planner.num_proposals=128", "num_proposals=128 must be less than planner.num_samples"),
        (f"{BOUNDS}=(0.5,-1.0)", NO_BOUNDS),
        (f"{BOUNDS}=(-1.0,)", NO_BOUNDS),
        (f"{BOUNDS}=(-1.0,0.0,0.5)", NO_BOUNDS),
        (
            "loss.entropy_coef_end=0.1 loss.entropy_start=0.5 loss.entropy_end=0.5",
            "entropy_start=0.5 must be less than loss.entropy_end=0.5",
        ),
        ("loss.entropy_scale=none loss.policy_loss=awr", "svg named first"),
        ("loss.entropy_scale=none loss.policy_loss=awr:1+svg:1", "svg named first"),
    ],
)
def test_impossible_settings_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        declared.from_dict(Settings(), flags(text))


DISCRETE = SPEC._replace(discrete=True)


@pytest.mark.parametrize(
    ("sections", "spec", "message"),
    [
        (dict(loss=dict(value_reduction="local", num_heads=1)), SPEC, "num_heads=1"),
        (dict(model=dict(critic="q"), loss=dict(num_heads=3)), SPEC, "num_heads=3.*has 2"),
        (dict(loss=dict(num_heads=3)), SPEC, "num_heads=3.*has 2"),
        (dict(planner=dict(name="cem")), DISCRETE, "planner.name='cem'.*leave it at 'mppi'"),
        (dict(loss=dict(jacobian=0.5)), DISCRETE, "loss.jacobian=0.5.*leave it at 0.0"),
        (dict(planner=dict(max_std=3.0)), DISCRETE, "planner.max_std=3.0 has no .*leave it at 2.0"),
        (dict(model=dict(log_std_min=-5.0)), DISCRETE, "log_std_min=-5.0.*leave it at -3.0"),
        (
            dict(loss=dict(termination_coef=2.0), model=dict(episodic="auto")),
            SPEC._replace(can_terminate=False),
            "termination_coef=2.0.*no terminations",
        ),
        (dict(planner=dict(name="predictive")), DISCRETE, "name='predictive'.*leave it at 'mppi'"),
        (dict(planner=dict(action_noise=1.5)), DISCRETE, "action_noise=1.5.*1 at most"),
        (dict(planner=dict(proposal_noise=1.1)), DISCRETE, "proposal_noise=1.1.*1 at most"),
        ({}, DISCRETE._replace(tasks=(SPEC, SPEC)), "several tasks"),
    ],
)
def test_what_the_task_or_the_model_cannot_have_is_refused(sections, spec, message):
    with pytest.raises(ValueError, match=message):
        make_agent(make_settings(**sections), spec)


@pytest.mark.parametrize(
    ("episodic", "can_terminate", "learnt"),
    [("auto", True, True), ("auto", False, False), ("True", False, True), ("False", True, False)],
)
def test_a_termination_head_where_a_task_can_end_by_itself(episodic, can_terminate, learnt):
    settings = make_settings(model=dict(episodic=episodic))
    assert world_config(settings, SPEC._replace(can_terminate=can_terminate)).episodic == learnt
