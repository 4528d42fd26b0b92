"""A part of a batch knows how many rows the whole has, from one exchange before its first loss."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import heads, returns
from mbx.agents.tdmpc import agent as agents
from mbx.agents.tdmpc import policy_loss as policies
from mbx.agents.tdmpc.counts import counted
from mbx.agents.tdmpc.model_loss import model_loss
from mbx.agents.tdmpc.types import BATCH_AXES, Batch, Counts, Noise, Scales, TrainState, ValueScales
from mbx.agents.tdmpc.update import init_state
from mbx.agents.tdmpc.value_targets import value_targets
from mbx.fast import collectives
from mbx.replay import Sample, Targets
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import SPEC, A, B, T, Toy, make_batch, make_settings, make_world
from tests.agents.tdmpc_helpers import toy_model as closed_form
from tests.helpers import PARTS, exchanges, in_parts
from tests.test_heads import head

MASK = np.array([[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0]], np.float32)
ENDS = np.array([[0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 0.0, 1.0]], np.float32)
PLANNED = np.array([[1, 1, 1, 1], [0, 1, 1, 1], [1, 1, 0, 1]], bool)
# Every loss that divides by a count, each with another of them.
ALL = dict(
    model=dict(episodic="True", critic="v", num_dynamics=2),
    loss=dict(
        value_target="planner",
        value_last_state=True,
        aux_gammas=(0.7,),
        encoder_consistency_coef=1.0,
        heads="toy:0.1",
        policy_loss="awr:1+kl:1+bc:1",
        trust_region_coef=1.0,
        optimist=True,
        head_strategy="single",
    ),
)


def batch_of(**more) -> Batch:
    given = dict(mask=MASK, terminated=ENDS, plan_valid=PLANNED) | more
    return make_batch(**{name: jnp.asarray(x) for name, x in given.items()})


@pytest.mark.parametrize(
    ("critic", "own", "values"),
    [
        ("q", dict(value_target="planner"), MASK.sum(1)),
        ("v", dict(value_target="lambda", value_last_state=True), MASK.sum(1)),
        ("v", dict(value_target="td"), MASK.sum(1)),
        # Of the last states those of windows 0 (not ended) and, in no episode, 2; 3 has ended.
        ("v", dict(value_target="td", value_last_state=True), [3, 2, 1]),
        ("v", dict(value_target="planner"), [3, 1]),
        ("v", dict(value_target="planner", value_last_state=True), [3, 1, 1]),
    ],
)
def test_counts_are_those_of_the_whole_batch(critic, own, values):
    settings = make_settings(loss=own)
    batch = batch_of()
    counts = in_parts(lambda batch: counted(settings, critic, batch).counts, (1,), batch)
    wanted = dict(rows=[3, 2], ends=[1, 1], values=values, plans=[3, 2, 2], stored=[3, 1])
    for name, expected in wanted.items():
        np.testing.assert_array_equal(getattr(counts, name), [expected] * PARTS, name)


def test_a_policy_loss_divides_by_the_states_that_it_reads():
    counts = Counts(rows=jnp.asarray([3, 2]), plans=jnp.asarray([2, 5, 1]))
    assert [counts.of_policy(name, 3).tolist() for name in ("awr", "kl")] == [[2, 5, 1]] * 2
    assert counts.of_policy("kl", 2).tolist() == [2, 5]
    assert [counts.of_policy(name, 3).tolist() for name in ("svg", "trust")] == [[3, 3, 2]] * 2
    assert counts.of_policy("bc", 2).tolist() == [3, 3]
    assert Counts().of_policy("awr", 3) is None


def test_a_whole_batch_counts_for_itself():
    batch = batch_of()
    assert counted(make_settings(), "q", batch) is batch


def test_losses_of_parts_with_those_counts_add_up_to_the_wholes(monkeypatch):
    monkeypatch.setattr(heads, "_KNOWN", {"toy": head()})
    settings = make_settings(**ALL)
    model, params = closed_form(settings), Toy(settings).params()
    model = model._replace(
        reward=lambda *args: model.reward_mean(*args)[..., None],
        value=lambda *args: model.value_mean(*args[:3])[..., None],
        bins=lambda: jnp.zeros(1),
        heads=heads.make_heads(settings.loss.head_terms, SPEC),
    )
    slow = jax.tree.map(lambda x: 1.1 * x, params)
    params |= dict(heads={"toy": jnp.float32(0.5)}, optimist=slow["policy"])
    units = ValueScales(returns.init_running_scale(), returns.init_return_ema())
    scales = Scales(units, returns.init_running_scale(), returns.init_running_scale())
    own = dict(params=params, target_value=slow["value"], target_aux=slow["aux_value"])
    state = TrainState(**{name: own.get(name) for name in TrainState.__dataclass_fields__})
    keys = jax.random.split(jax.random.key(2), 3)
    expert = jnp.abs(jax.random.normal(keys[0], (T + 1, B, 2, A))) + 0.1
    batch = batch_of()._replace(expert=expert)
    target_eps, policy_eps = jax.random.normal(keys[1], (2, T + 1, B, A))
    noise = Noise(target_eps[:-1], None, policy_eps, None)
    weights = jax.nn.softmax(batch.plan_values)

    def losses(batch: Batch, noise: Noise, weights):
        batch = counted(settings, "v", batch)
        z = model.encode(params, batch.obs)
        targets = value_targets(settings, model, state, z, batch, noise, weights)
        args = params, batch, z[1:], targets, noise
        _, (zs, metrics) = model_loss(settings, model, *args, progress=0.5)
        inputs = policies.policy_inputs(settings, zs, batch, weights, noise)
        args = params["policy"], params, slow["policy"], inputs, scales
        policy, (_, extra) = policies.policy_loss(settings, model, *args)
        args = params["optimist"], params, inputs, units
        optimist, _ = policies.optimist_loss(settings, model, *args)
        return metrics | dict(
            policy=policy, trust=collectives.mean_share(extra["trust"]), optimist=optimist
        )

    whole = jax.jit(losses)(batch, noise, weights)
    calls, total = [], collectives.psum
    monkeypatch.setattr(collectives, "psum", lambda tree: calls.append(tree) or total(tree))
    parts = functools.partial(in_parts, losses, (1, BATCH_AXES, 1))
    assert {"loss/aux_value", "loss/termination", "loss/encoder_consistency"} <= whole.keys()
    assert {"loss/heads/toy", "heads/toy/bias", "value/target"} <= whole.keys()
    for name, x in jax.jit(parts)(batch, noise, weights).items():
        np.testing.assert_allclose(jnp.sum(x), whole[name], rtol=2e-5, err_msg=name)
    assert len(calls) == 1


@pytest.mark.parametrize("policy_loss", ["awr", "svg"])
def test_an_update_exchanges_counts_once_and_gradients_once(policy_loss):
    """Traced for devices that are not there; svg's policy learns after the model, hence later."""
    own = dict(policy_loss=policy_loss, value_target="td") if policy_loss == "svg" else {}
    settings = make_settings(model=dict(episodic="True"), loss=own)
    model = make_world_model(make_world(settings))
    learn = agents.make_learn(settings, model)
    batch = make_batch(expert=None)
    targets = Targets(
        batch.plan_actions, batch.plan_values, jnp.zeros((T + 1, B), jnp.int32), batch.plan_valid
    )
    no = jnp.zeros((T + 1, B), bool)
    rows = dict(obs=batch.obs, action=jnp.zeros((T + 1, B, A)), reward=no * 1.0, terminated=no)
    sample = Sample(rows, targets if settings.stores_plans else None, MASK > 0, None)
    state = jax.eval_shape(functools.partial(init_state, settings, model), jax.random.key(0))
    sizes = exchanges(learn, state, sample, jax.random.key(1))
    params = sum(x.size for x in jax.tree.leaves(state.params))
    policy = sum(x.size for x in jax.tree.leaves(state.params["policy"]))
    # Rows, ends and value targets a step; states with plans, and stored ones.
    assert sizes[0] == ("psum", 3 * T + (policy_loss == "awr") * (2 * T + 1))
    if policy_loss == "awr":
        assert len(sizes) == 2 and params <= sizes[1][1] < params + 40 and sizes[1][0] == "psum"
    else:
        assert [name for name, _ in sizes] == ["psum", "psum", "all_gather", "psum"]
        assert params - policy <= sizes[1][1] < params - policy + 40
        assert sizes[2][1] == B and policy <= sizes[3][1] < policy + 40
