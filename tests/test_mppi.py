"""The planner: golden refits, and what it must do in models we know."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import mppi, planners
from tests.helpers import in_programs, load_fixture

mppi = in_programs(mppi)

TOLERANCE = dict(rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["mppi_update_0", "mppi_update_nan"])
def test_refit_golden(name):
    a, c = load_fixture("tdmpc", name)
    for i in range(c["iterations"]):
        actions = jnp.moveaxis(a[f"it{i}.actions"], 0, 1)  # [N, T, A]
        values = jnp.asarray(a[f"it{i}.value_raw"])[:, 0]
        ranked = np.nan_to_num(np.asarray(values))
        elites = a[f"it{i}.elite_idx"]
        common = dict(
            num_elites=c["num_elites"],
            temperature=c["temperature"],
            min_std=c["min_std"],
            max_std=c["max_std"],
            nonfinite="reference",
        )
        result = mppi.refit(actions, values, **common)
        np.testing.assert_array_equal(result.elite_values, ranked[elites])
        np.testing.assert_allclose(result.weights, a[f"it{i}.score"][:, 0], **TOLERANCE)
        if (ranked >= ranked[elites].min()).sum() > len(elites):
            # Equal values on both sides of the last place: which of them is an elite is free, so
            # the fixture's own elites are refitted.
            result = mppi.refit(actions[elites], values[elites], **common)
        np.testing.assert_allclose(result.mean, a[f"it{i}.mean"], **TOLERANCE)
        np.testing.assert_allclose(result.std, a[f"it{i}.std"], **TOLERANCE)


@pytest.mark.parametrize("name", ["seed_elite_mult", "seed_elite_div", "seed_elite_batched"])
def test_plan_golden_with_proposals_scored_once(name):
    a, c = load_fixture("tdmpc", name)
    proposals, rounds = jnp.asarray(a["pi_actions"]), c["iterations"]
    sampled = jnp.stack([a[f"it{i}.actions"] for i in range(rounds)])
    scores = jnp.stack([a[f"it{i}.scores"] for i in range(rounds)])
    batch, num_proposals, horizon, action_dim = proposals.shape

    def score(i, actions):
        if actions.shape[1] == num_proposals:  # the call before the rounds
            return jnp.asarray(a["pi_scores"])
        return scores[i]

    config = mppi.MPPIConfig(
        iterations=rounds,
        num_samples=num_proposals + sampled.shape[2],
        num_elites=c["num_elites"],
        temperature=c["temperature"],
        temperature_mode="multiply" if c["mult_by_temp"] else "divide",
        min_std=c["min_std"],
        max_std=c["max_std"],
        selection="best",
        rescore_proposals=False,
    )
    draws = mppi.Draws(
        candidate=lambda i: jnp.asarray(a["sample_eps"])[i],
        score=lambda i: i,
        gumbel=jnp.zeros((batch, c["num_elites"])),
        action=jnp.zeros((batch, action_dim)),
    )
    mean = jnp.zeros((batch, horizon, action_dim))
    if batch == 1:
        mean = mppi.warm_start(jnp.asarray(a["prev_mean"])[None], jnp.array([False]))
    std = jnp.full_like(mean, c["max_std"])
    plan = mppi.plan_with_draws(draws, score, mean, std, proposals=proposals, config=config)
    np.testing.assert_allclose(plan.actions[:, num_proposals:], sampled[-1], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plan.mean, a["mean"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plan.std, a["std"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(plan.action, a["action"], rtol=1e-4, atol=1e-5)


def settings(**overrides) -> mppi.MPPIConfig:
    fields = dict(iterations=5, num_samples=64, num_elites=8, temperature=5.0, max_std=1.0)
    return mppi.MPPIConfig(**{**fields, **overrides})


GOAL = jnp.array([[0.3, -0.6], [-0.8, 0.2], [0.0, 0.9]])


def quadratic(key, actions):
    """Best where every step of state b's actions is GOAL[b]."""
    return -jnp.sum(jnp.square(actions - GOAL[:, None, None]), axis=(-1, -2))


def start(horizon=2):
    mean = jnp.zeros((3, horizon, 2))
    return mean, jnp.ones_like(mean)


def test_plan_finds_the_optimum_of_every_state():
    plan = jax.jit(lambda k: mppi.plan(k, quadratic, *start(), config=settings(iterations=8)))(
        jax.random.key(0)
    )
    np.testing.assert_allclose(plan.mean[:, 0], GOAL, atol=0.15)
    assert plan.actions.shape == (3, 64, 2, 2) and plan.values.shape == (3, 64)
    np.testing.assert_allclose(plan.values, quadratic(None, plan.actions), rtol=1e-6)


@pytest.mark.parametrize("name", ["mppi", "icem", "predictive"])
def test_one_round_returns_exactly_the_initial_candidates(name):
    """But for the first ones, whose place proposals take."""
    initial = jax.random.uniform(jax.random.key(2), (3, 64, 2, 2), minval=-1.0)
    found = planners.find(name)
    config = found.config(iterations=1, num_samples=64, num_elites=8)
    given = dict(initial=initial, proposals=initial[:, 60:], config=config)
    plan = found.plan(jax.random.key(0), quadratic, *start(), **given)
    np.testing.assert_array_equal(plan.actions[:, 4:], initial[:, 4:])
    np.testing.assert_array_equal(plan.actions[:, :4], initial[:, 60:])


def test_nonfinite_values_never_win_while_a_finite_one_is_left():
    actions = jax.random.normal(jax.random.key(0), (6, 1, 1))
    values = jnp.array([jnp.nan, -5.0, jnp.inf, -3.0, -jnp.inf, -4.0])
    common = dict(temperature=0.5, min_std=0.01, max_std=2.0)
    result = mppi.refit(actions, values, num_elites=4, **common)
    np.testing.assert_array_equal(result.elite_values[:3], [-3.0, -4.0, -5.0])
    assert result.weights[3] == 0.0 and np.isfinite(result.mean).all()
    np.testing.assert_allclose(result.weights.sum(), 1.0, rtol=1e-6)
    nothing = mppi.refit(actions, jnp.full(6, jnp.nan), num_elites=2, **common)
    np.testing.assert_allclose(nothing.weights, 0.5)
    reference = mppi.refit(actions, values, num_elites=1, nonfinite="reference", **common)
    assert reference.elite_actions[0, 0, 0] == actions[2, 0, 0]


def planned_by_hand(draws, score, mean, std, proposals, mask, c, action_of):
    """One state's plan in NumPy: (action, mean, std, actions, values)."""
    known = None if proposals is None else score(c.iterations, proposals)
    for i in range(c.iterations):
        actions = np.clip(mean + std * draws.candidate[i], -1.0, 1.0) * mask
        values = score(i, actions)
        if proposals is not None:
            again = score(i, proposals) if c.rescore_proposals else known
            actions = np.concatenate([proposals, actions])
            values = np.concatenate([again, values])
        best = np.argsort(-values, kind="stable")[: c.num_elites]
        weights = np.exp(c.temperature * (values[best] - values[best[0]]))
        weights = weights / weights.sum()
        mean = np.einsum("k,kta->ta", weights, actions[best])
        variance = np.einsum("k,kta->ta", weights, (actions[best] - mean) ** 2)
        std = np.clip(np.sqrt(variance), c.min_std, c.max_std) * mask
        mean = mean * mask
    action = action_of(mean, actions[best], np.argmax(np.log(weights) + draws.gumbel))
    noisy = np.clip(action + c.action_noise * std[0] * draws.action, -1.0, 1.0) * mask
    return noisy, mean, std, actions, values, action


SELECTED = {
    "sample": lambda mean, elites, chosen: elites[chosen, 0],
    "best": lambda mean, elites, chosen: elites[0, 0],
    "mean": lambda mean, elites, chosen: mean[0],
}


@pytest.mark.parametrize(
    ("selection", "rescore", "proposed", "masks"),
    [
        ("sample", True, True, np.array([[1.0, 1.0], [0.0, 1.0]])),
        ("best", False, True, None),
        ("mean", True, False, np.array([1.0, 0.0])),
        ("sample", False, False, None),
    ],
)
def test_a_plan_is_that_of_numpy(selection, rescore, proposed, masks):
    b, n, p, k, t, a, rounds = 2, 9, 2 if proposed else 0, 4, 3, 2, 3
    rng = np.random.default_rng(4)
    config = mppi.MPPIConfig(
        rounds,
        n,
        k,
        temperature=2.0,
        min_std=0.1,
        max_std=0.5,
        selection=selection,
        action_noise=8.0,
        rescore_proposals=rescore,
    )
    goal = rng.uniform(-1.0, 1.0, (b, t, a))
    noise = rng.normal(size=(rounds, b, n - p, t, a))
    proposals = rng.uniform(-1.0, 1.0, (b, p, t, a)) if proposed else None
    mean, std = rng.uniform(-1.0, 1.0, (b, t, a)), rng.uniform(0.2, 1.0, (b, t, a))
    gumbel, action = rng.gumbel(size=(b, k)), np.array([[3.0, -0.1], [0.2, -4.0]])
    # Each round and the one look at proposals score differently, by the key they were handed.
    factor = np.array([1.0, 0.5, 2.0, 0.25])
    draws = mppi.Draws(lambda i: jnp.asarray(noise)[i], lambda i: i, gumbel, action)
    plan = jax.jit(
        lambda: mppi.plan_with_draws(
            draws,
            lambda i, x: -jnp.asarray(factor)[i] * jnp.sum((x - goal[:, None]) ** 2, axis=(-1, -2)),
            jnp.asarray(mean),
            jnp.asarray(std),
            proposals=proposals,
            action_mask=masks,
            config=config,
        )
    )()
    mask = np.broadcast_to(1.0 if masks is None else masks, (b, a))
    for e in range(b):
        wanted = planned_by_hand(
            mppi.Draws(noise[:, e], None, gumbel[e], action[e]),
            lambda i, x, e=e: -factor[i] * np.sum((x - goal[e]) ** 2, axis=(-1, -2)),
            mean[e],
            std[e],
            None if proposals is None else proposals[e],
            mask[e],
            config,
            SELECTED[selection],
        )
        for name, x in zip(mppi.Plan._fields[:-1], wanted, strict=True):
            got = getattr(plan, name)[e]
            np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-5, err_msg=f"{name} {e}")
    assert np.abs(plan.action).max() == 1.0  # the last clip had something to do


def test_selection_follows_the_weights():
    """With a soft temperature the chosen elite varies, and its frequency is its weight."""
    actions = jnp.array([-0.5, 0.5])[None, :, None, None]

    def score(key, a):
        return a[..., 0, 0]

    config = mppi.MPPIConfig(1, 2, 2, temperature=1.0)
    draw = jax.jit(
        jax.vmap(
            lambda k: mppi.plan(
                k, score, jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1)), initial=actions, config=config
            ).action[0, 0]
        )
    )
    chosen = draw(jax.random.split(jax.random.key(0), 2000))
    share = np.mean(np.asarray(chosen) > 0)
    assert abs(share - 1 / (1 + np.exp(-1.0))) < 0.04


def test_warm_start_shifts_and_resets_per_environment():
    mean = jnp.arange(12.0).reshape(2, 3, 2)
    shifted = mppi.warm_start(mean, jnp.array([False, True]))
    np.testing.assert_array_equal(shifted[0], [[2, 3], [4, 5], [0, 0]])
    np.testing.assert_array_equal(shifted[1], 0.0)


def test_large_action_spaces_get_extra_rounds():
    config = settings(extra_iterations=2, extra_iterations_action_dim=20)
    assert config.rounds(19) == 5 and config.rounds(20) == 7


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(num_elites=65), "num_elites=65"),
        (dict(iterations=0), "iterations=0"),
        (dict(temperature_mode="times"), "temperature_mode='times'"),
        (dict(selection="first"), "selection='first'"),
        (dict(nonfinite="ignore"), "nonfinite='ignore'"),
        (dict(temperature=-1.0), "temperature=-1.0 must be 0 or more, and finite"),
        (dict(temperature=np.inf), "temperature=inf must be 0 or more, and finite"),
        (dict(temperature=np.nan), "temperature=nan must be 0 or more"),
        (dict(temperature=0.0, temperature_mode="divide"), "temperature=0.0 must be above 0"),
        (dict(min_std=-0.1), "min_std=-0.1 must be 0 or more"),
        (dict(min_std=1.5), "max_std=1.0 must be min_std=1.5 or more"),
        (dict(action_noise=-1.0), "action_noise=-1.0 must be 0 or more"),
        (dict(action_noise=np.inf), "action_noise=inf must be 0 or more, and finite"),
        (dict(extra_iterations=-1), "extra_iterations=-1 must be 0 or more"),
        (dict(extra_iterations_action_dim=-1), "extra_iterations_action_dim=-1 must be 0 or more"),
    ],
)
def test_impossible_settings_are_told(fields, message):
    assert settings(num_elites=1, iterations=1).num_elites == 1
    assert settings(temperature=0.0, min_std=1.0, extra_iterations_action_dim=0).min_std == 1.0
    with pytest.raises(ValueError, match=message):
        settings(**fields)


def test_a_traced_temperature_is_not_asked_for_its_range():
    def made(temperature):
        return jnp.float32(settings(temperature=temperature, temperature_mode="divide").temperature)

    assert jax.eval_shape(made, jnp.float32(2.0)).shape == ()


@pytest.mark.parametrize("planner", ["mppi", "cem", "icem"])
@pytest.mark.parametrize("rescore", [True, False])
@pytest.mark.parametrize(
    ("score", "got"),
    [
        (lambda key, a: a.sum((2, 3)).T, r"float32\[\d+, 3\]"),
        (lambda key, a: a.sum((1, 2, 3)), r"float32\[3\]"),
        (lambda key, a: a.sum(3), r"float32\[3, \d+, 2\]"),
        (lambda key, a: a.sum((2, 3)) > 0.0, r"bool\[3, \d+\]"),
        (lambda key, a: (a.sum((2, 3)), {}), "tuple"),
    ],
)
def test_a_score_of_the_wrong_shape_is_told(planner, rescore, score, got):
    mean, std = start()
    proposals = jnp.zeros((3, 4, *mean.shape[1:]))
    found = planners.find(planner)
    fields = dict(num_samples=64, num_elites=8, rescore_proposals=rescore)
    config, columns = found.config(**fields), 64 if rescore else 4
    message = f"score_fn returned {got} for actions .*: return a number a candidate, .*3, {columns}"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda key: found.plan(key, score, mean, std, proposals=proposals, config=config),
            jax.random.key(0),
        )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (dict(proposals=jnp.zeros((3, 2, 2))), "proposals"),
        (dict(proposals=jnp.zeros((3, 4, 5, 2))), "proposals"),
        (dict(proposals=jnp.zeros((3, 64, 2, 2))), "no room"),
        (dict(initial=jnp.zeros((3, 1, 2, 2))), "initial"),
        (dict(mean=jnp.zeros((2, 2)), std=jnp.zeros((2, 2))), "mean"),
        (dict(std=jnp.zeros((3, 3, 2))), r"mean \(3, 2, 2\) and std \(3, 3, 2\) must both"),
        (dict(std=1.0), "std is .*: give an array"),
        (dict(mean=[0.0]), "mean is .*: give an array"),
        (dict(initial=1), "initial is .*: give an array"),
    ],
)
def test_wrong_arguments_are_refused_by_name(given, message):
    arrays = dict(zip(("mean", "std"), start(), strict=True)) | given
    mean, std = arrays.pop("mean"), arrays.pop("std")
    with pytest.raises(ValueError, match=message):
        mppi.plan(jax.random.key(0), quadratic, mean, std, **arrays, config=settings())


def test_more_elites_than_candidates_are_refused():
    fields = dict(num_elites=4, temperature=1.0, min_std=0.1, max_std=1.0)
    with pytest.raises(ValueError, match="num_elites"):
        mppi.refit(jnp.zeros((3, 2, 2)), jnp.zeros(3), **fields)


def with_cost(key, actions):
    """A score and, of every candidate, what tells it from all others."""
    cost = {"cost": 3.0 * actions[:, :, 0, 0], "path": (jnp.cumsum(actions, axis=2),)}
    return quadratic(key, actions), cost


@pytest.mark.parametrize(
    ("planner", "selection", "rescore"),
    [("mppi", "sample", True), ("cem", "mean", False), ("icem", "best", False)],
)
def test_auxiliaries_are_those_of_the_chosen_plan(planner, selection, rescore):
    found = planners.find(planner)
    fields = dict(num_samples=16, num_elites=5, iterations=2, selection=selection)
    config = found.config(**fields, rescore_proposals=rescore, action_noise=2.0)
    proposals = jax.random.uniform(jax.random.key(3), (3, 2, 2, 2), minval=-1.0)
    given = dict(proposals=proposals, config=config)
    key = jax.random.key(5)
    plan, plain = jax.jit(
        lambda: (
            found.plan(key, with_cost, *start(), has_aux=True, **given),
            found.plan(key, quadratic, *start(), **given),
        )
    )()
    np.testing.assert_allclose(plan.aux["cost"], 3.0 * plan.chosen[:, 0], rtol=1e-6)
    np.testing.assert_allclose(plan.aux["path"][0][:, 0], plan.chosen, rtol=1e-6)
    assert plan.aux["path"][0].shape == (3, 2, 2) and plain.aux is None
    for name in ("action", "mean", "std", "values", "chosen"):  # two programs, rounded apart
        np.testing.assert_allclose(getattr(plan, name), getattr(plain, name), atol=1e-6)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (
            lambda a: quadratic(None, a),
            r"returned float32\[3, 64\] alone .* return .values, auxiliaries.",
        ),
        (lambda a: (quadratic(None, a), {"c": a[:, 0]}), r"\['c'\] .* shape \[3, 2, 2\] .*'...'"),
        (lambda a: (quadratic(None, a), 1.0), r"auxiliary array .* has the shape \[\]"),
        (lambda a: (a, {}), r"score_fn returned float32\[3, 64, 2, 2\] for .* \[B, N\]"),
    ],
)
def test_auxiliaries_of_the_wrong_shape_are_told(aux, message):
    def score(key, actions):
        return aux(actions)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            lambda key: mppi.plan(key, score, *start(), has_aux=True, config=settings()),
            jax.random.key(0),
        )


@pytest.mark.parametrize("extra", [0, 3])
def test_the_mean_is_scored_once_more_with_a_key_of_its_own(extra):
    """After the rounds' own, and that of proposals which are scored but once."""
    config = mppi.MPPIConfig(4, 8, 2, selection="mean", extra_iterations=extra)
    config = dataclasses.replace(config, extra_iterations_action_dim=2)
    noise = jnp.zeros((3, 8, 2, 2))
    draws = mppi.Draws(lambda i: noise, lambda i: i, jnp.zeros((3, 2)), jnp.zeros((3, 2)))

    def score(key, actions):
        values = quadratic(key, actions)
        return values, {"key": jnp.full_like(values, key), "plan": actions}

    found = mppi.plan(draws, score, *start(), has_aux=True, config=config)
    assert found.aux["key"].tolist() == [5 + extra] * 3  # 0 .. 3: the rounds', 4: the proposals'
    np.testing.assert_array_equal(found.aux["plan"], found.mean)
