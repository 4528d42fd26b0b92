"""Planning in the latent model: what a candidate action sequence is worth, and two planners.

`mbx.mppi` knows no model; here it gets its score. The acting planner looks a few steps ahead, is
warm-started and joined by policy trajectories; the training planner starts from the policy and
returns all candidates with their values. Axes: B states, N candidates, P proposals, T horizon, A
action dims, L latent dims, H dynamics heads, R reward heads, V value heads; `...` are states and
candidates.
Sources: TD-MPC2 (arXiv 2310.16828), section 3.2 and reference code; docs/sources.md, entries
planner-targets and ensembles.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import mppi, networks, returns, successors, threefry
from mbx.agents.tdmpc.settings import Planner, Settings, TrainingPlanner
from mbx.keys import streams
from mbx.types import Array, Params
from mbx.world_model import WorldModel


class Planned(NamedTuple):
    """What the training planner found.

    Attributes:
        actions: the candidates' first actions, `[B, N, A]`.
        values: their values, `[B, N]`.
        action: the chosen one, `[B, A]`.
        mean, std: refitted, of the first step, `[B, A]`.
    """

    actions: Array
    values: Array
    action: Array
    mean: Array
    std: Array


# -------------------------------------------------------------------------------------------------
# What the model says about a latent


def discount_of(model: WorldModel, discount: float | tuple[float, ...], z: Array) -> Any:
    """The discount of a latent's task: one number for all, or `[...]` where every task has its."""
    if isinstance(discount, tuple):
        return model.config.tasks.look_up(discount, z)
    return discount


def masked(model: WorldModel, action: Array, z: Array) -> Array:
    """`action` with zeros where the latent's task has no such action."""
    mask = model.action_mask(z)
    return action if mask is None else action * mask


def continue_prob(model: WorldModel, params: Params, z: Array, how: str) -> Array | None:
    """Probability that the episode goes on in `z` `[..., L]`.

    Args:
        how: "soft": 1 - p of the termination head; "hard": 1 where p <= 0.5, else 0 (TD-MPC2).

    Returns:
        `[...]`, or None for a model that knows no terminations.
    """
    if not model.config.episodic:
        return None
    probability = jax.nn.sigmoid(model.termination(params, z))
    return 1.0 - probability if how == "soft" else (probability <= 0.5).astype(jnp.float32)


def choose_heads(key: Array, num_values: int, num_used: int) -> Array | None:
    """Indices of `num_used` different value heads, or None when all are used."""
    if num_used >= num_values:
        return None
    return jax.random.permutation(key, num_values)[:num_used]


def head_values(
    model: WorldModel,
    value_params: Params,
    z: Array,
    action: Array | None,
    heads: Array | None,
    dropout: Array | None = None,
) -> Array:
    """Decoded values of `heads` (None: all): `z [..., L] -> [V', ...]`; dropout: a key."""
    used = value_params if heads is None else networks.take_heads(value_params, heads)
    if dropout is not None:
        return model.decode(model.value(used, z, action, dropout))
    return model.value_mean(used, z, action)


# -------------------------------------------------------------------------------------------------
# What a plan is worth


class Estimate(NamedTuple):
    """The return of a plan, as an ensemble sees it.

    Attributes:
        value: the score, `[...]`.
        std: mean over dynamics heads of the ensembles' standard deviation of the return, `[...]`.
        disagreement: standard deviation of the score over dynamics heads, `[...]`.
    """

    value: Array
    std: Array
    disagreement: Array


def trajectory_estimate(
    rewards: Sequence[Array],
    values: Sequence[Array],
    factors: Sequence[Array | float],
    *,
    std_coef: float = 0.0,
    aggregate: bool = False,
) -> Estimate:
    """The return of T predicted steps: mean + std_coef * std, reduced over dynamics heads.

    Variances of rewards and value add over time. The best dynamics head counts where std_coef > 0,
    the worst where < 0, their mean at 0. Source: docs/sources.md, entry ensembles.

    Args:
        rewards: T times `[R, H or 1, ...]`; 1 where the state has not been stepped yet.
        values: `[V, H, ...]` of the states after steps 1..T, or of the last alone where `aggregate`
            is off.
        factors: T+1 weights, the discount times the probability of being alive, `[H, ...]` or
            numbers; factors[t] weighs reward t, factors[T] the last value.
        std_coef: above 0 optimism, below 0 pessimism.
        aggregate: a head's score is the mean over horizons 1..T of its estimates, not the last.
    """
    total: Array | float = 0.0
    variance: Array | float = 0.0
    scores, stds = [], []
    steps = len(rewards)
    for t, reward in enumerate(rewards):
        total = total + factors[t] * jnp.mean(reward, axis=0)
        variance = variance + jnp.square(factors[t] * returns.ensemble_std(reward))
        if aggregate or t + 1 == steps:
            value = values[t] if aggregate else values[-1]
            estimate = total + factors[t + 1] * jnp.mean(value, axis=0)
            value_std = factors[t + 1] * returns.ensemble_std(value)
            std = _safe_sqrt(variance + jnp.square(value_std))
            scores.append(estimate + std_coef * std if std_coef else estimate)
            stds.append(std)
    score = sum(scores[1:], scores[0]) / len(scores)
    std = sum(stds[1:], stds[0]) / len(stds)
    return Estimate(
        value=reduce_dynamics(score, "from_std_coef", std_coef),
        std=jnp.mean(std, axis=0),
        disagreement=returns.ensemble_std(score),
    )


def reduce_dynamics(x: Array, how: str, std_coef: float) -> Array:
    """Over dynamics heads, `[H, ...] -> [...]`, by "mean", "min", "max" or "from_std_coef".

    The heads' next latents are equally likely successors of a state and an action, so their mean is
    a successor expectation.
    """
    if x.shape[0] == 1:
        return jnp.squeeze(x, 0)
    if how == "mean" or (how == "from_std_coef" and std_coef == 0.0):
        x = jnp.moveaxis(x, 0, -1)
        return successors.dense_expectation(x, jnp.full_like(x, 1.0 / x.shape[-1]))
    return returns.reduce_heads(x, how, std_coef)


def latent_disagreement(z: Array) -> Array:
    """Variance over dynamics heads, averaged over latent dims: `[H, ..., L] -> [...]`."""
    return jnp.mean(jnp.var(z, axis=0), axis=-1)


def _safe_sqrt(x: Array) -> Array:
    """Square root whose gradient is 0, not infinite, at 0."""
    positive = x > 0.0
    return jnp.where(positive, jnp.sqrt(jnp.where(positive, x, 1.0)), 0.0)


def estimate_value(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    actions: Array,
    *,
    planner: Planner | TrainingPlanner,
    eps: Array,
    heads: Array | None,
) -> Array:
    """Discounted predicted rewards plus the value of the last state. Source: TD-MPC2, equation 5.

    Args:
        z: `[B, L]`.
        actions: `[B, N, T, A]`.
        planner: says how heads are combined (std_coef, aggregate, disagreement), and its discount.
        eps: `[B, N, A]`, noise of the bootstrap action (a V critic has no use for it).
        heads: the value heads averaged, None for all.

    Returns:
        `[B, N]`.
    """
    steps = actions.shape[2]
    state = model.tile_heads(z[:, None])
    discount = planner.discount or discount_of(model, settings.loss.discount, state)
    states, values, factors = [state], [], [1.0]
    for t in range(steps):
        state = model.step(params, state, actions[:, :, t])
        states.append(state)
        alive = continue_prob(model, params, state, settings.loss.termination)
        factor = factors[-1] * discount
        factors.append(factor if alive is None else factor * alive)
        if planner.aggregate or t + 1 == steps:
            bootstrap = None
            if model.config.critic == "q":
                bootstrap = model.act(*model.policy(params, state), eps[None])
            values.append(head_values(model, params["value"], state, bootstrap, heads))
    rewards = rollout_rewards(model, params, states[:-1], actions)
    estimate = trajectory_estimate(
        rewards, values, factors, std_coef=planner.std_coef, aggregate=planner.aggregate
    )
    if planner.disagreement:
        latents = state[..., : model.config.latent]
        return estimate.value + planner.disagreement * latent_disagreement(latents)
    return estimate.value


def rollout_rewards(
    model: WorldModel, params: Params, states: list[Array], actions: Array
) -> list[Array]:
    """Predicted rewards of T steps; all but the root's are one product, which is larger.

    Args:
        states: before each step: the root `[H, B, 1, L]`, then `[H, B, N, L]`.
        actions: `[B, N, T, A]`.

    Returns:
        T arrays `[R, H, B, N]`, the first `[R, 1, B, N]`.
    """
    # In the root all heads are in the same state: one look at its reward is enough.
    first = model.reward_mean(params, states[0][:1], actions[:, :, 0])
    if len(states) == 1:
        return [first]
    batch, _, _, size = actions.shape
    later = jnp.swapaxes(actions[:, :, 1:], 1, 2).reshape(batch, -1, size)
    rewards = model.reward_mean(params, jnp.concatenate(states[1:], axis=2), later)
    return [first, *jnp.split(rewards, len(states) - 1, axis=-1)]


def score_function(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    planner: Planner | TrainingPlanner,
) -> mppi.ScoreFn:
    """`estimate_value` from states `z` `[B, L]`, in the form `mppi.plan` takes."""

    def score(key: Array, actions: Array) -> Array:
        keys = streams(key, "eps", "heads")
        batch, num, _, action_dim = actions.shape
        return estimate_value(
            settings,
            model,
            params,
            z,
            actions,
            planner=planner,
            eps=threefry.normal(keys["eps"], (batch, num, action_dim)),
            heads=choose_heads(keys["heads"], model.config.num_values, settings.loss.num_heads),
        )

    return score


# -------------------------------------------------------------------------------------------------
# The policy in plans


def policy_trajectories(
    model: WorldModel,
    params: Params,
    z: Array,
    eps: Array,
    log_std_bounds: tuple[float, ...] = (),
) -> Array:
    """Actions of the policy rolled out in the model (by its first dynamics head).

    Args:
        z: `[B, L]`.
        eps: `[T, B, P, A]`.
        log_std_bounds: lowest and highest log std in the place of the model's, () for those.

    Returns:
        `[B, P, T, A]`.
    """
    params = _first_head(model, params)
    state, actions = z[None, :, None], []
    for t in range(eps.shape[0]):
        mean, log_std = model.policy(params, state[0])
        if log_std_bounds:
            log_std = _rebound(model, log_std, log_std_bounds)
        action = masked(model, model.act(mean, log_std, eps[t]), state[0])
        actions.append(action)
        if t + 1 < eps.shape[0]:
            state = model.step(params, state, action)
    return jnp.stack(actions, axis=2)


def _rebound(model: WorldModel, log_std: Array, bounds: tuple[float, ...]) -> Array:
    """A log std between other bounds, by the same share of the way: it is linear in them."""
    low, high = model.config.log_std_min, model.config.log_std_max
    share = (log_std - low) / max(high - low, 1e-8)
    return bounds[0] + share * (bounds[1] - bounds[0])


def policy_gaussian(
    model: WorldModel, params: Params, z: Array, horizon: int
) -> tuple[Array, Array]:
    """Mean and standard deviation of the policy along its own mean: `[B, T, A]` each."""
    params = _first_head(model, params)
    state, means, stds = z[None], [], []
    for _ in range(horizon):
        mean, log_std = model.policy(params, state[0])
        means.append(jnp.tanh(mean))
        stds.append(jnp.exp(log_std))
        state = model.step(params, state, means[-1])
    return jnp.stack(means, axis=1), jnp.stack(stds, axis=1)


def policy_share(step: Array, start: int, end: int) -> Array:
    """Share of the policy's Gaussian in where plans start, after `step` updates.

    1 before `start`, then falling by 1/end a step to 0. Source: NEWT's constrained planning, whose
    slope is 1/end, not 1/(end - start).
    """
    return jnp.where(step < start, 1.0, jnp.maximum(1.0 - (step - start) / max(end, 1), 0.0))


def blend(
    share: Array, policy: tuple[Array, Array], base: tuple[Array, Array]
) -> tuple[Array, Array]:
    """share * policy + (1 - share) * base, of means and of standard deviations."""
    mean, std = (share * p + (1.0 - share) * b for p, b in zip(policy, base, strict=True))
    return mean, std


def _first_head(model: WorldModel, params: Params) -> Params:
    if model.config.num_dynamics == 1:
        return params
    return {**params, "dynamics": jax.tree.map(lambda p: p[:1], params["dynamics"])}


# -------------------------------------------------------------------------------------------------
# The two planners


def mppi_config(planner: Planner | TrainingPlanner, **changes: Any) -> mppi.MPPIConfig:
    """What of a planner's settings is MPPI's own, by the same names."""
    own = {field.name for field in dataclasses.fields(planner)} - changes.keys()
    shared = own & {field.name for field in dataclasses.fields(mppi.MPPIConfig)}
    return mppi.MPPIConfig(**{name: getattr(planner, name) for name in shared}, **changes)


def plan_to_act(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    mean: Array,
    key: Array,
    *,
    evaluate: bool = False,
    share: Array | None = None,
) -> mppi.Plan:
    """The acting planner.

    Args:
        z: `[B, L]`.
        mean: warm start, `[B, T, A]`.
        evaluate: without exploration noise, and with the settings for evaluations.
        share: of the policy's own Gaussian in where the plan starts, None for none.
    """
    planner, config = settings.planner, mppi_config(settings.planner)
    if evaluate:
        planner = dataclasses.replace(planner, std_coef=planner.evaluation_std_coef)
        config = dataclasses.replace(
            config, action_noise=0.0, selection=planner.evaluation_selection
        )
    keys = streams(key, "proposals", "proposal_noise", "plan")
    batch, horizon, action_dim = mean.shape
    proposals = None
    if planner.num_proposals:
        eps = threefry.normal(
            keys["proposals"], (horizon, batch, planner.num_proposals, action_dim)
        )
        proposals = policy_trajectories(model, params, z, eps)
    if planner.num_proposals and planner.proposal_noise:
        noise = jax.random.normal(keys["proposal_noise"], proposals.shape)
        proposals = jnp.clip(proposals + planner.proposal_noise * noise, -1.0, 1.0)
        proposals = masked(model, proposals, z[:, None, None])
    score = score_function(settings, model, params, z, planner)
    std = jnp.full_like(mean, config.max_std)
    if share is not None:
        mean, std = blend(share, policy_gaussian(model, params, z, horizon), (mean, std))
    return mppi.plan(
        keys["plan"],
        score,
        mean,
        std,
        proposals=proposals,
        action_mask=model.action_mask(z),
        config=config,
    )


def plan_targets(
    settings: Settings, model: WorldModel, params: Params, z: Array, key: Array
) -> Planned:
    """The training planner, from `z` `[B, L]`. No warm start.

    With `training_planner.search` "policy" round 1 holds samples of the policy, and every later one
    samples of what was refitted to them, so that one round of horizon 1 (all that is left of it
    without `training_planner.enabled`) is the policy's imagined rollout. With "acting" it searches
    as the acting planner does, from mean 0 and the largest standard deviation and with the policy's
    trajectories in every round: an expert whose spread does not shrink with the policy's (BMPC).

    With an "optimist" among the parameters half of the policy's samples are its. Source:
    docs/sources.md, entries planner-targets and behaviour.
    """
    planner = settings.training_planner
    keys = streams(key, "policy", "plan")
    search = _acting_search if planner.enabled and planner.search == "acting" else _policy_search
    config, start = search(settings, model, params, z, keys["policy"])
    plan = mppi.plan(
        keys["plan"],
        score_function(settings, model, params, z, planner),
        action_mask=model.action_mask(z),
        config=config,
        **start,
    )
    chosen = plan.chosen
    return Planned(plan.actions[:, :, 0], plan.values, chosen, plan.mean[:, 0], plan.std[:, 0])


def _policy_search(
    settings: Settings, model: WorldModel, params: Params, z: Array, key: Array
) -> tuple[mppi.MPPIConfig, dict[str, Array]]:
    """MPPI's settings, and where it starts: samples of the policy."""
    planner = settings.training_planner
    config = mppi_config(planner) if planner.enabled else mppi_config(planner, iterations=1)
    horizon = planner.horizon if planner.enabled else 1
    mean, log_std = model.policy(params, z)

    def repeat(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None], (x.shape[0], horizon, x.shape[1]))

    eps = threefry.normal(key, (horizon, z.shape[0], config.num_samples, mean.shape[-1]))
    return config, dict(
        mean=repeat(jnp.tanh(mean)),
        std=repeat(jnp.exp(log_std)),
        initial=_samples_of_policies(model, params, z, eps),
    )


def _acting_search(
    settings: Settings, model: WorldModel, params: Params, z: Array, key: Array
) -> tuple[mppi.MPPIConfig, dict[str, Array]]:
    """MPPI's settings, and where it starts: nowhere, beside trajectories of the policy."""
    planner = settings.training_planner
    mean = jnp.zeros((z.shape[0], planner.horizon, model.config.action_dim))
    start = dict(mean=mean, std=jnp.full_like(mean, planner.max_std))
    if planner.num_proposals:
        shape = (planner.horizon, z.shape[0], planner.num_proposals, mean.shape[-1])
        eps, bounds = threefry.normal(key, shape), planner.proposal_log_std
        start["proposals"] = _samples_of_policies(model, params, z, eps, bounds)
    return mppi_config(planner), start


def _samples_of_policies(
    model: WorldModel,
    params: Params,
    z: Array,
    eps: Array,
    log_std_bounds: tuple[float, ...] = (),
) -> Array:
    """`policy_trajectories`; where there is an optimist, the second half of them are its."""
    if "optimist" not in params:
        return policy_trajectories(model, params, z, eps, log_std_bounds)
    num, second = eps.shape[2], {**params, "policy": params["optimist"]}
    own, others = eps[:, :, : num - num // 2], eps[:, :, num - num // 2 :]
    return jnp.concatenate(
        [
            policy_trajectories(model, params, z, own, log_std_bounds),
            policy_trajectories(model, second, z, others, log_std_bounds),
        ],
        axis=1,
    )
