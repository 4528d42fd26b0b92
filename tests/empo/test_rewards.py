"""U_r and V_r as networks: what they are learned towards, and what targets make of them."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import networks
from mbx.empo.agent import learners, models, targets
from mbx.empo.power.worlds import dense_successors
from mbx.networks import MLP
from tests.empo.helpers import (
    AT_ONCE,
    TABLES,
    exact_tables,
    load,
    problem_of,
    settings_of,
    train_state,
)

NETWORKS = dict(hidden=8, u_r="network", v_r="network", q_encoder="own")


def targets_by(found, states, y, v_r):
    """Targets by exact tables, with U_r and V_r as given by state."""
    problem = problem_of(found, settings_of(model=TABLES, curriculum=AT_ONCE))
    model = problem.model._replace(
        y=lambda params, index: jnp.asarray(y)[index],
        v_r=lambda params, index: jnp.asarray(v_r)[index],
    )
    problem = dataclasses.replace(problem, model=model)
    human = targets.exact_profiles(found.world, states)
    train, every = train_state(exact_tables(found)), jnp.ones(len(states), bool)
    given = (problem, train, states, human, every)
    return jax.jit(lambda: targets.make_targets(*given)[0])()


@pytest.mark.parametrize("name", ["dag_2h2r", "cyclic_3h1r_sum_unitweights"])
def test_targets_of_both_are_the_exact_ones_and_make_those_of_q(name, monkeypatch):
    found = load(name)
    p, exact = found.params, found.solution
    ended = np.asarray(found.table.terminal).astype(bool)
    states = jnp.asarray(np.flatnonzero(~ended)[:12], jnp.int32)
    y = (-np.asarray(exact.U_r)) ** (1.0 / p.eta)
    ours = targets_by(found, states, y, exact.V_r)
    x = np.asarray(exact.X_h)[:, np.asarray(states)]
    by_hand = (x**-p.xi).mean(axis=0) if p.reduce == "mean" else (x**-p.xi).sum(axis=0)
    np.testing.assert_allclose(ours.y, by_hand, rtol=1e-4)
    np.testing.assert_allclose(ours.v_r, np.asarray(exact.V_r)[states], rtol=1e-4)
    np.testing.assert_allclose(ours.q_r, np.asarray(exact.Q_r)[states], rtol=1e-4)

    def q_target(values):
        following, prob = dense_successors(found.table)
        values = np.where(ended, p.terminal_v_r, values)
        return p.gamma_r * expected(found, states, (prob * values[following]).sum(-1))

    asked = targets_by(found, states, 2.0 * y, 3.0 * exact.V_r)
    np.testing.assert_allclose(asked.q_r, q_target(3.0 * np.asarray(exact.V_r)), rtol=2e-4)
    # Doubled, y makes V_r by eq. (9) worse by (2^eta - 1) y^eta; its network is not asked yet.
    monkeypatch.setattr(targets, "RAMP_STAGE", 7)
    worse = targets_by(found, states, 2.0 * y, 3.0 * exact.V_r)
    more = (2.0**p.eta - 1.0) * y**p.eta
    np.testing.assert_allclose(worse.v_r, ours.v_r - more[states], rtol=1e-4)
    np.testing.assert_allclose(worse.y, ours.y, rtol=1e-5)  # its own target is eq. (8) still
    np.testing.assert_allclose(worse.q_r, q_target(np.asarray(exact.V_r) - more), rtol=2e-4)


def expected(found, states, of_joint):
    """Mean `[B, R]` of `[S, J]` over what humans do, each by its marginal."""
    table, solution = found.table, found.solution
    humans, robots, num = table.humans, table.robots, int(table.num_actions)
    weight = np.asarray(table.goal_weight) / np.asarray(table.goal_weight).sum(-1, keepdims=True)
    marginal = np.einsum("hgsa,hg->hsa", np.asarray(solution.pi_h), weight)
    result = np.zeros((len(states), num ** len(robots)))
    for joint in range(of_joint.shape[1]):
        actions = joint // num ** np.arange(len(humans) + len(robots)) % num
        chance = np.prod([marginal[i, states, actions[h]] for i, h in enumerate(humans)], axis=0)
        robot = int((actions[robots] * num ** np.arange(len(robots))).sum())
        result[:, robot] += chance * of_joint[np.asarray(states), joint]
    return result


def test_losses_and_heads_by_hand():
    found = load("dag_2h2r")
    problem = problem_of(found, settings_of(model=NETWORKS, curriculum=AT_ONCE))
    states = jnp.arange(3, dtype=jnp.int32)
    params = jax.jit(problem.model.init)(jax.random.key(0))
    for name, raw in (("u_r", 0.5), ("v_r", -0.25)):
        last = params[name]["out"]
        params[name]["out"] = {k: jnp.zeros_like(x) for k, x in last.items()} | {
            "bias": jnp.full_like(last["bias"], raw)
        }
    codes = problem.model.encode(states)
    latents = problem.model.trunk(params, codes)
    np.testing.assert_allclose(problem.model.y(params, latents), 1.0 + np.exp(0.5), rtol=1e-6)
    size = np.exp(-0.25) + models.Q_FLOOR
    np.testing.assert_allclose(problem.model.v_r(params, latents), -size, rtol=1e-6)
    human = targets.exact_profiles(found.world, states)
    every = jnp.ones(3, bool)
    mask = jnp.array([True, True, False])

    @jax.jit
    def compute(params):
        made, _ = targets.make_targets(problem, train_state(params), states, human, every)
        made = made._replace(y=jnp.array([1.0, 2.0, 9.0]), v_r=jnp.array([-2.0, -4.0, -9.0]))
        return learners.losses(problem, params, codes, made, mask)

    losses = compute(params)
    y = 1.0 + np.exp(0.5)
    np.testing.assert_allclose(losses["loss/u_r"], ((y - 1) ** 2 + (y - 2) ** 2) / 2, rtol=1e-5)
    ratio = np.array([2.0, 4.0]) / size
    np.testing.assert_allclose(losses["loss/v_r"], (ratio - np.log(ratio) - 1).mean(), rtol=1e-5)


def test_a_grid_encoder_by_hand():
    encoder = networks.GridEncoder((2, 3, 4), width=2, hidden=5)
    x = np.random.default_rng(0).normal(size=(2, 24 + 6)).astype(np.float32)
    params = encoder.init(jax.random.key(0), jnp.asarray(x))["params"]
    params = jax.tree.map(lambda w: w + 0.1, params)

    def conv(picture, name):
        padded = np.pad(picture, ((0, 0), (1, 1), (1, 1), (0, 0)))
        kernel, result = np.asarray(params[name]), np.zeros((*picture.shape[:3], 2))
        for dy in range(3):
            for dx in range(3):
                result += padded[:, dy : dy + 3, dx : dx + 4] @ kernel[dy, dx]
        return result + np.asarray(params[f"{name}_bias"])

    picture = np.moveaxis(x[:, :24].reshape(2, 2, 3, 4), 1, -1)
    y = np.maximum(conv(picture, "conv_0"), 0.0)
    for name in ("conv_1", "conv_2"):
        y = np.maximum(y + conv(y, name), 0.0)
    dense = MLP([5], 5, nn.tanh)
    flat = jnp.asarray(y.reshape(2, -1), jnp.float32)
    want = dense.apply({"params": params["dense"]}, flat, jnp.asarray(x[:, 24:]))
    np.testing.assert_allclose(encoder.apply({"params": params}, x), want, atol=1e-5)
