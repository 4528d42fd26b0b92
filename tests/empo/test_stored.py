"""EMPO with humans in the environment and successors in the replay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs, power, replay
from mbx.empo import suite as empo_envs
from mbx.empo.agent import evaluation as empo_evaluation
from tests.empo.helpers import (
    AT_ONCE,
    AVERAGING,
    EXPLORE,
    TABLES,
    errors_of,
    exact_tables,
    load,
    problem_of,
    settings_of,
    train,
    train_state,
)


def test_the_codec_returns_exactly_what_was_packed():
    state = {
        "a": jnp.array([1.5, -jnp.pi], jnp.float32),
        "b": jnp.uint32(2**32 - 5),
        "c": jnp.array([[True], [False]]),
        "d": jnp.int8(-7),
        "e": jnp.bfloat16(0.25),
    }
    world = load("dag_2h2r").world._replace(example_state=state)
    codec = power.make_codec(world)
    goals, actions = jnp.array([3, 1]), jnp.array([0, 1])
    obs = jax.jit(codec.pack)(state, goals, actions)
    assert obs.shape == (codec.size,) == (11,) and obs.dtype == jnp.int32
    got, *rest = codec.unpack(obs)
    for name, value in state.items():
        np.testing.assert_array_equal(got[name], value)
        assert got[name].dtype == value.dtype
    np.testing.assert_array_equal(rest, [goals, actions])
    with pytest.raises(ValueError, match="only numbers"):
        power.make_codec(world._replace(example_state=jax.random.key(0)))


def test_humans_live_in_the_environment():
    found = load("grid_rock_1h1r")
    environment = envs.episodic(empo_envs.raw_environment("empo:x", found.world), 64)
    assert environment.spec.discrete and environment.spec.action_dim == 4
    codec = power.make_codec(found.world)
    unpack = jax.vmap(codec.unpack)
    state, obs = jax.jit(environment.reset)(jax.random.key(0))
    step, unpack = jax.jit(environment.step), jax.jit(unpack)
    achieved = jax.jit(jax.vmap(found.world.achieved))
    listed = jax.jit(jax.vmap(found.world.successors))
    total, ended = 0.0, 0
    for i in range(6):
        action = jax.nn.one_hot(jnp.full(64, i % 4), 4)
        before, goals, _ = unpack(obs)
        state, timestep = step(state, action, jax.random.key(i + 1))
        after, new_goals, humans = unpack(timestep.final_obs)
        reached = np.asarray(achieved(after))[np.arange(64), 0, goals[:, 0]]
        np.testing.assert_array_equal(timestep.reward, reached)
        np.testing.assert_array_equal(timestep.terminated, jax.vmap(found.world.terminal)(after))
        # Every step is one that the table lists, with the action that the observation shows.
        joint = jnp.concatenate([humans, jnp.full((64, 1), i % 4)], axis=1)
        options, prob, _ = listed(before, joint)
        assert np.all(np.any((options == after[:, None]) & (prob > 0), axis=1))
        total, ended = total + reached.sum(), ended + int(timestep.terminated.sum())
        obs = timestep.obs
    assert total > 0 and ended >= 64


def test_humans_get_what_v_h_e_says_they_get():
    found = load("grid_rock_1h1r")
    exact = exact_tables(found)
    problem = problem_of(found, settings_of(model=TABLES, curriculum=AT_ONCE))
    policy = empo_evaluation.learned_policy(problem, train_state(exact))
    result = empo_evaluation.goal_reaching(
        found.world,
        policy,
        jax.random.key(0),
        episodes=20_000,
        length=6,
        gamma=float(found.params.gamma_h),
    )
    start = int(found.world.init(jax.random.key(0)))
    want = np.sum(found.world.goal_weight[0] * found.solution.V_h_e[0, :, start])
    assert abs(result["discounted"] - want) < 4 * result["discounted_error"]
    frozen = empo_evaluation.goal_reaching(
        found.world, empo_evaluation.frozen_policy, jax.random.key(0), episodes=5_000, length=6
    )
    assert result["reached"] > frozen["reached"] + 0.02


STORED = dict(
    model=AVERAGING, curriculum=EXPLORE, loss=dict(human_expectation="fresh", human_samples=1)
)


def test_stored_successors_are_those_of_the_world():
    found = load("dag_2h2r")
    records = power.make_records(found.world)
    record = jax.jit(records.draw)(jnp.int32(1), jax.random.key(0))
    words = jax.jit(records.pack)(record)
    assert words.shape == (records.size,) and words.dtype == jnp.int32
    jax.tree.map(np.testing.assert_array_equal, jax.jit(records.unpack)(words), record)
    np.testing.assert_allclose(record.prob.sum(-1), 1.0, rtol=1e-6)
    for changes in (dict(human_expectation="exact"), dict(human_samples=2)):
        loss = STORED["loss"] | changes
        if changes.get("human_expectation"):
            loss.pop("human_samples")
        with pytest.raises(ValueError, match="loss.human_expectation="):
            problem_of(found, settings_of(**STORED | dict(loss=loss)), "@stored")
    assert problem_of(found, settings_of(**STORED), "@stored").records
    assert envs.make("empo:test@stored", 1).spec.obs_shape[0] > records.size
    with pytest.raises(ValueError, match="only option"):
        envs.make("empo:test@packed", 1)


@pytest.mark.slow
def test_tables_learn_from_stored_successors():
    found, settings = load("dag_2h2r"), settings_of(**STORED)
    state, metrics = train(found, settings, 1_500, option="@stored")
    sizes = replay.bytes_per_transition(state.replay)["rows"]
    assert sizes > 4 * power.make_records(found.world).size and metrics["mass_error"] < 1e-5
    errors, _ = errors_of(found, settings, state)
    assert errors["v_h_e"] < 0.05 and errors["pi_r"] < 0.05, errors
