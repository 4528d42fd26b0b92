"""Symlog, two-hot, Gaussian policies and advantage weights: golden fixtures and properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbx import distributions
from mbx.world_model import WorldModelConfig, make_world_model
from tests.helpers import in_programs, load_fixture

dist = in_programs(distributions)

# README tolerances: single functions, what passes through symexp, losses.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
THROUGH_SYMEXP = {"rtol": 1e-4, "atol": 1e-6}
LOSS = {"rtol": 1e-4, "atol": 1e-6}

cross_entropy = jax.jit(dist.two_hot_cross_entropy)


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


def load(name):
    return load_fixture(*name.split("/"))


# Symlog and two-hot


@pytest.mark.parametrize("name", ["tdmpc/symlog_0", "tdmpc/symlog_1", "dreamer/symlog_0"])
def test_symlog(name):
    x, _ = load(name)
    symlog, symexp = ("symlog_x", "symexp_y") if "symlog_x" in x else ("symlog", "symexp")
    np.testing.assert_allclose(dist.symlog(x["x"]), x[symlog], **CLOSE)
    np.testing.assert_allclose(dist.symexp(x["y"]), x[symexp], **CLOSE)
    np.testing.assert_allclose(dist.symexp(dist.symlog(x["x"])), x["x"], **CLOSE)


@pytest.mark.parametrize("name", ["101", "51"])
def test_two_hot(name):
    x, config = load(f"tdmpc/two_hot_{name}")
    bins = dist.bins(config["vmin"], config["vmax"], config["num_bins"])
    target, logits = x["x"][:, 0], x["logits"]
    # A code hangs on the last bits of symlog(x) (times 1 / bin width), in which implementations of
    # the logarithm differ: so codes are compared at the correctly rounded symlog.
    wide = target.astype(np.float64)
    exact = (np.sign(wide) * np.log1p(np.abs(wide))).astype(np.float32)
    code = jax.jit(dist.two_hot_linear)(exact, bins)
    np.testing.assert_allclose(code, x["two_hot"], **CLOSE)
    loss = jax.jit(dist.two_hot_linear_cross_entropy)(logits, exact, bins)
    np.testing.assert_allclose(loss, x["soft_ce"][:, 0], **CLOSE)
    # The whole chain: one of 64 targets is one bit of symlog away from the reference's.
    np.testing.assert_allclose(dist.symlog(target), exact, rtol=2.0**-22)
    whole, loss = dist.two_hot(target, bins), cross_entropy(logits, target, bins)
    far = np.abs(dist.symlog(target) - exact) > 0
    assert far.sum() <= 6
    np.testing.assert_allclose(whole[~far], x["two_hot"][~far], **CLOSE)
    np.testing.assert_allclose(loss[~far], x["soft_ce"][~far, 0], **CLOSE)
    np.testing.assert_allclose(loss, x["soft_ce"][:, 0], rtol=1e-4)
    mean = dist.two_hot_mean(logits, bins)
    np.testing.assert_allclose(mean, x["two_hot_inv"][:, 0], **CLOSE)
    grad = jax.grad(lambda y: jnp.mean(dist.two_hot_cross_entropy(y, target, bins)))(logits)
    np.testing.assert_allclose(grad, x["soft_ce_grad_logits"], **CLOSE)
    back = dist.two_hot_mean(jnp.log(dist.two_hot(target, bins) + 1e-30), bins)
    np.testing.assert_allclose(back, x["decode_of_encode"][:, 0], **CLOSE)


def test_one_bin_is_symlog_regression():
    x, config = load("tdmpc/two_hot_scalar_1bin")
    bins = dist.bins(config["vmin"], config["vmax"], 1)
    np.testing.assert_allclose(dist.two_hot(x["x"][:, 0], bins), x["two_hot"], **CLOSE)
    mean = dist.two_hot_mean(x["logits"], bins)
    np.testing.assert_allclose(mean, x["two_hot_inv"][:, 0], **CLOSE)
    loss = dist.two_hot_cross_entropy(x["two_hot"], x["x"][:, 0], bins)
    np.testing.assert_allclose(loss, np.zeros(6), atol=1e-9)
    grad = jax.grad(lambda y: jnp.sum(dist.two_hot_cross_entropy(y, x["x"][:, 0], bins)))
    assert np.abs(grad(x["logits"])).min() > 0.1  # unlike the reference's, which is 0


@pytest.mark.parametrize("name", ["255", "41", "sharp", "small_range"])
def test_two_hot_head_in_symlog_space(name):
    x, config = load(f"dreamer/twohot_{name}")
    bins = dist.bins(config["low"], config["high"], config["bins"])
    np.testing.assert_allclose(bins, x["bins"], **CLOSE)
    target = x["x"][:, 0]
    loss = cross_entropy(x["logits"], target, bins)
    np.testing.assert_allclose(-loss, x["log_prob"], **LOSS)
    grad = jax.grad(lambda y: jnp.sum(dist.two_hot_cross_entropy(y, target, bins)))(x["logits"])
    np.testing.assert_allclose(grad, x["grad_logits"], rtol=1e-3, atol=1e-6)
    mean = dist.two_hot_mean(x["logits"], bins)
    np.testing.assert_allclose(mean, x["mean"][:, 0], **THROUGH_SYMEXP)
    uniform = dist.two_hot_mean(jnp.zeros((1, config["bins"])), bins)
    np.testing.assert_allclose(uniform, np.zeros(1), atol=1e-5)


@pytest.mark.parametrize("name", ["0", "sharp"])
def test_two_hot_head_in_real_space(name):
    """The official DreamerV3 form: uneven bins, a mean that is linear in them."""
    x, _ = load(f"dreamer/official_twohot_{name}")
    half = dist.symexp(dist.bins(-20, 0, 128))
    bins = jnp.concatenate([half, -half[:-1][::-1]])
    np.testing.assert_allclose(bins, x["bins"], rtol=1e-5)
    loss = dist.two_hot_linear_cross_entropy(x["logits"], x["x"], x["bins"])
    np.testing.assert_allclose(loss, x["loss"], **CLOSE)
    grad = jax.grad(
        lambda y: jnp.sum(dist.two_hot_linear_cross_entropy(y, x["x"], x["bins"])) * 1.0
    )(x["logits"])
    np.testing.assert_allclose(grad, x["grad_logits"], rtol=1e-3, atol=1e-6)
    mean = dist.two_hot_linear_mean(x["logits"], x["bins"])
    np.testing.assert_allclose(mean, x["pred"], rtol=1e-4)
    zero = dist.two_hot_linear_mean(jnp.zeros((2, 255)), x["bins"])
    np.testing.assert_array_equal(zero, np.zeros(2))


UNEVEN = np.array([-9.0, -3.0, -2.5, 0.0, 0.1, 4.0, 11.0], np.float32)


@settings(max_examples=60, deadline=None)
@given(st.floats(-12, 12, width=32), st.sampled_from(["even", "uneven"]))
def test_codes_are_distributions_on_two_neighbours_with_the_right_mean(y, kind):
    bins = UNEVEN if kind == "uneven" else np.linspace(-9, 11, 7, dtype=np.float32)
    code = np.asarray(dist.two_hot_linear(y, bins))
    used = np.flatnonzero(code)
    assert code.min() >= 0 and abs(code.sum() - 1) < 1e-6
    assert len(used) <= 2 and used[-1] - used[0] <= 1
    np.testing.assert_allclose(code @ bins, np.clip(y, -9, 11), rtol=1e-5, atol=2e-6)
    logits = np.sin(np.arange(7.0, dtype=np.float32))
    lean = dist.two_hot_linear_cross_entropy(logits, np.float32(y), bins)
    np.testing.assert_allclose(lean, -(code @ jax.nn.log_softmax(logits)), rtol=1e-5)


def test_a_target_on_a_bin_puts_all_mass_there():
    for bins in (UNEVEN, np.linspace(-20, 20, 255, dtype=np.float32)):
        np.testing.assert_allclose(dist.two_hot_linear(bins, bins), np.eye(len(bins)), atol=2e-5)


def test_two_hot_keeps_leading_axes_and_float32():
    bins = dist.bins(-5, 5, 11)
    assert dist.two_hot(3.0, bins).shape == (11,)
    assert dist.two_hot(np.zeros((2, 3)), bins).shape == (2, 3, 11)
    half = jnp.zeros((2, 3, 11), jnp.bfloat16)
    assert dist.two_hot_mean(half, bins).dtype == jnp.float32
    out = jax.vmap(dist.two_hot_cross_entropy, in_axes=(0, 0, None))(half, jnp.ones((2, 3)), bins)
    assert (out.shape, out.dtype) == ((2, 3), jnp.float32)


# Gaussian policies


@pytest.mark.parametrize("name", ["0", "masked"])
def test_gaussian_policy(name):
    x, config = load(f"tdmpc/gaussian_policy_{name}")
    mean, eps, action_dim = x["raw_mean"], x["eps"], x["eps"].shape[-1]
    log_std = dist.bounded_log_std(x["raw_log_std"], config["log_std_min"], config["log_std_max"])
    if name == "masked":
        mask = x["action_mask"]  # of unused dims std 1 and eps 0 remain, as in the reference
        mean, log_std, eps, action_dim = mean * mask, log_std * mask, eps * mask, mask.sum(-1)
    np.testing.assert_allclose(log_std, x["log_std"], **CLOSE)
    log_prob = dist.gaussian_log_prob(eps, log_std)
    np.testing.assert_allclose(log_prob, x["logp_gauss"][:, 0], **CLOSE)
    pre_action = mean + eps * jnp.exp(log_std)
    np.testing.assert_allclose(pre_action, x["pre_squash_action"], **CLOSE)
    mean, action, squashed = jax.jit(dist.squash)(mean, pre_action, log_prob)
    np.testing.assert_allclose(mean, x["mean"], **CLOSE)
    np.testing.assert_allclose(action, x["action"], **CLOSE)
    np.testing.assert_allclose(squashed, x["logp_squashed"][:, 0], **CLOSE)
    np.testing.assert_allclose(-squashed, x["entropy"][:, 0], **CLOSE)
    entropy = dist.scaled_entropy(log_prob, action_dim)
    np.testing.assert_allclose(entropy, x["scaled_entropy"][:, 0], **CLOSE)


def test_policy_parameterisations():
    x, _ = load("tdmpc/seed_policy_param_0")
    log_prob = dist.gaussian_log_prob(x["eps"], x["log_std"])
    np.testing.assert_allclose(log_prob, x["logp_gauss"][:, 0], **CLOSE)
    pre_action = x["raw_mean"] + x["eps"] * np.exp(x["log_std"])
    for scale in (0.0, 0.5, 1.0):
        mean, action, squashed = dist.squash(x["raw_mean"], pre_action, log_prob, scale)
        np.testing.assert_allclose(mean, x["squash.mean"], **CLOSE)
        np.testing.assert_allclose(action, x["squash.action"], **CLOSE)
        np.testing.assert_allclose(squashed, x[f"squash.j{scale}.logp"][:, 0], **CLOSE)
        scaled = -log_prob * x[f"entropy_multiplier.p{scale}"]
        np.testing.assert_allclose(dist.scaled_entropy(log_prob, 3, scale), scaled, **CLOSE)
    size = x["eps"].shape[-1]
    model = make_world_model(WorldModelConfig((3,), size, policy="tanh_mean"))
    action = model.act(x["raw_mean"], x["log_std"], x["eps"])
    np.testing.assert_allclose(action, x["bmpc.action"], **CLOSE)
    np.testing.assert_allclose(log_prob, x["bmpc.logp"][:, 0], **CLOSE)


def test_tanh_is_as_good_in_the_middle_as_at_the_ends():
    x = np.float32([-1e-4, 1e-3, -0.49, 0.51, 3.0, -6.0])
    np.testing.assert_allclose(dist._tanh(jnp.asarray(x)), np.tanh(np.float64(x)), rtol=2e-7)


@settings(max_examples=30, deadline=None)
@given(st.floats(-2, 2), st.floats(-2, 0.5), st.floats(-1.5, 1.5))
def test_sampling_and_stored_action_densities_agree(mean, log_std, eps):
    mean, log_std, eps = (np.full((1,), x, np.float32) for x in (mean, log_std, eps))
    pre_action = mean + eps * np.exp(log_std)
    _, action, log_prob = dist.squash(mean, pre_action, dist.gaussian_log_prob(eps, log_std))
    again = dist.squashed_log_prob(action, mean, log_std)
    if abs(pre_action[0]) < 3:
        np.testing.assert_allclose(again, log_prob, rtol=1e-3, atol=1e-3)
    assert np.isfinite(again)


def test_densities_and_gradients_are_finite_on_the_bounds():
    action = jnp.array([[1.0, -1.0], [0.0, 1.0]])

    def loss(mean, log_std):
        return jnp.sum(dist.squashed_log_prob(action, mean, log_std))

    grads = jax.grad(loss, argnums=(0, 1))(jnp.zeros((2, 2)), jnp.full((2, 2), -2.0))
    assert all(np.isfinite(g).all() for g in grads)

    def entropy(log_std):
        log_prob = dist.gaussian_log_prob(jnp.zeros((2, 2)), log_std)
        return jnp.sum(dist.scaled_entropy(log_prob, 2))

    # Where the log-density is exactly 0, the reference's ratio would be 0/0.
    at_zero = jnp.full((2, 2), -0.5 * np.log(2 * np.pi))
    np.testing.assert_allclose(jax.grad(entropy)(at_zero), np.full((2, 2), 2.0), rtol=1e-6)
    big = jnp.full((1, 2), 50.0)
    _, grad = jax.value_and_grad(lambda m: jnp.sum(dist.squash(m, m, jnp.zeros(1))[2]))(big)
    assert np.isfinite(grad).all()


@pytest.mark.parametrize("name", ["0", "small_std"])
def test_gaussian_kl(name):
    x, _ = load(f"tdmpc/kl_gaussian_{name}")
    expert = x["expert_mean"], x["expert_std"]
    policy = x["policy_mean"], x["policy_std"]
    covering, seeking = dist.gaussian_kl(*expert, *policy), dist.gaussian_kl(*policy, *expert)
    np.testing.assert_allclose(covering, x["kl_expert_policy"], **CLOSE)
    np.testing.assert_allclose(seeking, x["kl_policy_expert"], **CLOSE)
    loss = np.asarray(seeking).mean(-1, keepdims=True)
    np.testing.assert_allclose(loss, x["loss_per_sample_mean_over_A"], **CLOSE)


# Advantage weights


@pytest.mark.parametrize("name", ["0", "large"])
def test_planner_target_weights(name):
    x, config = load(f"tdmpc/planner_target_awr_{name}")
    values, log_probs = x["planner_values"][..., 0], x["log_probs"][..., 0]
    weights = dist.awr_weights(values, config["temperature"])
    np.testing.assert_allclose(weights, x["weights"][..., 0], **CLOSE)
    inverse = dist.awr_weights(values, 1 / config["temperature"], "multiply")
    np.testing.assert_allclose(inverse, weights, **CLOSE)
    loss = -np.sum(np.asarray(weights) * log_probs, -1)
    np.testing.assert_allclose(loss.sum(), x["loss_sum"], rtol=1e-5)
    np.testing.assert_allclose(loss.mean(), x["loss_mean"], rtol=1e-5)


def reference_scores(x, config, sign):
    """Score of every action by the sidecar's notes: head reduction, disagreement, running scale."""
    heads = x["td_heads"][..., 0]
    flat = heads.reshape(heads.shape[0], -1, heads.shape[-1])
    low = flat.min(1) if config["head_reduce"] == "min" else flat.mean(1)
    value = low if sign < 0 else flat.max(1)
    next_values = x["v_next_heads"][..., 0]
    spread = next_values.reshape(next_values.shape[0], -1, next_values.shape[-1]).std(1, ddof=1)
    coef = -config["lambda_pess"] if sign < 0 else config["lambda_opt"]
    scores = (value + coef * spread) / x["scale_value"]
    return scores.reshape(scores.shape[0], -1, config["N"])


@pytest.mark.parametrize("name", ["0", "mean_reduce"])
def test_advantage_weighted_regression(name):
    x, config = load(f"tdmpc/awr_{name}")
    weights = {}
    for sign, kind in ((-1, "pess"), (1, "opt")):
        scores = reference_scores(x, config, sign)
        weights[kind] = np.asarray(dist.awr_weights(scores, config["temperature"]))
        wanted = x[f"weights_{kind}"].reshape(scores.shape)
        np.testing.assert_allclose(weights[kind], wanted, **CLOSE)
    effective = 1 / (np.square(weights["pess"]).sum(-1) + 1e-8)
    np.testing.assert_allclose(effective.mean(), x["eff_samples_pess"], rtol=1e-5)
    # Op by op, as the reference: compiled, 1 - a^2 is not rounded in between, and better than it.
    log_prob = distributions.squashed_log_prob(x["actions"], x["raw_mean"], x["log_std"])
    np.testing.assert_allclose(log_prob, x["log_prob"][..., 0], **CLOSE)
    compiled = jax.jit(dist.squashed_log_prob)(x["actions"], x["raw_mean"], x["log_std"])
    np.testing.assert_allclose(compiled, log_prob, rtol=1e-4, atol=1e-4)
    per_state = (weights["pess"] * np.asarray(log_prob).reshape(weights["pess"].shape)).sum(-1)
    entropy = x["scaled_entropy"].mean((1, 2))
    losses = -per_state.mean(-1) - config["entropy_coef"] * entropy
    rho = config["rho"] ** np.arange(len(losses))
    np.testing.assert_allclose((rho * losses).sum() / rho.sum(), x["loss_pess"], rtol=1e-5)


def test_effective_samples():
    weights = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.25] * 4, [0.5, 0.25, 0.25, 0.0]])
    np.testing.assert_allclose(dist.effective_samples(weights), [1.0, 4.0, 1 / 0.375], rtol=1e-6)


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-12])
def test_weights_of_large_values_and_small_temperatures_are_exact(temperature):
    best = np.array([[60.0], [40.0]])
    values = best + temperature * np.array([[0.0, 0.0, 0.0], [0.0, -1.0, -2.0]])
    values = values.astype(np.float32)
    logits = (values.astype(np.float64) - best) / temperature
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(dist.awr_weights(values, temperature), expected, **CLOSE)
    weights = dist.awr_weights(values, 1 / temperature, mode="multiply")
    np.testing.assert_allclose(weights, expected, **CLOSE)


# Errors


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: dist.bins(1, -1, 5), "low = 1"),
        (lambda: dist.bins(-1, 1, 0), "num is 0"),
        (lambda: dist.two_hot(1.0, np.zeros((2, 2))), "bins has shape"),
        (lambda: dist.two_hot_mean(np.zeros(4), np.zeros(5)), "logits has shape"),
        (lambda: dist.two_hot_cross_entropy(np.zeros((2, 5)), 1.0, np.arange(5)), "x has shape"),
        (lambda: dist.awr_weights(np.zeros(3), 1.0, "scale"), "mode is 'scale'"),
    ],
)
def test_errors_name_the_field_the_value_and_the_remedy(call, match):
    with pytest.raises(ValueError, match=match):
        call()


def test_the_mean_of_a_shifted_distribution_needs_no_distribution():
    logits = jax.random.normal(jax.random.key(0), (7, 21))
    bins = jnp.linspace(-10.0, 10.0, 21)
    shift = jnp.linspace(-3.0, 3.0, 7)

    def slow(logits, shift):
        return dist.two_hot_mean(dist.shift_logits(logits, bins, shift, 1.1), bins)

    def fast(logits, shift):
        return dist.shifted_mean(logits, bins, shift, 1.1)

    np.testing.assert_allclose(fast(logits, shift), slow(logits, shift), rtol=1e-4)
    sums = [jax.grad(lambda x, s, f=f: f(x, s).sum(), argnums=(0, 1)) for f in (fast, slow)]
    for one, two in zip(*(grad(logits, shift) for grad in sums), strict=True):
        np.testing.assert_allclose(one, two, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_cross_entropy_and_its_derivatives(size):
    """Against float64, of targets that need not sum to 1, with logits of every size."""
    random = np.random.default_rng(0)
    logits = (size * random.normal(size=(2, 3, 101))).astype(np.float32)
    target = random.uniform(size=logits.shape).astype(np.float32)
    weight = random.normal(size=(2, 3)).astype(np.float32)
    exact = logits.astype(np.float64)
    exact = exact - exact.max(-1, keepdims=True)
    log_p = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    loss, back = jax.vjp(dist.cross_entropy, logits, target)
    np.testing.assert_allclose(loss, -(target * log_p).sum(-1), rtol=1e-5)
    d_logits, d_target = back(weight)
    mass = target.sum(-1, keepdims=True)
    wanted = weight[..., None] * (mass * np.exp(log_p) - target)
    np.testing.assert_allclose(d_logits, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(d_target, -weight[..., None] * log_p, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1.0, 30.0, 1e4])
def test_derivative_of_the_two_hot_mean(size):
    """sum_k p_k b_k: p_k (b_k - mean) for logits, p_k for bins; symexp's own is e^|mean|."""
    random = np.random.default_rng(1)
    logits = (size * random.normal(size=(2, 3, 21))).astype(np.float32)
    bins = dist.bins(-2.0, 2.0, 21)
    exact = logits.astype(np.float64)
    p = np.exp(exact - exact.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    mean = (p * np.asarray(bins)).sum(-1, keepdims=True)
    found, back = jax.vjp(dist.two_hot_mean, logits, bins)
    np.testing.assert_allclose(
        found, np.sign(mean[..., 0]) * np.expm1(np.abs(mean[..., 0])), rtol=2e-5, atol=1e-6
    )
    d_logits, d_bins = back(jnp.ones((2, 3)))
    slope = np.exp(np.abs(mean))
    np.testing.assert_allclose(
        d_logits, slope * p * (np.asarray(bins) - mean), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(d_bins, (slope * p).sum((0, 1)), rtol=1e-4, atol=1e-6)


def test_a_logit_of_minus_infinity_has_no_probability():
    logits = jnp.log(jnp.array([0.0, 0.5, 0.5]))
    bins = dist.bins(-1.0, 1.0, 3)
    assert float(dist.two_hot_mean(logits, bins)) == pytest.approx(np.expm1(0.5), abs=1e-6)
