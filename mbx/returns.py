"""Returns, discounts, TD targets and return scales.

Pure functions over time-major float32 arrays. Reward and flags arrive with a state: index t of
`r_t`, `discount_t` and `v_t` below all belong to the state *after* the t-th action. Numbers may be
Python floats or traced arrays. Nothing here stops gradients: stop them where a return is a
target.

Axes: T time, R reward heads, H dynamics heads, V value heads; trailing batch axes `...` are free.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from mbx.types import Record

_WAYS: dict[str, Callable[..., Array]] = {"mean": jnp.mean, "min": jnp.min, "max": jnp.max}
REDUCTIONS = (*_WAYS, "from_std_coef")

# Lambda returns


def lambda_returns(
    r_t: Array,
    discount_t: ArrayLike,
    v_t: Array,
    lambda_: ArrayLike,
    bootstrap: ArrayLike | None = None,
) -> Array:
    """Lambda returns, G_t = r_t + discount_t * ((1 - lambda_) * v_t + lambda_ * G_{t+1}), G_T =
    bootstrap.

    The sum is a reversed scan. Differentiable in rewards, discounts and values (a reparameterised
    actor needs all).
    Sources: Sutton & Barto, section 12.1; DreamerV3 (arXiv 2301.04104), section "Critic learning";
    value annotations (docs/sources.md#value-annotations) go in as v_t.

    Args:
      r_t: [T, ...] rewards.
      discount_t: [T, ...] or a number; gamma * (1 - terminated). A discount, never a logit.
      v_t: [T, ...] values of the states after the rewards.
      lambda_: a number, [T] or [T, ...]; 0 at the end of an episode cuts the trace there.
      bootstrap: [...] value that closes the recursion; None for v_t[-1].

    Returns:
      [T, ...] float32.

    Raises:
      ValueError: shapes do not fit, or T is 0.

    Examples:
      >>> reward, value = jnp.array([1.0, 1.0]), jnp.array([10.0, 20.0])
      >>> returns.lambda_returns(reward, 0.5, value, 1.0).tolist()  # rewards, and 20 at the end
      [6.5, 11.0]
      >>> returns.lambda_returns(reward, 0.5, value, 0.0).tolist()  # one step
      [6.0, 11.0]
    """
    r_t, v_t = _float(r_t), _float(v_t)
    if r_t.ndim == 0 or r_t.shape[0] == 0:
        raise ValueError(f"r_t has shape {r_t.shape}: give at least one step, [T, ...]")
    if v_t.shape != r_t.shape:
        raise ValueError(
            f"v_t has shape {v_t.shape} and r_t {r_t.shape}: make them equal, [T, ...]"
        )
    discount_t = _expand("discount_t", discount_t, r_t.shape)
    lambda_ = _expand("lambda_", lambda_, r_t.shape)
    last = v_t[-1] if bootstrap is None else _expand("bootstrap", bootstrap, r_t.shape[1:])

    def backwards(following: Array, step: tuple[Array, ...]) -> tuple[Array, Array]:
        reward, discount, value, trace = step
        result = reward + discount * ((1.0 - trace) * value + trace * following)
        return result, result

    _, returns = jax.lax.scan(backwards, last, (r_t, discount_t, v_t, lambda_), reverse=True)
    return returns


def replay_lambda_returns(
    r: Array,
    terminated: Array,
    is_last: Array,
    annotations: Array,
    gamma: ArrayLike,
    lambda_: ArrayLike,
) -> Array:
    """Targets of the critic on replay rows, from rewards and flags that arrive with their row.

    R_t = r_{t+1} + gamma (1 - terminated_{t+1}) ((1 - l_{t+1}) a_{t+1} + l_{t+1} R_{t+1}), with l =
    lambda_ (1 - is_last) and R_{T-1} = a_{T-1}: the trace stops at an episode's end, and a time
    limit bootstraps in full.
    Source: DreamerV3's official code (`repl_loss`), see docs/sources.md#critic-replay-loss.

    Args:
      r, terminated, is_last: [T, ...] fields of consecutive rows.
      annotations: [T, ...] values of the rows: the imagined return that starts there.
      gamma, lambda_: numbers.

    Returns:
      [T-1, ...] float32 targets of rows 0..T-2. The target of an `is_last` row crosses into the
      next episode: weight it 0.

    Raises:
      ValueError: shapes differ, or T < 2.

    Examples:
      >>> r, value = jnp.array([0.0, 1.0, 1.0]), jnp.array([9.0, 10.0, 20.0])
      >>> no = jnp.zeros(3)
      >>> returns.replay_lambda_returns(r, no, no, value, 0.5, 0.0).tolist()
      [6.0, 11.0]
      >>> over = jnp.array([0.0, 1.0, 0.0])  # row 1 is terminal
      >>> returns.replay_lambda_returns(r, over, over, value, 0.5, 0.0).tolist()
      [1.0, 11.0]
    """
    r, annotations = _float(r), _float(annotations)
    terminated, is_last = _float(terminated), _float(is_last)
    for name, x in (("terminated", terminated), ("is_last", is_last), ("annotations", annotations)):
        if x.shape != r.shape:
            raise ValueError(
                f"{name} has shape {x.shape} and r {r.shape}: make them equal, [T, ...]"
            )
    if r.ndim == 0 or r.shape[0] < 2:
        raise ValueError(f"r has shape {r.shape}: a target needs the next row, give T >= 2")
    return lambda_returns(
        r[1:],
        gamma * (1.0 - terminated[1:]),
        annotations[1:],
        lambda_ * (1.0 - is_last[1:]),
        annotations[-1],
    )


def discount_weights(continues: Array, gamma: ArrayLike) -> Array:
    """Loss weights along an imagined rollout: prod_{j <= t} (gamma c_j) / gamma.

    Row 0 has the weight c_0, so that an imagined trajectory from a terminal row counts nothing.
    Defined for gamma = 0, too.
    Source: DreamerV3 (sheeprl's behaviour learning).

    Args:
      continues: [T, ...] probabilities (or 0/1) that the episode continues at the state.
      gamma: a number.

    Returns:
      [T, ...] float32.

    Raises:
      ValueError: no time axis.
    """
    continues = _float(continues)
    if continues.ndim == 0:
        raise ValueError("continues is a number: give [T, ...]")
    return jnp.cumprod(jnp.concatenate([continues[:1], continues[1:] * gamma]), axis=0)


def discount_from_episode_length(
    length: ArrayLike, denom: float = 5, min: float = 0.95, max: float = 0.995
) -> ArrayLike:
    """TD-MPC2's discount heuristic: clip((L/denom - 1) / (L/denom), min, max).

    Args:
      length: L, episode length in agent steps (after action repeat): a number or an array.
      denom: a larger one gives a shorter horizon.

    Returns:
      A float for a number, a float32 array for an array.

    Raises:
      ValueError: a number that is not positive.
    """
    if isinstance(length, int | float):
        if length <= 0:
            raise ValueError(f"length is {length}: an episode has at least one step")
        low, high = float(min), float(max)
        raw = 1.0 - denom / length
        return low if raw < low else high if raw > high else raw
    return jnp.clip(1.0 - denom / _float(length), min, max)


# Scales


@flax.struct.dataclass
class ReturnEMA(Record):
    """Moving percentiles of returns: low, high, float32 []."""

    low: Array
    high: Array


def init_return_ema() -> ReturnEMA:
    """Starts at low = high = 0, without bias correction, as DreamerV3 does."""
    return ReturnEMA(low=jnp.zeros((), jnp.float32), high=jnp.zeros((), jnp.float32))


def update_return_ema(
    ema: ReturnEMA,
    returns: Array,
    *,
    decay: ArrayLike = 0.99,
    percentiles: tuple[ArrayLike, ArrayLike] = (5.0, 95.0),
) -> ReturnEMA:
    """Moves the ema by (1 - decay) towards the percentiles of all entries of `returns` (linear
    interpolation).

    Update first, then normalise with the new state. Source: DreamerV3, section "Actor learning".
    """
    low, high = _percentiles(_float(returns).reshape(-1), percentiles)
    return ReturnEMA(
        low=decay * ema.low + (1.0 - decay) * low, high=decay * ema.high + (1.0 - decay) * high
    )


def return_ema_offset_scale(ema: ReturnEMA, max_: ArrayLike = 1.0) -> tuple[Array, Array]:
    """Returns (offset, divisor) = (low, max(1/max_, high - low)); normalised = (x - offset) /
    divisor.
    """
    return ema.low, jnp.maximum(1.0 / max_, ema.high - ema.low)


@flax.struct.dataclass
class RunningNorm(Record):
    """Moving statistics of the official DreamerV3's `Normalize`, float32 [], all starting at 0.

    first, second: mean and mean square ("meanstd"), or the 5th and 95th percentile ("percentiles");
    weight: what corrects their bias.
    """

    first: Array
    second: Array
    weight: Array


def init_running_norm() -> RunningNorm:
    """Starts at 0."""
    return RunningNorm(*(jnp.zeros((), jnp.float32) for _ in range(3)))


def update_running_norm(
    norm: RunningNorm, x: Array, kind: str, rate: ArrayLike = 0.01
) -> RunningNorm:
    """Moves the statistics by `rate` towards those of all entries of `x`."""
    x = _float(x)
    if kind == "percentiles":
        found = _percentiles(x.reshape(-1), (5.0, 95.0))
    else:
        found = jnp.mean(x), jnp.mean(jnp.square(x))
    return jax.tree.map(
        lambda old, new: (1.0 - rate) * old + rate * new, norm, RunningNorm(*found, jnp.float32(1))
    )


def running_norm_offset_scale(
    norm: RunningNorm, kind: str, rate: ArrayLike = 0.01, limit: ArrayLike = 1e-8
) -> tuple[Array, Array]:
    """Offset and divisor: mean and standard deviation, or the 5th percentile and the range."""
    weight = jnp.maximum(norm.weight, rate)
    first, second = norm.first / weight, norm.second / weight
    if kind == "percentiles":
        return first, jnp.maximum(second - first, limit)
    return first, jnp.maximum(jnp.sqrt(jax.nn.relu(second - jnp.square(first))), limit)


@flax.struct.dataclass
class RunningScale(Record):
    """TD-MPC2's moving 5..95 percentile range: value, float32 of any shape. Use x / value."""

    value: Array


def init_running_scale(shape: tuple[int, ...] = ()) -> RunningScale:
    """Starts at 1."""
    return RunningScale(value=jnp.ones(shape, jnp.float32))


def update_running_scale(
    scale: RunningScale,
    x: Array,
    *,
    tau: ArrayLike,
    percentiles: tuple[ArrayLike, ArrayLike] = (5, 95),
    min_: ArrayLike = 1.0,
) -> RunningScale:
    """value <- value + tau * (max(p95 - p5, min_) - value): the floor comes before the average.

    Source: TD-MPC2, appendix "Implementation details" (RunningScale).

    Args:
      scale: the state, its value of shape [...].
      x: [n, ...]; percentiles over the first axis, linear interpolation.
      percentiles: lower and upper, in percent.
      min_: floor of the range.

    Raises:
      ValueError: x does not have the shape [n, *value.shape].
    """
    x = _float(x)
    if x.ndim == 0 or x.shape[1:] != scale.value.shape:
        raise ValueError(
            f"x has shape {x.shape}: give [n, *{list(scale.value.shape)}], as the scale"
        )
    low, high = _percentiles(x, percentiles)
    return scale.replace(value=scale.value + tau * (jnp.maximum(high - low, min_) - scale.value))


# TD targets


def ensemble_std(x: Array, axis: int = 0) -> Array:
    """Sample standard deviation (n-1) over an axis of heads; 0 for one head, and gradient 0 where
    heads agree.
    """
    x = _float(x)
    if x.shape[axis] == 1:
        return jnp.zeros_like(jnp.take(x, 0, axis=axis))
    return safe_sqrt(jnp.var(x, axis=axis, ddof=1))


def safe_sqrt(x: Array) -> Array:
    """Square root whose gradient is 0, not infinite, at 0: it takes the root of 1 there."""
    positive = x > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def reduce_heads(x: Array, how: str, std_coef: ArrayLike = 0.0, axis: int = 0) -> Array:
    """Reduces an axis of heads by "mean", "min", "max", or "from_std_coef".

    "from_std_coef" is max for a positive std_coef (optimism), min for a negative one, mean for 0.

    Raises:
      ValueError: unknown `how`.
    """
    if how not in REDUCTIONS:
        raise ValueError(f"dynamics_reduction is {how!r}: choose one of {REDUCTIONS}")
    if how == "from_std_coef" and isinstance(std_coef, int | float):
        how = "max" if std_coef > 0 else "min" if std_coef < 0 else "mean"
    if x.shape[axis] == 1:
        return jnp.squeeze(x, axis)
    if how in _WAYS:
        return _WAYS[how](x, axis=axis)
    mean, low, high = (way(x, axis=axis) for way in _WAYS.values())
    return jnp.where(std_coef > 0, high, jnp.where(std_coef < 0, low, mean))


def td_targets(
    reward_heads: Array,
    next_value_heads: Array,
    discount: ArrayLike,
    terminated: Array,
    *,
    std_coef: ArrayLike,
    dynamics_reduction: str | None,
    local_bootstrap: bool,
) -> Array:
    """One-step targets from ensembles of rewards, dynamics and values.

    With `local_bootstrap` head v bootstraps from itself, mean_R r + discount (1 - terminated) v +
    std_coef std_R r. Without, all heads share mean_R r + discount (1 - terminated) mean_V v +
    std_coef (std_R r + discount std_V v), where the value's std is not masked by termination (as in
    the reference). Then reduced over the dynamics heads. Source: docs/sources.md#ensembles.

    Args:
      reward_heads: [R, H, ...].
      next_value_heads: [V, H, ...] values of the next states.
      discount: a number.
      terminated: [H, ...] whether the step ended the episode: bool, or a probability.
      std_coef: below 0 pessimism, above 0 optimism. The std of one head is 0.
      dynamics_reduction: "mean" | "min" | "max" | "from_std_coef", see `reduce_heads`; None keeps
        the axis of dynamics heads.
      local_bootstrap: static bool.

    Returns:
      [V, ...] float32, or [V, H, ...] without a reduction.

    Raises:
      ValueError: shapes do not fit, or an unknown reduction.
    """
    rewards, values = _float(reward_heads), _float(next_value_heads)
    terminated = _float(terminated)
    if rewards.shape[1:] != terminated.shape or values.shape[1:] != terminated.shape:
        raise ValueError(
            f"reward_heads {rewards.shape}, next_value_heads {values.shape} and terminated "
            f"{terminated.shape} do not agree: give [R, H, ...], [V, H, ...] and [H, ...]"
        )
    reward = jnp.mean(rewards, axis=0)
    reward_std = ensemble_std(rewards)
    going_on = discount * (1.0 - terminated)
    if local_bootstrap:
        targets = (reward + std_coef * reward_std)[None] + going_on[None] * values
    else:
        spread = reward_std + discount * ensemble_std(values)
        shared = reward + going_on * jnp.mean(values, axis=0) + std_coef * spread
        targets = jnp.broadcast_to(shared[None], (values.shape[0], *shared.shape))
    if dynamics_reduction is None:
        return targets
    return reduce_heads(targets, dynamics_reduction, std_coef, axis=1)


# Helpers


def _float(x: ArrayLike) -> Array:
    return jnp.asarray(x, jnp.float32)


def _percentiles(x: Array, percentiles: tuple[ArrayLike, ArrayLike]) -> tuple[Array, Array]:
    low, high = (jnp.percentile(x, _float(p), axis=0, method="linear") for p in percentiles)
    return low, high


def _expand(name: str, x: ArrayLike, shape: tuple[int, ...]) -> Array:
    """Float32 x spread to `shape`, its axes aligned on the left (time first)."""
    x = _float(x)
    if x.ndim > len(shape) or any(a not in (1, b) for a, b in zip(x.shape, shape, strict=False)):
        raise ValueError(f"{name} has shape {x.shape}: give a number or {list(shape)}")
    return jnp.broadcast_to(x.reshape(x.shape + (1,) * (len(shape) - x.ndim)), shape)
