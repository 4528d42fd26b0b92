"""EMPO's networks: what is trained through which part of Q_r, and dropout in the heads."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import networks, power
from mbx.empo.agent import learners, models, targets
from mbx.empo.agent.settings import Model
from tests.empo.helpers import load, problem_of, settings_of

KEY = jax.random.key(3)


@pytest.mark.parametrize(
    ("q_encoder", "of_level", "of_advantage"),
    [
        ("shared", {"q_r/level"}, {"q_r/advantage"}),
        ("split", {"q_r/level_encoder", "q_r/heads/level"}, {"q_r/encoder", "q_r/heads/advantage"}),
    ],
)
def test_what_is_trained_through_either_part_of_q(q_encoder, of_level, of_advantage):
    options = Model(hidden=8, q_head="dueling", q_encoder=q_encoder)
    model = models.network_model(load("dag_2h2r").world, options)
    codes = model.encode(jnp.arange(4))

    @jax.jit
    @jax.grad
    def through(params, part):
        q = model.q_r(params, model.trunk(params, codes))
        level = jnp.mean(jnp.log(-q))
        return (1.0 - part) * level + part * jnp.sum(jnp.square(learners.log_advantage(q)))

    params = model.init(KEY)
    for part, wanted in ((0.0, of_level), (1.0, of_advantage)):
        leaves = jax.tree_util.tree_leaves_with_path(through(params, part))
        most = max(np.abs(x).max() for _, x in leaves)  # Q_r's floor mixes both parts a little
        names = {
            "/".join(k.key for k in path) for path, x in leaves if np.abs(x).max() > 0.01 * most
        }
        found = {next((w for w in wanted if name.startswith(w)), name) for name in names}
        assert found == wanted


def test_dropout_is_behind_every_hidden_layer_and_only_with_a_key():
    x = np.random.default_rng(0).normal(size=(64, 5)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def both(hidden):
        head = networks.DroppingMLP(hidden, 6, dropout=0.75)
        params = head.init(KEY, x)["params"]
        params["out"] = {"kernel": jnp.eye(6), "bias": jnp.zeros(6)}  # what is hidden comes out
        params = {"params": params}
        return head.apply(params, x), head.apply(params, x, rngs={"dropout": KEY})

    for hidden in ((6,), (6, 6)):
        whole, dropped = (np.asarray(value) for value in both(hidden))
        left = dropped != 0.0
        assert abs(left.mean() - 0.25) < 0.1
        same = np.isclose(dropped[left], 4.0 * whole[left], rtol=1e-4)
        assert same.all() if len(hidden) == 1 else same.mean() < 0.2  # the first one's dropped, too


def test_losses_drop_and_their_targets_do_not():
    found = load("dag_2h2r")
    networks = dict(hidden=8, x_h="network", dropout=0.5)
    settings = settings_of(model=networks, loss=dict(q_loss="mse"))
    problem = problem_of(found, settings)
    world, actions = problem.world, problem.num_robot_actions
    wanted = targets.Targets(
        q_r=-jnp.ones((3, actions)),
        known=jnp.ones((3, actions), bool),
        v_h_e=jnp.full((3, 2, world.num_goals), 0.5),
        coverage=jnp.ones((3, 2, world.num_goals)),
        policy=None,
        x_h=None,
    )

    @jax.jit
    def compute(key):
        model = problem.model
        codes, params = model.encode(jnp.arange(3)), model.init(key)
        losses = learners.losses(problem, params, codes, wanted, jnp.ones(3, bool), key)
        latents = model.trunk(params, codes)
        values = [
            (one.v_h_e(params, latents), one.q_r(params, latents), one.x_h(params, latents))
            for one in (model, model.dropping(key))
        ]
        return losses, *values

    losses, sure, noisy = jax.device_get(compute(KEY))
    assert not any(np.allclose(one, other) for one, other in zip(sure, noisy, strict=True))
    v, q, x = noisy
    np.testing.assert_allclose(losses["loss/q_r"], np.square(q + 1.0).mean(), rtol=1e-4)
    v, x = power.soft_clamp(v, 0.0, 1.0), power.soft_clamp(x, power.ABILITY_FLOOR, 1.0)
    np.testing.assert_allclose(losses["loss/v_h_e"], np.square(v - 0.5).mean(), rtol=1e-4)
    powers = np.clip(sure[0], 0.0, 1.0) ** problem.params.zeta
    ability = (np.asarray(world.goal_weight) * powers).sum(-1)
    np.testing.assert_allclose(losses["loss/x_h"], np.square(x - ability).mean(), rtol=1e-4)
    assert problem_of(found, settings_of(model=dict(hidden=8))).model.dropping is None
