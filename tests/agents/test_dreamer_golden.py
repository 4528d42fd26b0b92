"""Dreamer against the references: losses from given head outputs, optimiser, replay context."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import categorical, returns
from mbx.agents.dreamer import behaviour, optimizers, policy, rssm, types, update, world_model
from mbx.agents.dreamer import encoders as observations
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.networks import ModelConfig
from tests.agents.dreamer_helpers import batch_major, change, make_settings
from tests.helpers import load_fixture


@pytest.fixture(autouse=True)
def precise():
    with jax.default_matmul_precision("highest"):
        yield


def close(actual, expected, rtol=1e-4, atol=1e-6):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


def squeeze(x):
    """Without the trailing singleton axis of the reference, as a jax array."""
    return jnp.asarray(x[..., 0])


# Heads


@pytest.mark.parametrize("name", ["0", "mix10", "nomix"])
def test_one_hot(name):
    x, numbers = load_fixture("dreamer", f"onehot_{name}")
    mix = numbers["unimix"]

    @jax.jit
    def compute(x):
        def mixed(logits):
            return rssm.mixed_logits(logits, mix)

        def log_prob(logits):
            return jnp.sum(mixed(logits) * x["onehot"], axis=(-2, -1))

        def entropy(logits):
            return jnp.sum(categorical.entropy(mixed(logits)), axis=-1)

        def sample(logits):
            one_hot = jnp.round(x["sample"])
            return jnp.sum(x["weight"] * rssm.straight_through(mixed(logits), one_hot))

        logits = x["logits"]
        return {
            "mixed_probs": jnp.exp(mixed(logits)),
            "log_prob": log_prob(logits),
            "entropy": entropy(logits),
            "mode": rssm.mode_one_hot(logits),
        } | {
            f"grad_{f.__name__}": jax.grad(lambda y, f=f: jnp.sum(f(y)))(logits)
            for f in (sample, entropy, log_prob)
        }

    ours = compute(x)
    close(ours["mixed_probs"], x["mixed_probs"], rtol=1e-5)
    close(ours["log_prob"], x["log_prob"], rtol=1e-5)
    close(ours["entropy"], x["entropy"], rtol=1e-5, atol=1e-5)
    close(ours["mode"], x["mode"])
    for key in ("sample", "entropy", "log_prob"):
        close(ours[f"grad_{key}"], x[f"grad_{key}"], rtol=1e-3)


def test_continue_head():
    x, _ = load_fixture("dreamer", "continue_0")
    config = make_settings(ModelConfig(vector_dim=1))
    logit, target = squeeze(x["logits"]), squeeze(x["targets"])
    close(behaviour.continue_value(config, logit), x["mode"][:, 0])
    soft = change(config, imagination=dict(continues="soft"))
    close(behaviour.continue_value(soft, logit), x["probs"][:, 0], rtol=1e-5)
    close(world_model.continue_loss(config, logit, 1.0 - target), -x["log_prob"], rtol=1e-5)


@pytest.mark.parametrize("name", ["0", "noclip"])
def test_continuous_policy(name):
    x, numbers = load_fixture("dreamer", f"actor_continuous_{name}")
    dims = x["noise"].shape[-1]
    net = ModelConfig(
        vector_dim=1,
        action_dim=dims,
        **{name: numbers[name] for name in ("init_std", "min_std", "max_std")},
    )

    @jax.jit
    def compute(x):
        out = x["pre"]

        def sample(out):
            return policy.bound(net, policy.sample(net, out, x["noise"]), numbers["action_clip"])

        mean, std = policy.mean_std(net, out)
        found = {
            "mean": mean,
            "std": std,
            "action": sample(out),
            "log_prob": policy.log_prob(net, out, x["action"]),
            "entropy": policy.entropy(net, out),
        }
        gradients = {
            "action": lambda y: jnp.sum(x["weight"] * sample(y)),
            "log_prob": lambda y: jnp.sum(policy.log_prob(net, y, x["action"])),
            "entropy": lambda y: jnp.sum(policy.entropy(net, y)),
        }
        return found, {key: jax.grad(function)(out) for key, function in gradients.items()}

    found, gradients = compute(x)
    for key, value in found.items():
        close(value, x[key], rtol=1e-5, atol=1e-5 if key == "log_prob" else 1e-6)
    for key, value in gradients.items():
        close(value, x[f"grad_{key}"], rtol=1e-4, atol=1e-5)


# World-model loss


@pytest.mark.parametrize("name", ["0", "no_free", "official_weights"])
def test_world_model_loss(name):
    x, numbers = load_fixture("dreamer", f"wm_loss_{name}")
    net = ModelConfig(vector_dim=7)
    config = make_settings(
        net,
        loss=dict(
            dynamics_coef=numbers["kl_dynamic"], representation_coef=numbers["kl_representation"]
        ),
    )

    @jax.jit
    def compute(x):
        image = jnp.moveaxis(x["img"], 2, -1)

        def total(prior, posterior):
            prior, posterior = jax.nn.log_softmax(prior), jax.nn.log_softmax(posterior)
            prediction = {"vector": x["vec_pred"], "image": jnp.moveaxis(x["img_pred"], 2, -1)}
            obs = {"vector": x["vec"], "image": image * net.image_scale}
            rows = observations.reconstruction_loss(net, prediction, obs)
            seen = dict(rows)
            rows["reward"] = nets.two_hot_loss(net, x["reward_logits"], squeeze(x["reward"]))
            terminated = 1.0 - squeeze(x["continue_target"])
            logit = squeeze(x["continue_logits"])
            rows["continue"] = world_model.continue_loss(config, logit, terminated)
            rows["dynamics"], rows["representation"], kl = rssm.kl_losses(
                posterior, prior, numbers["free_nats"]
            )
            return world_model.scaled_sum(config, rows), (rows, kl, seen)

        logits = x["prior_logits"], x["posterior_logits"]
        (loss, (rows, kl, seen)), grads = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(
            *logits
        )
        return {
            "loss": loss,
            "kl": kl,
            "observation_loss": jnp.mean(sum(seen.values())),
            "reward_loss": jnp.mean(rows["reward"]),
            "continue_loss": jnp.mean(rows["continue"]),
            "kl_loss": world_model.scaled_sum(
                config, {name: rows[name] for name in ("dynamics", "representation")}
            ),
        }, {"grad_prior": grads[0], "grad_posterior": grads[1]}

    found, gradients = compute(x)
    for key, value in found.items():
        close(value, x[key])
    for key, value in gradients.items():
        close(value, x[key], rtol=1e-3)


# Behaviour from given head outputs


@pytest.mark.parametrize(
    "name", ["discrete_0", "continuous_0", "cont_terminal", "multidiscrete", "warm_ema"]
)
def test_behaviour(name):
    x, n = load_fixture("dreamer", f"behaviour_{name}")
    continuous = "policy_out" in x
    if continuous:
        net = ModelConfig(
            vector_dim=1, action_dim=x["policy_out"].shape[-1] // 2, num_bins=n["bins"]
        )
    else:
        parts = [x[f"policy_logits_{i}"] for i in range(4) if f"policy_logits_{i}" in x]
        factors = tuple(part.shape[-1] for part in parts)
        net = ModelConfig(
            vector_dim=1,
            action_dim=sum(factors),
            factors=factors,
            num_bins=n["bins"],
            policy_unimix=n["unimix"],
        )
        x["policy_out"] = np.concatenate(parts, axis=-1)
        x["actions"] = np.concatenate([x[f"action_{i}"] for i in range(len(factors))], axis=-1)
    moments = n["moments"]
    config = make_settings(
        net,
        critic=dict(gamma=n["gamma"], lambda_=n["lmbda"]),
        actor=dict(
            entropy_coef=n["ent_coef"],
            gradient="reparam" if continuous else "reinforce",
            return_limit=1.0 / moments["max"],
            return_decay=moments["decay"],
        ),
    )

    @jax.jit
    def compute(x):
        out, logits = x["policy_out"], x["value_logits"]
        actions = x.get("actions", jnp.zeros((*out.shape[:-1], net.action_dim)))
        ema = returns.ReturnEMA(jnp.float32(moments["low0"]), jnp.float32(moments["high0"]))
        rewards = nets.two_hot_mean(net, x["reward_logits"])
        values = nets.two_hot_mean(net, logits)
        slow = nets.two_hot_mean(net, x["target_value_logits"])
        continues = behaviour.continue_value(config, squeeze(x["continue_logits"]))
        continues = jnp.concatenate([squeeze(x["true_continue"]), continues[1:]])

        def run(out, rewards, values, logits):
            return behaviour.imagined_losses(
                config, out, actions, rewards, continues, values, logits, slow, ema
            )

        result = run(out, rewards, values, logits)
        main, regulariser = behaviour.critic_terms(config, logits[:-1], result.returns, slow[:-1])
        actor = jax.grad(lambda *args: jnp.mean(run(*args).actor), argnums=(0, 1, 2, 3))
        critic = jax.grad(lambda y: jnp.mean(run(out, rewards, values, y).critic))
        return {
            "rewards": rewards,
            "values": values,
            "continues": continues,
            "lambda_values": result.returns,
            "offset": result.ema.low,
            "invscale": result.metrics["ema_invscale"],
            "policy_loss": jnp.mean(result.actor),
            "value_loss": jnp.mean(result.critic),
            "value_loss_main": main,
            "value_loss_reg": regulariser,
            "entropy": policy.entropy(net, out),
            "grad_actor": actor(out, rewards, values, logits),
            "grad_value_logits": critic(logits),
        }

    ours = compute(x)
    close(ours["rewards"][1:], x["rewards"][1:, :, 0])
    for key in ("values", "continues", "lambda_values"):
        close(ours[key], x[key][..., 0])
    for key in ("offset", "invscale", "policy_loss", "value_loss"):
        close(ours[key], x[key])
    for key in ("value_loss_main", "value_loss_reg"):
        close(ours[key], x[key])
    close(ours["entropy"], x["entropy"], atol=1e-5)
    grads = ours["grad_actor"]
    if continuous:
        # The reference takes actions as leaves: rewards and values do not depend on them there.
        close(grads[0], x["grad_policy_0"], rtol=1e-3)
        close(grads[1], x["grad_rewards"][..., 0], rtol=1e-3)
        close(grads[2], x["grad_values"][..., 0], rtol=1e-3)
    else:
        expected = [x[f"grad_policy_{i}"] for i in range(len(net.factors))]
        close(grads[0], np.concatenate(expected, axis=-1), rtol=1e-3)
    assert not np.any(np.asarray(grads[3]))  # nothing of the actor's loss in the critic
    close(ours["grad_value_logits"], x["grad_value_logits"], rtol=1e-3)


@pytest.mark.parametrize("name", ["discrete", "continuous", "nocontdisc"])
def test_official_dreams(name):
    x, n = load_fixture("dreamer", f"official_imag_{name}")
    out = batch_major(x["policy_out"]) if "policy_out" in x else None
    if out is None:
        out = jnp.concatenate([batch_major(x[k]) for k in ("policy_mean", "policy_std")], axis=-1)
    if x["action"].ndim == 2:
        num = out.shape[-1]
        net = ModelConfig(
            vector_dim=1, action_dim=num, factors=(num,), policy_unimix=0.0, bins_space="raw"
        )
        actions = jax.nn.one_hot(batch_major(x["action"]), num)
    else:
        net = ModelConfig(vector_dim=1, action_dim=out.shape[-1] // 2, bins_space="raw")
        actions = batch_major(x["action"])
    config = make_settings(
        net,
        imagination=dict(continues="soft", first_continue="predicted"),
        loss=dict(continue_discount=n["contdisc"]),
        critic=dict(lambda_=n["lam"]),
        actor=dict(entropy_coef=n["actent"], gradient="reinforce"),
    )
    np.testing.assert_allclose(nets.value_bins(net), x["bins"], rtol=1e-6)

    @jax.jit
    def compute(x, out, actions):
        ema = returns.ReturnEMA(jnp.float32(n["low0"]), jnp.float32(n["high0"]))
        logits = batch_major(x["value_logits"])
        slow = nets.two_hot_mean(net, batch_major(x["slow_value_logits"]))
        rewards, continues = batch_major(x["rew"]), batch_major(x["con"])

        def run(out, logits):
            values = jax.lax.stop_gradient(nets.two_hot_mean(net, logits))
            return behaviour.imagined_losses(
                config, out, actions, rewards, continues, values, logits, slow, ema
            )

        def total(out, logits):
            result = run(out, logits)
            return jnp.mean(result.actor) + jnp.mean(result.critic)

        result = run(out, logits)
        grads = jax.grad(total, argnums=(0, 1))(out, logits)
        return {
            "values": nets.two_hot_mean(net, logits).T,
            "slow_values": slow.T,
            "ret": result.returns.T,
            "low": result.ema.low,
            "high": result.ema.high,
            "policy_loss": result.actor.T,
            "value_loss": result.critic.T,
        }, {
            "grad_policy_out": grads[0].swapaxes(0, 1),
            "grad_value_logits": grads[1].swapaxes(0, 1),
        }

    found, gradients = compute(x, out, actions)
    for key, value in found.items():
        close(value, x[key])
    for key, value in gradients.items():
        close(value, x[key], rtol=1e-3)


# Critic on replay rows


def replay_batch(reward, terminated, last):
    return types.Batch(
        obs={},
        action=None,
        reward=reward,
        is_first=np.zeros(np.shape(reward), bool),
        is_last=np.asarray(last) > 0,
        terminated=np.asarray(terminated) > 0,
    )


@pytest.mark.parametrize("name", ["0", "constant", "no_end", "trunc"])
def test_replay_critic(name):
    x, n = load_fixture("dreamer", f"replay_{name}")
    net = ModelConfig(vector_dim=1, num_bins=x["value_logits"].shape[-1])
    config = make_settings(
        net, critic=dict(gamma=n["gamma"], lambda_=n["lmbda"], regularizer=n["regulariser"])
    )
    np.testing.assert_array_equal(x["annotations"][-1], x["bootstrap"])
    batch = replay_batch(x["rewards"], x["terminated"], x["last"])

    def loss(logits, x, batch):
        slow = nets.two_hot_mean(net, x["slow_value_logits"])
        return jnp.mean(behaviour.replay_critic(config, logits, slow, x["annotations"], batch))

    value, grad = jax.jit(jax.value_and_grad(loss))(x["value_logits"], x, batch)
    close(value, x["replay_loss"])
    close(grad, x["grad_value_logits"], rtol=1e-3)


@pytest.mark.parametrize("name", ["0", "ends"])
def test_official_replay_critic(name):
    x, n = load_fixture("dreamer", f"official_replay_{name}")
    config = make_settings(
        ModelConfig(vector_dim=1, bins_space="raw"),
        critic=dict(lambda_=n["lam"], gamma=1.0 - 1.0 / n["horizon"], regularizer=n["slowreg"]),
    )
    batch = replay_batch(*(batch_major(x[name]) for name in ("rew", "term", "last")))

    def loss(logits, slow_logits, boot, batch):
        slow = nets.two_hot_mean(config.model, slow_logits)
        rows = behaviour.replay_critic(config, logits, slow, boot, batch)
        return jnp.mean(rows), rows

    names = ("value_logits", "slow_value_logits", "boot")
    (value, rows), grad = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        *(batch_major(x[name]) for name in names), batch
    )
    close(rows.T, x["loss_per_step"])
    close(value, x["loss"])
    close(grad.swapaxes(0, 1), x["grad_value_logits"], rtol=1e-3)


# Optimiser, replay context


def test_official_optimizer():
    x, n = load_fixture("dreamer", "official_optimizer_0")
    solver = optimizers.make("laprop", n["lr"], clip=n["agc"], eps=n["eps"], warmup=n["warmup"])
    params = {name: jnp.asarray(x[f"p0_{name}"]) for name in "abc"}
    state, update = solver.init(params), jax.jit(solver.update)
    for i in range(x["grad_a"].shape[0]):
        grads = {name: jnp.asarray(x[f"grad_{name}"][i]) for name in "abc"}
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        for name in "abc":
            close(updates[name], x[f"update_{name}"][i], atol=1e-12)
            close(params[name], x[f"param_{name}"][i])


@pytest.mark.parametrize("name", ["0", "continuous"])
def test_official_context(name):
    """First chunk of a sequence: stored latents of the context row, its action as the previous."""
    x, n = load_fixture("dreamer", f"official_context_{name}")
    deter, stoch = x["data_dyn_deter"], x["data_dyn_stoch"]
    fresh = x["data_consec"][:, 0] == 0  # later chunks: test_official_chunks_of_a_sequence
    net = ModelConfig(
        vector_dim=3,
        action_dim=2,
        deter=deter.shape[-1],
        stoch=stoch.shape[-2],
        classes=stoch.shape[-1],
    )
    config = make_settings(net, replay=dict(context=True))
    rows = {
        "obs": batch_major(x["data_vec"]),
        "action": batch_major(x["data_action"]),
        "reward": batch_major(x["data_reward"]),
        "is_first": batch_major(x["data_is_first"]),
        "is_last": batch_major(x["data_is_last"]),
        "terminated": batch_major(x["data_is_terminal"]),
        "deter": batch_major(deter),
        "stoch": batch_major(np.argmax(stoch, axis=-1)),
    }
    batch, carry = update.make_batch(config, rows)
    assert fresh.any()
    close(carry.deter[fresh], x["carry_h"][fresh])
    if np.all(np.isin(stoch, (0.0, 1.0))):
        close(carry.stoch[fresh], x["carry_z"][fresh])
    for field, key in (
        (batch.action, "prev_action"),
        (batch.is_first, "obs_is_first"),
        (batch.is_last, "obs_is_last"),
        (batch.terminated, "obs_is_terminal"),
        (batch.reward, "obs_reward"),
        (batch.obs["vector"], "obs_vec"),
    ):
        close(np.swapaxes(np.asarray(field), 0, 1)[fresh], x[key][fresh])


def test_official_chunks_of_a_sequence():
    """Later chunks go on from the state and the action that the chunk before them ended with."""
    x, _ = load_fixture("dreamer", "official_context_0")
    later = x["data_consec"][:, 0] > 0
    chunk, deter = x["data_vec"].shape[1] - 1, x["data_dyn_deter"].shape[-1]
    config = make_settings(
        ModelConfig(vector_dim=3, action_dim=1, deter=deter, stoch=3, classes=4, blocks=1),
        replay=dict(context=True),
        loss=dict(batch_length=chunk, parts=2),
    )

    def both(name):
        """A chunk of other rows, then the fixture's, whose first row ends the chunk before."""
        data = x[f"data_{name}"][later]
        return batch_major(np.concatenate([np.zeros_like(data[:, 1:]), data], axis=1))

    rows = {name: both(name) for name in ("reward", "is_first", "is_last", "action")} | {
        "obs": both("vec"),
        "terminated": both("is_terminal"),
        "deter": both("dyn_deter"),
        "stoch": np.argmax(both("dyn_stoch"), axis=-1),
    }
    batch, _ = update.make_batch(config, rows)
    for field, key in (
        (batch.action, "prev_action"),
        (batch.is_first, "obs_is_first"),
        (batch.is_last, "obs_is_last"),
        (batch.terminated, "obs_is_terminal"),
        (batch.reward, "obs_reward"),
        (batch.obs["vector"], "obs_vec"),
    ):
        close(np.swapaxes(np.asarray(field)[chunk:], 0, 1), x[key][later])
    close(x["carry_h"][later], x["running_h"][later])  # as tests of `loss.parts` have it here
