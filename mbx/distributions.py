"""Distribution arithmetic on arrays: symlog, two-hot, tanh-Gaussian policies, advantage weights.

Everything is computed in float32, whatever the network's dtype. Leading axes `...` are free. Axes:
K bins, A action dims, N candidate actions.
"""

from __future__ import annotations

import math
import warnings

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from mbx.fast import gradients, reductions

# Added to 1 - a^2 before the logarithm of the tanh Jacobian.
_JACOBIAN_EPS = 1e-6
# Stored actions are pulled this far into (-1, 1) before atanh.
_ACTION_LIMIT = 0.9999
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

# Symlog and two-hot


def symlog(x: ArrayLike) -> Array:
    """sign(x) ln(1 + |x|), float32. Source: DreamerV3, section "Symlog"."""
    x = _float(x)
    return jnp.sign(x) * jnp.log1p(jnp.abs(x))


def symexp(x: ArrayLike) -> Array:
    """sign(x) (exp(|x|) - 1), the inverse of `symlog`, float32."""
    x = _float(x)
    return jnp.sign(x) * jnp.expm1(jnp.abs(x))


def bins(low: float, high: float, num: int) -> Array:
    """Evenly spaced bins [num], float32, for the two-hot functions (in symlog space there).
    Raises ValueError for low >= high, or fewer than one bin.
    """
    if num < 1:
        raise ValueError(f"num is {num}: use at least 2 bins, or 1 for plain symlog regression")
    if not low < high:
        raise ValueError(f"bins from low = {low} to high = {high}: low must be below high")
    return jnp.linspace(low, high, num, dtype=jnp.float32)


def two_hot(x: ArrayLike, bins: Array) -> Array:
    """Two-hot code [..., K], float32, of symlog(x): mass on the two neighbouring bins, so that the
    code's mean is symlog(x).

    Values beyond the bins are clipped to them. With a single bin there is nothing to distribute:
    the "code" is symlog(x) itself, a regression target. Source: DreamerV3, section "Critic
    learning"; TD-MPC2 (math.two_hot).

    Args:
      x: [...] real.
      bins: [K] increasing, in symlog space, of any spacing.

    Examples:
      >>> bins = distributions.bins(-1.0, 1.0, 3)
      >>> print(np.array(distributions.two_hot(distributions.symexp(0.25), bins)).round(3))
      [0.   0.75 0.25]
    """
    return two_hot_linear(symlog(x), bins)


def two_hot_linear(y: ArrayLike, bins: Array) -> Array:
    """As `two_hot`, for y [...] already in the space of the bins.
    With bins = symexp(linspace) and y = x: the code of the official DreamerV3, in real space.
    """
    y, bins = _float(y), _check_bins(bins)
    if bins.shape[0] == 1:
        return y[..., None]
    lower, weight = (x[..., None] for x in _two_hot_position(y, bins))
    k = jnp.arange(bins.shape[0], dtype=jnp.int32).reshape((1,) * y.ndim + (-1,))
    return jnp.where(k == lower, 1.0 - weight, 0.0) + jnp.where(k == lower + 1, weight, 0.0)


def two_hot_mean(logits: Array, bins: Array) -> Array:
    """symexp(sum_k softmax(logits)_k bins_k), the mean taken in symlog space: logits [..., K] ->
    [...] real. With one bin: symexp(logits[..., 0]).
    Raises ValueError where logits and bins do not fit.
    """
    logits, bins = _check_logits(logits, bins)
    if bins.shape[0] == 1:
        return symexp(logits[..., 0])
    return symexp(_softmax_mean(logits, bins))


@gradients.Written
def _softmax_mean(logits: Array, bins: Array) -> Array:
    """sum_k softmax(logits)_k bins_k: [..., K], [K] -> [...]."""
    return _softmax_mean_forward(logits, bins)[0]


def _softmax_mean_forward(logits: Array, bins: Array) -> tuple[Array, tuple[Array, ...]]:
    e = jnp.exp(logits - jax.lax.stop_gradient(reductions.largest(logits)))
    sums = reductions.sums(e, jnp.stack([bins, jnp.ones_like(bins)], axis=1))
    mean, total = sums[..., 0] / sums[..., 1], sums[..., 1]
    return mean, (e, total, mean, bins)


def _softmax_mean_backward(residuals: tuple[Array, ...], grad: Array) -> tuple[Array, Array]:
    e, total, mean, bins = residuals
    scaled = e * (grad / total)[..., None]
    away = reductions.expand(bins, e.ndim) - mean[..., None]
    return scaled * away, jnp.sum(scaled, axis=tuple(range(e.ndim - 1)))


_softmax_mean.defvjp(_softmax_mean_forward, _softmax_mean_backward)


def two_hot_linear_mean(logits: Array, bins: Array) -> Array:
    """sum_k softmax(logits)_k bins_k for bins in real space: logits [..., K] -> [...].
    Bins symmetric about 0 are summed in mirrored pairs, so that equal logits give exactly 0
    although the outer bins are huge. Raises ValueError where logits and bins do not fit.
    Source: official DreamerV3 (outs.TwoHot).
    """
    logits, bins = _check_logits(logits, bins)
    terms = jax.nn.softmax(logits) * reductions.expand(bins, logits.ndim)
    return 0.5 * jnp.sum(terms + terms[..., ::-1], axis=-1)


def two_hot_cross_entropy(logits: Array, x: ArrayLike, bins: Array) -> Array:
    """-sum_k two_hot(x)_k log_softmax(logits)_k, float32 [...].

    With one bin, where a cross-entropy would be 0 whatever the logit: (logits - symlog(x))^2.
    Gradients flow into x too; stop them where x is a target.

    Args:
      logits: [..., K].
      x: [...] real targets.
      bins: [K] in symlog space.

    Raises:
      ValueError: logits, x and bins do not fit.
    """
    return two_hot_linear_cross_entropy(logits, symlog(x), bins)


def two_hot_linear_cross_entropy(logits: Array, y: ArrayLike, bins: Array) -> Array:
    """As `two_hot_cross_entropy`, for y [...] already in the space of the bins."""
    logits, bins = _check_logits(logits, bins)
    y = _float(y)
    if y.shape != logits.shape[:-1]:
        raise ValueError(f"x has shape {y.shape}: logits {logits.shape} need {logits.shape[:-1]}")
    if bins.shape[0] == 1:
        return jnp.square(logits[..., 0] - y)
    return cross_entropy(logits, two_hot_linear(y, bins))


@gradients.Written
def cross_entropy(logits: Array, target: Array) -> Array:
    """-sum_k target_k log_softmax(logits)_k: [..., K], [..., K] -> [...]."""
    return _cross_entropy_forward(logits, target)[0]


def _cross_entropy_forward(logits: Array, target: Array) -> tuple[Array, tuple[Array, ...]]:
    shifted = logits - jax.lax.stop_gradient(reductions.largest(logits))
    e = jnp.exp(shifted)
    total, mass = reductions.total(e), reductions.total(target)
    loss = mass * jnp.log(total) - reductions.total(target * shifted)
    return loss[..., 0], (e, total, shifted, target, mass)


def _cross_entropy_backward(residuals: tuple[Array, ...], grad: Array) -> tuple[Array, Array]:
    e, total, shifted, target, mass = residuals
    grad = grad[..., None]
    return grad * (e * (mass / total) - target), grad * (jnp.log(total) - shifted)


cross_entropy.defvjp(_cross_entropy_forward, _cross_entropy_backward)


def shift_logits(
    logits: Array, bins: Array, shift: ArrayLike = 0.0, scale: ArrayLike = 1.0
) -> Array:
    """Moves a two-hot distribution: first scaled in symlog space, then shifted in real space.

    Every bin's mass goes to where the bin moves to, split over the two nearest bins and clipped to
    the range. logits [..., K], bins [K] in symlog space, shift and scale numbers or [...] -> logits
    [..., K], the logarithm of the moved mass plus 1e-8. Source: docs/sources.md#ensembles.
    """
    logits, bins = _check_logits(logits, bins)
    lower, weight = _two_hot_position(_moved_bins(logits, bins, shift, scale), bins)
    return jnp.log(_share(jax.nn.softmax(logits, axis=-1), lower, weight) + 1e-8)


def shifted_mean(
    logits: Array, bins: Array, shift: ArrayLike = 0.0, scale: ArrayLike = 1.0
) -> Array:
    """`two_hot_mean(shift_logits(...), bins)` without the moved distribution: [..., K] -> [...].
    Splitting a mass over its two nearest bins keeps its mean: only the clipping is left to do.
    """
    logits, bins = _check_logits(logits, bins)
    moved = jnp.clip(_moved_bins(logits, bins, shift, scale), bins[0], bins[-1])
    return symexp(jnp.sum(jax.nn.softmax(logits, axis=-1) * moved, axis=-1))


def _moved_bins(logits: Array, bins: Array, shift: ArrayLike, scale: ArrayLike) -> Array:
    """Where every bin of every distribution goes, in symlog space: [..., K]."""
    shift, scale = (
        jnp.broadcast_to(_float(x), logits.shape[:-1])[..., None] for x in (shift, scale)
    )
    return symlog(symexp(reductions.expand(bins, logits.ndim) * scale) + shift)


@gradients.Written
def _share(mass: Array, lower: Array, weight: Array) -> Array:
    """Masses [..., K] moved to the bins `lower` and, by their `weight`, the ones above.
    A scatter of K numbers, where a matrix of two-hot codes would have K^2; its gradient gathers.
    """
    flat, index, share = (x.reshape(-1, x.shape[-1]) for x in (mass, lower, weight))
    row = jnp.arange(flat.shape[0])[:, None]
    moved = jnp.zeros_like(flat).at[row, index].add(flat * (1.0 - share))
    return moved.at[row, index + 1].add(flat * share).reshape(mass.shape)


def _share_backward(residuals: tuple[Array, ...], grad: Array) -> tuple[Array, None, Array]:
    mass, lower, weight = residuals
    here = jnp.take_along_axis(grad, lower, axis=-1)
    above = jnp.take_along_axis(grad, lower + 1, axis=-1)
    return (1.0 - weight) * here + weight * above, None, mass * (above - here)


_share.defvjp(lambda m, i, w: (_share(m, i, w), (m, i, w)), _share_backward)


# Gaussian policies


def bounded_log_std(raw: Array, min: ArrayLike = -10.0, max: ArrayLike = 2.0) -> Array:
    """min + (max - min) (tanh(raw) + 1) / 2, elementwise (TD-MPC2)."""
    return min + 0.5 * (max - min) * (jnp.tanh(_float(raw)) + 1.0)


def gaussian_log_prob(eps: Array, log_std: Array) -> Array:
    """Log-density of mean + eps exp(log_std) under the diagonal Gaussian: [..., A] -> [...]."""
    eps, log_std = _float(eps), _float(log_std)
    return jnp.sum(-0.5 * jnp.square(eps) - log_std - _HALF_LOG_2PI, axis=-1)


def squash(
    mean: Array, pre_action: Array, log_prob: Array, jacobian_scale: ArrayLike = 1.0
) -> tuple[Array, Array, Array]:
    """tanh(mean), a = tanh(pre_action), and log_prob - jacobian_scale sum_a ln(1 - a^2 + 1e-6).

    Args:
      mean, pre_action: [..., A] before the tanh.
      log_prob: [...] log-density of pre_action.
      jacobian_scale: 1 for the density of the squashed action; 0 leaves log_prob as it is.
    """
    action = _tanh(_float(pre_action))
    return _tanh(_float(mean)), action, _float(log_prob) - jacobian_scale * _log_jacobian(action)


def squashed_log_prob(action: Array, mean: Array, log_std: Array) -> Array:
    """Log-density [...] of stored actions under tanh(Normal(mean, exp(log_std))), summed over A.

    Actions [..., A] in [-1, 1] are clipped to +-0.9999, where atanh is still tame: what a planner
    puts on the bound has a finite density. mean, log_std: [..., A] before the tanh.
    """
    action = jnp.clip(_float(action), -_ACTION_LIMIT, _ACTION_LIMIT)
    log_std = _float(log_std)
    eps = (jnp.arctanh(action) - _float(mean)) * jnp.exp(-log_std)
    return gaussian_log_prob(eps, log_std) - _log_jacobian(action)


def scaled_entropy(log_prob: Array, action_dim: ArrayLike, power: ArrayLike = 1.0) -> Array:
    """-action_dim ** power * log_prob, elementwise [...].

    With power 1 and the log-density *before* the tanh this is TD-MPC2's scaled entropy: the
    reference multiplies the squashed entropy by (A logp) / (squashed logp), and the Jacobian
    cancels. Here without its 0/0. action_dim: A, or the number of unmasked dims, a number or [...].
    """
    return -_float(log_prob) * _float(action_dim) ** power


def gaussian_kl(mean_p: Array, std_p: Array, mean_q: Array, std_q: Array) -> Array:
    """KL(p || q) of diagonal Gaussians for every dim, unsummed: [..., A] four times -> [..., A]."""
    with warnings.catch_warnings():  # imported late: it takes a second, and its packages warn
        warnings.simplefilter("ignore")
        import distrax
    p = distrax.Normal(_float(mean_p), _float(std_p))
    return p.kl_divergence(distrax.Normal(_float(mean_q), _float(std_q)))


# Advantage weights


def awr_weights(values: Array, temperature: ArrayLike, mode: str = "divide") -> Array:
    """Softmax over the last axis of values [..., N] by a temperature, float32 [..., N] of sum 1.

    Args:
      temperature: a number.
      mode: "divide" values by it, which sharpens as it falls, or "multiply" (TD-MPC2's planner).

    Raises:
      ValueError: unknown mode.
    """
    # A softmax subtracts its largest logit as well, but of logits that are large for all (60 over a
    # temperature of 1e-9) what the compiler keeps of a product before that subtraction (a fused
    # multiply-add) is larger than an exponent may be.
    values = _float(values)
    values = values - jax.lax.stop_gradient(jnp.max(values, axis=-1, keepdims=True))
    if mode == "divide":
        return jax.nn.softmax(values / temperature)
    if mode == "multiply":
        return jax.nn.softmax(values * temperature)
    raise ValueError(f"mode is {mode!r}: choose 'divide' or 'multiply'")


def effective_samples(weights: Array) -> Array:
    """How many equally weighted samples `weights` [..., N] of sum 1 are worth: 1 / sum w^2, [...].
    1 where one has all the weight, N where all are equal. Source: Kish, Survey Sampling (1965).
    """
    return 1.0 / jnp.sum(jnp.square(weights), axis=-1)


# Helpers


def _float(x: ArrayLike) -> Array:
    return jnp.asarray(x, jnp.float32)


def _tanh(x: Array) -> Array:
    """tanh that is right to the last bit near +-1, where 1 - tanh^2 needs it (XLA's is not)."""
    e = jnp.exp(-2.0 * jnp.abs(x))
    return jnp.where(jnp.abs(x) < 0.5, jnp.tanh(x), jnp.sign(x) * (1.0 - 2.0 * e / (1.0 + e)))


def _log_jacobian(action: Array) -> Array:
    """sum_a ln(1 - a^2 + 1e-6), floored where rounding makes 1 - a^2 negative."""
    return jnp.sum(jnp.log(jax.nn.relu(1.0 - jnp.square(action)) + _JACOBIAN_EPS), axis=-1)


def _two_hot_position(y: Array, bins: Array) -> tuple[Array, Array]:
    """Index of the bin below y [...] (at most K-2) and the weight of the one above."""
    num = bins.shape[0] - 1
    y = jnp.clip(y, bins[0], bins[-1])
    k = jnp.arange(num, dtype=jnp.float32)
    # Evenly spaced bins are rounded to float32 one by one; measured from the first bin with the
    # exact step the weight is as good as the references', measured from the bin below it is not.
    # The barrier keeps a compiler from replacing the division by an inexact reciprocal.
    step = (bins[-1] - bins[0]) / jax.lax.optimization_barrier(jnp.float32(num))
    even = jnp.max(jnp.abs(bins[:-1] - (bins[0] + k * step))) <= 1e-6 * (bins[-1] - bins[0])
    origin = jnp.where(even, bins[0], bins[:-1])
    width = jnp.where(even, step, bins[1:] - bins[:-1])
    origin_distance = jnp.where(even, k, 0.0)
    below = jnp.clip(jnp.searchsorted(bins, y, side="right") - 1, 0, num - 1)
    weight = (y - origin[below]) / width[below] - origin_distance[below]
    # The search and the division may disagree about the side of a bin that y lies on.
    lower = jnp.clip(below + jnp.floor(weight).astype(below.dtype), 0, num - 1)
    return lower, weight + (below - lower)


def _check_bins(bins: Array) -> Array:
    bins = _float(bins)
    if bins.ndim != 1 or bins.shape[0] == 0:
        raise ValueError(f"bins has shape {bins.shape}: give increasing bins [K]")
    return bins


def _check_logits(logits: Array, bins: Array) -> tuple[Array, Array]:
    logits, bins = _float(logits), _check_bins(bins)
    if logits.ndim == 0 or logits.shape[-1] != bins.shape[0]:
        raise ValueError(f"logits has shape {logits.shape}: {bins.shape[0]} bins need [..., K]")
    return logits, bins
