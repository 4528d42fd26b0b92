"""Masks are normalised once, over all devices, so that losses of parts add up to the whole's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import heads, returns
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import losses, policies, update
from mbx.agents.tdmpc.types import BATCH_AXES, Batch, Noise, Scales
from mbx.agents.tdmpc.value_targets import value_targets
from mbx.fast import collectives
from mbx.replay import Sample, Targets
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import (
    SPEC,
    A,
    B,
    T,
    Toy,
    make_batch,
    make_settings,
    make_world,
    policy_loss,
    train_state,
)
from tests.agents.tdmpc_helpers import toy_model as closed_form
from tests.helpers import exchanges, in_parts
from tests.test_heads import head

MASK = np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]], np.float32)
ENDS = np.array([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]], np.float32)
PLANNED = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1]], bool)
# Every loss that divides by a count, each with another of them.
ALL = dict(
    model=dict(episodic="True", critic="v", num_dynamics=1),
    loss=dict(
        value_target="planner",
        value_last_state=True,
        aux_gammas=(0.7,),
        encoder_consistency_coef=1.0,
        heads="toy:0.1",
        policy_loss="awr:1+kl:1+bc:1",
        trust_region_coef=1.0,
        optimist=True,
    ),
)


def batch_of(**more) -> Batch:
    given = dict(mask=MASK, terminated=ENDS, plan_valid=PLANNED) | more
    return make_batch(**{name: jnp.asarray(x) for name, x in given.items()})


@pytest.mark.parametrize(
    ("critic", "own", "values"),
    [
        ("q", dict(value_target="planner"), MASK),
        ("v", dict(value_target="lambda", value_last_state=True), MASK),
        ("v", dict(value_target="td"), MASK),
        # Of the last states those of windows 0 (not ended) and, in no episode, 2; 3 has ended.
        ("v", dict(value_target="td", value_last_state=True), [*MASK, [1, 0, 0, 0]]),
        ("v", dict(value_target="planner"), MASK * PLANNED[:2]),
        (
            "v",
            dict(value_target="planner", value_last_state=True),
            [*(MASK * PLANNED[:2]), [1, 0, 0, 0]],
        ),
    ],
)
def test_rows_are_counted_over_the_whole_batch(critic, own, values):
    """By hand, of a batch and of its parts."""
    settings = make_settings(loss=own)
    batch = batch_of()
    states = np.concatenate([MASK[:1], MASK])
    made = functools.partial(losses.step_weights, settings, critic)
    wanted = dict(rows=MASK, states=states, plans=states * PLANNED, values=np.asarray(values))
    x = np.random.default_rng(0).normal(size=(T + 1, B))
    for name, mask in wanted.items():
        each = (x[: len(mask)] * mask).sum(1) / np.maximum(mask.sum(1), 1)
        mean = np.mean(0.5 ** np.arange(len(mask)) * each)
        even = (x[: len(mask)] * mask).sum() / mask.sum()
        whole = getattr(made(batch), name)
        np.testing.assert_allclose(whole.mean(x[: len(mask)]), mean, rtol=1e-5, err_msg=name)
        np.testing.assert_allclose(whole.even(x[: len(mask)]), even, rtol=1e-5, err_msg=name)

        def shares(batch, x, name=name):
            rows = getattr(made(batch), name)
            x = x[: len(rows.mask)]
            return rows.mean(x), rows.even(x)

        found = in_parts(shares, (1, 1), batch, x)
        np.testing.assert_allclose([np.sum(y) for y in found], [mean, even], rtol=1e-5)


def test_losses_of_parts_add_up_to_the_wholes(monkeypatch):
    monkeypatch.setattr(heads, "_KNOWN", {"toy": head()})
    settings = make_settings(**ALL)
    toy, params = closed_form(settings), Toy(settings).params()

    def logits(x):
        return jnp.stack([x, 0.0 * x, -x], axis=-1)

    model = toy._replace(
        reward=lambda *args: logits(toy.reward_mean(*args)),
        value=lambda *args: logits(toy.value_mean(*args[:3])),
        aux_value=lambda *args: logits(toy.value_mean(*args)),
        bins=lambda: jnp.linspace(-1.0, 1.0, 3),
        heads=heads.make_heads(settings.loss.head_terms, SPEC),
    )
    slow = jax.tree.map(lambda x: 1.1 * x, params)
    params |= dict(heads={"toy": jnp.float32(0.5)}, optimist=slow["policy"])
    scales = Scales(*[returns.init_running_scale()] * 3, returns.init_return_ema())
    state = train_state(params, target_value=slow["value"], target_aux=slow["aux_value"])
    keys = jax.random.split(jax.random.key(2), 3)
    expert = jnp.abs(jax.random.normal(keys[0], (T + 1, B, 2, A))) + 0.1
    batch = batch_of()._replace(expert=expert)
    target_eps, policy_eps = jax.random.normal(keys[1], (2, T + 1, B, A))
    noise = Noise(target_eps[:-1], None, policy_eps, None)
    weights = jax.nn.softmax(batch.plan_values)

    def both(batch: Batch, noise: Noise, weights):
        rows = losses.step_weights(settings, "v", batch)
        z = model.encode(params, batch.obs)
        targets = value_targets(settings, model, state, z, batch, noise, weights)
        args = params, batch, z[1:], targets, rows, noise
        _, (zs, metrics) = losses.model_loss(settings, model, *args, progress=0.5)
        inputs = losses.policy_inputs(zs, batch, rows, weights, noise)
        args = params["policy"], params, slow["policy"], inputs, scales
        policy, (_, extra) = policy_loss(settings, model, *args)
        own = policies.policy_of(settings, model, params, params["optimist"], inputs)
        optimist, _ = policies.optimist_loss(own, scales)
        return metrics | dict(
            policy=policy, trust=collectives.mean_share(extra["trust"]), optimist=optimist
        )

    whole = jax.jit(both)(batch, noise, weights)
    calls, total = [], collectives.psum
    monkeypatch.setattr(collectives, "psum", lambda tree: calls.append(tree) or total(tree))
    parts = functools.partial(in_parts, both, (1, BATCH_AXES, 1))
    assert {"loss/aux_value", "loss/termination", "loss/encoder_consistency"} <= whole.keys()
    assert {"loss/heads/toy", "heads/toy/bias", "value/target"} <= whole.keys()
    for name, x in jax.jit(parts)(batch, noise, weights).items():
        np.testing.assert_allclose(jnp.sum(x), whole[name], rtol=2e-5, err_msg=name)
    assert len(calls) == 1


def exchanged(settings):
    """Exchanges of a learner step traced for devices that are not there, and its train state."""
    model = make_world_model(make_world(settings))
    learn = functools.partial(agents.learn, settings, model)
    batch = make_batch(expert=None)
    targets = Targets(
        batch.plan_actions, batch.plan_values, jnp.zeros((T + 1, B), jnp.int32), batch.plan_valid
    )
    no = jnp.zeros((T + 1, B), bool)
    rows = dict(obs=batch.obs, action=jnp.zeros((T + 1, B, A)), reward=no * 1.0, terminated=no)
    sample = Sample(rows, targets if settings.stores_plans else None, MASK > 0, None)
    state = jax.eval_shape(functools.partial(update.init_state, settings, model), jax.random.key(0))
    return exchanges(learn, state, sample, jax.random.key(1)), state


@pytest.mark.parametrize("policy_loss", ["awr", "svg"])
def test_an_update_exchanges_counts_once_and_each_gradient_once(policy_loss):
    """The model's, then the policy's."""
    own = dict(policy_loss=policy_loss, value_target="td") if policy_loss == "svg" else {}
    sizes, state = exchanged(make_settings(model=dict(episodic="True"), loss=own))
    params = sum(x.size for x in jax.tree.leaves(state.params))
    policy = sum(x.size for x in jax.tree.leaves(state.params["policy"]))
    # Rows, states and value targets a step; states with plans.
    assert sizes[0] == ("psum", 3 * T + 1 + (policy_loss == "awr") * (T + 1))
    gathered = ["all_gather"] if policy_loss == "svg" else []
    assert [name for name, _ in sizes] == ["psum", "psum", *gathered, "psum"]
    assert params - policy <= sizes[1][1] < params - policy + 40
    assert policy <= sizes[-1][1] < policy + 40
    assert not gathered or sizes[2][1] == B


def test_heads_with_chunks_of_the_batch_exchange_nothing_by_themselves():
    """The update is of the whole batch, whose program the compiler divides."""
    assert exchanged(make_settings(model=dict(num_dynamics=2)))[0] == []


def test_values_and_policy_weigh_plans_by_the_temperature(monkeypatch):
    own = dict(value_target="planner", value_weighting="weighted", policy_loss="awr")
    settings = make_settings(loss=own | dict(awr_temperature=2.0))
    model = make_world_model(make_world(settings))
    seen = {}

    def watch(module, name, place):
        function = getattr(module, name)

        def call(*args):
            seen[name] = args[place]
            return function(*args)

        monkeypatch.setattr(module, name, call)

    watch(update, "value_targets", 6)
    watch(losses, "policy_inputs", 3)

    def weights(key, batch):
        state = update.init_state(settings, model, key)
        update.update_from_batch(settings, model, state, batch, update.draw(settings, model, key))
        return seen

    batch = make_batch()
    found = jax.jit(weights)(jax.random.key(0), batch)
    share = np.exp(np.asarray(batch.plan_values, np.float64) / 2.0)
    share /= share.sum(-1, keepdims=True)
    for name in ("value_targets", "policy_inputs"):
        np.testing.assert_allclose(found[name], share, rtol=1e-5, err_msg=name)
