"""MPPI refinement, lambda returns, ReturnEMA and successor aggregation in one compiled train step.

What the step computed for each is compared with numpy, from the same parameters and noise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import successors
from mbx.agents.tdmpc import planning, policies, value_targets
from mbx.agents.tdmpc.losses import select_latents
from mbx.agents.tdmpc.update import draw, init_state, update_from_batch, weigh_plans
from mbx.world_model import head_values, make_world_model
from tests.agents.tdmpc_helpers import A, B, T, loud, make_batch, make_settings, make_world
from tests.helpers import compiled, program

H, N = 3, 6


@pytest.fixture(scope="module")
def step():
    """Everything that one train step computed, by name, and what it was given."""
    settings = make_settings(
        model=dict(num_dynamics=H),
        training_planner=dict(iterations=3, num_samples=N),
        loss=dict(
            value_target="lambda",
            policy_loss="svg",
            value_scale="return_ema",
            lambda_=0.8,
            batch_size=H * 2,
        ),
    )
    model = compiled(make_world_model(make_world(settings)))
    state = program(init_state, settings, model)(jax.random.key(0))
    state = state.replace(params=loud(state.params), target_value=loud(state.target_value, 8))
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x[:, : H * 2 - B]], axis=1), make_batch())
    ends = batch.terminated.at[T - 1, 1].set(1.0)
    valid = batch.plan_valid.at[2, 1].set(False).at[1, 2].set(False)
    batch = batch._replace(mask=batch.mask.at[1, 0].set(0.0), terminated=ends, plan_valid=valid)
    noise = draw(settings, model, jax.random.key(1))

    @jax.jit
    def train_step(state, batch, key):
        z = model.encode(state.params, batch.obs.reshape(-1, 3))
        plan = planning.plan_targets(settings, model, state.params, z, key)
        lead = batch.obs.shape[:2]
        batch = batch._replace(
            plan_actions=plan.actions.reshape(*lead, N, A),
            plan_values=plan.values.reshape(*lead, N),
        )
        weights = weigh_plans(settings, batch.plan_values)
        z = z.reshape(*lead, -1)
        target, _ = value_targets.value_targets(settings, model, state, z, batch, noise, weights)
        new, metrics = update_from_batch(settings, model, state, batch, noise)
        return dict(
            plan=plan, batch=batch, weights=weights, target=target, new=new, z=z, metrics=metrics
        )

    return settings, model, state, train_step(state, batch, jax.random.key(2))


def test_planner_values_are_successor_expectations(step):
    _, model, state, out = step
    params, actions = state.params, np.asarray(out["plan"].actions)
    z = jnp.asarray(out["z"]).reshape(-1, out["z"].shape[-1])
    states = np.repeat(np.arange(len(z)), N)
    flat = jnp.asarray(actions.reshape(-1, A))
    before = np.asarray(z)[states]
    reward = jax.jit(model.decode)(model.reward(params, before[None], flat))[0, 0]
    heads = [
        model.step(
            {**params, "dynamics": jax.tree.map(lambda p, h=h: p[h : h + 1], params["dynamics"])},
            before[None],
            flat,
        )[0]
        for h in range(H)
    ]
    values = np.stack(
        [
            np.asarray(program(head_values, model)(params["value"], x, None, None)).mean(axis=0)
            for x in heads
        ]
    )
    expected = np.asarray(reward) + 0.9 * values.mean(axis=0)
    np.testing.assert_allclose(
        out["plan"].values.reshape(-1), expected, rtol=2e-3, atol=2e-4
    )  # values pass through symexp
    flat_form = successors.segment_expectation(
        jnp.asarray(values.T.reshape(-1)),
        jnp.full(values.size, 1.0 / H),
        jnp.repeat(jnp.arange(values.shape[1]), H),
        values.shape[1],
    )
    np.testing.assert_allclose(flat_form, values.mean(axis=0), rtol=1e-5)


def test_lambda_returns_of_the_planners_values(step):
    settings, model, state, out = step
    batch, weights = out["batch"], np.asarray(out["weights"])
    heads = draw(settings, model, jax.random.key(1)).target_heads
    own = program(head_values, model)(state.target_value, out["z"][1:], None, heads).mean(axis=0)
    annotations = (weights * np.asarray(batch.plan_values)).sum(-1)[1:]
    annotations = np.where(batch.plan_valid[1:], annotations, own)
    reward, mask = np.asarray(batch.reward), np.asarray(batch.mask)
    expected = np.zeros((T, H * 2))
    for b in range(H * 2):
        later = annotations[T - 1, b]
        for t in reversed(range(T)):
            follows = t + 1 < T and mask[t + 1, b] > 0
            trace = settings.loss.lambda_ if follows else 0.0
            mixed = (1 - trace) * annotations[t, b] + trace * later
            alive = 1.0 - float(batch.terminated[t, b])
            expected[t, b] = later = reward[t, b] + settings.loss.discount * alive * mixed
    np.testing.assert_allclose(out["target"].samples[0, ..., 0], expected, rtol=1e-4, atol=1e-5)


def test_return_ema_moved_towards_the_percentiles_of_the_values(step):
    settings, model, state, out = step
    assert settings.loss.policy_terms == {"svg": 1.0}
    noise = draw(settings, model, jax.random.key(1))
    # The policy of before in the model of after, on the latents that the losses rolled out.
    params = {**out["new"].params, "policy": state.params["policy"]}
    first = select_latents(model.tile_heads(out["z"][0])[None])[0]
    action = model.act(*model.policy(params, first), noise.policy_eps[0])
    value = program(policies.policy_value, settings, model)
    values = value(params, first, action, noise.policy_heads)
    low, high = np.percentile(np.asarray(values), [5.0, 95.0])
    ema, before = out["new"].return_ema, state.return_ema
    np.testing.assert_allclose(ema.low, 0.99 * before.low + 0.01 * low, rtol=1e-3)
    np.testing.assert_allclose(ema.high, 0.99 * before.high + 0.01 * high, rtol=1e-3)
    np.testing.assert_allclose(
        out["metrics"]["policy/scale"], max(1.0, float(ema.high - ema.low)), rtol=1e-6
    )
