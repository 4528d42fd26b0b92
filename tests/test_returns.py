"""Returns, discounts, scales and TD targets: golden fixtures, an O(T^2) reference, properties."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbx import returns
from tests.helpers import in_programs

discount_from_episode_length = returns.discount_from_episode_length  # of plain numbers, too
returns = in_programs(returns)

FIXTURES = Path(__file__).parent / "fixtures"
# README tolerances of single functions.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}

lambda_returns = jax.jit(returns.lambda_returns)


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def load(name):
    with np.load(FIXTURES / f"{name}.npz") as arrays:
        return dict(arrays), json.loads((FIXTURES / f"{name}.json").read_text())["config"]


# Lambda returns


@pytest.mark.parametrize("name", ["0", "h2", "l0", "l1", "terminal"])
def test_lambda_returns_of_an_imagined_rollout(name):
    x, config = load(f"dreamer/lambda_{name}")
    got = lambda_returns(x["rewards"], x["discounts"], x["values"], config["lmbda"])
    np.testing.assert_allclose(got, x["lambda_values"], **CLOSE)


@pytest.mark.parametrize("name", ["last0", "ones", "soft_l0", "soft_l1", "zeros"])
def test_lambda_returns_gradients(name):
    x, config = load(f"dreamer/lambda_grad_{name}")

    def loss(rewards, values, discounts):
        out = returns.lambda_returns(rewards, discounts, values, config["lmbda"])
        return jnp.sum(jnp.asarray(x["weight"]) * out), out

    grad = jax.jit(jax.grad(loss, argnums=(0, 1, 2), has_aux=True))
    grads, out = grad(x["rewards"], x["values"], x["discounts"])
    wanted = (x["grad_rewards"], x["grad_values"], x["grad_discounts"])
    for got, want in zip((*grads, out), (*wanted, x["lambda_values"]), strict=True):
        scale = 1e-5 * max(1.0, np.abs(want).max())
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=scale)


@pytest.mark.parametrize("name", ["0", "l0", "l1", "no_end"])
def test_listing_of_document_002(name):
    """The recursion agrees when closed alike; the listing's literal call does not."""
    x, config = load(f"dreamer/seed002_listing_{name}")
    gamma, lambda_ = config["gamma"], config["lmbda"]

    def close(got, want):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())

    discount = np.float32(gamma) * x["continues"]
    closed = lambda_returns(x["rewards"], discount, x["annotations"], lambda_)
    close(closed, x["returns_bootstrap_annotation"])
    zero = lambda_returns(x["rewards"], discount, x["annotations"], lambda_, jnp.zeros(config["B"]))
    close(zero, x["returns_bootstrap_zero"])
    soft = np.float32(gamma) / (1 + np.exp(-x["continue_logits"]))
    dream = lambda_returns(x["rewards"], soft, x["annotations"], lambda_)
    close(dream, x["returns_dream_logits"])
    assert np.abs(np.asarray(closed) - x["returns_literal_call"]).max() > 0.1


@pytest.mark.parametrize("name", ["0", "constant", "no_end", "trunc"])
def test_replay_returns(name):
    x, config = load(f"dreamer/replay_{name}")
    fields = x["rewards"], x["terminated"], x["last"], x["annotations"]
    got = jax.jit(returns.replay_lambda_returns)(*fields, config["gamma"], config["lmbda"])
    # The pinned function closes with the last annotation; so does every fixture that says so.
    np.testing.assert_array_equal(x["bootstrap"], x["annotations"][-1])
    np.testing.assert_allclose(got, x["returns_shifted_cut"], **CLOSE)
    uncut = returns.replay_lambda_returns(
        fields[0], fields[1], np.zeros_like(fields[2]), fields[3], config["gamma"], config["lmbda"]
    )
    np.testing.assert_allclose(uncut, x["returns_shifted"], **CLOSE)


@pytest.mark.parametrize("name", ["0", "trunc"])
def test_official_replay_returns(name):
    x, config = load(f"dreamer/official_lambda_{name}")
    fields = (x[k].T for k in ("rew", "term", "last", "boot"))
    got = returns.replay_lambda_returns(*fields, config["disc"], config["lam"])
    np.testing.assert_allclose(got, x["ret"].T, **CLOSE)


def reference(r, d, v, trace, bootstrap):
    """O(T^2): every n-step return with its weight, written out in float64."""
    steps = len(r)
    out = np.zeros_like(r, dtype=np.float64)
    for t in range(steps):
        weight, total = np.ones_like(r[0], dtype=np.float64), 0.0
        for k in range(t, steps):
            last = k == steps - 1
            tail = (1 - trace[k]) * v[k] + (trace[k] * bootstrap if last else 0)
            total = total + weight * (r[k] + d[k] * tail)
            weight = weight * d[k] * trace[k]
        out[t] = total
    return out


# XLA takes numbers below the smallest normal one as 0.
_numbers = st.floats(-10, 10, width=32, allow_subnormal=False)
_units = st.floats(0, 1, width=32, allow_subnormal=False)


def arrays(shape, elements):
    size = int(np.prod(shape))
    return st.lists(elements, min_size=size, max_size=size).map(
        lambda x: np.asarray(x, np.float32).reshape(shape)
    )


SHAPE = (5, 2)


@settings(max_examples=40, deadline=None)
@given(
    arrays(SHAPE, _numbers),
    arrays(SHAPE, _units),
    arrays(SHAPE, _numbers),
    arrays(SHAPE, _units),
    arrays(SHAPE[1:], _numbers),
)
def test_equals_the_quadratic_reference(r, d, v, trace, bootstrap):
    got = lambda_returns(r, d, v, trace, bootstrap)
    want = reference(r.astype(np.float64), d, v, trace, bootstrap)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@settings(max_examples=20, deadline=None)
@given(arrays((6, 2), _numbers), arrays((6, 2), _numbers), st.integers(1, 4))
def test_time_limits_bootstrap_and_terminations_do_not(r, a, at):
    end = np.zeros((6, 2), bool)
    end[at] = True
    no = np.zeros_like(end)
    truncated = np.asarray(returns.replay_lambda_returns(r, no, end, a, 0.9, 0.95))
    np.testing.assert_allclose(truncated[at - 1], r[at] + 0.9 * a[at], rtol=1e-5, atol=1e-5)
    terminated = np.asarray(returns.replay_lambda_returns(r, end, end, a, 0.9, 0.95))
    np.testing.assert_array_equal(terminated[at - 1], r[at])


def test_numbers_and_traced_arrays_agree():
    x, config = load("dreamer/lambda_0")
    eager = returns.lambda_returns(x["rewards"], x["discounts"], x["values"], config["lmbda"])
    jitted = lambda_returns(x["rewards"], x["discounts"], x["values"], jnp.float32(config["lmbda"]))
    np.testing.assert_allclose(eager, jitted, rtol=1e-6)
    spread = returns.lambda_returns(x["rewards"], 0.9, x["values"], np.full(15, 0.5), 0.0)
    full = returns.lambda_returns(
        x["rewards"], np.full((15, 8, 1), 0.9), x["values"], 0.5, np.zeros((8, 1))
    )
    np.testing.assert_array_equal(spread, full)
    half = returns.lambda_returns(jnp.ones(3, jnp.bfloat16), 0.5, jnp.ones(3, jnp.bfloat16), 0.5)
    assert half.dtype == jnp.float32


# Discounts and scales


@pytest.mark.parametrize("name", ["0", "gamma_half", "start"])
def test_discount_weights(name):
    x, config = load(f"dreamer/discount_{name}")
    got = jax.jit(returns.discount_weights)(x["continues"], config["gamma"])
    np.testing.assert_allclose(got, x["discount"], **CLOSE)
    np.testing.assert_array_equal(got[0], x["continues"][0])
    dead = returns.discount_weights(x["continues"], 0.0)
    np.testing.assert_array_equal(dead[1:], np.zeros_like(dead[1:]))


def test_discount_from_episode_length():
    x, config = load("tdmpc/discount_0")
    bounds = config["discount_denom"], config["discount_min"], config["discount_max"]
    got = [discount_from_episode_length(int(n), *bounds) for n in x["episode_length"]]
    np.testing.assert_allclose(got, x["discount"], rtol=1e-12)
    array = discount_from_episode_length(jnp.asarray(x["episode_length"]))
    np.testing.assert_allclose(array, x["discount"], **CLOSE)
    assert discount_from_episode_length(500) == pytest.approx(0.99)


MOMENTS = ["0", "decay_half", "max1e8", "small", "six_default", "six_limit1"]


@pytest.mark.parametrize("name", MOMENTS)
def test_return_ema(name):
    x, config = load(f"dreamer/moments_{name}")
    percentiles = 100 * config["percentile_low"], 100 * config["percentile_high"]
    update = jax.jit(returns.update_return_ema)
    ema = returns.init_return_ema()
    for i, batch in enumerate(x["returns"]):
        ema = update(ema, batch, decay=config["decay"], percentiles=percentiles)
        offset, scale = returns.return_ema_offset_scale(ema, config["max"])
        got = (ema.low, ema.high, offset, scale)
        wanted = (x["low"][i], x["high"][i], x["offset"][i], x["invscale"][i])
        np.testing.assert_allclose(got, wanted, **CLOSE)
        if "normed" in x:
            normed = (batch - offset) / scale
            size = np.abs(x["normed"][i]).max()
            np.testing.assert_allclose(normed, x["normed"][i], rtol=1e-5, atol=1e-5 * size)


def test_return_ema_defaults_and_outliers():
    batch = np.random.default_rng(0).normal(size=(20, 10)).astype(np.float32)
    ema = returns.update_return_ema(returns.init_return_ema(), batch)
    np.testing.assert_allclose(ema.high, 0.01 * np.percentile(batch, 95), **CLOSE)
    offset, scale = returns.return_ema_offset_scale(ema)
    assert (float(offset), float(scale)) == (float(ema.low), 1.0)
    batch[0, 0] = 1e6  # one outlier moves a percentile by at most one order statistic
    moved = returns.update_return_ema(returns.init_return_ema(), batch)
    assert float(moved.high) <= 0.01 * np.sort(batch.reshape(-1))[-10]


@pytest.mark.parametrize("name", ["0", "tau_half"])
def test_running_scale(name):
    x, config = load(f"tdmpc/running_scale_{name}")
    update = jax.jit(returns.update_running_scale)
    scale = returns.init_running_scale((1,))
    for i in range(sum(key.startswith("value") for key in x)):
        scale = update(scale, x[f"x{i}"], tau=config["tau"], min_=config["min"])
        np.testing.assert_allclose(scale.value, x[f"value{i}"], **CLOSE)
        scaled = x[f"x{i}"] / np.asarray(scale.value)
        np.testing.assert_allclose(scaled, x[f"scaled{i}"], **CLOSE)


def test_running_scale_of_single_values_and_its_floor():
    """p95 - p5 of 0, 1, .., 20 is 18; of numbers closer together than 1 the floor of 1 counts."""
    scale = returns.RunningScale(value=jnp.float32(3.0))
    update = jax.jit(returns.update_running_scale)
    np.testing.assert_allclose(update(scale, jnp.arange(21.0), tau=0.5).value, 10.5, **CLOSE)
    np.testing.assert_allclose(update(scale, jnp.arange(21.0) / 21, tau=0.5).value, 2.0, **CLOSE)


# TD targets


def test_heads_are_reduced_along_the_first_axis_unless_another_is_named():
    x = np.array([[1.0, 5.0, 3.0], [4.0, 2.0, 9.0]], np.float32)
    np.testing.assert_array_equal(returns.reduce_heads(x, "max", 0.0), [4.0, 5.0, 9.0])
    np.testing.assert_array_equal(returns.reduce_heads(x, "from_std_coef", -1.0, axis=1), [1, 2])


@pytest.mark.parametrize("name", ["0", "1", "single_heads"])
def test_td_targets(name):
    x, config = load(f"tdmpc/seed_td_target_{name}")
    rewards = np.moveaxis(x["reward_heads"], 0, 2)
    values = np.moveaxis(x["next_value_heads"], 1, 2)
    terminated = np.moveaxis(x["terminated"], 0, 1)
    cases = [key for key in x if key.startswith(("local", "global"))]
    assert len(cases) == 24
    traced = jax.jit(returns.td_targets, static_argnames=("dynamics_reduction", "local_bootstrap"))
    for key in cases:
        kind, coef, how = key.split(".coef")[0], *key.split(".coef")[1].rsplit(".", 1)
        settings_ = {"dynamics_reduction": how, "local_bootstrap": kind == "local"}
        fields = rewards, values, config["discount"], terminated
        got = returns.td_targets(*fields, std_coef=float(coef), **settings_)
        np.testing.assert_allclose(got, x[key], **CLOSE, err_msg=key)
        if how == "from_std_coef":
            again = traced(*fields, std_coef=jnp.float32(float(coef)), **settings_)
            np.testing.assert_allclose(again, x[key], **CLOSE, err_msg=key)


def test_std_of_one_head_or_equal_heads_has_finite_gradients():
    for x in (jnp.ones((1, 3)), jnp.ones((4, 3))):
        np.testing.assert_array_equal(returns.ensemble_std(x), np.zeros(3))
        grad = jax.grad(lambda y: jnp.sum(returns.ensemble_std(y)))(x)
        np.testing.assert_array_equal(grad, np.zeros(x.shape))
    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_allclose(returns.ensemble_std(x), x.std(0, ddof=1), **CLOSE)
    np.testing.assert_allclose(returns.ensemble_std(x, axis=1), x.std(1, ddof=1), **CLOSE)

    def loss(rewards, values):
        out = returns.td_targets(
            rewards,
            values,
            0.9,
            jnp.zeros((2, 3)),
            std_coef=-1.0,
            dynamics_reduction="min",
            local_bootstrap=False,
        )
        return jnp.sum(out)

    grads = jax.grad(loss, argnums=(0, 1))(jnp.ones((1, 2, 3)), jnp.ones((2, 2, 3)))
    assert all(np.isfinite(g).all() for g in grads)


# Errors

_R = np.zeros((3, 2), np.float32)
_TD = {"std_coef": 0.0, "local_bootstrap": True}


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: returns.lambda_returns(_R, 0.9, _R[:2], 0.9), "v_t has shape"),
        (lambda: returns.lambda_returns(_R[:0], 0.9, _R[:0], 0.9), "at least one step"),
        (lambda: returns.lambda_returns(_R[0, 0], 0.9, _R[0, 0], 0.9), "at least one step"),
        (lambda: returns.lambda_returns(_R, np.zeros(2), _R, 0.9), "discount_t has shape"),
        (lambda: returns.lambda_returns(_R, 0.9, _R, 0.9, np.zeros(3)), "bootstrap has shape"),
        (lambda: returns.replay_lambda_returns(_R[:1], _R[:1], _R[:1], _R[:1], 0.9, 0.9), "T >= 2"),
        (lambda: returns.replay_lambda_returns(_R, _R[:2], _R, _R, 0.9, 0.9), "terminated has"),
        (lambda: returns.discount_weights(jnp.ones(()), 0.9), "continues is a number"),
        (lambda: discount_from_episode_length(0), "length is 0"),
        (
            lambda: returns.update_running_scale(returns.init_running_scale(), _R, tau=0.1),
            "x has shape",
        ),
        (
            lambda: returns.update_running_scale(
                returns.init_running_scale(), jnp.float32(1.0), tau=0.1
            ),
            "x has shape",
        ),
        *(
            (
                lambda shapes=shapes: returns.td_targets(
                    *(_R[None, :n] for n in shapes), 0.9, _R, dynamics_reduction="min", **_TD
                ),
                "do not agree",
            )
            for shapes in ((2, 3), (3, 2))
        ),
        (
            lambda: returns.td_targets(
                _R[None], _R[None], 0.9, _R, dynamics_reduction="median", **_TD
            ),
            "median",
        ),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(call, match):
    with pytest.raises(ValueError, match=match):
        call()
