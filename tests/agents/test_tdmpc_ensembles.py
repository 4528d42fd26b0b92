"""Ensembles, priors, distillation and schedules, with BMPC's and NEWT's fixtures."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import distributions as dist
from mbx import networks, returns
from mbx.agents.tdmpc import losses, planning, policies, scoring, value_targets
from mbx.agents.tdmpc.loss_settings import parse_mixture
from mbx.agents.tdmpc.types import Batch, Noise, PolicyInputs, Scales
from mbx.agents.tdmpc.update import init_state
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import make_model, make_settings, policy_loss, replaced, weighed
from tests.agents.test_tdmpc_golden import torch_params
from tests.helpers import compiled, load_fixture, program

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
    estimate = functools.partial(scoring.trajectory_estimate, std_coef=coef, aggregate=aggregate)
    scores, stds = jax.jit(estimate)(
        list(rewards), list(values) if aggregate else [jnp.asarray(a["value_heads_T"])], alive
    )
    key = f"{'agg' if aggregate else 'single'}.coef{coef:+.1f}"
    value = returns.reduce_heads(scores, "from_std_coef", coef)
    np.testing.assert_allclose(value, a[f"{key}.value"], **SINGLE)
    np.testing.assert_allclose(stds.mean(0), a[f"{key}.std"], **SINGLE)
    disagreement = returns.ensemble_std(scores)
    np.testing.assert_allclose(disagreement, a[f"{key}.head_disagreement"], **SINGLE)
    if name == "seed_scoring_single_heads":
        return  # one head agrees with itself
    spread = scoring.latent_disagreement(jnp.asarray(a["latents"])[:, :, :, -1])
    np.testing.assert_allclose(spread, a["latent_disagreement"], **SINGLE)
    if aggregate and coef == 1.0:
        total = value + 0.7 * spread
        np.testing.assert_allclose(total, a["score_lambda0.7"], **SINGLE)


@pytest.mark.parametrize("name", ["seed_wm_losses_0", "seed_wm_losses_1"])
def test_model_losses_over_heads(name):
    a, config = load_fixture("tdmpc", name)
    zs = jnp.moveaxis(jnp.asarray(a["z_roll"]), 2, 0)[1:]  # [T, H, B, L]
    z = jnp.asarray(a["z_true"])[1:]
    shape = a["reward"].shape[:2]
    bins = dist.bins(config["vmin"], config["vmax"], config["num_bins"])
    rows = weighed(*shape, rho=config["rho"])
    per_step = jnp.mean(losses.consistency(zs, z), axis=1)
    np.testing.assert_allclose(per_step, a["consistency_per_t"], **SINGLE)
    consistency = rows.mean(losses.consistency(zs, z))
    np.testing.assert_allclose(consistency, a["consistency_loss"], **SINGLE)
    reward = jax.jit(losses.reward_loss)(a["reward_logits"], a["reward"][..., 0], bins)
    reward = rows.mean(reward)
    np.testing.assert_allclose(reward, a["reward_loss"], **SINGLE)
    total = dict(consistency=consistency, encoder_consistency=consistency, reward=reward)
    if config["episodic"]:
        logit = jnp.moveaxis(jnp.asarray(a["term_logits"])[..., 0], 0, 1)
        total["termination"] = losses.termination_loss(logit, a["terminated"][..., 0], rows)
        np.testing.assert_allclose(total["termination"], a["termination_loss"], **SINGLE)
    names = ("consistency", "encoder_consistency", "reward", "termination")
    coefficients = {f"{name}_coef": config[f"{name}_coef"] for name in names}
    settings = make_settings(loss=coefficients)
    np.testing.assert_allclose(losses.total_loss(settings, total), a["total"], **SINGLE)


def test_consistency_gradients_go_where_they_should():
    settings = make_settings(loss=dict(encoder_consistency_coef=1.0))
    rows = weighed(2, 4)
    zs, encoded = jnp.full((2, 1, 4, 8), 0.3), jnp.full((2, 4, 8), 0.7)

    def loss(zs, encoded, name):
        return losses.consistency_losses(settings, zs, encoded, rows, 0.0)[name]

    for name, own in (("consistency", 0), ("encoder_consistency", 1)):
        grads = jax.grad(loss, argnums=(0, 1))(zs, encoded, name)
        assert np.abs(grads[own]).sum() > 0 and np.abs(grads[1 - own]).sum() == 0
    late = replaced(settings, loss=dict(encoder_consistency_warmup=0.5))
    at = [
        losses.consistency_losses(late, zs, encoded, rows, p)["encoder_consistency"]
        for p in (0.4, 0.5)
    ]
    assert float(at[0]) == 0.0 and at[1] == loss(zs, encoded, "consistency") > 0.0


def test_head_strategies():
    a, _ = load_fixture("tdmpc", "seed_head_strategy_0")
    np.testing.assert_array_equal(losses.select_latents(jnp.asarray(a["z"])), a["split"])
    # The other two, which the agent does not have.
    np.testing.assert_array_equal(a["z"][:, 0], a["single"])
    np.testing.assert_array_equal(np.concatenate(a["z"].swapaxes(0, 1), axis=1), a["concat"])


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
        prior = jax.jit(module.apply)({"params": prior_params(a, form)}, jnp.asarray(a["x"]))
        np.testing.assert_allclose(prior, a[f"{form}.prior"], **FORWARD)
    shift = jax.jit(dist.shift_logits)
    # Logarithms of masses near 1e-8 blow rounding up: compare the masses, and logits above them.
    moved = [
        (shift(a["dist.main"], bins, a["dist.prior"][:, 0]), a["dist.out"]),
        (shift(a["ss.logits"], bins, a["ss.shift"][:, 0]), a["ss.shifted"]),
        (shift(a["ss.logits"], bins, 0.0, a["ss.scale"][:, 0]), a["ss.scaled"]),
        (shift(a["ss.logits"], bins, a["ss.shift"][:, 0], a["ss.scale"][:, 0]), a["ss.both"]),
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
    state = program(init_state, settings, model)(jax.random.key(0))
    state = state.replace(params=params, target_value=target)
    make = program(value_targets.value_targets, settings, model)
    made, _ = make(state, z, batch, noise, None)
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
    entropy = program(policies.policy_entropy, settings, model)(mean, log_std, a["pi.eps"])
    np.testing.assert_allclose(entropy, a["pi.scaled_entropy"][..., 0], **FORWARD)


@pytest.mark.parametrize("name", ["bmpc_0", "bmpc_td3_expl"])
def test_bmpc_distillation_step(name):
    a, c, settings, model, params, _ = bmpc(name)
    expert = jnp.asarray(a["expert_dist"]).reshape(3, 5, 2, 2)
    expert = jnp.concatenate([expert, expert[-1:]])
    eps = jnp.concatenate([a["kl.pi_eps"], np.zeros_like(a["kl.pi_eps"][-1:])])
    inputs = PolicyInputs(
        jnp.asarray(a["z"]),
        weighed(4, 5, rho=settings.loss.time_weight),
        jnp.asarray(eps),
        None,
        plans=weighed(4, 5, rho=settings.loss.time_weight),
        expert=expert,
    )
    fresh = returns.init_running_scale()
    scales = Scales(None, fresh, fresh, None)

    def loss(policy):
        return policy_loss(settings, model, policy, params, None, inputs, scales)

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, (scales, _)), grads = step(params["policy"])
    close = dict(rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(value, a["kl.pi_loss"], **close)
    np.testing.assert_allclose(scales.kl_scale.value, a["kl.scale_after"][0], **close)
    np.testing.assert_allclose(optax.tree.norm(grads), a["kl.pi_grad_norm"], **close)
    adam = optax.chain(optax.clip_by_global_norm(20.0), optax.adam(c["lr"], eps=1e-5))

    @jax.jit
    def apply(policy, grads):
        updates, _ = adam.update(grads, adam.init(policy))
        return optax.apply_updates(policy, updates)

    new = apply(params["policy"], grads)
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
