"""The TD-MPC agent against the reference implementation's numbers (fixtures/tdmpc)."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import mppi, networks, returns
from mbx.agents.tdmpc import planning, policies, scoring, value_targets
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch, Noise
from mbx.agents.tdmpc.update import init_state, update_from_batch
from mbx.world_model import WorldModelConfig, config_for_size, head_values, make_world_model
from tests.agents.tdmpc_helpers import make_settings
from tests.helpers import compiled, load_fixture, program

FORWARD = dict(rtol=2e-4, atol=2e-5)
COMPONENTS = dict(
    encoder="encoder",
    dynamics="dynamics",
    reward="reward",
    pi="policy",
    termination="termination",
    q="value",
    target_q="target_value",
)


@pytest.fixture(autouse=True)
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


def torch_params(arrays: dict, prefix: str) -> dict:
    """A fixture's weights (PyTorch layout) as this project's parameter tree.

    The fixtures' single dynamics and reward networks become ensembles of one.
    """
    params: dict = {}
    for theirs, ours in COMPONENTS.items():
        layers = sorted({k.split(".")[2] for k in arrays if k.startswith(f"{prefix}.{theirs}.")})
        for i, layer in enumerate(layers):

            def get(name, layer=layer, theirs=theirs):
                return arrays[f"{prefix}.{theirs}.{layer}.{name}"]

            dense = dict(kernel=get("weight").swapaxes(-1, -2), bias=get("bias"))
            normed = f"{prefix}.{theirs}.{layer}.ln_scale" in arrays
            if normed:
                norm = dict(scale=get("ln_scale"), bias=get("ln_bias"))
                value = dict(dense=dense, norm=norm)
            else:
                value = dense
            name = "out" if i == len(layers) - 1 else f"layer_{i}"
            params.setdefault(ours, {})[name] = value
    for name in {"dynamics", "reward"} & set(params):
        params[name] = jax.tree.map(lambda x: x[None], params[name])
    return params


def world_config(config: dict, obs_dim: int) -> WorldModelConfig:
    return WorldModelConfig(
        obs_shape=(obs_dim,),
        action_dim=config["action_dim"],
        enc_dim=config["enc_dim"],
        mlp_dim=config["mlp_dim"],
        latent_dim=config["latent_dim"],
        num_enc_layers=config["num_enc_layers"],
        num_values=config["num_q"],
        simnorm_dim=config["simnorm_dim"],
        num_bins=config["num_bins"],
        bin_min=config["vmin"],
        bin_max=config["vmax"],
        critic="q",
        policy="squashed",
        episodic=config["episodic"],
        log_std_min=config["log_std_min"],
        log_std_max=config["log_std_max"],
        dropout=0.0,
    )


def load_world(name: str, prefix: str = "w"):
    arrays, config = load_fixture("tdmpc", name)
    params = torch_params(arrays, prefix)
    target = params.pop("target_value")
    obs_dim = arrays[f"{prefix}.encoder.0.weight"].shape[1]
    model = make_world_model(world_config(config, obs_dim))
    return arrays, config, compiled(model), params, target


@pytest.mark.parametrize("name", ["world_model_forward_0", "world_model_forward_episodic"])
def test_world_model_forward(name):
    a, config, model, params, target = load_world(name)
    z = model.encode(params, a["obs"])
    action = jnp.asarray(a["action"])
    np.testing.assert_allclose(z, a["z"], **FORWARD)
    np.testing.assert_allclose(model.step(params, z[None], action)[0], a["z_next"], **FORWARD)
    reward_logits = model.reward(params, z[None], action)[0, 0]
    decode = jax.jit(model.decode)
    np.testing.assert_allclose(reward_logits, a["reward_logits"], **FORWARD)
    np.testing.assert_allclose(decode(reward_logits), a["reward"][:, 0], **FORWARD)
    q_logits = model.value(params["value"], z, action)
    np.testing.assert_allclose(q_logits, a["q_logits"], **FORWARD)
    np.testing.assert_allclose(decode(q_logits), a["q_all"][..., 0], **FORWARD)

    @jax.jit
    def least(target, index):
        heads = networks.take_heads(target, index)
        return returns.reduce_heads(model.decode(model.value(heads, z, action)), "min", 0.0)

    q_min = least(target, a["q_target_min_idx"])
    np.testing.assert_allclose(q_min, a["q_target_min"][:, 0], **FORWARD)
    q_avg = program(head_values, model)(params["value"], z, action, a["q_avg_idx"]).mean(axis=0)
    np.testing.assert_allclose(q_avg, a["q_avg"][:, 0], **FORWARD)
    mean, log_std = model.policy(params, z)
    np.testing.assert_allclose(jnp.tanh(mean), a["pi_mean"], **FORWARD)
    np.testing.assert_allclose(log_std, a["pi_log_std"], **FORWARD)
    np.testing.assert_allclose(model.act(mean, log_std, a["pi_eps"]), a["pi_action"], **FORWARD)
    entropy = program(policies.policy_entropy, make_settings(), model)(mean, log_std, a["pi_eps"])
    np.testing.assert_allclose(entropy, a["pi_scaled_entropy"][:, 0], **FORWARD)
    if config["episodic"]:
        probability = jax.nn.sigmoid(model.termination(params, z))
        np.testing.assert_allclose(probability, a["termination_prob"][:, 0], **FORWARD)


def test_first_layer_shared_by_many_actions_is_the_same_layer():
    a, _, model, params, _ = load_world("world_model_forward_0")
    z = model.encode(params, a["obs"])
    actions = jnp.stack([a["action"], -a["action"], a["action"] * 0.5], axis=1)
    shared = model.step(params, z[None, :, None], actions)[0]
    for n in range(3):
        alone = model.step(params, z[None], actions[:, n])[0]
        np.testing.assert_allclose(shared[:, n], alone, **FORWARD)


def reference_settings(config: dict) -> Settings:
    """The fixtures' settings: TD-MPC2's."""
    return make_settings(
        planner=dict(horizon=config["horizon"], discount=0.0),
        loss=dict(
            discount=config["discount"],
            horizon=config["horizon"],
            batch_size=config["batch_size"],
            rho=config["rho"],
            consistency_coef=config["consistency_coef"],
            reward_coef=config["reward_coef"],
            value_coef=config["value_coef"],
            termination_coef=config["termination_coef"],
            num_heads=2,
            value_target="td",
            value_reduction="min",
            policy_loss="svg",
            entropy_coef=config["entropy_coef"],
            entropy_scale="none",
        ),
        optimizer=dict(
            learning_rate=config["lr"],
            policy_lr_scale=1.0,
            encoder_lr_scale=config["enc_lr_scale"],
            grad_clip_norm=config["grad_clip_norm"],
            tau=config["tau"],
        ),
    )


@pytest.mark.parametrize("name", ["td_target_0", "td_target_episodic"])
def test_td_target(name):
    a, config, model, params, target = load_world(name)
    batch = Batch(
        obs=None,
        action=None,
        reward=a["reward"][..., 0],
        terminated=a["terminated"][..., 0],
        mask=jnp.ones(a["reward"].shape[:2]),
    )
    noise = Noise(a["pi_eps"], a["q_idx"], None, None)
    settings = reference_settings(config)
    z = np.concatenate([a["next_z"][:1], a["next_z"]])  # the first state is not read

    @jax.jit
    def targets(*given):
        return value_targets.q_targets(value_targets.Inputs(settings, model, *given))

    y = targets(params, target, z, batch, noise).samples[..., 0]
    np.testing.assert_allclose(y[0], a["td_target"][..., 0], **FORWARD)


def estimate_value(config, model, params, z, actions, **drawn):
    settings = make_settings(loss=dict(discount=config["discount"], termination="hard"))
    estimate = functools.partial(scoring.estimate_value, planner=settings.planner)
    return program(estimate, settings, model)(params, z, actions, **drawn)


@pytest.mark.parametrize("name", ["estimate_value_0", "estimate_value_episodic"])
def test_estimate_value(name):
    a, config, model, params, _ = load_world(name)
    z = model.encode(params, a["obs"])
    np.testing.assert_allclose(z, a["z"], **FORWARD)
    actions = jnp.moveaxis(a["actions"], 0, 1)[None]  # [1, N, T, A]
    drawn = dict(eps=a["pi_eps"][None], heads=a["q_idx"])
    value = estimate_value(config, model, params, z, actions, **drawn)
    np.testing.assert_allclose(value[0], a["value"][:, 0], **FORWARD)


@pytest.mark.parametrize("name", ["plan_train", "plan_eval_episodic"])
@pytest.mark.parametrize("call", [0, 1])
def test_plan(name, call):
    a, config, model, params, _ = load_world(name)
    c = f"c{call}."
    z = model.encode(params, a[c + "obs"])
    proposals = planning.policy_trajectories(model, params, z, a[c + "pi_traj_eps"][:, None])
    sample_eps = jnp.moveaxis(a[c + "sample_eps"], 1, 2)[:, None]  # [I, 1, N-P, T, A]

    def score(i, actions):
        return estimate_value(
            config,
            model,
            params,
            z,
            actions,
            eps=jnp.asarray(a[c + "bootstrap_eps"])[i][None],
            heads=jnp.asarray(a[c + "q_idx"])[i],
        )

    action_eps = a.get(c + "action_eps", np.zeros(config["action_dim"], np.float32))
    draws = mppi.Draws(
        candidate=lambda i: sample_eps[i],
        score=lambda i: i,
        gumbel=-jnp.log(a[c + "exponential"])[None],
        action=action_eps[None],
    )
    first = call == 0 and (config["t0"] or "c0.prev_mean" not in a)
    previous = jnp.zeros_like(a[c + "prev_mean_after"]) if first else a["c0.prev_mean_after"]
    mean = mppi.warm_start(jnp.asarray(previous)[None], jnp.array([first]))
    std = jnp.full_like(mean, config["max_std"])
    settings = mppi.MPPIConfig(
        iterations=config["iterations"],
        num_samples=config["num_samples"],
        num_elites=config["num_elites"],
        temperature=config["temperature"],
        min_std=config["min_std"],
        max_std=config["max_std"],
        action_noise=0.0 if config["eval_mode"] else 1.0,
        nonfinite="reference",
    )
    tolerance = dict(rtol=1e-3, atol=1e-3)

    @jax.jit
    def one_round(i, mean, std):
        only = draws._replace(candidate=lambda _: sample_eps[i], score=lambda _: i)
        once = dataclasses.replace(settings, iterations=1)
        return mppi.plan_with_draws(only, score, mean, std, proposals=proposals, config=once)

    now = (mean, std)
    for i in range(config["iterations"]):  # errors grow over rounds: compare every one
        plan = one_round(i, *now)
        np.testing.assert_allclose(plan.values[0], a[f"{c}it{i}.value"][:, 0], **tolerance)
        np.testing.assert_allclose(plan.mean[0], a[f"{c}it{i}.mean"], **tolerance)
        np.testing.assert_allclose(plan.std[0], a[f"{c}it{i}.std"], **tolerance)
        now = (plan.mean, plan.std)
    whole = jax.jit(
        lambda mean, std: mppi.plan_with_draws(
            draws, score, mean, std, proposals=proposals, config=settings
        )
    )
    plan = whole(mean, std)
    np.testing.assert_allclose(plan.values[0], a[f"{c}it{i}.value"][:, 0], **tolerance)
    np.testing.assert_allclose(plan.std[0], a[f"{c}it{i}.std"], **tolerance)
    np.testing.assert_allclose(plan.action[0], a[c + "action"], **tolerance)
    np.testing.assert_allclose(plan.mean[0], a[c + "prev_mean_after"], **tolerance)


@pytest.mark.parametrize("name", ["update_step_0", "update_step_episodic"])
def test_update_step(name):
    a, config, model, params, target = load_world(name, "w0")
    settings = reference_settings(config)
    state = program(init_state, settings, model)(jax.random.key(0))
    state = state.replace(params=params, target_value=target)
    update = jax.jit(lambda s, b, d: update_from_batch(settings, model, s, b, d))
    names = dict(
        consistency_loss="loss/consistency",
        reward_loss="loss/reward",
        value_loss="loss/value",
        termination_loss="loss/termination",
        total_loss="loss/total",
        pi_loss="loss/policy",
        grad_norm="grad_norm/model",
        pi_grad_norm="grad_norm/policy",
        pi_scaled_entropy="policy/entropy",
        pi_scale="policy/scale",
    )
    steps = sorted({k.split(".")[0] for k in a if k.startswith("s") and "." in k})
    for s in steps:
        batch = Batch(
            obs=a[f"{s}.obs"],
            action=a[f"{s}.action"],
            reward=a[f"{s}.reward"][..., 0],
            terminated=a[f"{s}.terminated"][..., 0],
            mask=jnp.ones(a[f"{s}.reward"].shape[:2]),
        )
        noise = Noise(a[f"{s}.td_pi_eps"], a[f"{s}.td_q_idx"], a[f"{s}.pi_eps"], a[f"{s}.pi_q_idx"])
        state, metrics = update(state, batch, noise)
        metrics["policy/entropy"] *= batch.action.shape[-1]  # the reference's is A times as much
        for theirs, ours in names.items():
            if ours == "loss/termination" and not config["episodic"]:
                continue
            expected = a[f"{s}.out.{theirs}"]
            np.testing.assert_allclose(
                metrics[ours], expected, rtol=1e-3, atol=1e-6, err_msg=f"{s} {theirs}"
            )
    new = torch_params(a, "w1")
    new_target = new.pop("target_value")
    tolerance = dict(rtol=1e-3, atol=2e-4)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), state.params, new)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, **tolerance), state.target_value, new_target
    )


def test_param_counts():
    a, config = load_fixture("tdmpc", "param_counts")
    for (size, obs_dim, action_dim, task_dim), counts, total in zip(
        a["rows"], a["counts"], a["total"], strict=True
    ):
        if task_dim or str(size) not in ("1", "5", "19", "48", "317"):
            continue
        world = config_for_size(int(size), obs_shape=(int(obs_dim),), action_dim=int(action_dim))
        shapes = jax.eval_shape(make_world_model(world).init, jax.random.key(0))
        ours = [
            sum(int(np.prod(x.shape)) for x in jax.tree.leaves(shapes[n]))
            for n in ("encoder", "dynamics", "reward", "policy", "value")
        ]
        assert ours[:4] == list(counts[:4])
        assert ours[4] == counts[4] * counts[5]
        assert sum(ours) == total
