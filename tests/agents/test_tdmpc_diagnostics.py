"""A look at the model: every measure on a model of closed form, against NumPy and by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import figure

from mbx import replay
from mbx.agents.base import Episodes
from mbx.agents.tdmpc import diagnostics
from mbx.agents.tdmpc.agent import world_config
from mbx.agents.tdmpc.scoring import score_function
from mbx.agents.tdmpc.types import Batch
from mbx.training import run
from mbx.training.logging import read_rows
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import SPEC, Toy, loud, make_settings, replaced, toy_model
from tests.helpers import tiny_config

STEPS, WINDOWS, DEEPEST = 4, 3, 2
GAMMA = 0.9


@pytest.fixture(scope="module")
def settings():
    return make_settings(
        model=dict(num_dynamics=2, num_rewards=2, num_values=3, episodic="True"),
        loss=dict(discount=GAMMA, num_heads=3, termination="soft"),
        planner=dict(horizon=2, iterations=3, num_samples=64, num_elites=8, num_proposals=2),
    )


@pytest.fixture(scope="module")
def batch() -> Batch:
    rng = np.random.default_rng(0)
    mask = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]], np.float32)
    terminated = np.zeros((STEPS, WINDOWS), np.float32)
    terminated[1, 2] = 1.0  # the third window ends by itself, the second is cut
    terminated[3, 1] = 1.0  # of another episode
    return Batch(
        obs=jnp.asarray(rng.normal(size=(STEPS + 1, WINDOWS, 2)), jnp.float32),
        action=jnp.asarray(rng.uniform(-1, 1, (STEPS, WINDOWS, 2)), jnp.float32),
        reward=jnp.asarray(rng.normal(size=(STEPS, WINDOWS)), jnp.float32),
        terminated=jnp.asarray(terminated),
        mask=jnp.asarray(mask),
    )


def test_errors_are_those_of_the_models_own_future(settings, batch):
    toy, model = Toy(settings), toy_model(settings)
    z = batch.obs[: DEEPEST + 1]
    short = batch._replace(action=batch.action[:DEEPEST], reward=batch.reward[:DEEPEST])
    found = diagnostics.open_loop(model, toy.params(), z, short)
    latent, still, reward = (np.asarray(x) for x in found)
    obs, action, real = (np.asarray(x) for x in (batch.obs, batch.action, batch.reward))
    heads = [obs[0], obs[0]]  # each dynamics head goes on from where it is
    for t in range(DEEPEST):
        expected = np.mean([toy.rewards(h, action[t]) for h in heads], axis=(0, 1))
        np.testing.assert_allclose(reward[t], np.abs(expected - real[t]), rtol=1e-4)
        heads = [0.9 * h + g * action[t] for h, g in zip(heads, toy.gain, strict=True)]
        gone = np.square(np.mean(heads, axis=0) - obs[t + 1]).mean(axis=-1)
        np.testing.assert_allclose(latent[t], gone, rtol=1e-4)
        np.testing.assert_allclose(still[t], np.square(obs[0] - obs[t + 1]).mean(-1), rtol=1e-4)


def played(**changes) -> Episodes:
    """Four steps of three episodes, seen at steps 0 and 2; the first is cut by the time limit, the
    second ended by itself after three steps, the third was cut after two."""
    rewards = np.random.default_rng(2).normal(size=(STEPS, WINDOWS)).astype(np.float32)
    lengths = np.array([4, 3, 2])
    rewards[np.arange(STEPS)[:, None] >= lengths] = 0.0
    fields = dict(
        rewards=rewards,
        lengths=lengths,
        terminated=np.array([False, True, False]),
        steps=np.array([0, 2]),
        obs=np.zeros((2, WINDOWS, 2), np.float32),
        last_obs=np.zeros((WINDOWS, 2), np.float32),
    )
    return Episodes(**fields | changes)


def test_the_realised_return_ends_where_the_episode_does():
    last = jnp.array([10.0, 20.0, 30.0])
    found, known = diagnostics.realised_returns(played(), GAMMA, last)
    r = played().rewards
    expected = [
        r[0, 0] + 0.9 * r[1, 0] + 0.81 * r[2, 0] + 0.729 * r[3, 0] + 0.6561 * 10.0,
        r[0, 1] + 0.9 * r[1, 1] + 0.81 * r[2, 1],  # ended by itself: nothing follows
        r[0, 2] + 0.9 * r[1, 2] + 0.81 * 30.0,
        r[2, 0] + 0.9 * r[3, 0] + 0.81 * 10.0,
        r[2, 1],
    ]
    np.testing.assert_allclose(found[:5], expected, rtol=1e-5)
    np.testing.assert_array_equal(known, [1, 1, 1, 1, 1, 0])  # the third had ended
    each, _ = diagnostics.realised_returns(played(), jnp.array([0.9, 0.9, 0.5]), last)
    expected[2] = r[0, 2] + 0.5 * r[1, 2] + 0.25 * 30.0  # several tasks
    np.testing.assert_allclose(each[:5], expected, rtol=1e-5)


def test_an_episode_with_a_step_that_is_no_number_is_not_known():
    rewards = played().rewards.copy()
    rewards[1, 0] = np.nan
    _, known = diagnostics.realised_returns(played(rewards=rewards), GAMMA, jnp.zeros(3))
    np.testing.assert_array_equal(known, [0, 1, 1, 0, 1, 0])


def test_values_and_terminations_are_means_over_heads(settings, batch):
    toy, model = Toy(settings), toy_model(settings)
    z, action = np.asarray(batch.obs[:2]), np.asarray(batch.action[:2])
    value = diagnostics.state_values(model, toy.params(), batch.obs[:2])
    np.testing.assert_allclose(value, toy.values(z).mean(axis=0), rtol=1e-5)
    said = diagnostics.termination(model, toy.params(), batch.obs[:2], batch.action[:2])
    wanted = np.mean([1.0 - toy.alive(after) for after in toy.step(z, action)], axis=0)
    np.testing.assert_allclose(said, wanted, rtol=1e-5)


def test_rounds_begin_with_the_policys_value_and_improve_on_it(settings):
    toy, model = Toy(settings), toy_model(settings)
    z = np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32)
    key = jax.random.key(0)
    plans = jax.jit(
        lambda z: diagnostics.plans_by_round(settings, model, toy.params(), z, jnp.int32(0), key)
    )(z)
    assert plans.shape == (4, 8)
    # The policy's actions follow the first dynamics head; the score is a mean over both.
    head, heads, total, alive = z, [z, z], 0.0, np.ones((2, 8))
    for t in range(2):
        action = toy.act(head, 0.0)
        rewards = np.stack([toy.rewards(h, action).mean(axis=0) for h in heads])
        total = total + GAMMA**t * alive * rewards
        head = 0.9 * head + toy.gain[0] * action
        heads = [0.9 * h + g * action for h, g in zip(heads, toy.gain, strict=True)]
        alive = alive * np.stack([toy.alive(h) for h in heads])
    value = np.stack([toy.values(h).mean(axis=0) for h in heads])
    np.testing.assert_allclose(plans[0], (total + GAMMA**2 * alive * value).mean(axis=0), rtol=1e-4)
    means = np.asarray(plans).mean(axis=1)
    assert means[3] > means[0] and means[3] >= means[1]


def test_a_look_puts_what_was_predicted_beside_what_came(monkeypatch, settings, batch):
    """Windows by depth; values and plans of states that the evaluation saw, known ones first."""
    toy, model = Toy(settings), toy_model(settings)
    rng = np.random.default_rng(3)
    obs, last = rng.normal(size=(2, WINDOWS, 2)), rng.normal(size=(WINDOWS, 2))
    episodes = played(obs=obs.astype(np.float32), last_obs=last.astype(np.float32))
    monkeypatch.setattr(diagnostics, "newest_windows", lambda *_: batch)
    monkeypatch.setattr(
        diagnostics, "plans_by_round", lambda settings, model, params, z, step, key: z
    )
    monkeypatch.setattr(diagnostics, "training_gain", lambda *_: jnp.arange(3.0))
    monkeypatch.setattr(diagnostics, "PLANNED", 5)

    @jax.jit
    def both(params):
        z, train = batch.obs, SimpleNamespace(params=params, step=0)
        found = diagnostics.look(settings, model, train, None, episodes, jax.random.key(0))
        return found, dict(
            zip(
                ("latent", "still", "reward"),
                diagnostics.open_loop(model, params, z, batch),
                strict=True,
            ),
            said=diagnostics.termination(model, params, z[:-1], batch.action),
        )

    found, wanted = both(toy.params())
    wanted |= dict(mask=batch.mask, ended=batch.terminated)
    wanted["value"] = toy.values(obs.reshape(-1, 2)).mean(axis=0)
    ending = jnp.asarray(toy.values(last).mean(axis=0), jnp.float32)
    wanted["realised"], wanted["known"] = diagnostics.realised_returns(episodes, GAMMA, ending)
    assert sorted(np.asarray(found.chosen)) == [0, 1, 2, 3, 4]  # the last was not reached
    wanted |= dict(chosen=found.chosen, plans=obs.reshape(-1, 2)[found.chosen])
    wanted["training"] = np.arange(3.0)
    assert wanted.keys() == set(found._fields)
    for name, value in wanted.items():
        np.testing.assert_allclose(getattr(found, name), value, rtol=1e-5, err_msg=name)


def test_discrete_plans_are_plans_that_exist():
    """Against all 27 sequences of three actions in a model with random parameters."""
    settings = make_settings(
        planner=dict(horizon=3, iterations=4, num_samples=64, num_elites=8, prior_updates=4)
    )
    spec = SPEC._replace(action_dim=3, discrete=True)
    widths = dict(enc_dim=8, mlp_dim=8, latent_dim=8)
    world = dataclasses.replace(world_config(settings, spec), **widths)
    model = make_world_model(world)
    params = loud(model.init(jax.random.key(3)))
    z = jax.jit(model.encode)(params, jax.random.normal(jax.random.key(4), (6, 3)))

    @jax.jit
    def both(z):
        step, key = jnp.int32(9), jax.random.key(0)
        plans = diagnostics.plans_by_round(settings, model, params, z, step, key)
        every = jnp.asarray(list(itertools.product(np.eye(3), repeat=3)), jnp.float32)
        score = score_function(settings, model, params, z, settings.planner)
        return plans, score(key, jnp.broadcast_to(every, (6, 27, 3, 3)))

    plans, values = (np.asarray(x) for x in both(z))
    assert plans.shape == (5, 6)
    for k, each in enumerate(plans):  # the policy's, and those after each round
        gap = np.abs(each[:, None] - values).min(axis=1)
        np.testing.assert_allclose(gap, 0.0, atol=1e-4, err_msg=str(k))
    np.testing.assert_allclose(plans[-1], values.max(axis=1), rtol=1e-4)


def test_the_training_planners_gain_is_over_the_policys_own_action(settings):
    """One round of horizon 1, all actions averaged: the mean value of samples, less the mean's."""
    own = replaced(
        settings, training_planner=dict(enabled=False, num_samples=512), loss=dict(value_best_n=512)
    )
    toy, model = Toy(own), toy_model(own)
    z = np.random.default_rng(1).normal(size=(4, 2)).astype(np.float32)
    key = jax.random.key(0)
    gain = jax.jit(lambda z: diagnostics.training_gain(own, model, toy.params(), z, key))(z)

    def value(action):
        after = toy.step(z, action)
        values = toy.alive(after) * toy.values(after).mean(axis=0)
        return (toy.rewards(z, action).mean(axis=0) + GAMMA * values).mean(axis=0)

    eps = np.random.default_rng(2).normal(size=(4000, 1, 2))
    samples = np.mean([value(toy.act(z, e)) for e in eps], axis=0)
    np.testing.assert_allclose(gain, samples - value(toy.act(z, 0.0)), atol=0.1)


def test_the_newest_windows_are_kept(monkeypatch):
    monkeypatch.setattr(diagnostics, "WINDOWS", 8)
    settings = make_settings(planner=dict(horizon=1), loss=dict(discount=GAMMA))
    row = dict.fromkeys(("reward", "obs"), jax.ShapeDtypeStruct((1,), jnp.float32))
    row["reward"] = jax.ShapeDtypeStruct((), jnp.float32)
    row["action"] = jax.ShapeDtypeStruct((2,), jnp.float32)
    row |= dict.fromkeys(("is_first", "is_last", "terminated"), jax.ShapeDtypeStruct((), jnp.bool_))
    state = replay.init(row, num_envs=1, capacity=60)
    never = jnp.zeros(1, bool)

    def insert(state, i):  # wraps around
        rows = dict(obs=jnp.full((1, 1), i), action=jnp.zeros((1, 2)), reward=jnp.zeros(1))
        return replay.insert(
            state, rows | dict(is_first=never, is_last=never, terminated=never)
        ), None

    state, _ = jax.lax.scan(insert, state, jnp.arange(100.0))
    batch = jax.jit(diagnostics.newest_windows, static_argnums=0)(
        settings, state, jax.random.key(0)
    )
    first = np.asarray(batch.obs[0, :, 0])
    assert len(batch.mask) == 3 and first.shape == (8,)  # three times the horizon
    # The replay holds 40 to 99; of 32 draws the newest 8 begin in its last part.
    assert first.min() > 65 and first.max() <= 98 and (np.diff(first) <= 0).all()
    np.testing.assert_array_equal(batch.obs[1, :, 0], np.minimum(first + 1, 99))


def look(**changes) -> diagnostics.Look:
    """Two windows of depth 2, of which the second has only one step, and three states, of which the
    second was not reached; planned from the third and the first."""
    fields = dict(
        mask=np.array([[1.0, 1.0], [1.0, 0.0]]),
        latent=np.array([[1.0, 3.0], [5.0, 99.0]]),
        still=np.array([[2.0, 4.0], [6.0, 99.0]]),
        reward=np.array([[0.5, 1.5], [3.0, 99.0]]),
        ended=np.array([[0.0, 1.0], [1.0, 1.0]]),
        said=np.array([[0.9, 0.8], [0.1, 0.9]]),
        realised=np.array([1.0, 99.0, 3.0]),
        value=np.array([2.0, 99.0, 6.0]),
        known=np.array([True, False, True]),
        chosen=np.array([2, 0]),
        plans=np.array([[1.0, 3.0], [2.0, 4.0], [5.0, 7.0]]),
        training=np.array([0.5, 1.5]),
    )
    return diagnostics.Look(**fields | changes)


def test_the_numbers_are_those_by_hand():
    assert diagnostics.summarise(look(), [1, 2]) == pytest.approx(
        {
            "model/latent_error_1": 2.0,
            "model/latent_error_2": 5.0,
            "model/still_error_1": 3.0,
            "model/still_error_2": 6.0,
            "model/reward_error_1": 1.0,
            "model/reward_error_2": 3.0,
            "model/realised": 2.0,
            "model/value": 4.0,
            "model/value_bias": 2.0,
            "model/value_correlation": 1.0,
            "model/policy": 2.0,
            "model/planned": 6.0,
            "model/planned_bias": 4.0,
            "model/planned_correlation": -1.0,  # 3 followed the plan of 5, and 1 that of 7
            "model/planner_gain": 4.0,
            "model/gain_by_round_1": 0.25,
            "model/gain_by_round_2": 1.0,
            "model/training_gain": 1.0,
            "model/termination_precision": 0.5,  # of two that were said one was
            "model/termination_recall": 0.5,  # of two that were one was said
        }
    )


def test_what_cannot_be_said_is_left_out():
    nothing = look(
        said=None,
        value=np.array([2.0, 2.0, 2.0]),
        plans=np.array([[5.0, 7.0], [2.0, 4.0]]),
        mask=np.array([[1.0, 1.0], [0.0, 0.0]]),
    )
    found = diagnostics.summarise(nothing, [1, 2])
    assert all(math.isfinite(x) for x in found.values())
    missing = ("model/termination_recall", "model/value_correlation", "model/gain_by_round_1")
    assert not {*missing, "model/latent_error_2"} & found.keys()
    assert found["model/planner_gain"] == -3.0
    empty = diagnostics.summarise(look(known=np.zeros(3, bool)), [1])
    assert "model/value_bias" not in empty and "model/planned_bias" not in empty
    partly = diagnostics.summarise(look(known=np.array([False, False, True])), [1])
    assert partly["model/planned_bias"] == 5.0 - 3.0 and partly["model/value_bias"] == 6.0 - 3.0
    silent = diagnostics.summarise(look(said=np.zeros((2, 2))), [1])
    assert "model/termination_precision" not in silent
    assert silent["model/termination_recall"] == 0.0


def test_a_correlation_is_of_what_varies():
    assert diagnostics.correlation(np.array([0.0, 3e-9]), np.array([2.0, 1.0])) == -1.0
    assert math.isnan(diagnostics.correlation(np.array([0.0, 1.9e-9]), np.array([2.0, 1.0])))
    assert math.isnan(diagnostics.correlation(np.array([2.0]), np.array([1.0])))


def test_predictions_are_drawn_over_what_was_realised(monkeypatch):
    drawn = []
    monkeypatch.setattr(figure.Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    found = look(known=np.array([False, False, True]))
    diagnostics.draw(found)
    latents, rewards, returns, rounds = drawn[0].axes
    lines = (*latents.lines, *rewards.lines)
    for line, error in zip(lines, (found.latent, found.still, found.reward), strict=True):
        np.testing.assert_array_equal(line.get_ydata(), diagnostics.by_depth(error, found.mask))
        np.testing.assert_array_equal(line.get_xdata(), [1, 2])
    values, plans = returns.collections
    np.testing.assert_array_equal(values.get_offsets(), [[3.0, 6.0]])
    np.testing.assert_array_equal(plans.get_offsets(), [[3.0, 5.0]])  # planned from it first
    np.testing.assert_array_equal(rounds.lines[0].get_ydata(), found.plans[:, 0])


@pytest.mark.slow
@pytest.mark.parametrize("changes", [dict(env=dict(name="toy:ends")), dict(num_seeds=2)])
def test_a_run_logs_the_look_and_draws_it(tmp_path, changes):
    result = run.train(tiny_config(eval=dict(model=True), **changes), str(tmp_path))
    path = tmp_path / "seed-1" if "num_seeds" in changes else tmp_path
    rows = [r for r in read_rows(str(path / "metrics.jsonl")) if r["kind"] == "eval"]
    assert len(rows) == len(result.evaluations)
    for row in rows:
        names = {name for name in row if name.startswith("model/")}
        depths = {f"model/latent_error_{n}" for n in (1, 3)}  # episodes end before the deepest, 9
        assert depths == {name for name in names if "latent_error" in name}
        assert {"model/value_bias", "model/planner_gain"} <= names
    assert (path / "model.png").read_bytes().startswith(b"\x89PNG")
