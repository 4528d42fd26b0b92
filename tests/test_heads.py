"""Auxiliary heads: their losses by hand, what they join, and what is refused."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import observation_head, own_head
from mbx import heads, networks
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import update, world_model
from mbx.agents.dreamer.settings import Settings
from mbx.agents.dreamer.types import Batch as Rows
from mbx.agents.tdmpc import losses as model_loss
from mbx.agents.tdmpc.agent import make_agent
from mbx.training.logging import read_rows
from mbx.types import EnvSpec
from tests.agents import dreamer_helpers
from tests.agents.tdmpc_helpers import SPEC, B, T, empty_replay, make_batch, make_settings
from tests.agents.tdmpc_helpers import toy_model as closed_form
from tests.helpers import in_parts

MASK = np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]], np.float32)


class Scale:
    """A network of one number, which multiplies the sum of its inputs."""

    def init(self, key, *inputs):
        return {"params": jnp.float32(0.5)}

    def apply(self, variables, *inputs):
        return variables["params"] * sum(inputs)


def head(**changes):
    """Predicts actions from both states around them, off the first numbers of their latents."""
    own = heads.Head(
        network=lambda spec: Scale(),
        inputs=lambda w: (w.encoded[:-1, :, :2], w.latents[1:, :, :2]),
        target=lambda w: w.action,
        coef=2.0,
        metrics=lambda found, wanted: {"bias": jnp.mean(found - wanted, axis=-1)},
    )
    return own._replace(**changes)


@pytest.fixture
def known(monkeypatch):
    """Names for the heads of a test alone."""
    monkeypatch.setattr(heads, "_KNOWN", {"inverse_dynamics": own_head.inverse_dynamics})
    heads.register("toy", head())


def test_the_example_predicts_the_next_observation_from_its_predicted_latent():
    obs = np.array([[[0.0, -1.0]], [[3.0, -0.5]], [[-7.0, 0.25]]], np.float32)
    latents, one = jnp.arange(12.0).reshape(3, 1, 4), jnp.ones((2, 1))
    window = heads.Window(jnp.asarray(obs), latents + 5, latents, one[..., None], one, one, one)
    own = observation_head.next_observation
    np.testing.assert_array_equal(*own.inputs(window), latents[1:])
    wanted = np.sign(obs[1:]) * np.log1p(np.abs(obs[1:]))
    np.testing.assert_allclose(own.target(window), wanted, rtol=1e-6)
    assert own.network(SPEC).features == 3


def test_squared_error():
    a, b = np.arange(12.0).reshape(2, 3, 2), np.ones((2, 3, 2))
    np.testing.assert_allclose(heads.squared_error(a, b), ((a - b) ** 2).mean(-1))
    np.testing.assert_allclose(heads.squared_error(a[..., 0], b[..., 0]), (a[..., 0] - 1.0) ** 2)


def test_losses_of_a_window_are_those_of_numpy(known):
    """Two dynamics heads, whose predicted latents differ: the mean over both."""
    settings = make_settings(loss=dict(rho=0.5))
    batch = make_batch(mask=jnp.asarray(MASK))
    model = closed_form(settings)._replace(heads=heads.make_heads({"toy": 0.25}, SPEC))
    zs = np.random.default_rng(5).normal(size=(T + 1, 2, B, 2)).astype(np.float32)
    zs[0] = np.asarray(batch.obs)[0, None, :, :2]
    losses, metrics = model_loss.head_losses(
        model,
        {"heads": {"toy": jnp.float32(0.5)}},
        jnp.asarray(zs),
        batch,
        model_loss.step_weights(settings, "v", batch),
    )
    encoded, action = np.asarray(batch.obs)[..., :2], np.asarray(batch.action)
    errors = [0.5 * (encoded[:-1] + zs[1:, h]) - action for h in range(2)]
    each = np.mean([(e**2).mean(-1) for e in errors], axis=0)
    steps = [(each[t] * MASK[t]).sum() / MASK[t].sum() for t in range(T)]
    np.testing.assert_allclose(losses["heads/toy"], (steps[0] + 0.5 * steps[1]) / 2, rtol=1e-5)
    bias = np.mean([e.mean(-1) for e in errors], axis=0)
    np.testing.assert_allclose(metrics["heads/toy/bias"], (bias * MASK).sum() / MASK.sum(), 1e-5)
    total = model_loss.total_loss(settings, losses, heads=model.heads)
    np.testing.assert_allclose(total, 0.25 * losses["heads/toy"])


def test_networks_are_made_for_one_transition_of_one_environment(known):
    """A head may join any fields of a window, so their shapes go together already there."""
    seen = []

    class Noting(Scale):
        def init(self, key, window):
            seen.append(window)
            return {"params": {}}

    heads.register("toy", head(network=lambda spec: Noting(), inputs=lambda w: (w,)))
    made = heads.make_heads({"toy": None}, SPEC)
    assert made.init(jax.random.key(0), 5, (3, 4)) == {"toy": {}} and made.coefs == {"toy": 2.0}
    assert {name: x.shape for name, x in seen[0]._asdict().items()} == dict(
        obs=(2, 1, 3, 4),
        encoded=(2, 1, 5),
        latents=(2, 1, 5),
        action=(1, 1, SPEC.action_dim),
        reward=(1, 1),
        terminated=(1, 1),
        mask=(1, 1),
    )
    assert float(seen[0].mask[0, 0]) == 1.0 and not np.any(seen[0].terminated)


def test_the_mean_over_no_transition_is_zero():
    x = jnp.asarray([[2.0, 4.0]])
    assert float(heads.masked_mean(x, jnp.zeros((1, 2)))) == 0.0
    assert float(heads.masked_mean(x, jnp.ones((1, 2)))) == 3.0


def test_the_gradient_reaches_the_encoder_and_no_target(known):
    heads.register("toy", head(target=lambda w: w.encoded[1:, :, :2]))
    settings, batch = make_settings(), make_batch()
    model = closed_form(settings)._replace(
        heads=heads.make_heads({"toy": None}, SPEC),
        encode=lambda params, obs: params["encoder"] * obs[..., :2],
    )

    def loss(scale, copy):
        params = {"heads": {"toy": jnp.float32(0.5)}, "encoder": scale}
        zs = jnp.broadcast_to(copy * batch.obs[:, None, :, :2], (T + 1, 1, B, 2))
        weights = model_loss.step_weights(settings, "v", batch)
        return model_loss.head_losses(model, params, zs, batch, weights)[0]["heads/toy"]

    z, w = np.asarray(batch.obs)[..., :2], 0.5 ** np.arange(T)[:, None, None] / (T * B * 2)
    error = 0.5 * (z[:-1] + z[1:]) - z[1:]
    # Of the two inputs only later encoded states depend on `scale`: the first is the rollout's.
    by_scale = (w * 2 * error * 0.5 * np.concatenate([np.zeros_like(z[:1]), z[1:-1]])).sum()
    np.testing.assert_allclose(jax.grad(loss)(1.0, 1.0), by_scale, rtol=1e-4, atol=1e-7)


def test_a_declaration_joins_parameters_optimiser_and_log(known):
    settings = make_settings(loss=dict(heads="inverse_dynamics+toy:3"))
    agent = make_agent(settings, SPEC)
    train = jax.eval_shape(agent.init, jax.random.key(0))
    own = train.params["heads"]["inverse_dynamics"]
    moments = [p for p, _ in jax.tree_util.tree_leaves_with_path(train.opt_state)]
    assert own["out"]["kernel"].shape == (64, SPEC.action_dim)
    assert sum("inverse_dynamics" in jax.tree_util.keystr(p) for p in moments) == 2 * len(
        jax.tree.leaves(own)
    )
    buffer = jax.eval_shape(lambda: empty_replay(agent, 2, 100))
    metrics = jax.eval_shape(agent.update, train, buffer, jax.random.key(0))[2]
    names = {name for name in metrics if "heads/" in name}
    assert names == {
        *("loss/heads/inverse_dynamics", "loss/heads/toy"),
        *("heads/inverse_dynamics/error", "heads/toy/bias"),
    }
    plain = jax.eval_shape(make_agent(make_settings(), SPEC).init, jax.random.key(0))
    assert {*train.params} - {*plain.params} == {"heads"}


def test_a_run_may_start_from_one_with_other_heads(known):
    def begun(which, number):
        agent = make_agent(make_settings(loss=dict(heads=which)), SPEC)
        shapes = jax.eval_shape(agent.init, jax.random.key(0))
        return agent, jax.tree.map(lambda x: jnp.full(x.shape, number, x.dtype), shapes)

    agent, new = begun("toy+inverse_dynamics", 1.0)
    for which, wanted in (("toy", 2.0), ("", 1.0)):
        params = agent.start_from(new, begun(which, 2.0)[1], SPEC).params
        assert (
            params["heads"]["toy"] == wanted and jax.tree.leaves(params["dynamics"])[0].min() == 2
        )
        assert jax.tree.leaves(params["heads"]["inverse_dynamics"])[0].max() == 1.0
        assert list(params["heads"]) == list(new.params["heads"])


def test_statistics_of_another_run_count_as_a_hundred_batches_at_most():
    agent = make_agent(make_settings(model=dict(normalize_observations=True)), SPEC)
    shapes = jax.eval_shape(agent.init, jax.random.key(0))
    for number, count in ((7.0, 7.0), (1234.0, 100.0)):
        old = jax.tree.map(lambda x, n=number: jnp.full(x.shape, n, x.dtype), shapes)
        params = agent.start_from(old, old, SPEC).params
        assert params["statistics"]["count"] == count
        assert params["statistics"]["mean"].max() == number


def test_dreamers_window_has_the_actions_between_its_rows(known):
    spec = EnvSpec("toy:small", (3,), jnp.float32, 2, 50, 1)
    settings = dreamer.resolve(dreamer_helpers.change(Settings(), loss=dict(heads="toy")), spec)
    rng = np.random.default_rng(0)
    features, action = (rng.normal(size=(4, 3, n)).astype(np.float32) for n in (5, 2))
    is_first = np.zeros((4, 3), bool)
    is_first[0], is_first[2, 1] = True, True
    zeros = jnp.zeros((4, 3))
    obs = {"vector": jnp.zeros((4, 3, 3))}
    batch = Rows(obs, action, zeros, jnp.asarray(is_first), zeros > 0, zeros > 0)
    losses, metrics = world_model.head_losses(
        settings.model, {"toy": jnp.float32(0.5)}, jnp.asarray(features), batch
    )
    error = 0.5 * (features[:-1, :, :2] + features[1:, :, :2]) - action[1:]
    mask = np.ones((3, 3))
    mask[1, 1] = 0.0
    np.testing.assert_allclose(losses["heads/toy"], ((error**2).mean(-1) * mask).sum() / 8, 1e-5)
    np.testing.assert_allclose(metrics["heads/toy/bias"], (error.mean(-1) * mask).sum() / 8, 1e-5)
    both = {**losses, "reward": zeros + 1.0}
    np.testing.assert_allclose(
        update.total_loss(settings, both), 2.0 * losses["heads/toy"] + 1.0, rtol=1e-6
    )
    params = jax.eval_shape(lambda: dreamer.init_params(settings.model, jax.random.key(0)))
    assert params["model"]["heads"]["toy"].shape == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(inputs=lambda w: w.encoded), "head 'toy': inputs are float32.*, wanted a tuple"),
        (dict(target=lambda w: w.reward), r"head 'toy': the prediction is float32\[2, 4, 2\], .*"),
        (dict(loss=lambda a, b: jnp.mean(a)), r"the loss of head 'toy' is float32\[\], .*\[2, 4\]"),
        (dict(loss=lambda a, b: a), r"loss of head 'toy' is float32\[2, 4, 2\], wanted \[2, 4\]"),
        (dict(metrics=lambda a, b: {"m": a.T}), r"toy/m is float32\[2, 4, 2\], wanted \[2, 4\]"),
    ],
)
def test_wrong_shapes_are_told(known, changes, message):
    heads.register("toy", head(**changes))
    latents, one = jnp.zeros((3, 4, 2)), jnp.zeros((2, 4))
    window = heads.Window(latents, latents, latents, jnp.zeros((2, 4, 2)), one, one, one)
    made = heads.make_heads({"toy": None}, SPEC)
    with pytest.raises(ValueError, match=message):
        made.losses({"toy": jnp.float32(1.0)}, window)


def test_names(known):
    with pytest.raises(ValueError, match=r"loss.heads='other': choose one of inverse_dynamics, t"):
        make_agent(make_settings(loss=dict(heads="other")), SPEC)
    with pytest.raises(ValueError, match="head 'a:b': choose a name of letters"):
        heads.register("a:b", head())
    terms = make_settings(loss=dict(heads="a+b:0.5")).loss.head_terms
    assert terms == {"a": None, "b": 0.5}
    for wrong in ("a+a", "a:0", "a:x", "a:inf", "+", "a:"):
        (problem,) = make_settings(loss=dict(heads=wrong)).loss.check()
        assert problem.startswith(f"heads={wrong!r}: give names of registered heads")


def test_a_head_has_one_loss(known):
    with pytest.raises(ValueError, match="head 'toy' has a loss and a batch_loss: give one"):
        heads.register("toy", head(loss=infonce, batch_loss=masked_infonce))


@pytest.mark.slow
@pytest.mark.parametrize("config", ["tdmpc", "dreamer"])
def test_a_head_from_outside_is_learned_by_the_ordinary_commands(config, tmp_path):
    own, run = "--import=examples/own_head.py", str(tmp_path / "run")

    def command(name, *arguments):
        subprocess.run([sys.executable, "-m", f"experiments.{name}", *arguments], check=True)

    small = ["loss.heads=inverse_dynamics:0.5", "train.log_interval=100", "eval.episodes=2"]
    if config == "dreamer":
        small += ["env.name=gymnax:Pendulum-v1", "train.train_ratio=128", "eval.interval=400"]
    flags = [f"--config.{x}" for x in small] + [own, f"--workdir={run}"]
    command("train", f"--config={config}", "--config.train.steps=1400", *flags)
    more = ["--config.train.steps=1600", "--config.resume=True"]
    command("train", f"--config={config}", *more, *flags)
    rows = [row for row in read_rows(f"{run}/metrics.jsonl") if row["kind"] == "train"]
    errors = [row.get("loss/heads/inverse_dynamics") for row in rows]
    errors = [error for error in errors if error is not None]
    assert errors[-1] < 0.7 * errors[0], errors
    command("evaluate", run, "--episodes=2", own)
    command("plot", run, f"--out={tmp_path / 'curve.png'}", own)
    command("export", run, f"--out={tmp_path / 'policy.mbx'}", own)
    assert (tmp_path / "policy.mbx").stat().st_size > 1000


def infonce(found, wanted):
    logits = jnp.einsum("tip,tjp->tij", found, wanted)
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(found * wanted, axis=-1)


def masked_infonce(found, wanted, mask):
    logits = jnp.einsum("tip,tjp->tij", found, wanted) - 1e9 * (1.0 - mask[:, None])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.sum(found * wanted, axis=-1)


def test_a_loss_that_compares_rows_is_given_those_of_all_devices(monkeypatch):
    """The parts' losses and gradients add up to the whole batch's; masked rows are no negatives."""
    bare = heads.Head(
        network=lambda spec: networks.MLP(hidden=(4,), features=3),
        inputs=lambda window: (window.latents[1:],),
        target=lambda window: window.encoded[1:],
    )
    own = dict(loss=infonce, metrics=lambda found, wanted: {"error": infonce(found, wanted)})
    monkeypatch.setitem(heads._KNOWN, "infonce", bare._replace(**own))
    monkeypatch.setitem(heads._KNOWN, "masked", bare._replace(batch_loss=masked_infonce))
    terms, spec = {"infonce": None, "masked": None}, EnvSpec("a", (3,), jnp.float32, 1, 50, 1)
    made = heads.make_heads(terms, spec)
    params, z = (
        made.init(jax.random.key(0), 3, (3,)),
        jax.random.normal(jax.random.key(1), (3, 8, 3)),
    )
    one, mask = jnp.ones((2, 8)), jnp.ones((2, 8)).at[1, 3:6].set(0.0)
    window = heads.Window(z, z, z, one[..., None], one, one, mask)

    def total(params, window):
        losses, metrics = made.losses(params, window)
        masked = jnp.sum(window.mask * losses["masked"])
        return jnp.sum(losses["infonce"]) + masked, (jnp.sum(metrics["infonce/error"]), masked)

    whole, wanted = jax.jit(jax.value_and_grad(total, has_aux=True))(params, window)
    found = np.asarray(made.modules["masked"].apply({"params": params["masked"]}, z[1:]))
    logits = np.einsum("tip,tjp->tij", found, z[1:])
    terms = [
        np.log(np.exp(x[np.ix_(k, k)]).sum(1)) - x.diagonal()[k]
        for x, k in zip(logits, np.asarray(mask, bool), strict=True)
    ]
    np.testing.assert_allclose(whole[1][1], np.concatenate(terms).sum(), rtol=1e-4)
    parts, grads = in_parts(jax.value_and_grad(total, has_aux=True), (None, 1), params, window)
    np.testing.assert_allclose(
        *map(jax.tree.leaves, (jax.tree.map(jnp.sum, parts), whole)), rtol=1e-5
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a.sum(0), b, rtol=1e-4, atol=1e-5), grads, wanted
    )
