"""CEM and iCEM against loops in NumPy, and planners by name in the TD-MPC agent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import mppi, planners
from mbx.agents.tdmpc import planning
from mbx.agents.tdmpc.settings import Settings
from mbx.planners import cem
from mbx.settings import from_dict
from tests.agents.tdmpc_helpers import Toy, toy_model
from tests.helpers import program

B, N, P, T, A, K, ROUNDS = 2, 11, 2, 4, 2, 4, 3
GOAL = np.linspace(-0.7, 0.7, T * A).reshape(T, A)


def score(key, actions):
    return -jnp.sum(jnp.square(actions - GOAL[None, None]), axis=(-2, -1))


def score_by_loop(actions):
    return -np.sum(np.square(actions - GOAL), axis=(-2, -1))


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(ROUNDS, B, N - P, T, A)).astype(np.float32)
    mean = rng.uniform(-0.5, 0.5, (B, T, A)).astype(np.float32)
    std = rng.uniform(0.3, 0.9, (B, T, A)).astype(np.float32)
    proposals = rng.uniform(-1, 1, (B, P, T, A)).astype(np.float32)
    draws = mppi.Draws(
        candidate=lambda i: jnp.asarray(noise)[i],
        score=lambda i: jax.random.key(0),
        gumbel=jnp.asarray(rng.gumbel(size=(B, K)), jnp.float32),
        action=jnp.asarray(rng.normal(size=(B, A)), jnp.float32),
    )
    return draws, noise, mean, std, proposals


def coloured_by_loop(noise, beta):
    """White noise `[T, A]` through its spectrum, every step scaled back to variance 1."""
    horizon = len(noise)
    scale = [max(k, 1) ** (-beta / 2) for k in range(horizon // 2 + 1)]
    spectrum = np.fft.rfft(noise, axis=0) * np.array(scale)[:, None]
    # Of white noise every frequency has one variance; those between 0 and the last count twice.
    power = sum(s**2 * (1 if k == 0 or 2 * k == horizon else 2) for k, s in enumerate(scale))
    return np.fft.irfft(spectrum, horizon, axis=0) / np.sqrt(power / horizon)


@pytest.mark.parametrize("mask", [None, np.array([[1.0, 0.0], [1.0, 1.0]])])
def test_icem_is_its_loop(problem, mask):
    draws, noise, mean, std, proposals = problem
    config = cem.ICEMConfig(
        iterations=ROUNDS,
        num_samples=N,
        num_elites=K,
        noise_beta=1.5,
        keep_elites=0.5,
        momentum=0.2,
        selection="best",
        max_std=0.8,
    )
    proposed = proposals if mask is None else proposals * mask[:, None, None]
    got = cem.icem(draws, score, mean, std, proposals=proposed, action_mask=mask, config=config)
    for b in range(B):
        allowed = np.ones(A) if mask is None else mask[b]
        m, s, elites = mean[b] * allowed, std[b] * allowed, None
        for i in range(ROUNDS):
            white = [coloured_by_loop(noise[i, b, n], 1.5) for n in range(N - P)]
            sampled = [np.clip(m + s * w, -1.0, 1.0) * allowed for w in white]
            if i:
                sampled[:2] = elites[:2]  # half of four
            if i == ROUNDS - 1:
                sampled[-1] = np.clip(m, -1.0, 1.0)
            candidates = np.array([*proposed[b], *sampled])
            values = score_by_loop(candidates)
            order = np.argsort(-values)[:K]
            elites = candidates[order]
            m = (0.2 * m + 0.8 * elites.mean(axis=0)) * allowed
            s = (0.2 * s + 0.8 * np.clip(elites.std(axis=0), 0.05, 0.8)) * allowed
        np.testing.assert_allclose(got.actions[b], candidates, atol=2e-6)
        np.testing.assert_allclose(got.values[b], values, rtol=1e-5)
        np.testing.assert_allclose(got.mean[b], m, atol=2e-6)
        np.testing.assert_allclose(got.std[b], s, atol=2e-6)
        np.testing.assert_allclose(got.chosen[b], elites[0, 0], atol=2e-6)


def test_icem_begins_with_what_is_given(problem):
    draws, _, mean, std, proposals = problem
    config = cem.ICEMConfig(iterations=1, num_samples=N, num_elites=K, noise_beta=0.0)
    initial = np.random.default_rng(1).uniform(-1, 1, (B, N, T, A)).astype(np.float32)
    given = dict(proposals=proposals, initial=initial, config=config)
    plan = cem.icem(draws, score, mean, std, **given)
    # Proposals take the place of its first candidates.
    np.testing.assert_array_equal(plan.actions[:, P:], initial[:, P:])
    with pytest.raises(ValueError, match=r"mean \(2, 4, 2\) and std \(2, 3, 2\) must both"):
        cem.icem(draws, score, mean, std[:, 1:], **given)


def test_all_elites_but_one_go_on_where_as_many_as_candidates_are_kept(problem):
    draws, _, mean, std, _ = problem
    noise = np.random.default_rng(2).normal(size=(2, B, N, T, A)).astype(np.float32)
    draws = draws._replace(
        candidate=lambda i: jnp.asarray(noise)[i], gumbel=jnp.zeros((B, N), jnp.float32)
    )
    kept = dict(num_samples=N, num_elites=N, keep_elites=1.0)
    one, two = (
        cem.icem(draws, score, mean, std, config=cem.ICEMConfig(iterations=rounds, **kept))
        for rounds in (1, 2)
    )
    for b in range(B):
        best = np.asarray(one.actions[b])[np.argsort(-np.asarray(one.values[b]))]
        np.testing.assert_allclose(two.actions[b, : N - 1], best[: N - 1], atol=1e-6)


def test_a_round_of_icem_draws_one_candidate_whatever_is_kept(monkeypatch):
    made = []

    def search(draws, score_fn, mean, std, method, *, config):
        mask = jnp.ones((1, 1, 1))
        elites = jnp.full((1, 3, 2, 1), 0.5)
        frame = mppi.Frame(draws, mean, std, mask, num=3, rounds=3, config=config)
        made.append(method(frame).sample(1, mppi.Refit(mean, std, elites, None, None)))

    monkeypatch.setattr(mppi, "search", search)
    noise = jnp.asarray([[[0.1], [0.2]], [[0.3], [0.4]], [[0.6], [-0.7]]])[None]
    draws = mppi.Draws(candidate=lambda i: noise, score=None, gumbel=None, action=None)
    config = cem.ICEMConfig(
        iterations=3, num_samples=3, num_elites=3, keep_elites=1.0, noise_beta=0.0
    )
    cem.icem(draws, score, jnp.zeros((1, 2, 1)), jnp.ones((1, 2, 1)), config=config)
    actions = np.asarray(made[0])[0, ..., 0]
    np.testing.assert_allclose(actions, [[0.5, 0.5], [0.5, 0.5], [0.6, -0.7]], rtol=1e-6)


def test_cem_refits_to_elites_of_one_weight(problem):
    _, _, mean, std, _ = problem
    config = mppi.MPPIConfig(iterations=1, num_samples=N, num_elites=K, temperature=7.0)
    plan = cem.cem(jax.random.key(1), score, mean, std, config=config)
    for b in range(B):
        elites = np.asarray(plan.actions[b])[np.argsort(-np.asarray(plan.values[b]))[:K]]
        np.testing.assert_allclose(plan.mean[b], elites.mean(axis=0), atol=1e-6)
        std = np.clip(elites.std(axis=0), config.min_std, config.max_std)
        np.testing.assert_allclose(plan.std[b], std, atol=1e-6)


@pytest.mark.parametrize("horizon", [1, 2, 3, 8])
@pytest.mark.parametrize("beta", [0.0, 1.0, 3.0])
def test_noise_has_variance_one_and_the_spectrum_asked_for(horizon, beta):
    matrix = cem.noise_matrix(horizon, beta)
    np.testing.assert_allclose((matrix @ matrix.T).diagonal(), 1.0, rtol=1e-12)
    if beta == 0.0:
        np.testing.assert_allclose(matrix, np.eye(horizon), atol=1e-12)
    power = np.square(np.abs(np.fft.rfft(matrix, axis=0))).mean(axis=1)
    expected = np.maximum(np.arange(horizon // 2 + 1), 1.0) ** -beta
    np.testing.assert_allclose(power / power[0], expected, rtol=1e-9)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(noise_beta=-1.0), "noise_beta=-1.0: must be 0 or more"),
        (dict(keep_elites=1.5), "keep_elites=1.5: must lie in 0..1.0"),
        (dict(momentum=1.0), "momentum=1.0: must lie in 0..0.999"),
    ],
)
def test_impossible_settings_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        cem.ICEMConfig(**wrong)


def settings(**sections):
    return from_dict(Settings(), sections)


@pytest.fixture(scope="module")
def world():
    """A model of closed form, which compiles nothing, with latents `[B, L]`."""
    own = settings()
    return toy_model(own), Toy(own).params(), jnp.ones((B, 2))


def test_planners_of_ones_own_act_and_make_targets(world):
    model, params, z = world
    seen = []

    def constant(key, score_fn, mean, std, *, proposals=None, initial=None, config, **rest):
        seen.append((None if proposals is None else proposals.shape[1], config))
        actions = jnp.full((mean.shape[0], config.num_samples, *mean.shape[1:]), 0.25)
        first = actions[:, 0, 0]
        return mppi.Plan(first, mean + 1.0, std, actions, score_fn(key, actions), first)

    planners.register("constant", constant)
    mine = settings(
        planner=dict(name="constant", num_samples=6, num_elites=2, num_proposals=3),
        training_planner=dict(name="constant", num_samples=5, num_elites=2),
        loss=dict(value_best_n=2),
        replay=dict(keep_targets=4),
    )
    mean = jnp.zeros((B, 3, 2))
    plan = program(planning.plan_to_act, mine, model)(params, z, mean, jax.random.key(0))
    np.testing.assert_array_equal(plan.action, np.full((B, 2), 0.25))
    np.testing.assert_array_equal(plan.mean, np.ones((B, 3, 2)))
    made = program(planning.plan_targets, mine, model)(params, z, jax.random.key(0))
    np.testing.assert_array_equal(made.actions, np.full((B, 5, 2), 0.25))
    assert [proposals for proposals, _ in seen] == [3, None]
    assert [config.num_samples for _, config in seen] == [6, 5]


def test_a_planner_is_found_with_its_settings_and_its_function_for_discrete_actions(monkeypatch):
    monkeypatch.setattr(planners, "_KNOWN", dict(planners._KNOWN))
    planners.register("mine", mppi.plan, cem.ICEMConfig, cem.cem)
    assert planners.find("mine") == planners.Planner(mppi.plan, cem.ICEMConfig, cem.cem)
    planners.register("mine", cem.cem)
    assert planners.find("mine") == planners.Planner(cem.cem, mppi.MPPIConfig, None)


def test_icem_is_the_published_one(world):
    model, params, z = world
    mine = settings(planner=dict(name="icem", horizon=4))
    config = planning.search_config(mine.planner)
    assert (config.momentum, config.noise_beta, config.keep_elites) == (0.1, 2.0, 0.3)
    act = program(planning.plan_to_act, mine, model)
    plan = act(params, z, jnp.zeros((B, 4, 2)), jax.random.key(0))
    assert plan.action.shape == (B, 2) and bool(jnp.all(jnp.isfinite(plan.action)))


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (dict(name="cem", temperature=2.0), "planner.temperature=2.0 has no effect here"),
    ],
)
def test_settings_of_another_planner_are_refused(planner, message):
    with pytest.raises(ValueError, match=message):
        settings(planner=planner)


def test_unknown_planners_and_taken_names_are_refused():
    with pytest.raises(ValueError, match="planner.name='nobody': choose one of"):
        planning.search_config(settings(planner=dict(name="nobody")).planner)
    for name in ("cem", "evosax:mine"):
        with pytest.raises(ValueError, match=f"planner '{name}' comes with mbx"):
            planners.register(name, mppi.plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.actions, "planner 'broken' returned a .*, wanted an mppi.Plan"),
        (
            lambda p: p._replace(action=p.mean),
            r"action of its Plan .* \[2, 3, 1\], wanted \[B, A\] =",
        ),
        (lambda p: p._replace(std=p.std[:, 0]), r"std of its Plan .*\[2, 1\], wanted \[B, T, A\]"),
        (
            lambda p: p._replace(values=p.values[:, 1:]),
            r"values .*\[2, 7\], wanted \[B, N\] = \[2, 8",
        ),
        (
            lambda p: p._replace(actions=None),
            r"actions of its Plan .*wanted \[B, N, T, A\] = \[2, 8",
        ),
    ],
)
def test_the_plan_of_ones_own_planner_is_looked_at(monkeypatch, change, message):
    monkeypatch.setattr(planners, "_KNOWN", dict(planners._KNOWN))
    planners.register("broken", lambda *args, **given: change(mppi.plan(*args, **given)))
    mean, config = jnp.zeros((2, 3, 1)), mppi.MPPIConfig(num_samples=8, num_elites=2)

    def planned(key):
        score = lambda _, actions: actions.sum((2, 3))  # noqa: E731
        return planners.plan("broken", key, score, mean, mean + 1.0, config=config)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(planned, jax.random.key(0))


def test_numpys_numbers_are_looked_at_as_pythons():
    with pytest.raises(ValueError, match="noise_beta=-1.0: must be 0 or more"):
        cem.ICEMConfig(noise_beta=np.float32(-1.0))
