"""Ensembles, priors, distillation and schedules, with BMPC's and NEWT's fixtures."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import distributions as dist
from mbx import networks, replay, returns
from mbx import settings as declared
from mbx.agents.tdmpc import model_loss as losses
from mbx.agents.tdmpc import planning, scoring, value_targets
from mbx.agents.tdmpc import policy_loss as policies
from mbx.agents.tdmpc.agent import make_agent, world_config
from mbx.agents.tdmpc.loss_settings import parse_mixture
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch, Noise, PolicyInputs, Scales, ValueScales
from mbx.agents.tdmpc.update import draw, init_state, learn_policy, policy_due
from mbx.training.loop import summarise
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import (
    SPEC,
    B,
    T,
    empty_replay,
    loud,
    make_model,
    make_settings,
    make_world,
    moved,
    replaced,
    row,
)
from tests.agents.test_tdmpc_golden import torch_params
from tests.helpers import compiled, load_fixture

SINGLE = dict(rtol=1e-5, atol=1e-6)
FORWARD = dict(rtol=2e-4, atol=2e-5)


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.mark.parametrize("coef", [-1.5, 0.0, 1.0])
@pytest.mark.parametrize("aggregate", [False, True])
@pytest.mark.parametrize(
    "name", ["seed_scoring_0", "seed_scoring_episodic", "seed_scoring_single_heads"]
)
def test_trajectory_estimate(name, aggregate, coef):
    a, _ = load_fixture("tdmpc", name)
    rewards = jnp.moveaxis(jnp.asarray(a["reward_heads"]), -1, 0)  # T of [R, H, B, N]
    values = jnp.moveaxis(jnp.asarray(a["value_heads_all"]), -1, 0)
    alive = [1.0] * (len(rewards) + 1)
    if "term_prob" in a:  # [H, B, N, T] at z_0..z_{T-1}
        probability = jnp.moveaxis(jnp.asarray(a["term_prob"]), -1, 0)
        going = jnp.cumprod(1.0 - probability, axis=0)
        alive = [jnp.ones_like(going[0]), *going]
    estimate = scoring.trajectory_estimate(
        list(rewards),
        list(values) if aggregate else [jnp.asarray(a["value_heads_T"])],
        alive,
        std_coef=coef,
        aggregate=aggregate,
    )
    key = f"{'agg' if aggregate else 'single'}.coef{coef:+.1f}"
    np.testing.assert_allclose(estimate.value, a[f"{key}.value"], **SINGLE)
    np.testing.assert_allclose(estimate.std, a[f"{key}.std"], **SINGLE)
    np.testing.assert_allclose(estimate.disagreement, a[f"{key}.head_disagreement"], **SINGLE)
    if name == "seed_scoring_single_heads":
        return  # one head agrees with itself
    spread = scoring.latent_disagreement(jnp.asarray(a["latents"])[:, :, :, -1])
    np.testing.assert_allclose(spread, a["latent_disagreement"], **SINGLE)
    if aggregate and coef == 1.0:
        total = estimate.value + 0.7 * spread
        np.testing.assert_allclose(total, a["score_lambda0.7"], **SINGLE)


@pytest.mark.parametrize("name", ["seed_wm_losses_0", "seed_wm_losses_1"])
def test_model_losses_over_heads(name):
    a, config = load_fixture("tdmpc", name)
    zs = jnp.moveaxis(jnp.asarray(a["z_roll"]), 2, 0)[1:]  # [T, H, B, L]
    z = jnp.asarray(a["z_true"])[1:]
    mask = jnp.ones(a["reward"].shape[:2])
    bins = dist.bins(config["vmin"], config["vmax"], config["num_bins"])
    rho = config["rho"]
    per_step = jnp.mean(losses.consistency(zs, z), axis=1)
    np.testing.assert_allclose(per_step, a["consistency_per_t"], **SINGLE)
    consistency = losses.time_weighted(losses.consistency(zs, z), mask, rho)
    np.testing.assert_allclose(consistency, a["consistency_loss"], **SINGLE)
    reward = losses.reward_loss(jnp.asarray(a["reward_logits"]), a["reward"][..., 0], bins)
    reward = losses.time_weighted(reward, mask, rho)
    np.testing.assert_allclose(reward, a["reward_loss"], **SINGLE)
    total = dict(consistency=consistency, encoder_consistency=consistency, reward=reward)
    if config["episodic"]:
        logit = jnp.moveaxis(jnp.asarray(a["term_logits"])[..., 0], 0, 1)
        total["termination"] = losses.termination_loss(logit, a["terminated"][..., 0], mask, False)
        np.testing.assert_allclose(total["termination"], a["termination_loss"], **SINGLE)
    names = ("consistency", "encoder_consistency", "reward", "termination")
    coefficients = {f"{name}_coef": config[f"{name}_coef"] for name in names}
    settings = make_settings(loss=coefficients)
    np.testing.assert_allclose(losses.total_loss(settings, total), a["total"], **SINGLE)


def test_consistency_gradients_go_where_they_should():
    settings = make_settings(loss=dict(encoder_consistency_coef=1.0))
    batch = Batch(None, None, None, None, jnp.ones((2, 4)))
    zs, encoded = jnp.full((2, 1, 4, 8), 0.3), jnp.full((2, 4, 8), 0.7)

    def loss(zs, encoded, name):
        return losses.consistency_losses(settings, zs, encoded, batch, 0.0)[name]

    for name, own in (("consistency", 0), ("encoder_consistency", 1)):
        grads = jax.grad(loss, argnums=(0, 1))(zs, encoded, name)
        assert np.abs(grads[own]).sum() > 0 and np.abs(grads[1 - own]).sum() == 0
    late = replaced(settings, loss=dict(encoder_consistency_warmup=0.5))
    at = [
        losses.consistency_losses(late, zs, encoded, batch, p)["encoder_consistency"]
        for p in (0.4, 0.5)
    ]
    assert float(at[0]) == 0.0 and float(at[1]) > 0.0


def test_head_strategies():
    a, _ = load_fixture("tdmpc", "seed_head_strategy_0")
    for strategy in ("single", "split", "concat"):
        np.testing.assert_array_equal(
            losses.select_latents(jnp.asarray(a["z"]), strategy), a[strategy]
        )
    copies = losses.repeat_for_heads(jnp.arange(6).reshape(1, 6), "concat", 2)
    np.testing.assert_array_equal(copies[0], [*range(6), *range(6)])


def prior_params(a, prefix):
    return {
        f"layer_{i}": dict(
            kernel=jnp.asarray(a[f"{prefix}.prior.{i}.weight"]).T,
            bias=jnp.asarray(a[f"{prefix}.prior.{i}.bias"]),
        )
        for i in range(3)
    }


def test_prior_networks_and_moved_distributions():
    a, config = load_fixture("tdmpc", "seed_prior_0")
    bins = dist.bins(config["vmin"], config["vmax"], config["num_bins"])
    for form in ("dist", "plain"):
        module = networks.PriorMLP((8, 8), a[f"{form}.prior"].shape[-1])
        prior = module.apply({"params": prior_params(a, form)}, jnp.asarray(a["x"]))
        np.testing.assert_allclose(prior, a[f"{form}.prior"], **FORWARD)
    # Logarithms of masses near 1e-8 blow rounding up: compare the masses, and logits above them.
    moved = [
        (dist.shift_logits(a["dist.main"], bins, a["dist.prior"][:, 0]), a["dist.out"]),
        (dist.shift_logits(a["ss.logits"], bins, a["ss.shift"][:, 0]), a["ss.shifted"]),
        (dist.shift_logits(a["ss.logits"], bins, 0.0, a["ss.scale"][:, 0]), a["ss.scaled"]),
        (
            dist.shift_logits(a["ss.logits"], bins, a["ss.shift"][:, 0], a["ss.scale"][:, 0]),
            a["ss.both"],
        ),
    ]
    for ours, theirs in moved:
        np.testing.assert_allclose(jnp.exp(ours), np.exp(theirs), rtol=2e-4, atol=2e-6)
    np.testing.assert_allclose(a["plain.main"] + a["plain.prior"], a["plain.out"], **SINGLE)


@pytest.mark.parametrize("name", ["seed_entropy_schedule_lin", "seed_entropy_schedule_exp"])
def test_entropy_schedule(name):
    a, c = load_fixture("tdmpc", name)
    schedule = dict(
        entropy_coef=c["start_entropy_coeff"],
        entropy_coef_end=c["end_entropy_coeff"],
        entropy_start=c["start_dynamic_entropy_ratio"],
        entropy_end=c["end_dynamic_entropy_ratio"],
        entropy_schedule=c["dynamic_entropy_schedule"],
    )
    settings = make_settings(loss=schedule)
    for step, expected in zip(a["step"], a["coef"], strict=True):
        ours = policies.entropy_coefficient(settings, jnp.float32(step / c["steps"]))
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-11)


def bmpc(name):
    a, c = load_fixture("tdmpc", name)
    a = {key.replace(".target_v.", ".target_q."): value for key, value in a.items()}
    params = torch_params(a, "w")
    target = params.pop("target_value")
    settings = make_settings(
        model=dict(
            num_bins=c["num_bins"],
            bin_min=c["vmin"],
            bin_max=c["vmax"],
            num_values=c["num_q"],
            log_std_min=c["log_std_min"],
            log_std_max=c["log_std_max"],
        ),
        loss=dict(
            discount=c["discount"],
            horizon=c["horizon"],
            rho=c["rho"],
            entropy_coef=c["entropy_coef"],
            value_target="td",
            td_horizon=c["td_horizon"],
            td_rollouts=1,
            policy_loss="kl",
            expert_min_std=0.0,
        ),
        optimizer=dict(tau=c["tau"], learning_rate=c["lr"]),
    )
    sizes = dict(latent_dim=16, mlp_dim=12, simnorm_dim=c["simnorm_dim"])
    return a, c, settings, make_model(settings, **sizes), params, target


@pytest.mark.parametrize("name", ["bmpc_0", "bmpc_td3_expl"])
def test_bmpc_value_target_and_policy(name):
    a, c, settings, model, params, target = bmpc(name)
    z = jnp.asarray(a["z"])
    batch = Batch(None, None, jnp.zeros((3, 5)), jnp.zeros((3, 5)), jnp.ones((3, 5)))
    noise = Noise(
        None,
        jnp.asarray(a["td.v_idx"]),
        None,
        None,
        rollout_eps=jnp.asarray(a["td.pi_eps"])[:, :, :, None],
    )
    state = init_state(settings, model, jax.random.key(0))
    state = state.replace(params=params, target_value=target)
    made, _ = value_targets.value_targets(settings, model, state, z, batch, noise, None)
    np.testing.assert_allclose(made.samples[0, ..., 0], a["td.target"][..., 0], **FORWARD)
    if bool(a["pi.expl"]):
        world = dataclasses.replace(
            model.config, log_std_min=c["expl_log_std_min"], log_std_max=c["expl_log_std_max"]
        )
        model = compiled(make_world_model(world))
    mean, log_std = model.policy(params, z)
    np.testing.assert_allclose(jnp.tanh(mean), a["pi.mean"], **FORWARD)
    np.testing.assert_allclose(log_std, a["pi.log_std"], **FORWARD)
    np.testing.assert_allclose(model.act(mean, log_std, a["pi.eps"]), a["pi.action"], **FORWARD)
    entropy = policies.policy_entropy(settings, model, mean, log_std, a["pi.eps"])
    np.testing.assert_allclose(entropy, a["pi.scaled_entropy"][..., 0], **FORWARD)


@pytest.mark.parametrize("name", ["bmpc_0", "bmpc_td3_expl"])
def test_bmpc_distillation_step(name):
    a, c, settings, model, params, _ = bmpc(name)
    expert = jnp.asarray(a["expert_dist"]).reshape(3, 5, 2, 2)
    expert = jnp.concatenate([expert, expert[-1:]])
    eps = jnp.concatenate([a["kl.pi_eps"], np.zeros_like(a["kl.pi_eps"][-1:])])
    inputs = PolicyInputs(
        jnp.asarray(a["z"]),
        jnp.ones((4, 5)),
        jnp.asarray(eps),
        None,
        valid=jnp.ones((4, 5)),
        expert=expert,
    )
    fresh = returns.init_running_scale()
    scales = Scales(None, fresh, fresh)

    def loss(policy):
        return policies.policy_loss(settings, model, policy, params, None, inputs, scales)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, (scales, _)), grads = step(params["policy"])
    close = dict(rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(value, a["kl.pi_loss"], **close)
    np.testing.assert_allclose(scales.kl.value, a["kl.scale_after"][0], **close)
    np.testing.assert_allclose(optax.tree.norm(grads), a["kl.pi_grad_norm"], **close)
    adam = optax.chain(optax.clip_by_global_norm(20.0), optax.adam(c["lr"], eps=1e-5))
    updates, _ = adam.update(grads, adam.init(params["policy"]))
    new = optax.apply_updates(params["policy"], updates)
    layers = [new["layer_0"]["dense"], new["layer_1"]["dense"], new["out"]]
    for i, layer in enumerate(layers):
        weight, bias = a[f"kl.w1.pi.{i}.weight"], a[f"kl.w1.pi.{i}.bias"]
        np.testing.assert_allclose(layer["kernel"].T, weight, rtol=1e-3, atol=2e-4)
        np.testing.assert_allclose(layer["bias"], bias, rtol=1e-3, atol=2e-4)


def test_newt_blends_the_policy_into_the_plan_and_clones_masked_actions():
    a, c = load_fixture("tdmpc", "newt_0")
    for i, step in enumerate(a["steps"]):
        share = planning.policy_share(jnp.int32(step), c["start"], c["end"])
        mean, std = planning.blend(
            share, (a["pi_mean"], a["pi_std"]), (a["base_mean"], a["base_std"])
        )
        np.testing.assert_allclose(mean, a["mean"][i], **SINGLE)
        np.testing.assert_allclose(std, a["std"][i], **SINGLE)
    mask = jnp.asarray(a["bc.masks"])[a["bc.task"][0]][None]
    cloned = policies.cloning(a["bc.pi_action"], a["bc.action"], mask)
    np.testing.assert_allclose(cloned, a["bc.loss"], **SINGLE)


@pytest.mark.parametrize("text", ["ppo", "svg:0", "svg:x", "svg+svg", ""])
def test_impossible_mixtures_are_refused(text):
    with pytest.raises(ValueError, match="policy_loss"):
        parse_mixture(text)


def test_mixtures():
    assert parse_mixture("awr") == {"awr": 1.0}
    assert parse_mixture("svg:1+kl:0.5") == {"svg": 1.0, "kl": 0.5}


# One configuration a way of learning: every option of the settings is in one of them.
SCORED = dict(std_coef=1.0, aggregate=True, disagreement=0.1, discount=1.0)
VARIANTS = {
    "ensemble": dict(
        model=dict(num_dynamics=2, num_rewards=3, num_values=3, prior_scale=1.0, episodic="True"),
        planner=SCORED,
        training_planner=SCORED,
        loss=dict(
            value_target="td",
            value_reduction="local",
            num_heads=3,
            td_std_coef=-0.5,
            td_rollouts=2,
            td_horizon=2,
            td_dynamics_reduction="from_std_coef",
            td_ema_policy=True,
            policy_loss="svg:1+kl:0.5",
            policy_std_coef=1.0,
            trust_region_coef=0.1,
            optimist=True,
            encoder_consistency_coef=1.0,
            head_strategy="split",
            final_rho=0.125,
            termination="soft",
            termination_balance=True,
            aux_gammas=(0.5, 0.8),
            entropy_coef_end=1e-6,
            entropy_schedule="exponential",
        ),
        optimizer=dict(weight_decay=0.01, ensemble_lr_scaling=True),
    ),
    "concat": dict(
        model=dict(num_dynamics=2, num_rewards=2, critic="q"),
        planner=SCORED,
        training_planner=SCORED,
        train=dict(steps=2, seed_steps=0, pretrain_updates=0, utd_ratio=1.0),
        loss=dict(
            value_target="planner",
            head_strategy="concat",
            policy_loss="awr:1+bc:0.1",
            td_all_dynamics=False,
            value_reduction="mean",
            td_std_coef=1.0,
            aux_gammas=(0.7,),
            aux_joint=True,
            expert_mean="final",
            jacobian=0.5,
        ),
        optimizer=dict(
            value_every=2, policy_every=2, encoder_lr_step_at=0.5, encoder_lr_step_scale=0.0
        ),
    ),
    "lambda": dict(
        model=dict(num_dynamics=2),
        planner=dict(SCORED, proposal_noise=0.05, prior_start=2, prior_updates=5),
        training_planner=dict(SCORED, horizon=2),
        reanalyze=dict(slices=True),
        loss=dict(
            value_target="lambda",
            policy_loss="kl",
            kl_forward=True,
            expert_source="acting",
            head_strategy="single",
        ),
    ),
}


def variant(name):
    return make_settings(**VARIANTS[name])


SELDOM = [name for name in VARIANTS if variant(name).optimizer.policy_every > 1]


@pytest.fixture(scope="module", params=list(VARIANTS))
def learnt(request):
    """(settings, agent, states before and after three updates, metrics, replay, after a pass)."""
    settings = variant(request.param)
    agent = make_agent(settings, SPEC)
    train = jax.jit(agent.init)(jax.random.key(0))
    buffer = empty_replay(agent, num_envs=2, capacity=12)
    no, actor = jnp.zeros(2, bool), agent.init_actor(2)
    act, make = jax.jit(agent.act, static_argnums=5), jax.jit(agent.store.targets)
    for i in range(8):
        obs = jax.random.normal(jax.random.key(i), (2, 3))
        action, actor = act(train, actor, obs, no | (i == 0), jax.random.key(50 + i), False)
        made = make(train, actor, obs, jax.random.key(10 + i))
        buffer = replay.insert(buffer, row(obs, action, first=i == 0), made)
    update = jax.jit(agent.update)
    states, key = [train], jax.random.key(1)
    for i in range(3):
        new, _, metrics = update(states[-1], buffer, jax.random.fold_in(key, i))
        states.append(new)
    refreshed, _ = jax.jit(agent.store.reanalyze)(states[-1], buffer, key, jnp.int32(-1))
    return settings, agent, states, metrics, buffer, refreshed


def test_every_way_of_learning_trains_what_it_should(learnt):
    settings, _, states, metrics, _, _ = learnt
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics)), metrics
    first, last = states[0].params, states[-1].params
    for name in first:
        prior = name in ("dynamics", "reward", "value") and settings.model.prior_scale
        trained = last[name]["main"] if prior else last[name]
        assert any(moved(first[name]["main"] if prior else first[name], trained)), name
        if prior:
            assert not any(moved(first[name]["prior"], last[name]["prior"])), name
    assert (states[-1].target_policy is None) == (not settings.keeps_target_policy)
    if settings.keeps_target_policy:
        assert any(moved(states[0].target_policy, states[-1].target_policy))


def test_a_gradient_reaches_every_dynamics_and_reward_head(learnt):
    settings, _, states, _, _, _ = learnt
    for name, num in (
        ("dynamics", settings.model.num_dynamics),
        ("reward", settings.model.num_rewards),
        ("value", settings.model.num_values),
    ):
        for head in range(num):
            one = [
                jax.tree.map(lambda x, h=head: x[h], s.params[name])
                for s in (states[0], states[-1])
            ]
            assert any(moved(*one)), (name, head)


def test_update_frequencies_hold_values_and_policy_back(learnt):
    settings, _, states, _, _, _ = learnt
    held = [
        not any(moved(a.params["value"], b.params["value"]))
        for a, b in zip(states, states[1:], strict=False)
    ]
    still = [
        not any(moved(a.params["policy"], b.params["policy"]))
        for a, b in zip(states, states[1:], strict=False)
    ]
    assert held == [settings.optimizer.value_every == 2 and i % 2 == 1 for i in range(3)]
    assert still == [settings.optimizer.policy_every == 2 and i % 2 == 1 for i in range(3)]


@pytest.mark.parametrize("learnt", SELDOM, indirect=True)
def test_what_only_some_updates_have_is_averaged_over_those(learnt):
    settings, _, states, _, buffer, _ = learnt
    update, key = jax.jit(make_agent(settings, SPEC).update), jax.random.key(1)
    logged, sums, total = [], None, 0.0
    for i in range(4):
        metrics = update(states[i % 2], buffer, jax.random.fold_in(key, i))[2]
        logged.append(metrics)
        total = jax.tree.map(jnp.add, total, metrics) if i else metrics
    sums = {f"update/{name}": value for name, value in total.items()} | {"updates": 4}
    means = summarise(sums)
    for name in ("loss/policy", "policy/entropy", "grad_norm/policy"):
        due = [float(x[name].total) for x in logged if float(x[name].count)]
        assert len(due) == 2 and all(value != 0.0 for value in due)
        np.testing.assert_allclose(means[name], np.mean(due), rtol=1e-5)
    # The values' loss is known in every update.
    values = [float(x["loss/value"]) for x in logged]
    assert min(values) > 0.0
    np.testing.assert_allclose(means["loss/value"], np.mean(values), rtol=1e-5)
    assert "policy/entropy" not in summarise(
        {f"update/{name}": x for name, x in logged[1].items()} | {"updates": 1}
    )


def test_reanalyze_writes_back_to_the_rows_it_read(learnt):
    settings, _, states, _, buffer, refreshed = learnt
    touched = np.asarray(refreshed.targets.step == 3) & np.asarray(refreshed.targets.valid)
    assert touched.any()
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(
            np.asarray(new)[~touched], np.asarray(old)[~touched]
        ),
        refreshed.targets,
        buffer.targets,
    )
    if settings.uses_expert:
        expert = np.asarray(refreshed.targets.expert)[touched]
        assert np.abs(expert[:, 0]).max() <= 1.0 and (expert[:, 1] > 0.0).all()


def test_the_acting_planners_expert_is_what_is_stored():
    agent = make_agent(variant("lambda"), SPEC)
    train, obs = jax.jit(agent.init)(jax.random.key(0)), jnp.ones((2, 3))
    untouched, make = agent.init_actor(2), jax.jit(agent.store.targets)
    made = make(train, untouched, obs, jax.random.key(2))
    act = jax.jit(agent.act, static_argnums=5)
    _, actor = act(train, untouched, obs, jnp.ones(2, bool), jax.random.key(1), False)
    acted = make(train, actor, obs, jax.random.key(2))
    np.testing.assert_array_equal(acted.expert, actor.gaussian)
    assert not np.array_equal(made.expert, acted.expert)


@pytest.mark.parametrize("how", ["chosen", "final"])
def test_the_acting_experts_mean_is_an_elite_or_the_final_mean_without_noise(how):
    own = dict(VARIANTS["lambda"]["loss"], expert_mean=how)
    planner = dict(action_noise=3.0, selection="best")
    settings = make_settings(loss=own, planner=planner)
    agent = make_agent(settings, SPEC)
    train, obs = jax.jit(agent.init)(jax.random.key(0)), jnp.ones((2, 3))
    act = jax.jit(agent.act, static_argnums=5)
    args = (train, agent.init_actor(2), obs, jnp.ones(2, bool), jax.random.key(1))
    action, actor = act(*args, False)
    silent = make_agent(replaced(settings, planner=dict(action_noise=0.0)), SPEC)
    still, quiet = jax.jit(silent.act, static_argnums=5)(*args, False)
    assert np.abs(action - still).max() > 0.1
    expected = still if how == "chosen" else quiet.mean[:, 0]
    np.testing.assert_allclose(actor.gaussian[:, 0], expected, rtol=1e-5, atol=1e-6)


def test_the_policy_rests_in_pretraining_where_it_should():
    settings = make_settings(train=dict(pretrain_updates=2, pretrain_policy=False))
    due = [policy_due(settings, jnp.int32(step)) for step in range(4)]
    assert due == [False, False, True, True]
    rare = replaced(settings, optimizer=dict(policy_every=3))
    assert [bool(policy_due(rare, jnp.int32(i))) for i in range(7)] == [
        i in (3, 6) for i in range(7)
    ]
    assert policy_due(replaced(settings, train=dict(pretrain_policy=True)), jnp.int32(0)) is None


@pytest.mark.parametrize(
    ("policy_loss", "value_scale"), [("kl", "running"), ("kl", "return_ema"), ("svg", "return_ema")]
)
def test_the_optimists_unit_of_values_follows_values(policy_loss, value_scale):
    own = dict(policy_loss=policy_loss, value_scale=value_scale, value_target="td")
    settings = make_settings(
        model=dict(num_dynamics=2),
        loss=dict(own, optimist=True, optimist_std_coef=0.5, optimist_entropy_scale=0.0),
    )
    model = make_model(settings)
    state = init_state(settings, model, jax.random.key(0))
    state = state.replace(params=loud(state.params, 3), return_ema=returns.ReturnEMA(-1.0, 4.0))
    noise = draw(settings, model, jax.random.key(1))
    inputs = PolicyInputs(
        jax.random.normal(jax.random.key(2), (T + 1, B, 8)),
        jnp.ones((T + 1, B)),
        noise.policy_eps,
        None,
        valid=jnp.ones((T + 1, B)),
        expert=jnp.ones((T + 1, B, 2, 2)),
    )
    new, metrics = jax.jit(lambda s: learn_policy(settings, model, s, inputs, noise))(state)

    def values(policy, eps, std_coef):
        params = dict(state.params, policy=policy)
        action = model.act(*model.policy(params, inputs.zs), eps)
        return np.asarray(
            policies.policy_value(settings, model, params, inputs.zs, action, None, std_coef)
        )

    optimists = values(state.params["optimist"], noise.optimist_eps, 0.5)
    moving = optimists[0]
    if policy_loss == "svg":  # the policy's values move the unit, once
        moving = values(state.params["policy"], noise.policy_eps, 0.0)[0]
    low, high = np.percentile(moving, [5.0, 95.0])
    if value_scale == "running":
        unit = 1.0 + 0.01 * (max(high - low, 1.0) - 1.0)
        np.testing.assert_allclose(new.scale.value, unit, rtol=1e-4)
        assert unit > 1.0
    else:
        unit = (0.99 * 4.0 + 0.01 * high) - (0.99 * -1.0 + 0.01 * low)
        np.testing.assert_allclose(new.return_ema.high - new.return_ema.low, unit, rtol=1e-4)
    weights = 0.5 ** np.arange(T + 1)
    expected = np.mean(weights * -optimists.mean(axis=1) / unit)
    np.testing.assert_allclose(metrics["loss/optimist"], expected, rtol=1e-3)


@pytest.mark.parametrize("policy", ["tanh_mean", "squashed"])
def test_the_trust_region_is_the_kl_from_the_ema_policy(policy):
    settings = make_settings(model=dict(policy=policy), loss=dict(rho=0.7))
    model = make_model(settings)
    rng = np.random.default_rng(0)
    mean, log_std, old_mean, old_log_std = rng.normal(size=(4, T + 1, B, 2))
    mask = np.ones((T + 1, B))
    mask[2, 1] = 0.0
    inputs = PolicyInputs(None, jnp.asarray(mask), None, None)
    scale = returns.RunningScale(jnp.float32(3.0))
    ours, new = policies.trust_region(
        settings,
        model,
        tuple(map(jnp.asarray, (mean, log_std))),
        tuple(map(jnp.asarray, (old_mean, old_log_std))),
        inputs,
        scale,
    )
    if policy == "tanh_mean":
        mean, old_mean = np.tanh(mean), np.tanh(old_mean)
    ratio = np.exp(2 * (old_log_std - log_std))
    gap = (old_mean - mean) ** 2 / np.exp(2 * log_std)
    kl = (0.5 * (ratio + gap - 1.0) + log_std - old_log_std).sum(-1)
    low, high = np.percentile(kl[0], [5, 95])
    unit = 3.0 + 0.01 * (max(high - low, 1.0) - 3.0)
    np.testing.assert_allclose(new.value, unit, rtol=1e-5)
    each = (kl * mask).sum(1) / mask.sum(1) / unit
    np.testing.assert_allclose(ours, np.mean(0.7 ** np.arange(T + 1) * each), rtol=1e-4)


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
    inputs = PolicyInputs(zs, jnp.ones((T + 1, B)), noise.policy_eps, None, noise.policy_dropout)
    unit = returns.init_running_scale()
    scales = Scales(ValueScales(unit, returns.init_return_ema()), unit, unit)
    loss = policies.policy_loss(settings, model, params["policy"], params, None, inputs, scales)[0]
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
    still = policies.policy_loss(
        settings, model, params["policy"], params, None, inputs._replace(dropout=None), scales
    )[0]
    assert abs(float(still - loss)) > 1e-2
    silent = make_settings(model=dict(dropout=0.0), loss=dict(policy_loss="svg", optimist=True))
    noise = draw(silent, make_model(silent), jax.random.key(1))
    assert noise.dropout is noise.policy_dropout is noise.optimist_dropout is None


@pytest.mark.parametrize(("forward", "least"), [(False, 1.0), (True, 0.01)])
def test_distillation_is_the_kl_in_units_of_its_range(forward, least):
    own = dict(
        policy_loss="kl",
        kl_forward=forward,
        kl_scale_min=least,
        expert_std_scale=1.5,
        expert_min_std=0.3,
    )
    settings = make_settings(loss=own)
    rng = np.random.default_rng(0)
    mean, log_std = 0.05 * rng.normal(size=(2, T + 1, B, 2))
    expert = np.stack([0.1 * rng.normal(size=mean.shape), 0.1 + rng.random(mean.shape)], axis=-2)
    mask, valid = np.ones((T + 1, B)), np.ones((T + 1, B))
    mask[1, 2], valid[1, 3] = 0.0, 0.0
    inputs = PolicyInputs(
        None, jnp.asarray(mask), None, None, valid=jnp.asarray(valid), expert=jnp.asarray(expert)
    )
    scale = returns.RunningScale(jnp.float32(2.0))
    policy = (jnp.asarray(mean), jnp.asarray(log_std))
    ours, states, new = policies.distillation(settings, policy, inputs, scale)
    one = (np.tanh(mean), np.exp(log_std))
    two = (expert[..., 0, :], np.maximum(1.5 * expert[..., 1, :], 0.3))
    (m1, s1), (m2, s2) = (two, one) if forward else (one, two)
    kl = (np.log(s2 / s1) + (s1**2 + (m1 - m2) ** 2) / (2 * s2**2) - 0.5).mean(-1)
    low, high = np.percentile(kl[0], [5, 95])
    assert 0.01 < high - low < 1.0
    unit = 2.0 + 0.01 * (max(high - low, least) - 2.0)
    np.testing.assert_allclose(new.value, unit, rtol=1e-6)
    np.testing.assert_allclose(ours, kl[:-1] / unit, rtol=1e-4)
    np.testing.assert_array_equal(states, (mask * valid)[:-1])


def test_lambda_targets_follow_the_recursion_and_stop_at_episode_ends():
    settings = make_settings(loss=dict(value_target="lambda", lambda_=0.7, horizon=3))
    model = make_world_model(make_world(settings))
    params = model.init(jax.random.key(0))
    reward = jnp.arange(1.0, 7.0).reshape(3, 2)
    mask = jnp.array([[1.0, 1.0], [1.0, 1.0], [1.0, 0.0]])  # env 1 ends after its second step
    terminated = jnp.zeros((3, 2)).at[1, 1].set(1.0)
    values = jax.random.normal(jax.random.key(1), (4, 2, 2))
    weights = jnp.full((4, 2, 2), 0.5)
    valid = jnp.ones((4, 2), bool)
    batch = Batch(None, None, reward, terminated, mask, None, values, valid)
    noise = Noise(None, None, None, None)
    z = jnp.zeros((3, 2, 8))
    ours = value_targets.lambda_targets(
        settings, model, params, params["value"], z, batch, noise, weights
    )[0]
    v = np.asarray(values).mean(-1)[1:]
    expected = np.zeros((3, 2))
    expected[2, 0] = reward[2, 0] + 0.9 * v[2, 0]
    for t in (1, 0):
        expected[t, 0] = reward[t, 0] + 0.9 * (0.3 * v[t, 0] + 0.7 * expected[t + 1, 0])
    expected[1, 1] = reward[1, 1]
    expected[0, 1] = reward[0, 1] + 0.9 * (0.3 * v[0, 1] + 0.7 * expected[1, 1])
    np.testing.assert_allclose(ours[:, 0], expected[:, 0], rtol=1e-5)
    np.testing.assert_allclose(ours[:2, 1], expected[:2, 1], rtol=1e-5)


def test_termination_balance_weighs_both_kinds_alike():
    """One end and three other steps that count, one that does not: half of the weight each."""
    logit, mask = jnp.zeros((1, 1, 5)), jnp.array([[1.0, 1.0, 1.0, 1.0, 0.0]])
    terminated = jnp.array([[1.0, 0.0, 0.0, 0.0, 1.0]])
    grad = jax.jit(jax.grad(losses.termination_loss), static_argnums=3)
    for balance, (end, other) in {False: (1.0, 1.0), True: (2.0, 2.0 / 3.0)}.items():
        wanted = np.array([-end, other, other, other, 0.0]) * 0.5 / 4.0
        found = grad(logit, terminated, mask, balance)[0, 0]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    # Without any end steps weigh as they are.
    found = grad(logit, jnp.zeros((1, 5)), mask, True)[0, 0]
    np.testing.assert_allclose(found, [0.125] * 4 + [0.0], rtol=1e-6)


def test_initialisation_differs_from_head_to_head_and_last_layers_are_zero():
    model = make_world_model(make_world(variant("ensemble")))
    params = jax.jit(model.init)(jax.random.key(0))
    for name in ("dynamics", "reward", "value"):
        kernel = np.asarray(params[name]["main"]["layer_0"]["dense"]["kernel"])
        assert all(0.015 < head.std() < 0.025 for head in kernel)
        assert not np.array_equal(kernel[0], kernel[1])
        prior = np.asarray(params[name]["prior"]["layer_0"]["kernel"])
        fan = sum(prior.shape[1:])
        assert 0.7 < prior[0].std() / np.sqrt(2.0 / fan) < 1.3
    for name in ("reward", "value"):
        assert not np.asarray(params[name]["main"]["out"]["kernel"]).any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            dict(loss=dict(entropy_coef_end=0.0, entropy_schedule="exponential")),
            "entropy_coef_end=0 .*linear",
        ),
        (
            dict(loss=dict(entropy_coef=0.0, entropy_coef_end=0.1, entropy_schedule="exponential")),
            "entropy_coef=0 .*linear",
        ),
        (
            dict(loss=dict(policy_loss="kl"), training_planner=dict(enabled=False)),
            "training_planner.enabled",
        ),
        (
            dict(loss=dict(policy_loss="svg:1+kl:1"), model=dict(policy="squashed")),
            "Gaussian of actions.*choose 'tanh_mean'",
        ),
        (dict(loss=dict(aux_gammas=(1.5,))), "aux_gammas"),
        (dict(loss=dict(value_target="td", td_horizon=0)), "td_horizon=0"),
        (dict(loss=dict(head_strategy="all")), "head_strategy"),
        (dict(model=dict(num_dynamics=3)), "batch_size=128 is not divisible .*num_dynamics=3"),
        (dict(loss=dict(awr_effective_samples=8.0)), "8 planner actions"),
        (
            dict(
                loss=dict(awr_effective_samples=8.0),
                replay=dict(keep_targets=0),
                training_planner=dict(num_samples=8),
            ),
            "8 planner actions",
        ),
        (dict(loss=dict(awr_effective_samples=1.0)), "between 1 and that"),
        (dict(loss=dict(awr_effective_samples=2.0, advantage_scale="range")), "no effect"),
        (dict(loss=dict(entropy_scale="value")), "svg named first"),
        (dict(loss=dict(entropy_scale="value", policy_loss="awr:1+svg:1")), "svg named first"),
    ],
)
def test_impossible_settings_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        declared.from_dict(Settings(), values)


@pytest.mark.parametrize(
    ("sections", "spec", "message"),
    [
        (dict(loss=dict(value_reduction="local", num_heads=1)), SPEC, "num_heads=1"),
        (dict(model=dict(critic="q"), loss=dict(num_heads=3)), SPEC, "num_heads=3.*has 2"),
        ({}, SPEC._replace(discrete=True), "discrete actions"),
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
