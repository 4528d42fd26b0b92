"""Dreamer against whole training steps of the references: losses, gradients, moved parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import returns
from mbx.agents.dreamer import behaviour, rssm, types, update, world_model
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.optimizers import make_optimizers
from tests.agents import dreamer_helpers as ref
from tests.agents.dreamer_helpers import batch_major, make_settings
from tests.helpers import load_fixture

MODULES = {"enc": "encoder", "dyn": "rssm", "dec": "decoder", "rew": "reward", "con": "continue"}


@pytest.fixture(autouse=True)
def precise():
    with jax.default_matmul_precision("highest"):
        yield


def close(actual, expected, rtol=1e-3, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


def leaves(expected, actual):
    """((path, leaf), leaf) of two trees of one structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    flat = jax.tree_util.tree_leaves_with_path(expected)
    named = [(jax.tree_util.keystr(path), x) for path, x in flat]
    return zip(named, jax.tree.leaves(actual), strict=True)


# Official agent: one joint gradient


def official_case(name):
    x, n = load_fixture("dreamer", f"official_agent_{name}")
    discrete, image = n["actions"] == "discrete", "image" in x
    keys = ref.vector_keys(x)
    outputs = x["p/pol/head/action/" + ("logits" if discrete else "mean") + "/bias"].size
    own = dict(encoder_layers="enc_layers", decoder_layers="dec_layers", reward_layers="rew_layers")
    own |= dict(continue_layers="con_layers", policy_layers="pol_layers", value_layers="val_layers")
    own |= dict(prior_layers="imglayers", posterior_layers="obslayers", min_std="minstd")
    own |= dict(max_std="maxstd", decoder_blocks="bspace", num_bins="bins")
    same = ("deter", "hidden", "stoch", "classes", "blocks", "units", "depth", "unimix")
    net = ModelConfig(
        vector_dim=sum(np.prod(x[key].shape[2:], dtype=int) for key in keys),
        image_shape=x["image"].shape[2:] if image else None,
        action_dim=outputs,
        factors=(outputs,) if discrete else (),
        bins_space="raw",
        policy_unimix=0.0,
        **{name: n[theirs] for name, theirs in (own | dict(zip(same, same, strict=True))).items()},
    )
    scales = n["loss_scales"]
    config = make_settings(
        net,
        loss=dict(
            batch_size=n["B"],
            batch_length=n["T"],
            free_nats=n["free_nats"],
            dynamics_coef=scales["dyn"],
            representation_coef=scales["rep"],
            continue_discount=n["contdisc"],
            reward_gradient=n["reward_grad"],
            updates="joint",
        ),
        imagination=dict(
            horizon=n["H"], rows=n["imag_last"], continues="soft", first_continue="predicted"
        ),
        critic=dict(
            gamma=1.0 - 1.0 / n["horizon"],
            lambda_=n["lam"],
            regularizer=n["slowreg"],
            replay_coef=scales["repval"],
            replay_gradient=n["repval_grad"],
        ),
        actor=dict(entropy_coef=n["actent"], gradient="reinforce"),
    )
    return x, n, config, keys


def official_inputs(x, n, config, keys):
    """Batch, carry, noise and train state; dreams are reordered from [B K] to [K B]."""
    net, batch_size = config.model, n["B"]
    obs = {}
    if keys:
        parts = [x[key].reshape(*x[key].shape[:2], -1) for key in keys]
        obs["vector"] = batch_major(np.concatenate(parts, axis=-1).astype(np.float32))
    if net.image_shape is not None:
        obs["image"] = batch_major(x["image"])
    action = batch_major(x["prev_action"])
    first = batch_major(x["is_first"])
    if net.discrete:
        action = jax.nn.one_hot(action, net.action_dim)
    flags = (batch_major(x[name]) for name in ("is_last", "is_terminal"))
    batch = types.Batch(obs, action, batch_major(x["reward"]), first, *flags)
    carry = types.State(jnp.asarray(x["carry_h"]), jnp.asarray(x["carry_z"]))

    def dreams(y):
        y = jnp.asarray(y).reshape(batch_size, -1, *y.shape[1:])
        return jnp.moveaxis(y, 2, 0).swapaxes(1, 2).reshape(y.shape[2], -1, *y.shape[3:])

    chosen = dreams(x["draw_action"])
    if net.discrete:
        chosen = jax.nn.one_hot(chosen, net.action_dim)
    given = (batch_major(x["draw_z"]), dreams(x["draw_imag_z"]), chosen)
    noise = types.Noise(*map(types.Given, given))
    params = ref.official_params(ref.Official(x, "p/"), net, n)
    slow = ref.Official(x, "p/").head("slowval", n["val_layers"], "logits")
    ema = returns.ReturnEMA(jnp.float32(n["low0"]), jnp.float32(n["high0"]))
    solvers = make_optimizers(config.optimizer, net)
    solver_states = {name: solver.init(params[name]) for name, solver in solvers.items()}
    state = types.TrainState(params, slow, solver_states, ema, jnp.int32(0))
    return state, batch, carry, noise, dreams


@pytest.mark.parametrize("name", ["discrete", "continuous", "image", "options", "entropy"])
def test_official_agent(name):
    x, n, config, keys = official_case(name)
    state, batch, carry, noise, dreams = official_inputs(x, n, config, keys)

    def run(state):
        return update.step_gradients(config, state, batch, carry, noise)

    step = jax.jit(run)(state)
    grads, output, result = step.grads, step.output, step.result
    close(output.observed.states.deter.swapaxes(0, 1), x["h"], 1e-4)
    close(output.observed.posterior.swapaxes(0, 1), x["posterior_logits"], 1e-4)
    rows = {key: loss.T for key, loss in output.losses.items()}
    pairs = {"dynamics": "dyn", "representation": "rep", "reward": "rew", "continue": "con"}
    for ours, theirs in pairs.items():
        close(rows[ours], x[f"loss/{theirs}"], 1e-4)
    if keys:
        close(rows["vector"], sum(x[f"loss/{key}"] for key in keys), 1e-4)
    if "image" in rows:
        close(rows["image"], x["loss/image"], 1e-4)
    close(result.returns, dreams(x["imag_ret"]))
    close(result.losses["policy"], dreams(x["imag_policy_loss"]))
    close(result.losses["value"], dreams(x["imag_value_loss"]))
    close(result.losses["replay_value"].T, x["loss/repval"])
    close(result.ema.low, x["moments_low"])
    close(result.ema.high, x["moments_high"])
    close(update.total_loss(config, output.losses | result.losses), x["loss_total"])
    expected = ref.official_params(ref.Official(x, "g/"), config.model, n)
    for (path, want), have in leaves(expected, grads):
        limit = 1e-5 * max(1.0, float(np.max(np.abs(want))))
        np.testing.assert_allclose(have, want, rtol=2e-3, atol=limit, err_msg=path)


@pytest.mark.parametrize("name", ["discrete", "options"])
def test_gradients_flow_where_the_official_ones_do(name):
    """Norm of every single loss's gradient in every module; a zero there is an exact zero here."""
    x, n, config, keys = official_case(name)
    state, batch, carry, noise, _ = official_inputs(x, n, config, keys)

    def all_losses(params):
        output = world_model.model_losses(config, params["model"], batch, carry, noise.posterior)
        result = behaviour.behaviour_losses(
            config, params, state.slow_critic, output, batch, state.ema, noise
        )
        return jax.tree.map(jnp.mean, output.losses | result.losses)

    jacobian = jax.jit(jax.jacrev(all_losses))(state.params)
    ours = dict(dyn="dynamics", rep="representation", rew="reward", policy="policy", value="value")
    ours |= {"con": "continue", "repval": "replay_value"}
    vectors = [row for row, key in enumerate(n["loss_names"]) if key in keys]
    for row, key in enumerate(n["loss_names"]):
        if key not in ours and len(vectors) > 1:
            continue  # several vectors are one loss here
        grad = jacobian[ours.get(key, "vector")]
        for column, module in enumerate(n["module_names"]):
            tree = grad["actor"] if module == "pol" else grad["critic"]
            if module in MODULES:
                tree = grad["model"][MODULES[module]]
            norm = np.sqrt(sum(float(np.sum(np.square(g))) for g in jax.tree.leaves(tree)))
            want = float(x["grad_norm"][row, column])
            if want == 0.0:
                assert norm == 0.0, (key, module)
            else:
                np.testing.assert_allclose(norm, want, rtol=2e-3, err_msg=f"{key} {module}")


# sheeprl: world model, then actor and critic on dreams of the updated model


@pytest.mark.parametrize("name", ["discrete", "continuous", "warm_scale"])
def test_sheeprl_step(name):
    x, n = load_fixture("dreamer", f"sheeprl_train_step_{name}")
    dims, adam = tuple(n["action_dims"]), n["adam"]
    net = ModelConfig(
        vector_dim=n["obs"],
        action_dim=sum(dims),
        factors=() if n["continuous"] else dims,
        deter=n["Hd"],
        hidden=n["units"],
        units=n["units"],
        stoch=n["S"],
        classes=n["K"],
        **dict(core="dense", norm="layer", initial="learned", num_bins=n["bins"]),
        **{f"{part}_layers": 1 for part in ("prior", "encoder", "decoder", "policy", "value")},
        **{name: n["unimix"] for name in ("unimix", "policy_unimix")},
    )
    groups = [adam[key] for key in ("world_model", "actor", "critic")]
    config = make_settings(
        net,
        loss=dict(
            batch_size=n["B"],
            batch_length=n["T"],
            free_nats=n["free_nats"],
            dynamics_coef=n["kl_dynamic"],
            representation_coef=n["kl_representation"],
        ),
        imagination=dict(horizon=n["H"]),
        critic=dict(gamma=n["gamma"], lambda_=n["lmbda"], replay_loss="none"),
        actor=dict(
            entropy_coef=n["ent_coef"], gradient="reparam" if n["continuous"] else "reinforce"
        ),
        optimizer=dict(
            learning_rates=tuple(group["lr"] for group in groups),
            clips=tuple(group["clip"] for group in groups),
            epsilons=tuple(group["eps"] for group in groups),
        ),
    )
    params = ref.sheeprl_params(x, "p0", net)
    slow = ref.sheeprl_critic(ref.Sheeprl(x, "p0/target_critic/"), net.stoch * net.classes)
    solvers = make_optimizers(config.optimizer, config.model)
    state = types.TrainState(
        params,
        slow,
        {name: solver.init(params[name]) for name, solver in solvers.items()},
        returns.ReturnEMA(jnp.float32(n["low0"]), jnp.float32(n["high0"])),
        jnp.int32(0),
    )
    actions = jnp.asarray(x["actions"])
    rows = {key: jnp.asarray(x[key][..., 0]) for key in ("rewards", "is_first", "terminated")}
    batch = types.Batch(
        {"vector": jnp.asarray(x["vec"])},
        jnp.concatenate([jnp.zeros_like(actions[:1]), actions[:-1]]),
        rows["rewards"],
        (rows["is_first"] > 0).at[0].set(True),
        jnp.zeros(rows["rewards"].shape, bool),
        rows["terminated"] > 0,
    )
    if n["continuous"]:
        action = jnp.asarray(x["action_noise"])
    else:
        action = types.Given(jnp.asarray(x["imagined_actions"]))
    noise = types.Noise(
        types.Given(jnp.asarray(x["posterior_sample"])),
        types.Given(jnp.asarray(x["prior_sample_imagination"])),
        action,
    )

    def run(state):
        carry = rssm.initial(net, state.params["model"]["rssm"], (n["B"],))
        return update.step_gradients(config, state, batch, carry, noise)

    step = jax.jit(run)(state)
    for ours, theirs in (("reward", "reward"), ("continue", "continue"), ("vector", "observation")):
        close(jnp.mean(step.output.losses[ours]), x[f"loss_{theirs}"])
    close(step.output.metrics["kl"], x["kl_mean"])
    close(update.total_loss(config, step.output.losses), x["loss_world_model"])
    close(step.result.returns, x["lambda_values"][..., 0])
    close(jnp.mean(step.result.losses["policy"]), x["loss_policy"])
    close(jnp.mean(step.result.losses["value"]), x["loss_value"])
    close(step.result.ema.low, x["moments_low"])
    close(step.result.ema.high, x["moments_high"])
    expected = ref.sheeprl_params(x, "g", net)
    for ((path, want), have), moved, after in zip(
        leaves(expected, step.grads),
        jax.tree.leaves(step.params),
        jax.tree.leaves(ref.sheeprl_params(x, "p1", net)),
        strict=True,
    ):
        limit = 1e-5 + 1e-4 * float(np.max(np.abs(want), initial=0.0))
        np.testing.assert_allclose(have, want, rtol=1e-3, atol=limit, err_msg=path)
        clear = np.abs(want) > 1e-5
        close(np.asarray(moved)[clear], np.asarray(after)[clear], 0.0, 2e-6)
