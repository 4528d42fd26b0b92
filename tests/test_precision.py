"""The pinned interface at every precision, under JAX's switches, and at the edge of its numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import categorical, distributions, mppi, power, replay, returns, successors
from mbx.fast import rng
from mbx.planners import bases, cem, predictive

SMALL = dict(num_samples=16, num_elites=4, iterations=2)
MPPI = mppi.MPPIConfig(**SMALL)
PLANNERS = {
    "mppi": (mppi.plan, MPPI),
    "cem": (cem.cem, MPPI),
    "icem": (cem.icem, cem.ICEMConfig(**SMALL)),
    "predictive": (predictive.plan, MPPI),
    "categorical": (categorical.plan, MPPI),
    "points": (bases.over(mppi.plan, bases.control_points(2, horizon=3)), MPPI),
    "smoothed": (bases.over(mppi.plan, bases.smoothing(1.0, horizon=3)), MPPI),
}
X = np.linspace(-3.0, 3.0, 6)
BINS = np.linspace(-2.0, 2.0, 5)


def key():
    return jax.random.key(0)


def planned(name, dtype=float, score=lambda key, a: -jnp.square(a - 0.5).sum((-2, -1))):
    plan, config = PLANNERS[name]
    mean = jnp.zeros((1, 3, 2), dtype)
    given = dict(proposals=jnp.full((1, 1, 3, 2), 0.25, dtype))
    if name == "categorical":
        given = {}
    return plan(key(), score, mean, jnp.ones_like(mean), config=config, **given)


def stored():
    spec = replay.TargetSpec(num_actions=2, action_dim=1)
    row = dict(obs=0.0, is_first=False, is_last=False)
    state = replay.init(row, num_envs=2, capacity=6, target_spec=spec)
    no = jnp.zeros(2, bool)
    made = replay.Targets(
        jnp.ones((2, 2, 1)), jnp.ones((2, 2)), jnp.array([3, 4], jnp.int32), jnp.ones(2, bool)
    )
    for i in range(8):
        rows = dict(obs=jnp.full(2, float(i)), is_first=no, is_last=no)
        state = replay.insert(state, rows, made if i % 2 else None)
    drawn = replay.sample(state, key(), batch_size=8, length=2)
    stale = replay.sample_stale(state, key(), batch_size=2, step=9, exponent=1.0)
    here = replay.Index(jnp.array([0]), jnp.array([1]))
    better = jax.tree.map(lambda x: x[:1], made).replace(values=jnp.full((1, 2), 5.0))
    state = replay.update_targets(state, here, better)
    age = replay.target_age(state, here, 9)
    return drawn.rows["obs"], drawn.mask, stale, replay.targets_at(state, here).values, age


def scaled():
    ema = returns.update_return_ema(returns.init_return_ema(), jnp.asarray(X))
    return ema, returns.return_ema_offset_scale(ema)


CASES = {
    "symlog": lambda: distributions.symlog(X),
    "symexp": lambda: distributions.symexp(X),
    "two_hot": lambda: distributions.two_hot(jnp.asarray(X), jnp.asarray(BINS)),
    "two_hot_mean": lambda: distributions.two_hot_mean(jnp.eye(5), jnp.asarray(BINS)),
    "two_hot_cross_entropy": lambda: distributions.two_hot_cross_entropy(
        jnp.eye(5), jnp.asarray(X[:5]), jnp.asarray(BINS)
    ),
    "lambda_returns": lambda: returns.lambda_returns(jnp.asarray(X), 0.9, jnp.asarray(X), 0.8),
    "replay_lambda_returns": lambda: returns.replay_lambda_returns(
        jnp.asarray(X), jnp.asarray(X > 2), jnp.asarray(X > 1), jnp.asarray(X), 0.9, 0.8
    ),
    "discount_weights": lambda: returns.discount_weights(jnp.asarray(X > 0), 0.9),
    "return_ema": scaled,
    "refit": lambda: mppi.refit(
        jnp.asarray(X).reshape(6, 1, 1),
        jnp.arange(6),
        num_elites=2,
        temperature=0.5,
        min_std=0.1,
        max_std=2.0,
    ),
    "segment_expectation": lambda: successors.segment_expectation(
        jnp.asarray(X), jnp.full(6, 0.5), jnp.array([0, 0, 1, 1, 2, 3]), 3
    ),
    "robot_policy": lambda: power.robot_policy(-jnp.exp(jnp.asarray(X)), 2.0),
    "aggregate_ability": lambda: power.aggregate_ability(jnp.abs(X), jnp.full(6, 0.2), 1.5),
    "intrinsic_reward": lambda: power.intrinsic_reward(jnp.exp(jnp.asarray(X)), 1.0, 1.1),
    "replay": lambda: jax.jit(stored)(),  # one program to compile, not dozens of small ones
    "rng": lambda: (
        jax.random.normal(rng.unrolled(key()), (5,), jnp.float32),
        rng.normal(key(), (20, 20)),
    ),
    **{name: lambda name=name: jax.jit(planned, static_argnums=0)(name) for name in PLANNERS},
}


@pytest.mark.parametrize("name", CASES)
def test_a_program_of_64_bits_gets_the_same_numbers(name):
    wanted = CASES[name]()
    with jax.enable_x64(True):
        assert jnp.zeros(1).dtype == np.float64
        got = CASES[name]()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_random_numbers_of_64_bits_are_jaxs():
    with jax.enable_x64(True):
        for draw in (jax.random.normal, jax.random.uniform, jax.random.bits):
            np.testing.assert_array_equal(draw(rng.unrolled(key()), (7,)), draw(key(), (7,)))


@pytest.mark.parametrize("name", PLANNERS)
def test_scores_and_plans_of_any_precision_are_planned_in_float32(name):
    def count(key, actions, dtype=jnp.float32):
        return (actions > 0.1).sum((-2, -1)).astype(dtype)

    wanted = planned(name, score=count)
    for dtype in (jnp.int32, jnp.int8, jnp.bfloat16):
        found = planned(name, score=lambda key, a, dtype=dtype: count(key, a, dtype))
        np.testing.assert_array_equal(found.mean, wanted.mean)
        assert found.values.dtype == found.action.dtype == jnp.float32
    found = planned(name, jnp.bfloat16, score=count)
    np.testing.assert_array_equal(found.actions, wanted.actions)


def collisions(key, actions):
    """Best at 0.25; -inf, NaN or an outlier where an action is large, NaN where it is small."""
    first = actions[..., 0, 0]
    good = -jnp.square(actions - 0.25).sum((-2, -1))
    return jnp.where(first > 0.5, -jnp.inf, jnp.where(first < -0.5, jnp.nan, good))


@pytest.mark.parametrize("name", ["mppi", "cem", "icem", "predictive", "points", "smoothed"])
def test_scores_that_are_no_numbers_lose(name):
    assert jnp.abs(planned(name, score=collisions).mean[0, 0, 0]) <= 0.5
    lost = planned(name, score=lambda key, a: jnp.full(a.shape[:2], jnp.nan))
    assert jnp.isfinite(lost.action).all() and jnp.isfinite(lost.mean).all()


def test_the_planner_under_every_switch():
    """Collisions under debug_nans, strict promotion, without jit, by keys of other generators."""
    wanted = planned("mppi", score=collisions).action
    for name, value in (
        ("jax_debug_nans", True),
        ("jax_numpy_dtype_promotion", "strict"),
        ("jax_disable_jit", True),
    ):
        before = getattr(jax.config, name)
        jax.config.update(name, value)
        try:
            found = planned("mppi", score=lambda key, a: collisions(key, jnp.maximum(a, -0.5)))
            assert jnp.isfinite(found.action).all(), name
            if name == "jax_disable_jit":
                found = planned("mppi", score=collisions).action
                np.testing.assert_allclose(found, wanted, atol=1e-5)
        finally:
            jax.config.update(name, before)
    plan, config = PLANNERS["mppi"]
    mean = jnp.zeros((1, 3, 2))
    for other in (jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        assert jnp.isfinite(plan(other, collisions, mean, mean + 1.0, config=config).action).all()


@pytest.mark.parametrize("kind", bases.KINDS)
def test_control_points_keep_constants_and_lines(kind):
    for horizon, num in ((2, 1), (5, 2), (9, 4), (9, 9), (20, 3)):
        basis = bases.control_points(num, horizon=horizon, kind=kind)
        np.testing.assert_allclose(basis.forward.sum(1), 1.0, atol=1e-9)
        np.testing.assert_allclose(basis.back @ basis.forward, np.eye(num), atol=1e-6)
        if kind != "zero" and num > 1:
            line = basis.forward @ np.linspace(-1.0, 1.0, num)
            np.testing.assert_allclose(line, np.linspace(-1.0, 1.0, horizon), atol=1e-6)


def test_codes_and_weights_of_extreme_numbers():
    bins = jnp.linspace(-10.0, 10.0, 101)
    x = jnp.array([0.0, 1e6, -1e6, 1e30, 22_025.0])
    code = distributions.two_hot(x, bins)
    np.testing.assert_allclose(code.sum(-1), 1.0, rtol=1e-6)
    assert (code >= 0.0).all() and (code[1:4] == jnp.eye(101)[jnp.array([-1, 0, -1])]).all()
    loss = lambda logits: distributions.two_hot_cross_entropy(logits, x, bins).sum()  # noqa: E731
    value, slope = jax.value_and_grad(loss)(jnp.zeros((5, 101)))
    np.testing.assert_allclose(value, 5 * np.log(101), rtol=1e-5)
    assert jnp.isfinite(slope).all()
    for values, wanted in (([0.0, 0.0], 0.5), ([1e20, 1e20], 0.5), ([0.0, 1e20], 0.0)):
        weights = distributions.awr_weights(jnp.array([values]), 0.5)
        np.testing.assert_allclose(weights, [[wanted, 1.0 - wanted]], rtol=1e-6)
