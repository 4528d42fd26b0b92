"""Named keys; several tasks in one model: what belongs to one stays with it."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import returns, types
from mbx.agents.tdmpc import planning, policies, scoring
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import PolicyInputs, Scales
from mbx.world_model import config_for_size, make_world_model
from tests.agents.tdmpc_helpers import weighed
from tests.helpers import compiled, program

TASKS = types.TaskSet(("short", "long"), (1, 3), embedding_dim=5)


@pytest.fixture(scope="module")
def model_and_params():
    model = make_world_model(
        config_for_size(
            "tiny",
            obs_shape=(4 + 2,),
            action_dim=3,
            num_bins=11,
            num_values=2,
            num_dynamics=2,
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


def test_plans_of_the_policy_leave_missing_actions_at_zero(model_and_params):
    model, params = model_and_params
    eps = jax.random.normal(jax.random.key(3), (2, 6, 4, 3))
    z = observations(model, params)
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


def test_losses_to_imitate_are_means_over_the_actions_a_task_has(model_and_params):
    model, params = model_and_params
    zs, nothing = jnp.stack([observations(model, params)] * 2), jnp.zeros((2, 6, 3))
    wanted = jnp.asarray([[2.0, 9.0, 9.0]] * 3 + [[1.0, 2.0, 3.0]] * 3)
    expert, rows = jnp.stack([wanted, jnp.ones((6, 3))], axis=-2), weighed(2, 6)
    inputs = PolicyInputs(zs, rows, nothing, None, plans=rows, expert=jnp.stack([expert] * 2))
    inputs = inputs._replace(behaviour=wanted[None])
    policy = policies.Policy(Settings(), model, {}, nothing, nothing, inputs)
    scales = Scales(*[returns.init_running_scale()] * 3, None)
    cloned, *_ = policies.clone(policy, scales)
    np.testing.assert_allclose(cloned[0], [4.0] * 3 + [14 / 3] * 3, rtol=1e-6)
    kl, _, new, _ = policies.distil(policy, scales)  # of unit Gaussians
    np.testing.assert_allclose(2.0 * kl * new.kl_scale.value, cloned, rtol=1e-6)


def test_every_task_has_its_discount(model_and_params):
    model, params = model_and_params
    z = observations(model, params)
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
    moved = types.carry_over(jnp.asarray([[1.0], [3.0]]), ("a", "b"), ("new", "b"))
    np.testing.assert_allclose(moved, [[2.0], [3.0]])


@pytest.mark.parametrize(
    ("names", "dims", "says"),
    [(("a", "a"), (1, 1), "name of its own"), (("a",), (0,), "at least 1")],
)
def test_impossible_tasks_are_refused(names, dims, says):
    with pytest.raises(ValueError, match=says):
        types.TaskSet(names, dims)


def test_every_name_has_a_stream_of_its_own_and_a_name_twice_is_refused():
    key = jax.random.key(3)
    found = types.streams(key, "act", "learn", "plan")
    assert list(found) == ["act", "learn", "plan"]
    data = np.stack([jax.random.key_data(x) for x in found.values()])
    np.testing.assert_array_equal(data, jax.random.key_data(jax.random.split(key, 3)))
    assert len({tuple(x) for x in [*data, np.asarray(jax.random.key_data(key))]}) == 4
    with pytest.raises(ValueError, match=r"streams \('a', 'b', 'a'\): give every one a name of"):
        types.streams(key, "a", "b", "a")
