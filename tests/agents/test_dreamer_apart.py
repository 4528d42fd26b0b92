"""Dreamer's losses of a part of a batch: with those of the other parts they are the whole's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import heads, replay, returns
from mbx.agents.dreamer import agent as agents
from mbx.agents.dreamer import behaviour, types, update, world_model
from mbx.agents.dreamer.settings import Settings
from mbx.types import EnvSpec
from tests.agents.dreamer_helpers import change
from tests.helpers import PARTS, exchanges, in_parts
from tests.test_heads import head

SPEC = EnvSpec("toy:small", (3,), jnp.float32, 2, 50, 1)
H, K, B, T = 3, 2, 4, 4
OWN = change(
    Settings(),
    model=dict(deter=8, hidden=8, classes=4, stoch=2, units=8, num_bins=21, blocks=2),
    loss=dict(batch_size=B, batch_length=T),
    imagination=dict(horizon=H, rows=K),
)


def slow(name):
    return pytest.param(*(name if type(name) is tuple else (name,)), marks=pytest.mark.slow)


def test_each_part_imagines_the_trajectories_that_start_in_its_rows():
    steps, num = np.arange(H)[:, None, None], np.arange(K * B)[None, :, None]
    noise = types.Noise(jnp.zeros((T, B, 1)), jnp.asarray(steps + 10 * num), jnp.asarray(-num))
    rows = noise._replace(
        prior=noise.prior.reshape(H, K, B, 1), action=noise.action.reshape(1, K, B, 1)
    )
    parts = in_parts(update.by_trajectory, (update.NOISE_AXES,), rows)
    for i in range(PARTS):  # of one row each: start 0 of that row, then start 1
        np.testing.assert_array_equal(parts.prior[i, 0, :, 0], [10 * i, 10 * (B + i)])
        np.testing.assert_array_equal(parts.action[i, 0, :, 0], [-i, -(B + i)])
    whole = update.by_trajectory(rows)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(noise), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("gradient", ["reinforce", slow("reparam")])
def test_imagined_losses_and_metrics_are_those_of_all_trajectories(gradient):
    """Percentiles, spreads and extremes of all parts' returns; means as shares of them."""
    settings = change(OWN, actor=dict(gradient=gradient, entropy_coef=0.1))
    settings = agents.resolve(settings, SPEC)
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=(*shape[:1], K * B, *shape[1:])), jnp.float32)

    bins, out = settings.model.num_bins, 2 * SPEC.action_dim
    args = [array(H + 1, out), jnp.tanh(array(H + 1, 2)), array(H + 1)]
    args += [jax.nn.sigmoid(array(H + 1)), array(H + 1), array(H, bins), array(H)]
    ema = returns.init_return_ema()

    def of(*args):
        out, actions, rewards, continues, *rest = args
        imagined = types.Imagined(None, actions, rewards, continues)
        found = behaviour.imagined_losses(settings, imagined, out, *rest, ema)
        total = update.total_loss(settings, found.losses)
        return found, update.logged(found) | dict(total=total)

    whole, metrics = jax.jit(of)(*args)
    parts, shares = jax.jit(lambda *args: in_parts(of, (1,) * len(args), *args))(*args)
    one = jax.tree.map(lambda x: jnp.concatenate(list(x), axis=1), (parts.losses, parts.returns))
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(whole[:2]), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(parts.ema.high, [whole.ema.high] * PARTS, rtol=1e-6)
    assert {"lambda_std", "adv_std", "discount_min", "total", "actor_loss"} <= metrics.keys()
    advantage = (whole.returns - args[4][:-1]) / metrics["ema_invscale"]
    np.testing.assert_allclose(metrics["adv_std"], np.std(advantage), rtol=1e-5)
    for name, x in metrics.items():
        np.testing.assert_allclose(jnp.sum(shares[name]), x, rtol=1e-5, atol=1e-6, err_msg=name)


def test_the_model_is_scored_on_the_means_of_all_rows(monkeypatch):
    """An auxiliary head counts the transitions of all parts."""
    monkeypatch.setattr(heads, "_KNOWN", {"toy": head()})
    settings = agents.resolve(change(OWN, loss=dict(heads="toy:0.5")), SPEC)
    rng = np.random.default_rng(0)
    features, action = (jnp.asarray(rng.normal(size=(T, B, n)), jnp.float32) for n in (5, 2))
    first = np.zeros((T, B), bool)
    first[2, 1] = first[1, 3] = first[3, 3] = True
    kl = jnp.asarray(rng.normal(size=(T, B)), jnp.float32)
    zeros = jnp.zeros((T, B))
    batch = types.Batch({"vector": jnp.zeros((T, B, 3))}, action, zeros, first, first, first)

    def of(features, batch, kl):
        net, params = settings.model, {"toy": jnp.float32(0.5)}
        losses, extra = world_model.head_losses(net, params, features, batch)
        losses["representation"] = kl
        output = types.ModelOutput(losses, None, features, extra)
        return update.logged(output) | {"all": update.total_loss(settings, losses)}

    whole = of(features, batch, kl)
    shares = in_parts(of, (1, 1, 1), features, batch, kl)
    expected = settings.loss.representation_coef * kl.mean() + 0.5 * whole["loss/heads/toy"]
    np.testing.assert_allclose(whole["all"], expected, rtol=1e-6)
    assert {"loss/heads/toy", "heads/toy/bias", "loss/representation"} <= whole.keys()
    for name, x in whole.items():
        np.testing.assert_allclose(jnp.sum(shares[name]), x, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("updates", "context"), [("sequential", False), slow(("joint", False)), ("joint", True)]
)
def test_an_update_exchanges_gradients_and_returns(updates, context):
    """Traced for devices that are not there; stored latents need no exchange."""
    own = change(OWN, loss=dict(updates=updates), replay=dict(context=context))
    settings, agent = agents.resolve(own, SPEC), agents.make_agent(own, SPEC)
    given = dict(num_envs=PARTS, capacity=100, shards=PARTS)
    held = jax.eval_shape(lambda: replay.init(agent.example_row(), **given))
    train = jax.eval_shape(agent.init, jax.random.key(0))
    found = exchanges(agent.update, train, held, jax.random.key(1))
    sizes = {name: sum(x.size for x in jax.tree.leaves(p)) for name, p in train.params.items()}
    num = 4 * PARTS * H * K * (B // PARTS)  # returns, values, slow values and weights of all
    model, own = sizes["model"], sizes["actor"] + sizes["critic"]
    if settings.loss.updates == "sequential":
        assert [name for name, _ in found] == ["psum", "all_gather", "psum"]
        assert model < found[0][1] < model + 20 and own < found[2][1] < own + 30
        assert found[1][1] == num
    else:
        assert [name for name, _ in found] == ["all_gather", "psum"]
        assert found[0][1] == num and model + own < found[1][1] < model + own + 40
