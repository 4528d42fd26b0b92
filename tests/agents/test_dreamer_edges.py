"""Dreamer off the golden path: episode borders, options, stored latents, shards."""

from __future__ import annotations

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dreamer as default
from mbx import replay
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import behaviour, optimizers, policy, rssm, sequences, types, update
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.settings import Settings
from mbx.envs.base import Timestep
from mbx.settings import from_dict
from mbx.training import job, loop
from mbx.training.state import Schedule, init_state
from mbx.types import EnvSpec
from tests.agents import dreamer_helpers as ref
from tests.agents.dreamer_helpers import change, make_settings
from tests.agents.test_dreamer_steps import official_case
from tests.helpers import register_toy

NET = ModelConfig(
    vector_dim=2,
    action_dim=2,
    deter=8,
    hidden=6,
    stoch=2,
    classes=4,
    units=8,
    blocks=2,
    num_bins=21,
    policy_layers=1,
    value_layers=1,
    encoder_layers=1,
    decoder_layers=1,
)
# The official code's choices; with rates of 0 an update changes the stored latents alone.
CONTEXT = make_settings(
    NET,
    loss=dict(batch_size=2, batch_length=5, updates="joint", continue_discount=True),
    imagination=dict(horizon=2, continues="soft", first_continue="predicted"),
    critic=dict(replay_gradient=True),
    replay=dict(context=True, fresh=1),
    optimizer=dict(name="laprop", learning_rates=(0.0, 0.0, 0.0), clips=(0.3, 0.3, 0.3)),
)
SPEC = EnvSpec("x", (2,), jnp.float32, 2, 10, 1)


def moved(params):
    """Parameters none of which is the exact zero that many start with."""
    return jax.tree.map(lambda x: x + 0.1 * jnp.cos(jnp.arange(x.size)).reshape(x.shape), params)


# -------------------------------------------------------------------------------------------------
# Critic on replay rows


def test_replay_targets_stop_where_the_next_row_is_first_though_no_end_was_stored():
    """Rows 0, 1 of an episode that broke off, rows 2, 3 of the next; by hand."""
    config = make_settings(NET, critic=dict(gamma=0.5, lambda_=0.5, regularizer=0.0))
    reward, value = np.array([9.0, 1.0, 7.0, 2.0]), np.array([9.0, 4.0, 8.0, 6.0])
    no = jnp.zeros((4, 1), bool)
    batch = types.Batch({}, None, jnp.float32(reward)[:, None], no.at[2].set(True), no, no)
    logits = jax.random.normal(jax.random.key(0), (4, 1, 21))
    loss = behaviour.replay_critic(
        config, logits, jnp.zeros((4, 1)), jnp.float32(value)[:, None], batch
    )
    targets = jnp.array([1.0 + 0.5 * 4.0, 0.0, 2.0 + 0.5 * 6.0])
    expected = nets.two_hot_loss(NET, logits[:3, 0], targets) * jnp.array([1.0, 0.0, 1.0])
    np.testing.assert_allclose(loss[:, 0], expected, rtol=1e-5)


# -------------------------------------------------------------------------------------------------
# Optimiser


def test_a_clip_of_zero_is_none():
    params = {"a": jnp.zeros((2, 2)), "b": jnp.ones(3)}
    grads = {"a": jnp.zeros((2, 2)), "b": jnp.array([5.0, -7.0, 0.0])}
    solver = optimizers.laprop(1e-2, clip=0.0, warmup=0)
    updates, _ = solver.update(grads, solver.init(params), params)
    np.testing.assert_array_equal(updates["a"], 0.0)
    np.testing.assert_allclose(updates["b"], [-1e-2, 1e-2, 0.0], rtol=1e-5)


def test_adaptive_clipping_acts_on_the_official_tensors():
    """One step of LaProp from the official gradients, in NumPy, tensor by official tensor."""
    x, n, config, _ = official_case("continuous")
    own = dict(name="laprop", learning_rates=(1e-2, 1e-2, 1e-2), clips=(0.05, 0.05, 0.05))
    config = change(config, optimizer=own | dict(epsilons=(0.1, 0.1, 0.1)))
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
        solvers = update.make_optimizers(config)
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


# -------------------------------------------------------------------------------------------------
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
    net = ModelConfig(vector_dim=1, action_dim=2, deter=4, hidden=3, stoch=2, classes=2, core=core)
    net = net if core == "dense" else ModelConfig(**{**vars(net), "blocks": 2})
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
    act = jax.jit(dreamer.make_act(settings), static_argnums=5)
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
        act = dreamer.make_act(make_settings(net, eval=dict(action=how)))
        actor = dreamer.init_actor(net, 400)
        action, after = jax.jit(
            lambda: act(train, actor, obs, first, jax.random.key(1), evaluate)
        )()
        np.testing.assert_array_equal(after.action, action)
        return np.mean(action, axis=0)

    np.testing.assert_array_equal(share("mode", True), [0.0, 1.0])
    for how, evaluate in (("mode", False), ("sample", True)):
        np.testing.assert_allclose(share(how, evaluate), [0.27, 0.73], atol=0.08)


# -------------------------------------------------------------------------------------------------
# Replay


@pytest.mark.parametrize("context", [False, True])
def test_a_batch_begins_like_an_episode_unless_latents_are_stored(context):
    """Rows 1..T, the actions before them, and the state before row 1."""
    shape, key = (4, 2), jax.random.key(0)
    rows = dict(
        obs=jax.random.normal(key, (*shape, 2)),
        action=jax.random.normal(key, (*shape, 2)),
        reward=jnp.arange(8.0).reshape(shape),
        is_first=jnp.zeros(shape, bool).at[2, 0].set(True),
        is_last=jnp.zeros(shape, bool).at[1, 0].set(True),
        terminated=jnp.zeros(shape, bool).at[1, 0].set(True),
        deter=jnp.arange(64.0).reshape(*shape, 8),
        stoch=jnp.arange(16).reshape(*shape, 2) % 4,
    )
    batch, carry = update.make_batch(change(CONTEXT, replay=dict(context=context)), rows)
    np.testing.assert_array_equal(batch.action, rows["action"][:3])
    np.testing.assert_array_equal(batch.obs["vector"], rows["obs"][1:])
    np.testing.assert_array_equal(batch.reward, rows["reward"][1:])
    np.testing.assert_array_equal(batch.is_last, rows["is_last"][1:])
    begins = np.array([[0, 0], [1, 0], [0, 0]], bool)
    if context:
        np.testing.assert_array_equal(carry.deter, rows["deter"][0])
        np.testing.assert_array_equal(jnp.argmax(carry.stoch, -1), rows["stoch"][0])
    else:
        assert carry is None
        begins[0] = True
    np.testing.assert_array_equal(batch.is_first, begins)


def filled(shards, num_envs=4, steps=60, capacity=64):
    """Rows of random numbers; an episode ends every eleventh row."""
    row = dreamer.example_row(CONTEXT)
    state = replay.init(row, num_envs=num_envs, capacity=capacity, shards=shards)

    def insert(state, t):
        key = jax.random.fold_in(jax.random.key(0), t)
        number = jnp.full(num_envs, t, jnp.float32)
        rows = {n: jnp.zeros((num_envs, *x.shape), x.dtype) for n, x in row.items()}
        rows |= dict(
            obs=jnp.stack([number, jnp.arange(num_envs) + 0.0], -1),
            action=jax.random.uniform(key, (num_envs, 2), minval=-1.0),
            is_first=jnp.broadcast_to(t % 11 == 0, num_envs),
            is_last=jnp.broadcast_to(t % 11 == 10, num_envs),
            reward=jnp.sin(number),
        )
        return replay.insert(state, rows), None

    return jax.jit(lambda s: jax.lax.scan(insert, s, jnp.arange(steps))[0])(state)


@pytest.mark.parametrize("fresh", [1, 3])
def test_as_many_columns_are_newest_rows_whatever_the_shards(fresh):
    sample = jax.jit(sequences.sample, static_argnames=("batch_size", "length", "fresh"))
    for shards in (1, 2, 4):
        seen, state = set(), filled(shards, steps=2000, capacity=2000)
        for seed in range(4):
            rows = sample(state, jax.random.key(seed), batch_size=8, length=3, fresh=fresh).rows
            newest = np.asarray(rows["obs"])[-1, :, 0] == 1999.0
            assert newest.sum() == fresh, (shards, seed)
            seen |= set(np.asarray(rows["obs"])[-1, newest, 1])
        assert len(seen) > fresh  # not always the same environments


def follows(params, before, action, after):
    """Whether latents are those that the model gets to from others by an action."""
    stoch = jax.nn.one_hot(before["stoch"], NET.classes)
    part = rssm.action_input(NET, params["model"]["rssm"], action)
    deter = rssm.recur(NET, params["model"]["rssm"], types.State(before["deter"], stoch), part)
    return np.all(np.abs(np.asarray(deter - after["deter"])) < 1e-5, axis=-1)


def test_latents_are_written_back_to_the_rows_they_belong_to():
    """Every row but the first has the latents that follow from those stored with the row before."""
    state = filled(shards=2)
    train = dreamer.init_state(CONTEXT, jax.random.key(0))
    train = train.replace(params=moved(train.params))
    key = jax.random.key(7)
    train, after, metrics = jax.jit(update.make_update(CONTEXT))(train, state, key)
    assert all(np.isfinite(value) for value in metrics.values())
    index = sequences.sample(
        state, jax.random.split(key)[0], batch_size=2, length=6, fresh=1
    ).index  # the same rows as in the update
    rows = replay.row_at(after, index)
    begins = np.asarray(rows["is_first"])
    carried = np.stack(
        [
            follows(
                train.params,
                {n: rows[n][t] for n in ("deter", "stoch")},
                rows["action"][t],
                {n: rows[n][t + 1] for n in ("deter", "stoch")},
            )
            for t in range(5)
        ]
    )
    assert begins[1:].sum() < 3 and np.all(carried[~begins[1:]])
    zero = np.asarray(after.data["deter"] == 0.0).all(-1)
    assert (~zero).sum() == 10  # five rows each of two sequences, and no other row
    for name in ("obs", "action", "reward", "is_first"):
        np.testing.assert_array_equal(after.data[name], state.data[name])


@pytest.mark.parametrize("shards", [1, 2])
def test_parts_of_a_sequence_are_learned_from_in_turn_with_the_state_carried_on(
    monkeypatch, shards
):
    """With a learner that adds every row's number to its state, and counts."""

    def learner(settings, train, batch, carry, noise):
        seen = batch.obs["vector"][..., :1]
        deter = carry.deter[None] + jnp.cumsum(seen, axis=0)
        shape = (*deter.shape[:2], NET.stoch, NET.classes)
        told = {"first": jnp.mean(seen[0]), "draw": noise.posterior[0, 0, 0]}
        return train + 1, told, types.State(deter, jnp.broadcast_to(carry.stoch[None], shape))

    monkeypatch.setattr(update, "update_from_batch", learner)
    settings = change(CONTEXT, loss=dict(batch_length=2, parts=3))
    state, key = filled(shards), jax.random.key(3)
    train, after, metrics = jax.jit(update.make_update(settings))(jnp.int32(0), state, key)
    sample_key, draw_key = jax.random.split(key)
    sample = sequences.sample(state, sample_key, batch_size=2, length=7, fresh=1)
    seen = np.asarray(sample.rows["obs"])[1:, :, :1]
    expected = np.asarray(sample.rows["deter"])[:1] + np.cumsum(seen, axis=0)
    stored = replay.row_at(after, jax.tree.map(lambda x: x[1:], sample.index))["deter"]
    np.testing.assert_allclose(stored, expected, rtol=1e-6)
    written = np.asarray(after.data["deter"] != state.data["deter"]).any(-1)
    assert written.sum() == 12  # six rows each of two sequences, and no other row
    for name in ("obs", "action", "reward", "is_first"):
        np.testing.assert_array_equal(after.data[name], state.data[name])
    assert int(train) == 3
    np.testing.assert_allclose(metrics["first"], seen[::2].mean(), rtol=1e-6)
    keys = jax.random.split(draw_key, 3)  # every part has draws of its own
    draws = [update.draw_noise(settings, part).posterior[0, 0, 0] for part in keys]
    np.testing.assert_allclose(metrics["draw"], np.mean(draws), rtol=1e-6)


def test_what_parts_of_a_sequence_need():
    loss = dict(batch_size=16, batch_length=64, parts=2)
    settings = change(Settings(), train=dict(train_ratio=1024.0), loss=loss)
    assert settings.updates_per_step() == 0.5  # of two learner steps each
    assert settings.rows_before_learning() == 129 * settings.env.num_envs
    needed = 129 * settings.env.num_envs
    from_dict(Settings(), dict(loss=loss, replay=dict(capacity=needed)))
    told = "loss.batch_length=64 in loss.parts=2 parts needs one row more .* gives 128: raise it"
    with pytest.raises(ValueError, match=told):
        from_dict(Settings(), dict(loss=loss, replay=dict(capacity=needed - 1)))


def test_latents_of_the_seed_phase_follow_from_the_actions_taken():
    settings = change(CONTEXT, replay=dict(fresh=0))
    agent = dreamer.build_agent(settings)

    class Environment:  # as much of one as a state is made from
        num_envs, spec = 2, SPEC

    schedule = Schedule(
        seed_steps=100,
        pretrain_updates=0,
        utd_ratio=0.0,
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
    obs = jax.random.normal(jax.random.key(1), (6, 2, 2))
    state = init_state(agent, Environment, key=jax.random.key(0), capacity=9, host_obs=obs[0])
    select_action = jax.jit(loop.make_select_action(agent, schedule, 2, SPEC))
    no, zero = jnp.zeros(2, bool), jnp.zeros(2)
    for t in range(5):
        action, actor, _ = select_action(state, jax.random.key(t))
        step = Timestep(obs[t + 1], obs[t + 1], zero, no, no, zero, zero, no)
        state = loop.store(agent, state, action, actor, None, step)
    rows = {name: x[:, :5].swapaxes(0, 1) for name, x in state.replay.data.items()}
    assert np.all(np.abs(rows["action"]) > 0.0)
    for t in range(4):
        before, after = ({n: rows[n][i] for n in ("deter", "stoch")} for i in (t, t + 1))
        assert np.all(follows(state.train.params, before, rows["action"][t], after)), t


def test_nothing_of_a_fault_is_learned_from():
    """A step that gave NaN leaves finite rows, of which none is learned across the break."""
    agent = dreamer.build_agent(CONTEXT)

    class Environment:
        num_envs, spec = 2, SPEC

    obs = jnp.ones((2, 2))
    state = init_state(agent, Environment, key=jax.random.key(0), capacity=9, host_obs=obs)
    no, zero = jnp.zeros(2, bool), jnp.zeros(2)
    for t in range(7):
        fault = jnp.array([t == 3, False])
        final = jnp.where(fault[:, None], jnp.nan, obs)
        step = Timestep(obs, final, zero + 1.0, no, fault, zero, zero, fault)
        action = jnp.full((2, 2), 0.1)
        state = loop.store(agent, state, action, dreamer.init_actor(NET, 2), None, step)
    data = state.replay.data
    assert all(np.all(np.isfinite(x)) for x in data.values() if x.dtype == jnp.float32)
    assert data["is_first"][0, 4] and not np.any(np.asarray(data["is_last"]))
    assert data["reward"][0, 4] == 0.0  # that of the fault is not the next episode's
    columns = {name: x[:1, 1:7].swapaxes(0, 1) for name, x in data.items()}
    batch, _ = update.make_batch(change(CONTEXT, loss=dict(batch_size=1)), columns)
    logits = jax.random.normal(jax.random.key(0), (5, 1, 21))
    losses = [
        behaviour.replay_critic(CONTEXT, logits, jnp.zeros((5, 1)), values, batch)
        for values in (jnp.ones((5, 1)), jnp.ones((5, 1)).at[2:].set(50.0))
    ]
    # The break is before batch row 2: row 1 has no target, and none before it sees what follows.
    assert losses[0][1, 0] == 0.0 and losses[0][0, 0] > 0.0
    np.testing.assert_array_equal(losses[0][:2], losses[1][:2])
    assert losses[0][2, 0] != losses[1][2, 0]


# -------------------------------------------------------------------------------------------------
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
