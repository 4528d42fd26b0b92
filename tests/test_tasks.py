"""Several tasks in one model: what belongs to a task stays with it, and padding means nothing."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import types
from mbx.agents.tdmpc import planning, policies, scoring
from mbx.agents.tdmpc.settings import Settings
from mbx.world_model import config_for_size, discount_of, make_world_model
from tests.helpers import compiled, program

TASKS = types.TaskSet(("short", "long"), (1, 3), embedding_dim=5)


@pytest.fixture(scope="module", params=["v", "q"])
def model_and_params(request):
    model = make_world_model(
        config_for_size(
            "tiny",
            obs_shape=(4 + 2,),
            action_dim=3,
            num_bins=11,
            num_values=2,
            num_dynamics=2,
            critic=request.param,
            tasks=TASKS,
        )
    )
    model = compiled(model)
    params = model.init(jax.random.key(0))
    # Zeroed last layers would hide what heads read.
    fill = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    return model, jax.tree.map(lambda p: p + 0.1 * np.resize(fill, p.shape), params)


def observations(model, params):
    obs = jax.random.normal(jax.random.key(2), (6, 4))
    one_hot = jnp.repeat(jnp.eye(2), 3, axis=0)
    return model.encode(params, jnp.concatenate([obs, one_hot], axis=-1))


def test_a_latent_carries_its_task_through_the_dynamics(model_and_params):
    model, params = model_and_params
    z = observations(model, params)
    assert z.shape == (6, model.config.latent + 5 + 2)
    stepped = model.step(params, model.tile_heads(z), jnp.ones((6, 3)))
    np.testing.assert_array_equal(stepped[0, :, -7:], z[:, -7:])
    np.testing.assert_allclose(z[:3, -7:-2], np.broadcast_to(params["task"][0], (3, 5)), rtol=1e-6)
    np.testing.assert_array_equal(TASKS.one_hot(z), np.repeat(np.eye(2), 3, axis=0))


def test_actions_that_a_task_does_not_have_change_nothing(model_and_params):
    model, params = model_and_params
    z = observations(model, params)
    one, two = jnp.zeros((6, 3)), jnp.zeros((6, 3)).at[:, 1:].set(1.0)
    np.testing.assert_array_equal(model.action_mask(z), [[1, 0, 0]] * 3 + [[1, 1, 1]] * 3)
    outputs = [
        (
            model.step(params, model.tile_heads(z), a),
            model.reward(params, z[None], a)[0],
            model.value(params["value"], z, a),
        )
        for a in (one, two)
    ]
    for first, second in zip(*outputs, strict=True):
        np.testing.assert_array_equal(first[:, :3], second[:, :3])
    changed = np.abs(outputs[0][0][:, 3:] - outputs[1][0][:, 3:]).max()
    assert changed > 1e-4, "the task that has these actions must feel them"


def test_the_policy_and_its_plans_leave_missing_actions_at_zero(model_and_params):
    model, params = model_and_params
    z = observations(model, params)
    mean, log_std = model.policy(params, z)
    assert not mean[:3, 1:].any() and not log_std[:3, 1:].any() and mean[3:].all()
    eps = jax.random.normal(jax.random.key(3), (2, 6, 4, 3))
    actions = program(planning.policy_trajectories, model)(params, z, eps)
    assert not actions[:3, ..., 1:].any() and actions[3:].all()


def test_entropy_counts_the_actions_a_task_has(model_and_params):
    model, _ = model_and_params
    mask = jnp.asarray([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    log_std, eps = jnp.asarray([[-1.0, 0.0, 0.0], [-1.0, 0.5, 0.2]]), jnp.ones((2, 3))
    entropy = policies.policy_entropy(Settings(), model, jnp.zeros((2, 3)), log_std, eps, mask)
    one = -(-0.5 + 1.0 - 3 * 0.5 * np.log(2 * np.pi))  # missing dims add a constant
    three = -3 * (-1.5 + 0.3 - 3 * 0.5 * np.log(2 * np.pi))
    np.testing.assert_allclose(entropy, [one, three], rtol=1e-5)
    difference = jnp.asarray([[2.0, 9.0, 9.0], [1.0, 2.0, 3.0]])
    np.testing.assert_allclose(policies.mean_over_actions(difference, mask), [2.0, 2.0])


def test_every_task_has_its_discount(model_and_params):
    model, params = model_and_params
    z = observations(model, params)
    discounts = discount_of(model, (0.9, 0.99), z)
    np.testing.assert_allclose(discounts, [0.9] * 3 + [0.99] * 3, rtol=1e-6)
    actions = jnp.zeros((6, 1, 2, 3))
    eps = jnp.zeros((6, 1, 3))

    def value(discount):
        settings = Settings()
        loss = dataclasses.replace(settings.loss, discount=discount)
        own = dataclasses.replace(settings, loss=loss)
        estimate = functools.partial(scoring.estimate_value, planner=settings.planner, heads=None)
        return program(estimate, own, model)(params, z, actions, eps=eps)

    both, low, high = value((0.9, 0.99)), value(0.9), value(0.99)
    assert np.all(np.abs(low - high) > 1e-3 * np.abs(high))
    np.testing.assert_allclose(both[:3], low[:3], rtol=1e-5)
    np.testing.assert_allclose(both[3:], high[3:], rtol=1e-5)


def test_embeddings_have_norm_one_at_most_and_move_on_to_other_tasks():
    embeddings = TASKS.init(jax.random.key(0))
    assert (jnp.linalg.norm(embeddings, axis=-1) <= 1.0 + 1e-6).all()
    limited = types.limit_norm(jnp.asarray([[3.0, 4.0], [0.3, 0.4]]))
    np.testing.assert_allclose(limited, [[0.6, 0.8], [0.3, 0.4]], rtol=1e-6)
    moved = types.carry_over(jnp.asarray([[1.0], [3.0]]), ("a", "b"), ("new", "b"))
    np.testing.assert_allclose(moved, [[2.0], [3.0]])


@pytest.mark.parametrize(
    ("names", "dims", "says"),
    [(("a", "a"), (1, 1), "name of its own"), (("a",), (0,), "at least 1")],
)
def test_impossible_tasks_are_refused(names, dims, says):
    with pytest.raises(ValueError, match=says):
        types.TaskSet(names, dims)
