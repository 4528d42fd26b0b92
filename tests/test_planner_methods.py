"""Predictive sampling, CEM, sequences of fewer numbers, tuning and evosax's optimisers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import mppi, planners
from mbx.agents.tdmpc import planning
from mbx.agents.tdmpc.agent import resolve
from mbx.agents.tdmpc.settings import Settings
from mbx.planners import bases, cem, evosax, predictive, tuning
from mbx.settings import from_dict
from tests.agents.tdmpc_helpers import SPEC, Toy, toy_model
from tests.helpers import program

B, N, P, T, A, K, ROUNDS = 2, 11, 2, 4, 2, 4, 3
GOAL = np.linspace(-0.7, 0.7, T * A).reshape(T, A)
RNG = np.random.default_rng


def score(key, actions):
    return -jnp.sum(jnp.square(actions - GOAL[None, None]), axis=(-2, -1))


def uniform(*shape, seed=0, low=-1.0):
    return RNG(seed).uniform(low, 1.0, shape).astype(np.float32)


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


# -------------------------------------------------------------------------------------------------
# Predictive sampling


@pytest.mark.parametrize("mask", [None, np.array([[1.0, 0.0], [1.0, 1.0]], np.float32)])
def test_predictive_sampling_is_its_loop(problem, mask):
    draws, noise, mean, std, proposals = problem
    allowed = np.ones((B, A), np.float32) if mask is None else mask
    proposals = proposals * allowed[:, None, None]
    config = mppi.MPPIConfig(
        iterations=ROUNDS,
        num_samples=N,
        num_elites=K,
        selection="mean",  # has no say here, and neither has the temperature
        temperature=9.0,
        action_noise=0.5,
        max_std=0.6,
    )
    got = predictive.plan(
        draws, score, mean, std, proposals=proposals, action_mask=mask, config=config
    )
    for b in range(B):
        nominal = mean[b] * allowed[b]
        for i in range(ROUNDS):
            noisy = [np.clip(nominal + std[b] * noise[i, b, n], -1, 1) for n in range(1, N - P)]
            candidates = np.array([*proposals[b], nominal, *(x * allowed[b] for x in noisy)])
            values = -np.square(candidates - GOAL).sum((-2, -1))
            elites = candidates[np.argsort(-values)[:K]]
            nominal = elites[0]
        spread = np.clip(elites.std(axis=0), 0.05, 0.6) * allowed[b]
        np.testing.assert_allclose(got.actions[b], candidates, atol=1e-6)
        np.testing.assert_allclose(got.mean[b], nominal, atol=1e-6)
        np.testing.assert_allclose(got.std[b], spread, atol=1e-6)
        np.testing.assert_allclose(got.chosen[b], nominal[0], atol=1e-6)
        action = np.clip(nominal[0] + 0.5 * spread[0] * draws.action[b], -1, 1) * allowed[b]
        np.testing.assert_allclose(got.action[b], action, atol=1e-6)


# -------------------------------------------------------------------------------------------------
# CEM and iCEM


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
            values = -np.square(candidates - GOAL).sum((-2, -1))
            order = np.argsort(-values)[:K]
            elites = candidates[order]
            m = (0.2 * m + 0.8 * elites.mean(axis=0)) * allowed
            s = (0.2 * s + 0.8 * np.clip(elites.std(axis=0), 0.05, 0.8)) * allowed
        np.testing.assert_allclose(got.actions[b], candidates, atol=2e-6)
        np.testing.assert_allclose(got.values[b], values, rtol=1e-5)
        np.testing.assert_allclose(got.mean[b], m, atol=2e-6)
        np.testing.assert_allclose(got.std[b], s, atol=2e-6)
        np.testing.assert_allclose(got.chosen[b], elites[0, 0], atol=2e-6)


def test_a_round_of_icem_draws_one_candidate_whatever_is_kept(monkeypatch):
    made = []

    def plan(draws, score_fn, mean, std, *, method, config):
        mask = jnp.ones((1, 1, 1))
        elites = jnp.full((1, 3, 2, 1), 0.5)
        frame = mppi.Frame(draws, mean, std, mask, num=3, rounds=3, config=config)
        made.append(method(frame).sample(1, mppi.Refit(mean, std, elites, None, None)))

    monkeypatch.setattr(mppi, "plan", plan)
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


# -------------------------------------------------------------------------------------------------
# Sequences


def natural_spline(at, values, steps):
    """A natural cubic spline by its second derivatives, which are 0 at both ends."""
    n, h = len(at), np.diff(at)
    system, right = np.eye(n), np.zeros(n)
    for i in range(1, n - 1):
        system[i, i - 1 : i + 2] = h[i - 1], 2 * (h[i - 1] + h[i]), h[i]
        right[i] = 6 * ((values[i + 1] - values[i]) / h[i] - (values[i] - values[i - 1]) / h[i - 1])
    second = np.linalg.solve(system, right)
    found = []
    for t in steps:
        i = min(int(np.searchsorted(at, t, side="right")) - 1, n - 2)
        a, b = at[i + 1] - t, t - at[i]
        found.append(
            (second[i] * a**3 + second[i + 1] * b**3) / (6 * h[i])
            + (values[i] / h[i] - second[i] * h[i] / 6) * a
            + (values[i + 1] / h[i] - second[i + 1] * h[i] / 6) * b
        )
    return np.array(found)


def test_control_points_by_hand():
    points = functools.partial(bases.control_points, horizon=5)
    zero = points(2, kind="zero").forward @ [1.0, 2.0]
    assert zero.tolist() == [1.0, 1.0, 1.0, 2.0, 2.0]
    linear = points(3).forward @ [0.0, 1.0, -1.0]
    np.testing.assert_allclose(linear, [0.0, 0.5, 1.0, 0.0, -1.0], atol=1e-12)
    cubic = points(3, kind="cubic").forward @ [0.0, 1.0, -1.0]
    expected = natural_spline(np.array([0.0, 2.0, 4.0]), np.array([0.0, 1.0, -1.0]), range(5))
    np.testing.assert_allclose(cubic, expected, atol=1e-12)
    for kind, num in itertools.product(bases.KINDS, (1, 2, 5)):
        basis = points(num, kind=kind)
        assert basis.forward.shape == (5, num)
        np.testing.assert_array_equal(basis.forward[0], np.eye(num)[0])
        # What the points make comes back as these points.
        np.testing.assert_allclose(basis.back @ basis.forward, np.eye(num), atol=1e-12)
    np.testing.assert_allclose(points(1).forward, np.ones((5, 1)))


def test_smoothing_weighs_neighbours_by_a_gaussian():
    forward = bases.smoothing(1.5, horizon=6).forward
    for t in range(6):
        weights = np.array([np.exp(-((t - s) ** 2) / (2 * 1.5**2)) for s in range(6)])
        np.testing.assert_allclose(forward[t], weights / weights.sum(), rtol=1e-6)
    np.testing.assert_array_equal(bases.smoothing(0.0, horizon=6).forward, np.eye(6))
    traced = bases.smoothing(jnp.float32(1.5), horizon=6).forward
    np.testing.assert_allclose(traced, forward, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bases.control_points(2, horizon=4, kind="square"), "kind='square': choose"),
        (lambda: bases.control_points(5, horizon=4), "num=5 control points: 1 to horizon=4"),
        (lambda: bases.control_points(0, horizon=4), "num=0 control points"),
        (lambda: bases.smoothing(-1.0, horizon=4), "width=-1.0 must be 0 or more"),
        (lambda: cem.ICEMConfig(noise_beta=np.float32(-1)), "noise_beta=-1.0 must be 0 or more"),
        (lambda: cem.ICEMConfig(keep_elites=1.5), "keep_elites=1.5 must be 0 to 1"),
        (lambda: cem.ICEMConfig(momentum=1.0), "momentum=1.0 must be 0 to 0.999"),
        (lambda: tune(temperatures=(0.0, 1.0)), r"temperatures=\(0.0, 1.0\) must be"),
        (lambda: tune(deviations=(1.0, 0.5)), r"deviations=\(1.0, 0.5\) must be"),
        (lambda: tune(num=0), "num=0 pairs"),
    ],
)
def test_impossible_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def tune(**given):
    return tuning.tune(jax.random.key(0), lambda *_: 0.0, **given)


def stub(seen, selection="best"):
    """A planner whose candidates are its proposals and noise-free; it says what it was given."""

    def plan(key, score_fn, mean, std, *, proposals=None, has_aux=False, config, **given):
        seen.append(dict(mean=mean, std=std, proposals=proposals, has_aux=has_aux, **given))
        found = score_fn(key, proposals)
        values, aux = found if has_aux else (found, None)
        best = int(np.argmax(values[0]))
        aux = jax.tree.map(lambda x: x[:, best], aux)
        chosen = mean[:, 0] if config.selection == "mean" else proposals[:, best, 0]
        return mppi.Plan(
            chosen + 0.125, mean, std, proposals, values, chosen, aux if has_aux else None
        )

    return plan


BASES = {
    "linear": bases.control_points(2, horizon=T),
    "smooth": bases.smoothing(0.8, horizon=T),
    "both": bases.chain(
        bases.control_points(3, horizon=T, kind="cubic"), bases.smoothing(0.8, horizon=T)
    ),
}


@pytest.mark.parametrize("selection", ["best", "mean"])
@pytest.mark.parametrize("name", BASES)
def test_a_planner_searches_among_parameters(name, selection):
    forward, back = map(np.asarray, BASES[name])
    seen, config = [], mppi.MPPIConfig(num_samples=3, num_elites=1, selection=selection)
    mean, std = uniform(1, T, A), uniform(1, T, A, seed=1, low=0.2)
    proposals = uniform(1, 3, T, A, seed=2)
    plan = bases.over(stub(seen), BASES[name])(
        jax.random.key(0), score, mean, std, proposals=proposals, config=config, action_mask="mask"
    )
    (given,) = seen
    parameters = np.clip(np.einsum("kt,bnta->bnka", back, proposals), -1, 1)
    np.testing.assert_allclose(given["proposals"], parameters, atol=1e-6)
    np.testing.assert_allclose(given["mean"][0], np.clip(back @ mean[0], -1, 1), atol=1e-6)
    assert given["action_mask"] == "mask" and given["has_aux"] == (selection != "mean")
    for k in range(forward.shape[1]):  # variances weighted by the squares of the way back
        weights = back[k] ** 2 / (back[k] ** 2).sum()
        np.testing.assert_allclose(given["std"][0, k], np.sqrt(weights @ std[0] ** 2), rtol=1e-5)
    actions = np.clip(np.einsum("tk,bnka->bnta", forward, parameters), -1, 1)
    np.testing.assert_allclose(plan.actions, actions, atol=1e-6)
    values = -np.square(actions - GOAL).sum((-2, -1))
    np.testing.assert_allclose(plan.values, values, rtol=1e-5)
    means = np.clip(forward @ np.asarray(given["mean"][0]), -1, 1)
    np.testing.assert_allclose(plan.mean[0], means, atol=1e-6)
    chosen = means[0] if selection == "mean" else actions[0, np.argmax(values[0]), 0]
    np.testing.assert_allclose(plan.chosen[0], chosen, atol=1e-6)
    np.testing.assert_allclose(plan.action[0], np.clip(chosen + 0.125, -1, 1), atol=1e-6)
    spread = np.sqrt(forward**2 @ np.asarray(given["std"][0]) ** 2)
    np.testing.assert_allclose(plan.std[0], spread, rtol=1e-5)
    assert plan.aux is None
    with pytest.raises(ValueError, match="the basis is of horizon=4 and the plan of 3 steps"):
        bases.over(mppi.plan, BASES[name])(
            jax.random.key(0), score, mean[:, 1:], std[:, 1:], config=config
        )


@pytest.mark.parametrize("selection", ["mean", "best"])
def test_a_width_of_smoothing_may_be_traced_behind_control_points(selection):
    config = mppi.MPPIConfig(num_samples=N, num_elites=K, iterations=2, selection=selection)
    mean, std = np.zeros((B, T, A), np.float32), np.full((B, T, A), 0.5, np.float32)

    def found(width):
        points = bases.control_points(2, horizon=T)
        basis = bases.chain(points, bases.smoothing(width, horizon=T))
        plan = bases.over(mppi.plan, basis)
        return plan(jax.random.key(0), score, mean, std, config=config)

    constant, traced = jax.jit(lambda: found(0.7))(), jax.jit(found)(jnp.float32(0.7))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), constant, traced)


def test_auxiliaries_pass_through():
    proposals, config = uniform(1, 3, T, A), mppi.MPPIConfig(num_samples=3, num_elites=1)
    for basis in BASES.values():
        plan = bases.over(stub([]), basis)(
            jax.random.key(0),
            lambda key, actions: (score(key, actions), {"last": actions[:, :, -1]}),
            proposals[:, 0],
            proposals[:, 0],
            proposals=proposals,
            has_aux=True,
            config=dataclasses.replace(config, selection="best"),
        )
        best = int(np.argmax(plan.values[0]))
        np.testing.assert_allclose(plan.aux["last"][0], plan.actions[0, best, -1], atol=1e-6)


# -------------------------------------------------------------------------------------------------
# Tuning


def test_halving_drops_the_worse_half_and_averages():
    seen = []

    def value(key, temperature, deviation):
        jax.debug.callback(lambda *x: seen.append(tuple(map(float, x))), temperature, deviation)
        return -jnp.square(jnp.log(temperature / 3.0)) - jnp.square(jnp.log(deviation / 0.4))

    found = tuning.tune(jax.random.key(0), value, temperatures=(0.1, 50.0), num=6)
    jax.effects_barrier()
    assert len(seen) == 6 + 3 + 2 + 1
    pairs = np.array(seen)
    values = -(np.log(pairs[:, 0] / 3.0) ** 2) - np.log(pairs[:, 1] / 0.4) ** 2
    best = np.argmax(values)
    np.testing.assert_array_equal(pairs[-1], pairs[best])  # the last pass has it alone
    np.testing.assert_allclose(found, [*pairs[best], values[best]], rtol=1e-4)
    assert np.all((pairs >= [0.1, 0.05]) & (pairs <= [50.0, 2.0]))


def test_what_is_not_finite_is_the_worst():
    def value(key, temperature, deviation):
        return jnp.where(deviation > 0.3, jnp.nan, deviation)

    found = tuning.tune(jax.random.key(1), value, num=4)
    assert found.deviation <= 0.3 and np.isfinite(found.value)


@pytest.mark.parametrize("selection", ["mean", "best"])
def test_the_value_of_a_plan_is_of_what_it_executes(selection):
    seen = []

    def plan(key, score_fn, mean, std, *, config):
        seen.append((float(std[0, 0, 0]), config))
        actions = jnp.stack([mean + 0.5, mean + 0.25], axis=1)
        return mppi.Plan(mean[:, 0], mean + 0.75, std, actions, score_fn(key, actions), mean[:, 0])

    def sums(key, actions):
        return actions.sum((-2, -1))

    config = mppi.MPPIConfig(num_samples=2, num_elites=1, selection=selection)
    value = tuning.plan_value(sums, jnp.zeros((B, T, A)), config=config, plan=plan)
    got = value(jax.random.key(0), jnp.float32(3.0), jnp.float32(0.04))
    assert float(got) == (0.75 if selection == "mean" else 0.5) * T * A
    ((std, used),) = seen
    assert std == pytest.approx(0.04)
    assert float(used.max_std) == float(used.min_std) == pytest.approx(0.04)
    assert float(used.temperature) == 3.0


# -------------------------------------------------------------------------------------------------
# Optimisers that are asked and told


class Params(NamedTuple):
    std_init: Any = 1.0

    def replace(self, **new):
        return self._replace(**new)


class Walk:
    """Asks for steps of half the deviation around its mean, and moves to the best it is told."""

    default_params = Params()

    def __init__(self, population_size, solution):
        assert population_size > 2, "more than two"
        self.num, self.shape = population_size, solution.shape

    def init(self, key, mean, params):
        return {"mean": mean, "asked": jnp.float32(0.0)}

    def ask(self, key, state, params):
        steps = jnp.arange(self.num, dtype=jnp.float32).reshape(-1, 1, 1) - 1.0
        population = state["mean"][None] + 0.5 * params.std_init * steps
        return population, {**state, "asked": state["asked"] + 1.0}

    def tell(self, key, population, fitness, state, params):
        return {**state, "mean": population[jnp.argmin(fitness)]}, {}

    def get_mean(self, state):
        return state["mean"]


class Herd:
    """Holds a population that creeps towards the best solution so far."""

    default_params = Params()

    def __init__(self, population_size, solution):
        self.shape = solution.shape

    class State(NamedTuple):
        population: Any
        best_solution: Any
        best_fitness: Any

    def init(self, key, population, fitness, params):
        best = jnp.argmin(fitness)
        return self.State(population, population[best].reshape(-1), fitness[best])

    def ask(self, key, state, params):
        best = state.best_solution.reshape(self.shape)
        return 0.5 * state.population + 0.5 * best[None], state

    def tell(self, key, population, fitness, state, params):
        best = jnp.argmin(fitness)
        better = fitness[best] < state.best_fitness
        flat = jnp.where(better, population[best].reshape(-1), state.best_solution)
        return self.State(population, flat, jnp.minimum(fitness[best], state.best_fitness)), {}


@pytest.fixture
def toys(monkeypatch):
    known = {"Walk": Walk, "Herd": Herd}
    monkeypatch.setattr(evosax, "_algorithm", known.__getitem__)


def test_an_optimiser_that_holds_a_distribution_is_its_loop(toys):
    config = mppi.MPPIConfig(iterations=ROUNDS, num_samples=N, num_elites=K, selection="best")
    mean, proposals = uniform(B, T, A), uniform(B, P, T, A, seed=1)
    std = np.full((B, T, A), 0.3, np.float32)
    std[1] = 0.2
    got = planners.plan(
        "evosax:Walk", jax.random.key(0), score, mean, std, proposals=proposals, config=config
    )
    for b in range(B):
        middle = mean[b]
        for _ in range(ROUNDS):
            own = [np.clip(middle + 0.5 * std[b, 0, 0] * (n - 1), -1, 1) for n in range(N - P)]
            candidates = np.array([*proposals[b], *own])
            values = -np.square(candidates - GOAL).sum((-2, -1))
            middle = own[int(np.argmax(values[P:]))]
        np.testing.assert_allclose(got.actions[b], candidates, atol=1e-6)
        np.testing.assert_allclose(got.mean[b], middle, atol=1e-6)
        np.testing.assert_allclose(got.chosen[b], candidates[np.argmax(values)][0], atol=1e-6)


def test_an_optimiser_that_holds_a_population_begins_with_what_is_given(toys):
    config = mppi.MPPIConfig(iterations=2, num_samples=N, num_elites=K)
    initial, mean = uniform(1, N, T, A), jnp.zeros((1, T, A))
    of = dict(initial=initial, config=config)
    got = planners.plan("evosax:Herd", jax.random.key(0), score, mean, mean + 1.0, **of)
    values = -np.square(initial[0] - GOAL).sum((-2, -1))
    best = initial[0][np.argmax(values)]
    second = 0.5 * initial[0] + 0.5 * best
    np.testing.assert_allclose(got.actions[0], second, atol=1e-6)
    every = np.concatenate([initial[0], second])
    best = every[np.argmax(-np.square(every - GOAL).sum((-2, -1)))]
    np.testing.assert_allclose(got.mean[0], best, atol=1e-6)


def test_costs_that_are_not_finite_are_as_the_worst():
    values = jnp.array([[1.0, jnp.nan, -3.0], [jnp.nan, jnp.inf, jnp.nan]])
    assert evosax._costs(values).tolist() == [[-1.0, 3.0, 3.0], [0.0, 0.0, 0.0]]


def test_what_an_optimiser_cannot_do_is_refused(toys, monkeypatch):
    mean = jnp.zeros((1, T, A))
    config = mppi.MPPIConfig(num_samples=4, num_elites=1)
    plan = functools.partial(planners.plan, "evosax:Walk", jax.random.key(0), score, mean, mean)
    with pytest.raises(ValueError, match=r"cannot begin with .* training_planner.search='acting'"):
        plan(initial=jnp.zeros((1, 4, T, A)), config=config)
    with pytest.raises(ValueError, match=r"'evosax:Walk' cannot have 2 candidates .*more than two"):
        plan(proposals=jnp.zeros((1, 2, T, A)), config=config)
    with pytest.raises(ValueError, match="plans continuous actions alone"):
        plan(discrete=True, config=config)
    monkeypatch.undo()
    monkeypatch.setitem(__import__("sys").modules, "evosax", None)
    with pytest.raises(ValueError, match=r"needs evosax: pip install 'mbx-rl\[evosax\]'"):
        planners.find("evosax:CMA_ES")


# -------------------------------------------------------------------------------------------------
# As settings of the agent


def settings(**sections):
    return from_dict(Settings(), sections)


@pytest.mark.parametrize(
    ("planner", "message"),
    [
        (dict(name="predictive", temperature=2.0), "temperature=2.0 has no effect here"),
        (dict(name="cem", temperature=2.0), "planner.temperature=2.0 has no effect here"),
        (
            dict(name="predictive", evaluation_selection="best"),
            "selection='best' has no effect here",
        ),
    ],
)
def test_settings_without_effect_are_refused(planner, message):
    with pytest.raises(ValueError, match=message):
        settings(planner=planner)


def test_planners_that_cannot_make_targets_are_refused_before_anything_is_compiled(toys):
    made = settings(training_planner=dict(name="evosax:Walk"))
    with pytest.raises(ValueError, match=r"training_planner.name='evosax:Walk' makes .*'acting'"):
        resolve(made, SPEC)
    for name, search in (("evosax:Walk", "acting"), ("evosax:Herd", "policy")):
        resolve(settings(training_planner=dict(name=name, search=search)), SPEC)


def test_the_acting_planner_has_its_name():
    own = settings(planner=dict(name="predictive", num_proposals=0))
    model, params = toy_model(own), Toy(own).params()
    mean, z = jnp.zeros((B, 3, 2)), jnp.ones((B, 2))
    plan = planning.plan_to_act(own, model, params, z, mean, jax.random.key(0), evaluate=True)
    np.testing.assert_allclose(plan.chosen, plan.mean[:, 0], atol=1e-6)  # its best candidate


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


# -------------------------------------------------------------------------------------------------
# A pendulum in its true dynamics


def swing(state, action):
    """Gymnasium's Pendulum: angle and velocity `[..., 2]`, torque in [-1, 1] of 2 N m."""
    angle, velocity = state[..., 0], state[..., 1]
    wrapped = (angle + jnp.pi) % (2 * jnp.pi) - jnp.pi
    torque = 2.0 * action
    cost = wrapped**2 + 0.1 * velocity**2 + 0.001 * torque**2
    velocity = jnp.clip(velocity + 0.05 * (15.0 * jnp.sin(angle) + 3.0 * torque), -8.0, 8.0)
    return jnp.stack([angle + 0.05 * velocity, velocity], axis=-1), -cost


def solves(plan, config, steps=100, horizon=20, std=1.0):
    """Heights of two pendulums, which hung, in the last quarter of an episode."""

    def returns(states):
        def score(key, actions):
            start = jnp.broadcast_to(states[:, None], (*actions.shape[:2], 2))
            rewards = jax.lax.scan(swing, start, jnp.moveaxis(actions[..., 0], 2, 0))[1]
            return rewards.sum(0)

        return score

    def step(carry, key):
        states, mean = carry
        found = plan(key, returns(states), mean, jnp.full_like(mean, std), config=config)
        states, _ = swing(states, found.action[:, 0])
        mean = mppi.warm_start(found.mean, jnp.zeros(2, bool))
        return (states, mean), jnp.cos(states[:, 0])

    start = jnp.array([[jnp.pi, 0.0], [2.0, 0.5]]), jnp.zeros((2, horizon, 1))
    keys = jax.random.split(jax.random.key(0), steps)
    return jax.jit(lambda: jax.lax.scan(step, start, keys)[1])()[-steps // 4 :]


SMALL = dict(iterations=3, num_samples=48, num_elites=8, selection="mean", max_std=1.0)
PLANNERS = {
    "mppi": (mppi.plan, mppi.MPPIConfig(**SMALL)),
    "cem": (cem.cem, mppi.MPPIConfig(**SMALL)),
    "icem": (cem.icem, cem.ICEMConfig(**SMALL)),
    "predictive": (predictive.plan, mppi.MPPIConfig(**SMALL)),
    "knots": (
        bases.over(mppi.plan, bases.control_points(6, horizon=20, kind="cubic")),
        mppi.MPPIConfig(**SMALL),
    ),
    "smooth": (bases.over(mppi.plan, bases.smoothing(1.0, horizon=20)), mppi.MPPIConfig(**SMALL)),
}


@pytest.mark.parametrize(
    "name",
    [
        "predictive",
        *(pytest.param(n, marks=pytest.mark.slow) for n in PLANNERS if n != "predictive"),
    ],
)
def test_each_method_swings_the_true_pendulum_up(name):
    heights = solves(*PLANNERS[name])
    assert heights.min() > 0.95


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CMA_ES", "SNES", "PSO"])
def test_optimisers_of_evosax_swing_it_up(name):
    pytest.importorskip("evosax")
    plan = evosax.planner(name)
    with jax.numpy_rank_promotion("allow"):
        heights = solves(plan, mppi.MPPIConfig(**SMALL))
    assert heights.min() > 0.9
    with pytest.raises(ValueError, match="evosax has no 'Nobody': choose one of"):
        evosax.planner("Nobody")
