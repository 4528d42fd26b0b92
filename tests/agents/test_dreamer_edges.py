"""Dreamer off the golden path: episode borders, options, stored latents, shards."""

from __future__ import annotations

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dreamer as default
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import behaviour, optimizers, policy, rssm, types
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.settings import Settings
from mbx.settings import from_dict
from mbx.training import job
from mbx.training.state import Schedule
from mbx.types import Part
from tests.agents import dreamer_helpers as ref
from tests.agents.dreamer_helpers import CONTEXT, NET, change, make_settings, moved
from tests.agents.test_dreamer_steps import official_case
from tests.helpers import program, register_toy

# Critic on replay rows


def test_replay_targets_stop_where_the_next_row_is_first_though_no_end_was_stored():
    """Rows 0, 1 of an episode that broke off, rows 2, 3 of the next; by hand."""
    config = make_settings(NET, critic=dict(gamma=0.5, lambda_=0.5, regularizer=0.0))
    reward, value = np.array([9.0, 1.0, 7.0, 2.0]), np.array([9.0, 4.0, 8.0, 6.0])
    no = jnp.zeros((4, 1), bool)
    batch = types.Batch({}, None, jnp.float32(reward)[:, None], no.at[2].set(True), no, no)
    logits = jax.random.normal(jax.random.key(0), (4, 1, 21))
    loss = program(behaviour.replay_critic, config)(
        logits, jnp.zeros((4, 1)), jnp.float32(value)[:, None], batch
    )
    targets = jnp.array([1.0 + 0.5 * 4.0, 0.0, 2.0 + 0.5 * 6.0])
    expected = nets.two_hot_loss(NET, logits[:3, 0], targets) * jnp.array([1.0, 0.0, 1.0])
    np.testing.assert_allclose(loss[:, 0], expected, rtol=1e-5)


# Optimiser


def test_kernels_of_zero_move_by_the_rate_once_it_has_risen_and_a_clip_of_zero_is_none():
    params = {"a": jnp.zeros((2, 2)), "b": jnp.ones(3)}
    grads = {"a": jnp.full((2, 2), 1e-9), "b": jnp.array([5.0, -7.0, 0.0])}
    for clip, warmup in ((0.0, 0), (0.3, 0), (0.3, 10)):
        solver = optimizers.make("laprop", 1e-2, clip=clip, eps=1e-20, warmup=warmup)
        updates, _ = solver.update(grads, solver.init(params), params)
        rate = 0.0 if warmup else 1e-2
        np.testing.assert_allclose(updates["a"], -rate, rtol=1e-3)
        np.testing.assert_allclose(updates["b"], [-rate, rate, 0.0], rtol=1e-5)


@pytest.mark.parametrize("case", ["continuous", "discrete"])  # of one vector, and of two
def test_adaptive_clipping_acts_on_the_official_tensors(case):
    """One step of LaProp from the official gradients, in NumPy, tensor by official tensor."""
    x, n, config, _ = official_case(case)
    parts = tuple(Part(key, x[key].shape[2:]) for key in ref.vector_keys(x))
    config = change(config, model=dict(parts=parts))
    own = dict(name="laprop", learning_rates=(1e-2, 1e-2, 1e-2), clips=(0.05, 0.05, 0.05))
    config = change(config, optimizer=own | dict(epsilons=(0.1, 0.1, 0.1), warmup=0))
    moved, clipped = {}, 0
    for name in [name[2:] for name in x if name.startswith("p/")]:
        if name.startswith("slowval"):
            continue
        param, grad = x[f"p/{name}"].astype(np.float64), x[f"g/{name}"].astype(np.float64)
        limit = 0.05 * max(np.sqrt(np.sum(param**2)), 1e-3)
        factor = max(1.0, np.sqrt(np.sum(grad**2)) / limit)
        clipped += factor > 1.0
        grad = grad / factor
        moved[f"u/{name}"] = -1e-2 * grad / (np.abs(grad) + 0.1)
    assert 10 < clipped < len(moved)
    params, grads, expected = (
        ref.official_params(ref.Official(x | moved, prefix), config.model, n)
        for prefix in ("p/", "g/", "u/")
    )

    @jax.jit
    def updates(params, grads):
        solvers = optimizers.make_optimizers(config.optimizer, config.model)
        return {
            name: solver.update(grads[name], solver.init(params[name]), params[name])[0]
            for name, solver in solvers.items()
        }

    for (path, want), have in zip(
        jax.tree_util.tree_flatten_with_path(expected)[0],
        jax.tree.leaves(updates(params, grads)),
        strict=True,
    ):
        np.testing.assert_allclose(
            have, want, rtol=1e-4, atol=1e-9, err_msg=jax.tree_util.keystr(path)
        )


# Recurrent model, policy


def test_several_layers_of_the_recurrent_cell():
    """The official formula in NumPy: block-linear, norm, SiLU, `core_layers` times."""
    net = ModelConfig(vector_dim=1, deter=6, hidden=3, stoch=2, classes=2, blocks=2, core_layers=3)
    params = rssm.init(jax.random.key(0), net, 4)
    params = moved(params)
    keys = jax.random.split(jax.random.key(1), 3)
    deter = jax.random.normal(keys[0], (5, 6))
    stoch, action = jax.random.normal(keys[1], (5, 2, 2)), jax.random.uniform(keys[2], (5, 1))
    have = jax.jit(
        lambda p: rssm.recur(net, p, types.State(deter, stoch), rssm.action_input(net, p, action))
    )(params)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def silu_norm(x, norm):
        y = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-4) * norm["scale"]
        return y / (1.0 + np.exp(-y))

    def layer(x, own):
        return silu_norm(x @ own["kernel"] + own["bias"], own["norm"])

    def blocks(x, own):
        parts = [x[:, 3 * g : 3 * g + 3] @ own["kernel"][g] for g in range(2)]
        return np.concatenate(parts, -1) + own.get("bias", 0.0)

    h = np.asarray(deter, np.float64)
    inputs = [layer(h, p["in_h"]), layer(np.asarray(stoch).reshape(5, 4), p["in_z"])]
    x = blocks(h, p["hidden_h"]) + np.concatenate(inputs, -1) @ p["hidden_x"]["kernel"]
    x += layer(np.asarray(action), p["in_a"]) @ p["hidden_a"]["kernel"] + p["hidden_a"]["bias"]
    x = silu_norm(x, p["hidden_norm"])
    assert len(p["hidden_rest"]) == 2
    for i in range(2):
        own = p["hidden_rest"][f"layer_{i}"]
        x = silu_norm(blocks(x, own), own["norm"])
    gates = blocks(x, {"kernel": p["gru"]["kernel"]}).reshape(5, 2, 9)
    gates = gates + p["gru"]["bias"].reshape(2, 9)
    reset, candidate, gate = (gates[..., 3 * i : 3 * i + 3].reshape(5, 6) for i in range(3))
    gate, reset = (1.0 / (1.0 + np.exp(-y)) for y in (gate - 1.0, reset))
    want = gate * np.tanh(reset * candidate) + (1.0 - gate) * h
    np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("core", ["block", "dense"])
def test_imagined_actions_reach_the_model_bounded_as_the_replay_holds_them(core):
    small = dict(deter=4, hidden=3, stoch=2, classes=2, blocks=2 if core == "block" else 0)
    net = ModelConfig(vector_dim=1, action_dim=2, core=core, **small)
    params = rssm.init(jax.random.key(0), net, 4)
    start = rssm.initial(net, params, (3,))
    draws = jnp.full((1, 3, 2), 0.5)

    @jax.jit
    def states(action):
        actions = jnp.broadcast_to(action, (2, 3, 2))
        result = rssm.imagine(net, params, start, lambda _, draw: draw, actions, draws)
        return result[0].deter[1], result[1][0]

    far, kept = states(jnp.array([3.0, -0.5]))
    edge, _ = states(jnp.array([1.0, -0.5]))
    inside, _ = states(jnp.array([0.7, -0.5]))
    np.testing.assert_array_equal(far, edge)
    assert np.all(np.any(np.asarray(edge != inside), axis=-1))
    np.testing.assert_array_equal(kept[0], [3.0, -0.5])  # REINFORCE scores the sample itself


def test_action_clip_bounds_what_the_policy_does():
    np.testing.assert_allclose(
        policy.bound(NET, jnp.array([-3.0, 0.2, 0.6]), 0.5), [-0.5, 0.2, 0.5], rtol=1e-6
    )
    settings = change(CONTEXT, actor=dict(gradient="reparam", action_clip=0.25))
    train = dreamer.init_state(settings, jax.random.key(0))
    act = jax.jit(functools.partial(dreamer.act, settings), static_argnums=5)
    actor, obs, first = dreamer.init_actor(NET, 50), jnp.ones((50, 2)), jnp.ones(50, bool)
    action, _ = act(train, actor, obs, first, jax.random.key(1), False)
    np.testing.assert_allclose(np.abs(action).max(), 0.25, rtol=1e-6)
    noise = types.Noise(
        None, jnp.full((1, 50, 2), 0.5), policy.draw(NET, jax.random.key(2), (2, 50))
    )
    start = rssm.initial(NET, train.params["model"]["rssm"], (50,))
    imagined = jax.jit(
        lambda p: behaviour.imagine(settings, p["model"], p["actor"], start, first, noise)
    )(train.params)
    np.testing.assert_allclose(np.abs(imagined.actions).max(), 0.25, rtol=1e-6)
    with pytest.raises(ValueError, match="action_clip=0.5 has no effect.*gradient='auto' or"):
        from_dict(Settings(), dict(actor=dict(gradient="reinforce", action_clip=0.5)))


def test_evaluations_take_the_mode_and_training_samples():
    """A policy of one action at 73 %: the mode is always that one."""
    net = ModelConfig(**{**vars(NET), "factors": (2,)})
    train = dreamer.init_state(make_settings(net), jax.random.key(0))
    actor = train.params["actor"]
    out = {"kernel": jnp.zeros_like(actor["out"]["kernel"]), "bias": jnp.array([0.0, 1.0])}
    train = train.replace(params=train.params | {"actor": actor | {"out": out}})
    obs, first = jnp.ones((400, 2)), jnp.ones(400, bool)

    def share(how, evaluate):
        act = functools.partial(dreamer.act, make_settings(net, eval=dict(action=how)), train)
        actor = dreamer.init_actor(net, 400)
        action, after = jax.jit(lambda: act(actor, obs, first, jax.random.key(1), evaluate))()
        np.testing.assert_array_equal(after.action, action)
        return np.mean(action, axis=0)

    np.testing.assert_array_equal(share("mode", True), [0.0, 1.0])
    for how, evaluate in (("mode", False), ("sample", True)):
        np.testing.assert_allclose(share(how, evaluate), [0.27, 0.73], atol=0.08)


# Schedule, tasks


def test_a_small_train_ratio_is_not_rounded_to_no_learning():
    for ratio, expected in ((0.5, Fraction(1, 2048)), (1.0, Fraction(1, 1024)), (0.0, 0)):
        settings = change(
            Settings(), train=dict(train_ratio=ratio), loss=dict(batch_size=16, batch_length=64)
        )
        assert Schedule(0, 0, settings.updates_per_step(), 0, 0).ratio == expected
    assert Schedule(0, 0, 1 / 3, 0, 0).ratio == Fraction(1, 3)


def test_several_tasks_at_once_are_refused():
    register_toy()
    config = default.get_config().to_dict()
    config["env"].update(name="multi:toy:point+toy:line", num_envs=2)
    with pytest.raises(ValueError, match=r"env.name='multi:.*several tasks.*agent tdmpc"):
        job.prepare(config)
