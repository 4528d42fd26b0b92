"""Ways of learning beside the default: each trains what it should, as often as it should."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.agents.tdmpc.agent import make_agent
from mbx.training.loop import summarise
from tests.agents.tdmpc_helpers import SPEC, VARIANTS, empty_replay, moved, row, variant


@pytest.fixture(autouse=True, scope="module")
def highest_precision():
    with jax.default_matmul_precision("highest"):
        yield


# One configuration a way of learning: every option of the settings is in one of them.


SELDOM = [name for name in VARIANTS if not variant(name).train.pretrain_policy]


@pytest.fixture(scope="module", params=list(VARIANTS))
def learnt(request):
    """(settings, update, states before and after three updates, metrics, replay, after a pass)."""
    settings = variant(request.param)
    agent = make_agent(settings, SPEC)
    train = jax.jit(agent.init)(jax.random.key(0))
    buffer = empty_replay(agent, num_envs=2, capacity=12)
    no, actor = jnp.zeros(2, bool), agent.init_actor(2)
    act, make = jax.jit(agent.act, static_argnums=5), jax.jit(agent.store.targets)
    for i in range(8):
        obs = jax.random.normal(jax.random.key(i), (2, 3))
        action, actor = act(train, actor, obs, no | (i == 0), jax.random.key(50 + i), False)
        made = make(train, actor, obs, jax.random.key(10 + i))
        buffer = replay.insert(buffer, row(obs, action, first=i == 0), made)
    update = jax.jit(agent.update)
    states, key = [train], jax.random.key(1)
    for i in range(3):
        new, _, metrics = update(states[-1], buffer, jax.random.fold_in(key, i))
        states.append(new)
    refreshed, _ = jax.jit(agent.store.reanalyze)(states[-1], buffer, key, jnp.int32(-1))
    return settings, update, states, metrics, buffer, refreshed


def test_every_way_of_learning_trains_what_it_should(learnt):
    settings, _, states, metrics, _, _ = learnt
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(metrics)), metrics
    first, last = states[0].params, states[-1].params
    heads = dict(
        dynamics=settings.model.num_dynamics,
        reward=settings.model.num_rewards,
        value=settings.model.num_values,
    )
    for name in first:
        before, after = first[name], last[name]
        if name in heads and settings.model.prior_scale:
            assert not any(moved(before["prior"], after["prior"])), name
            before, after = before["main"], after["main"]
        for head in range(heads.get(name, 1)):  # a gradient reaches every one
            pair = before, after
            if name in heads:
                pair = jax.tree.map(lambda x, h=head: x[h], pair)
            assert any(moved(*pair)), (name, head)
    assert (states[-1].target_policy is None) == (not settings.keeps_target_policy)
    if settings.keeps_target_policy:
        assert any(moved(states[0].target_policy, states[-1].target_policy))


def test_update_frequencies_hold_values_and_policy_back(learnt):
    settings, _, states, _, _, _ = learnt
    held = [
        not any(moved(a.params["value"], b.params["value"]))
        for a, b in zip(states, states[1:], strict=False)
    ]
    still = [
        not any(moved(a.params["policy"], b.params["policy"]))
        for a, b in zip(states, states[1:], strict=False)
    ]
    assert held == [settings.optimizer.value_every == 2 and i % 2 == 1 for i in range(3)]
    assert still == [not settings.train.pretrain_policy and i == 0 for i in range(3)]


@pytest.mark.parametrize("learnt", SELDOM, indirect=True)
def test_what_only_some_updates_have_is_averaged_over_those(learnt):
    _, update, states, _, buffer, _ = learnt
    key = jax.random.key(1)
    logged, sums, total = [], None, 0.0
    for i in range(4):
        metrics = update(states[i % 2], buffer, jax.random.fold_in(key, i))[2]
        logged.append(metrics)
        total = jax.tree.map(jnp.add, total, metrics) if i else metrics
    sums = {f"update/{name}": value for name, value in total.items()} | {"updates": 4}
    means = summarise(sums)
    for name in ("loss/policy", "policy/entropy", "grad_norm/policy"):
        due = [float(x[name].total) for x in logged if float(x[name].count)]
        assert len(due) == 2 and all(value != 0.0 for value in due)
        np.testing.assert_allclose(means[name], np.mean(due), rtol=1e-5)
    # The values' loss is known in every update.
    values = [float(x["loss/value"]) for x in logged]
    assert min(values) > 0.0
    np.testing.assert_allclose(means["loss/value"], np.mean(values), rtol=1e-5)
    assert "policy/entropy" not in summarise(
        {f"update/{name}": x for name, x in logged[0].items()} | {"updates": 1}
    )


def test_reanalyze_writes_back_to_the_rows_it_read(learnt):
    settings, _, states, _, buffer, refreshed = learnt
    touched = np.asarray(refreshed.targets.step == 3) & np.asarray(refreshed.targets.valid)
    assert touched.any()
    jax.tree.map(
        lambda new, old: np.testing.assert_array_equal(
            np.asarray(new)[~touched], np.asarray(old)[~touched]
        ),
        refreshed.targets,
        buffer.targets,
    )
    if settings.uses_expert:
        expert = np.asarray(refreshed.targets.expert)[touched]
        assert np.abs(expert[:, 0]).max() <= 1.0 and (expert[:, 1] > 0.0).all()
