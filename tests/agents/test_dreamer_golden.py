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

    @jax.jit
    def compute(x):
        def mixed(logits):
            return rssm.mixed_logits(logits, numbers["unimix"])

        def sample(logits):
            one_hot = jnp.round(x["sample"])
            return jnp.sum(x["weight"] * rssm.straight_through(mixed(logits), one_hot))

        functions = {
            "log_prob": lambda y: jnp.sum(mixed(y) * x["onehot"], axis=(-2, -1)),
            "entropy": lambda y: jnp.sum(categorical.entropy(mixed(y)), axis=-1),
        }
        logits = x["logits"]
        found = {name: f(logits) for name, f in functions.items()}
        for name, f in (functions | {"sample": sample}).items():
            found[f"grad_{name}"] = jax.grad(lambda y, f=f: jnp.sum(f(y)))(logits)
        probs, mode = jnp.exp(mixed(logits)), rssm.mode_one_hot(logits)
        return found | {"mixed_probs": probs, "mode": mode}

    tolerances = {"mode": 1e-4, "mixed_probs": 1e-5, "log_prob": 1e-5, "entropy": 1e-5}
    for key, found in compute(x).items():
        close(found, x[key], tolerances.get(key, 1e-3), 1e-5 if key == "entropy" else 1e-6)


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
    own = {name: numbers[name] for name in ("init_std", "min_std", "max_std")}
    net = ModelConfig(vector_dim=1, action_dim=x["noise"].shape[-1], **own)

    @jax.jit
    def compute(x):
        out = x["pre"]

        def sample(out):
            return policy.bound(net, policy.sample(net, out, x["noise"]), numbers["action_clip"])

        mean, std = policy.mean_std(net, out)
        found = {
            "mean": mean,
            "mode": policy.mode(net, out),
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
    x["mode"] = x["mean"]
    for key, value in found.items():
        close(value, x[key], rtol=1e-5, atol=1e-5 if key == "log_prob" else 1e-6)
    for key, value in gradients.items():
        close(value, x[f"grad_{key}"], rtol=1e-4, atol=1e-5)


# World-model loss


@pytest.mark.parametrize("name", ["0", "no_free", "official_weights"])
def test_world_model_loss(name):
    x, numbers = load_fixture("dreamer", f"wm_loss_{name}")
    net, dynamic = ModelConfig(vector_dim=7), numbers["kl_dynamic"]
    coefs = dict(dynamics_coef=dynamic, representation_coef=numbers["kl_representation"])
    config = make_settings(net, loss=coefs)

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
            return update.total_loss(config, rows), (rows, kl, seen)

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
            "kl_loss": update.total_loss(
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
    own = dict(vector_dim=1, num_bins=n["bins"])
    if continuous:
        net = ModelConfig(action_dim=x["policy_out"].shape[-1] // 2, **own)
    else:
        parts = [x[f"policy_logits_{i}"] for i in range(4) if f"policy_logits_{i}" in x]
        factors = tuple(part.shape[-1] for part in parts)
        own |= dict(factors=factors, policy_unimix=n["unimix"])
        net = ModelConfig(action_dim=sum(factors), **own)
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
            imagined = types.Imagined(None, actions, rewards, continues)
            return behaviour.imagined_losses(config, imagined, out, values, logits, slow, ema)

        result = run(out, rewards, values, logits)
        main, regulariser = behaviour.critic_terms(config, logits[:-1], result.returns, slow[:-1])
        actor = jax.grad(lambda *args: jnp.mean(run(*args).losses["policy"]), argnums=(0, 1, 2, 3))
        critic = jax.grad(lambda y: jnp.mean(run(out, rewards, values, y).losses["value"]))
        return {
            "rewards": rewards,
            "values": values,
            "continues": continues,
            "lambda_values": result.returns,
            "offset": result.ema.low,
            "invscale": result.metrics["ema_invscale"],
            "policy_loss": jnp.mean(result.losses["policy"]),
            "value_loss": jnp.mean(result.losses["value"]),
            "value_loss_main": main,
            "value_loss_reg": regulariser,
            "entropy": policy.entropy(net, out),
            "grad_actor": actor(out, rewards, values, logits),
            "grad_value_logits": critic(logits),
        }

    ours = compute(x)
    grads, by_logits = ours.pop("grad_actor"), ours.pop("grad_value_logits")
    ours["rewards"], x["rewards"] = ours["rewards"][1:], x["rewards"][1:]
    for key, found in ours.items():
        one = (
            x[key][..., 0] if key in ("rewards", "values", "continues", "lambda_values") else x[key]
        )
        close(found, one, atol=1e-5 if key == "entropy" else 1e-6)
    if continuous:
        # The reference takes actions as leaves: rewards and values do not depend on them there.
        close(grads[0], x["grad_policy_0"], rtol=1e-3)
        close(grads[1], x["grad_rewards"][..., 0], rtol=1e-3)
        close(grads[2], x["grad_values"][..., 0], rtol=1e-3)
    else:
        expected = [x[f"grad_policy_{i}"] for i in range(len(net.factors))]
        close(grads[0], np.concatenate(expected, axis=-1), rtol=1e-3)
    assert not np.any(np.asarray(grads[3]))  # nothing of the actor's loss in the critic
    close(by_logits, x["grad_value_logits"], rtol=1e-3)


@pytest.mark.parametrize("name", ["discrete", "continuous", "nocontdisc"])
def test_official_dreams(name):
    x, n = load_fixture("dreamer", f"official_imag_{name}")
    out = batch_major(x["policy_out"]) if "policy_out" in x else None
    if out is None:
        out = jnp.concatenate([batch_major(x[k]) for k in ("policy_mean", "policy_std")], axis=-1)
    actions, own = batch_major(x["action"]), dict(vector_dim=1, bins_space="raw")
    if actions.ndim == 2:
        num = out.shape[-1]
        net = ModelConfig(action_dim=num, factors=(num,), policy_unimix=0.0, **own)
        actions = jax.nn.one_hot(actions, num)
    else:
        net = ModelConfig(action_dim=out.shape[-1] // 2, **own)
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
            imagined = types.Imagined(None, actions, rewards, continues)
            return behaviour.imagined_losses(config, imagined, out, values, logits, slow, ema)

        def total(out, logits):
            result = run(out, logits)
            return jnp.mean(result.losses["policy"]) + jnp.mean(result.losses["value"])

        result = run(out, logits)
        grads = jax.grad(total, argnums=(0, 1))(out, logits)
        return {
            "values": nets.two_hot_mean(net, logits).T,
            "slow_values": slow.T,
            "ret": result.returns.T,
            "low": result.ema.low,
            "high": result.ema.high,
            "policy_loss": result.losses["policy"].T,
            "value_loss": result.losses["value"].T,
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


def same_batch(batch, x, rows, ours=None):
    """A batch is that of the fixture in its `rows`, which are `ours` here."""
    fields = (batch.action, batch.is_first, batch.is_last, batch.terminated, batch.reward)
    names = ("prev_action", "obs_is_first", "obs_is_last", "obs_is_terminal", "obs_reward")
    pairs = dict(zip(names, fields, strict=True)) | {"obs_vec": batch.obs["vector"]}
    for key, field in pairs.items():
        close(np.swapaxes(field, 0, 1)[rows if ours is None else ours], x[key][rows])


@pytest.mark.parametrize("name", ["0", "continuous"])
def test_official_context(name):
    """First chunk of a sequence: stored latents of the context row, its action as the previous."""
    x, n = load_fixture("dreamer", f"official_context_{name}")
    deter, stoch = x["data_dyn_deter"], x["data_dyn_stoch"]
    fresh = x["data_consec"][:, 0] == 0  # later chunks: test_official_chunks_of_a_sequence
    sizes = dict(deter=deter.shape[-1], stoch=stoch.shape[-2], classes=stoch.shape[-1])
    net = ModelConfig(vector_dim=3, action_dim=2, **sizes)
    config = make_settings(net, replay=dict(context=True))
    own = dict(obs="vec", terminated="is_terminal", deter="dyn_deter")
    names = ("obs", "action", "reward", "is_first", "is_last", "terminated", "deter")
    rows = {name: batch_major(x[f"data_{own.get(name, name)}"]) for name in names}
    rows["stoch"] = batch_major(np.argmax(stoch, axis=-1))
    batch, carry = update.make_batch(config, rows)
    assert fresh.any()
    close(carry.deter[fresh], x["carry_h"][fresh])
    if np.all(np.isin(stoch, (0.0, 1.0))):
        close(carry.stoch[fresh], x["carry_z"][fresh])
    same_batch(batch, x, fresh)


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
    same_batch(jax.tree.map(lambda x: x[chunk:], batch), x, later, slice(None))
    close(x["carry_h"][later], x["running_h"][later])  # as tests of `loss.parts` have it here
