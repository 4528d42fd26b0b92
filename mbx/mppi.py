"""MPPI: a sampling planner for continuous actions that knows no model.

You hand it a function that scores action sequences and it refines a Gaussian over them:

    def score(key, actions):                      # [B, N, T, A] -> [B, N]
        return my_model_return(actions)

    plan = mppi.plan(key, score, mean, std, config=mppi.MPPIConfig())
    plan.action                                   # [B, A]

Each round samples candidates, scores them, keeps the elites and refits mean and standard deviation
to them with exponential weights; all rounds are one `lax.fori_loop`.

Axes: B states planned for at once, N candidates, P proposals, K elites, T horizon, A action dims.
Sources: Williams et al. 2017 (MPPI); TD-MPC2 (arXiv 2310.16828), section 3.2 and reference code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from mbx.fast import collectives, rng

ScoreFn = Callable[[Array, Array], Any]  # (key, actions) -> values, or (values, auxiliaries)

TEMPERATURE_MODES = ("multiply", "divide")
SELECTIONS = ("sample", "best", "mean")
NONFINITE = ("worst", "reference")


@dataclasses.dataclass(frozen=True)
class MPPIConfig:
    """Settings of the planner; the defaults are TD-MPC2's.

    Attributes:
        iterations: rounds of sampling and refitting. With K rounds, K sets of candidates are scored
            and the actions and values returned are those of the last one.
        num_samples: candidates N a round, proposals included.
        num_elites: candidates K <= N that the Gaussian is refitted to.
        temperature: of the elites' weights. It, `min_std`, `max_std` and `action_noise` may be
            traced.
        temperature_mode: weights are exp(temperature * (v - max v)) with "multiply" (TD-MPC2) and
            exp((v - max v) / temperature) with "divide".
        min_std, max_std: bounds of the refitted standard deviation, in action units.
        selection: the action is the first of an elite drawn by weight ("sample"), of the best elite
            ("best"), or of the refitted mean ("mean").
        action_noise: factor of the Gaussian noise, with the first step's refitted standard
            deviation, added to the selected action. 0 when evaluating.
        rescore_proposals: score the proposals in every round (True, as TD-MPC2 does: worth it when
            scores are random) or once.
        extra_iterations: additional rounds when A >= `extra_iterations_action_dim`.
        nonfinite: see `refit`.
    """

    iterations: int = 6
    num_samples: int = 512
    num_elites: int = 64
    temperature: float | Array = 0.5
    temperature_mode: str = "multiply"
    min_std: float | Array = 0.05
    max_std: float | Array = 2.0
    selection: str = "sample"
    action_noise: float | Array = 0.0
    rescore_proposals: bool = True
    extra_iterations: int = 0
    extra_iterations_action_dim: int = 20
    nonfinite: str = "worst"

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"iterations={self.iterations}: the planner needs at least one round")
        if not 1 <= self.num_elites <= self.num_samples:
            raise ValueError(
                f"num_elites={self.num_elites} must be in 1..num_samples={self.num_samples}: "
                "lower num_elites or raise num_samples"
            )
        _check_choice("temperature_mode", self.temperature_mode, TEMPERATURE_MODES)
        _check_choice("selection", self.selection, SELECTIONS)
        _check_choice("nonfinite", self.nonfinite, NONFINITE)
        divided = self.temperature_mode == "divide"
        self.check_ranges(
            ("temperature", "above 0 to divide by", lambda x: not divided or x > 0.0),
            ("temperature", "0 or more, and finite", lambda x: 0.0 <= x < math.inf),
            ("min_std", "0 or more", lambda x: x >= 0.0),
            ("max_std", f"min_std={self.min_std} or more", lambda x: x >= self.min_std),
            ("action_noise", "0 or more, and finite", lambda x: 0.0 <= x < math.inf),
            ("extra_iterations", "0 or more", lambda x: x >= 0),
            ("extra_iterations_action_dim", "0 or more", lambda x: x >= 0),
        )

    def check_ranges(self, *rows: tuple[str, str, Callable[[Any], Any]]) -> None:
        """Raise ValueError for a field out of range; rows: field, range in words, whether it holds.

        A traced number has no value yet: the caller keeps it in its range.
        """
        for name, wanted, holds in rows:
            value = getattr(self, name)
            with contextlib.suppress(jax.errors.TracerBoolConversionError):
                if not holds(value):
                    raise ValueError(f"{name}={value} must be {wanted}")

    def rounds(self, action_dim: int) -> int:
        """Rounds for an action space of `action_dim` dimensions."""
        large = action_dim >= self.extra_iterations_action_dim
        return self.iterations + (self.extra_iterations if large else 0)


class Refit(NamedTuple):
    """A Gaussian refitted to the elites.

    Attributes:
        mean, std: `[..., T, A]`.
        elite_actions: `[..., K, T, A]`, best first.
        elite_values: `[..., K]`.
        weights: `[..., K]`, non-negative, sum 1.
    """

    mean: Array
    std: Array
    elite_actions: Array
    elite_values: Array
    weights: Array


class Plan(NamedTuple):
    """What `plan` returns.

    Attributes:
        action: `[B, A]`, the selected first action with exploration noise, clipped.
        chosen: `[B, A]`, the same without.
        mean, std: `[B, T, A]`, the last refit.
        actions, values: `[B, N, T, A]` and `[B, N]`, the candidates of the last round and their
            scores.
        aux: with `has_aux` the score's auxiliaries of the chosen plan, leaves `[B, ...]`.
    """

    action: Array
    mean: Array
    std: Array
    actions: Array
    values: Array
    chosen: Array
    aux: Any = None


class Draws(NamedTuple):
    """Every random number of one `plan` call, so that a test can put its own in.

    Attributes:
        candidate: round index -> standard normal noise `[B, N - P, T, A]`.
        score: round index -> key of `score_fn`.
        gumbel: `[B, K]` standard Gumbel draws of the elite choice.
        action: `[B, A]` standard normal.
    """

    candidate: Callable[[Array], Array]
    score: Callable[[Array], Array]
    gumbel: Array
    action: Array


Key: TypeAlias = Array | Draws


def refit(
    actions: Array,
    values: Array,
    *,
    num_elites: int,
    temperature: float | Array,
    temperature_mode: str = "multiply",
    min_std: float | Array,
    max_std: float | Array,
    nonfinite: str = "worst",
) -> Refit:
    """Refit mean and standard deviation to the best candidates.

    Source: TD-MPC2 `_plan`; the second normalisation by (sum + 1e-9) is the reference's.

    Args:
        actions: `[..., N, T, A]`.
        values: `[..., N]`.
        nonfinite: "worst" ranks NaN and +-inf behind every finite value and gives them no weight
            while a finite one is left; "reference" does as TD-MPC2's code (NaN counts as 0, +-inf
            as the largest finite numbers), which lets a NaN win where returns are negative.

    Raises:
        ValueError: an unknown mode or more elites than candidates.

    Examples:
        >>> actions = jnp.array([[[0.0]], [[1.0]], [[0.5]]])  # N = 3 candidates, one step, one dim
        >>> of = dict(num_elites=2, temperature=1.0, min_std=0.0, max_std=2.0)
        >>> found = mppi.refit(actions, jnp.array([1.0, 5.0, 5.0]), **of)
        >>> print(np.array(found.mean).round(3), found.weights)
        [[0.75]] [0.5 0.5]
    """
    _check_choice("temperature_mode", temperature_mode, TEMPERATURE_MODES)
    _check_choice("nonfinite", nonfinite, NONFINITE)
    if not 1 <= num_elites <= values.shape[-1]:
        raise ValueError(
            f"num_elites={num_elites} must be in 1..{values.shape[-1]} (the number of candidates)"
        )
    elite_values, elite_index = collectives.top_k(_ranked(values, nonfinite), num_elites)
    elite_actions = jnp.take_along_axis(actions, elite_index[..., None, None], axis=-3)

    finite = jnp.isfinite(elite_values)
    # The best as a maximum, not as the first: sliced twice, what the sort gives is no longer what
    # the compiler knows as the best few, and everything would be sorted.
    best = jnp.max(elite_values, axis=-1, keepdims=True)
    best = jnp.where(jnp.isfinite(best), best, 0.0)
    gap = jnp.where(finite, elite_values - best, 0.0)
    scaled = gap * temperature if temperature_mode == "multiply" else gap / temperature
    # Without a single finite candidate all elites have equal weights.
    usable = finite | ~jnp.any(finite, axis=-1, keepdims=True)
    weights = jnp.where(usable, jnp.exp(scaled), 0.0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

    w = weights[..., None, None]
    total = jnp.sum(w, axis=-3) + 1e-9
    mean = jnp.sum(w * elite_actions, axis=-3) / total
    deviation = jnp.square(elite_actions - jnp.expand_dims(mean, -3))
    std = jnp.sqrt(jnp.sum(w * deviation, axis=-3) / total)
    std = jnp.clip(std, min_std, max_std)
    return Refit(mean, std, elite_actions, elite_values, weights)


def _ranked(values: Array, nonfinite: str) -> Array:
    """Values as elites are chosen by them."""
    values = values.astype(jnp.float32)
    if nonfinite == "reference":
        return jnp.nan_to_num(values, nan=0.0)
    return jnp.where(jnp.isfinite(values), values, -jnp.inf)


class Frame(NamedTuple):
    """What `plan` hands to a method before the first round.

    Attributes:
        draws: the random numbers.
        mean, std: `[B, T, A]` float32, as they were given; the mean is masked.
        mask: `[B, 1, A]`.
        num: candidates a round without the proposals, N - P.
        rounds: rounds there will be.
        config: settings.
    """

    draws: Draws
    mean: Array
    std: Array
    mask: Array
    num: int
    rounds: int
    config: Any


class Rounds(NamedTuple):
    """What a planner does in a round; all else is `plan`.

    Attributes:
        sample: (round, the last refit) -> candidates `[B, N - P, T, A]`, which `plan` clips and
            masks.
        blend: (the last refit, this round's) -> what the next round begins with.
        memory: a pytree that goes from round to round, for a planner that keeps more than the last
            refit. `sample` then takes it as a third argument and returns (candidates, memory).
        tell: with a memory: (round, memory, the candidates, their values `[B, N - P]`) -> (memory,
            mean `[B, T, A]`, which replaces the refitted one).
        begin: mean `[B, T, A]` of round one; None: as it was given.
        select: (the last refit) -> first action `[B, A]` without and with exploration noise; None:
            as `config.selection` and `config.action_noise` say.
    """

    sample: Callable[..., Any]
    blend: Callable[[Refit, Refit], Refit] = lambda last, new: new
    memory: Any = None
    tell: Callable[[Array, Any, Array, Array], tuple[Any, Array]] | None = None
    begin: Array | None = None
    select: Callable[[Refit], tuple[Array, Array]] | None = None


def gaussian(frame: Frame) -> Rounds:
    """MPPI's own rounds: candidates from the last refit."""

    def sample(i: Array, last: Refit) -> Array:
        return last.mean[:, None] + last.std[:, None] * frame.draws.candidate(i)

    return Rounds(sample)


def plan(
    key: Key,
    score_fn: ScoreFn,
    mean: Array,
    std: Array,
    *,
    proposals: Array | None = None,
    initial: Array | None = None,
    action_mask: Array | None = None,
    has_aux: bool = False,
    method: Callable[[Frame], Rounds] = gaussian,
    config: MPPIConfig,
) -> Plan:
    """Refine a Gaussian over action sequences and select an action. Actions are in [-1, 1].

    Everything is computed in float32.
    Source: TD-MPC2 (arXiv 2310.16828), section 3.2.

    Args:
        key: consumed; or the random numbers themselves (`Draws`).
        score_fn: (key, actions `[B, n, T, A]`) -> values `[B, n]`, higher is better.
        mean, std: `[B, T, A]`, where round one samples from.
        proposals: `[B, P, T, A]`, candidates that join every round in the place of P samples
            (policy trajectories).
        initial: `[B, N, T, A]`, candidates of round one instead of Gaussian samples (draws from a
            policy).
        action_mask: `[A]` or `[B, A]`, 0 for dimensions an environment does not have.
        has_aux: `score_fn` returns (values, auxiliaries): arrays `[B, n, ...]` in any pytree, a
            constraint's cost, say. `Plan.aux` holds those of the plan that `chosen` begins: the
            selected elite's; with `selection="mean"` the mean is scored once more for them.
        method: what a round does; this function is the frame of every planner that samples, scores
            and refits in rounds.

    Raises:
        ValueError: shapes do not fit `config`, values are not numbers `[B, n]`, or auxiliaries do
            not lead with that.

    Examples:
        >>> def score(key, actions):  # [B, N, T, A] -> [B, N]
        ...     return -jnp.square(actions - 0.5).sum((-2, -1))
        >>> mean = jnp.zeros((1, 2, 1))  # one state, two steps, one dimension
        >>> config = mppi.MPPIConfig(num_samples=64, num_elites=8, selection="best")
        >>> plan = mppi.plan(jax.random.key(0), score, mean, jnp.ones_like(mean), config=config)
        >>> bool(abs(plan.action[0, 0] - 0.5) < 0.1), plan.actions.shape
        (True, (1, 64, 2, 1))
    """
    mean, std, proposals, initial = _checked(mean, std, proposals, initial, config)
    batch, horizon, action_dim = mean.shape
    num, elites, rounds = config.num_samples, config.num_elites, config.rounds(action_dim)
    own = num - (0 if proposals is None else proposals.shape[1])
    draws = key if isinstance(key, Draws) else draw(key, mean, own, config)
    mask = _expand_mask(action_mask, batch, action_dim)
    mean = mean * mask
    how = method(Frame(draws, mean, std, mask, own, rounds, config))
    score = checked_score(score_fn, has_aux)
    once = proposals is not None and not config.rescore_proposals
    fixed = score(draws.score(jnp.int32(rounds)), proposals) if once else None
    names = ("num_elites", "temperature", "temperature_mode", "min_std", "max_std", "nonfinite")
    how_to_fit: dict[str, Any] = {name: getattr(config, name) for name in names}

    def one_round(i: Array, carry: tuple) -> tuple:
        last, _, _, memory = carry
        if how.tell is None:
            sampled = how.sample(i, last)
        else:
            sampled, memory = how.sample(i, last, memory)
        sampled = jnp.clip(sampled, -1.0, 1.0) * mask[:, None]
        if initial is not None:
            sampled = jnp.where(i == 0, initial[:, num - own :], sampled)
        actions = sampled if proposals is None else jnp.concatenate([proposals, sampled], axis=1)
        scored = score(draws.score(i), sampled if once else actions)
        if once:
            scored = jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), fixed, scored)
        new = how.blend(last, refit(actions, scored[0], **how_to_fit))
        if how.tell is not None:
            memory, fitted = how.tell(i, memory, sampled, scored[0][:, num - own :])
            new = new._replace(mean=fitted)
        new = new._replace(mean=new.mean * mask, std=new.std * mask)
        return new, actions, scored, memory

    zeros = functools.partial(jnp.zeros, dtype=mean.dtype)
    mean = mean if how.begin is None else how.begin * mask
    none = zeros((batch, elites, horizon, action_dim)), *[zeros((batch, elites))] * 2
    actions, scored = zeros((batch, num, horizon, action_dim)), (zeros((batch, num)), None)
    if has_aux:
        shapes = jax.eval_shape(score, draws.score(jnp.int32(0)), actions)
        scored = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    carry = Refit(mean, std * mask, *none), actions, scored, how.memory
    last, actions, (values, aux), _ = jax.lax.fori_loop(0, rounds, one_round, carry)
    if has_aux and config.selection == "mean":  # no candidate: it is scored once more
        aux = score(draws.score(jnp.int32(rounds + 1)), last.mean[:, None])[1]
        aux = jax.tree.map(lambda x: x[:, 0], aux)
    elif has_aux:
        ranks = collectives.top_k(_ranked(values, config.nonfinite), elites)[1]
        states = jnp.arange(batch)
        which = ranks[states, _place(last, draws, config.selection)]
        aux = jax.tree.map(lambda x: x[states, which], aux)
    if how.select is None:
        chosen = select_first(last, draws, config.selection)
        action = chosen + config.action_noise * last.std[:, 0] * draws.action
        action = jnp.clip(action, -1.0, 1.0) * mask[:, 0]
    else:
        chosen, action = how.select(last)
    return Plan(action, last.mean, last.std, actions, values, chosen * mask[:, 0], aux)


plan_with_draws = plan  # the deterministic core: the same function, given `Draws`


def draw(key: Array, mean: Array, num_samples: int, config: MPPIConfig) -> Draws:
    """The random numbers of one plan from `mean` `[B, T, A]` with `num_samples` drawn a round."""
    batch, horizon, action_dim = mean.shape
    noise_key, score_key, choice_key, action_key = jax.random.split(rng.unrolled(key), 4)
    shape = (batch, num_samples, horizon, action_dim)
    return Draws(
        candidate=lambda i: rng.normal(jax.random.fold_in(noise_key, i), shape),
        score=lambda i: jax.random.fold_in(score_key, i),
        gumbel=jax.random.gumbel(choice_key, (batch, config.num_elites), jnp.float32),
        action=jax.random.normal(action_key, (batch, action_dim), jnp.float32),
    )


def warm_start(mean: Array, is_first: Array) -> Array:
    """Shift the previous plan by one step; zeros where an episode began.

    Args:
        mean: `[B, T, A]`, of the previous call.
        is_first: `[B]` bool.

    Returns:
        `[B, T, A]`; the freed last step is zero.
    """
    shifted = jnp.concatenate([mean[:, 1:], jnp.zeros_like(mean[:, :1])], axis=1)
    return jnp.where(is_first[:, None, None], 0.0, shifted)


def select_first(last: Refit, draws: Draws, selection: str) -> Array:
    """The first action of the chosen elite, or of the mean: `[B, A]`."""
    if selection == "mean":
        return last.mean[:, 0]
    chosen = _place(last, draws, selection)
    return jnp.take_along_axis(last.elite_actions[:, :, 0], chosen[:, None, None], axis=1)[:, 0]


def _place(last: Refit, draws: Draws, selection: str) -> Array:
    """The place of the chosen one among the elites: `[B]`."""
    if selection == "best":
        return jnp.zeros(last.mean.shape[0], jnp.int32)
    return jnp.argmax(jnp.log(last.weights) + draws.gumbel, axis=-1)


def _expand_mask(action_mask: Array | None, batch: int, action_dim: int) -> Array:
    """`[A]`, `[B, A]` or None (all) as `[B, 1, A]`."""
    mask = jnp.asarray(1.0 if action_mask is None else action_mask, jnp.float32)
    mask = mask.reshape((1,) * (2 - mask.ndim) + mask.shape)
    return jnp.broadcast_to(mask, (batch, action_dim))[:, None]


def _check_choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{field}={value!r}: choose one of {choices}")


def _checked(
    mean: Array, std: Array, proposals: Array | None, initial: Array | None, config: MPPIConfig
) -> Any:
    """The arguments of a plan as float32.

    Raises:
        ValueError: they do not fit each other or `config`.
    """
    given = dict(mean=mean, std=std, proposals=proposals, initial=initial)
    for name, x in given.items():
        if x is not None and not (hasattr(x, "astype") and jnp.ndim(x)):
            raise ValueError(
                f"{name} is {x!r}: give an array [B, ..., T, A], for example "
                "jnp.full_like(mean, 1.0) as std"
            )
    if mean.ndim != 3 or mean.shape != std.shape:
        raise ValueError(f"mean {mean.shape} and std {std.shape} must both be [B, T, A]")
    batch, horizon, action_dim = mean.shape
    if proposals is not None:
        want = (batch, *proposals.shape[1:2], horizon, action_dim)
        if proposals.shape != want:
            raise ValueError(f"proposals {proposals.shape} must be [B, P, T, A] = {want}")
        if proposals.shape[1] >= config.num_samples:
            raise ValueError(
                f"{proposals.shape[1]} proposals leave no room among num_samples="
                f"{config.num_samples}: raise num_samples or give fewer proposals"
            )
    want = (batch, config.num_samples, horizon, action_dim)
    if initial is not None and initial.shape != want:
        raise ValueError(f"initial {initial.shape} must be [B, N, T, A] = {want}")
    return [None if x is None else x.astype(jnp.float32) for x in given.values()]


def checked_score(
    score_fn: ScoreFn, has_aux: bool = False
) -> Callable[[Array, Array], tuple[Array, Any]]:
    """`score_fn` as float32 values and auxiliaries (None without), checked while it is traced.

    It raises ValueError where values are not numbers `[B, N]`, or auxiliaries do not lead with
    that.
    """

    def score(key: Array, actions: Array) -> tuple[Array, Any]:
        values, aux, want = score_fn(key, actions), None, actions.shape[:2]
        shown = f"for actions {list(actions.shape)} = [B, N, T, A]"
        if has_aux:
            if not (type(values) is tuple and len(values) == 2):
                raise ValueError(
                    f"score_fn returned {_described(values)} alone {shown}: with has_aux=True "
                    "return (values, auxiliaries)"
                )
            values, aux = values
        for path, x in jax.tree_util.tree_leaves_with_path(aux):
            if jnp.shape(x)[:2] != want:
                raise ValueError(
                    f"auxiliary {jax.tree_util.keystr(path) or 'array'} of score_fn has the shape "
                    f"{list(jnp.shape(x))} {shown}: return [B, N, ...] = {[*want, '...']}"
                )
        kind = getattr(values, "dtype", jnp.bool_)
        number = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
        if not number or values.shape != want:
            raise ValueError(
                f"score_fn returned {_described(values)} {shown}: return a number a candidate, "
                f"[B, N] = {list(want)}"
            )
        return values.astype(jnp.float32), aux

    return score


def _described(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
