"""Two planners in the latent model, and the policy's part in their plans.

In: latents `[B, L]` of states, the world model's parameters and a key. Out: for acting
(`plan_to_act`) an `mppi.Plan`; for training targets (`plan_targets`) candidate actions with their
values. The acting planner looks a few steps ahead, with a warm start and policy trajectories; the
training planner starts from the policy. `scoring` gives the search methods (`mbx.mppi`,
`mbx.planners`) their score.

Axes: B states, N candidates, P proposals, T horizon, A action dims, L latent dims.
Sources: TD-MPC2 (arXiv 2310.16828), section 3.2 and reference code; docs/sources.md, entries
planner-targets and ensembles.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import io_callback

from mbx import categorical, mppi, planners
from mbx.agents.base import See
from mbx.agents.tdmpc.scoring import plan_discount, score_function
from mbx.agents.tdmpc.types import KeptPlan
from mbx.fast import rng
from mbx.types import Array, Params, streams
from mbx.world_model import WorldModel, action_mean, masked

if TYPE_CHECKING:
    from mbx.agents.tdmpc.planner_settings import Search
    from mbx.agents.tdmpc.settings import Planner, Settings


class Planned(NamedTuple):
    """What the training planner found."""

    actions: Array  # the candidates' first actions, `[B, N, A]`
    values: Array  # `[B, N]`
    action: Array  # the chosen one, `[B, A]`
    mean: Array  # refitted, of the first step, `[B, A]`
    std: Array


# -------------------------------------------------------------------------------------------------
# The policy in plans


def policy_trajectories(
    model: WorldModel, params: Params, z: Array, eps: Array, log_std_bounds: tuple[float, ...] = ()
) -> Array:
    """Actions of the policy rolled out in the model's first dynamics head, `[B, P, T, A]`.

    Args:
        z: `[B, L]`.
        eps: `[T, B, P, A]`.
        log_std_bounds: lowest and highest log std; (): the model's.
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
    """A log std moved linearly from the model's bounds to other bounds."""
    low, high = model.config.log_std_min, model.config.log_std_max
    share = (log_std - low) / max(high - low, 1e-8)
    return bounds[0] + share * (bounds[1] - bounds[0])


def policy_gaussian(
    model: WorldModel, params: Params, z: Array, horizon: int
) -> tuple[Array, Array]:
    """Mean and standard deviation of the policy along its own mean: `[B, T, A]` each.

    For a categorical policy the probabilities along its likeliest actions.
    """
    params = _first_head(model, params)
    state, means, stds = z[None], [], []
    for _ in range(horizon):
        mean, log_std = model.policy(params, state[0])
        means.append(action_mean(model, mean))
        stds.append(jnp.exp(log_std))
        state = model.step(params, state, model.act(mean, log_std, jnp.zeros_like(mean)))
    return jnp.stack(means, axis=1), jnp.stack(stds, axis=1)


def policy_share(step: Array | int, start: int, end: int) -> Array:
    """Share of the policy's Gaussian in the start of plans after `step` updates.

    1 before `start`, then falling by 1/end a step to 0. Source: NEWT's constrained planning, whose
    slope is 1/end, not 1/(end - start).
    """
    return jnp.where(step < start, 1.0, jnp.maximum(1.0 - (step - start) / max(end, 1), 0.0))


def blend(
    share: Array, policy: tuple[Array, Array], base: tuple[Array, Array]
) -> tuple[Array, Array]:
    """share * policy + (1 - share) * base, for means and standard deviations."""
    mean, std = (share * p + (1.0 - share) * b for p, b in zip(policy, base, strict=True))
    return mean, std


def _first_head(model: WorldModel, params: Params) -> Params:
    if model.config.num_dynamics == 1:
        return params
    return {**params, "dynamics": jax.tree.map(lambda p: p[:1], params["dynamics"])}


# -------------------------------------------------------------------------------------------------
# The two planners


def search_config(planner: Search) -> mppi.MPPIConfig:
    """The search's own configuration, from a planner's settings of the same names."""
    kind = planners.find(planner.name).config
    own, names = ({field.name for field in dataclasses.fields(x)} for x in (planner, kind))
    return kind(**{name: getattr(planner, name) for name in own & names})


def plan_to_act(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    mean: Array,
    key: Array,
    *,
    evaluate: bool = False,
    step: Array | int = 0,
    see: See | None = None,
) -> mppi.Plan:
    """The acting planner.

    Args:
        z: `[B, L]`.
        mean: warm start, `[B, T, A]`.
        evaluate: without exploration noise, and with the settings for evaluations.
        step: updates made.
        see: called with every set of candidates and with the plan; None: not in the program.
    """
    planner, config = settings.planner, search_config(settings.planner)
    if evaluate:
        planner = dataclasses.replace(planner, std_coef=planner.evaluation_std_coef)
        config = dataclasses.replace(
            config, action_noise=0.0, selection=planner.evaluation_selection
        )
    keys = streams(key, "proposals", "proposal_noise", "plan")
    proposals = policy_proposals(
        planner, model, params, z, keys["proposals"], keys["proposal_noise"]
    )
    score = score_function(settings, model, params, z, planner)
    if see is not None:
        score = _seen(score, see)
    start = plan_start(planner, model, params, z, mean, step)
    plan = search(
        planner, model, z, keys["plan"], score, *start, proposals=proposals, config=config
    )
    if see is not None:
        discount = plan_discount(settings, model, planner, z)
        discount = jnp.broadcast_to(discount, z.shape[:1])
        found = {**plan._asdict(), "num_elites": config.num_elites, "discount": discount}
        io_callback(functools.partial(see, "plan"), None, found, ordered=True)
    return plan


def follow_or_plan(
    settings: Settings,
    model: WorldModel,
    params: Params,
    z: Array,
    kept: KeptPlan,
    is_first: Array,
    key: Array,
    *,
    evaluate: bool,
    **given: Any,
) -> tuple[Array, KeptPlan]:
    """Actions `[E, A]` of the kept plans where they still hold, else of new ones.

    A plan holds where the latent is within `planner.reuse` of the expected one (Euclidean), for the
    steps that it has. The planner runs unless all plans hold.
    Source: AdaReP (arXiv 2606.23079), here with a constant tolerance.
    """
    off = jnp.linalg.norm(z - kept.expected, axis=-1)
    holds = (off <= settings.planner.reuse) & (kept.left > 0) & ~is_first
    mean, std = (mppi.warm_start(x, is_first) for x in (kept.mean, kept.std))

    def follow() -> tuple[Array, Array, Array]:
        noise = jax.random.normal(streams(key, "follow")["follow"], mean[:, 0].shape)
        much = 0.0 if evaluate else settings.planner.action_noise
        return jnp.clip(mean[:, 0] + much * std[:, 0] * noise, -1.0, 1.0), mean, std

    def plan() -> tuple[Array, Array, Array]:
        new = plan_to_act(settings, model, params, z, mean, key, evaluate=evaluate, **given)
        pairs = zip(follow(), (new.action, new.mean, new.std), strict=True)
        return tuple(jnp.where(holds.reshape(-1, *[1] * (y.ndim - 1)), x, y) for x, y in pairs)

    seen = given.get("see") is not None  # a watched planner shows every plan
    action, mean, std = plan() if seen else jax.lax.cond(jnp.all(holds), follow, plan)
    left = jnp.where(holds, kept.left, settings.planner.horizon) - 1
    start = jnp.where(holds[:, None], kept.expected, z)
    expected = model.step(_first_head(model, params), start[None], mean[:, 0])[0]
    return masked(model, action, z), KeptPlan(mean, std, expected, left)


def search(
    planner: Search,
    model: WorldModel,
    z: Array,
    key: Array,
    score: mppi.ScoreFn,
    mean: Array,
    std: Array,
    **given: Any,
) -> mppi.Plan:
    """`mppi.plan` by a planner's own method, among the actions of the latents' tasks."""
    return planners.plan(
        planner.name,
        key,
        score,
        mean,
        std,
        action_mask=model.action_mask(z),
        discrete=model.config.policy == "categorical",
        **given,
    )


def plan_start(
    planner: Planner, model: WorldModel, params: Params, z: Array, mean: Array, step: Array | int
) -> tuple[Array, Array]:
    """Mean and standard deviation that an acting plan starts from, `[B, T, A]` each.

    `mean` with the highest standard deviation, or after `step` updates a share of the policy's
    Gaussian.
    """
    std = jnp.full_like(mean, planner.max_std)
    if not planner.prior_updates:
        return mean, std
    share = policy_share(step, planner.prior_start, planner.prior_updates)
    if model.config.policy == "categorical":
        mean = categorical.probabilities(mean)
    return blend(share, policy_gaussian(model, params, z, planner.horizon), (mean, std))


def policy_proposals(
    planner: Planner, model: WorldModel, params: Params, z: Array, key: Array, noise_key: Array
) -> Array | None:
    """Policy trajectories among an acting plan's candidates, `[B, P, T, A]`; None for 0."""
    if not planner.num_proposals:
        return None
    shape = (planner.horizon, z.shape[0], planner.num_proposals, model.config.action_dim)
    proposals = policy_trajectories(model, params, z, rng.normal(key, shape))
    if not planner.proposal_noise:
        return proposals
    noise = jax.random.normal(noise_key, proposals.shape)
    proposals = _disturbed(model, proposals, planner.proposal_noise, noise)
    return masked(model, proposals, z[:, None, None])


def _disturbed(model: WorldModel, actions: Array, much: Array | float, noise: Array) -> Array:
    """Actions with normal noise `[..., A]`; a share of discrete ones is drawn uniformly."""
    if model.config.policy == "categorical":
        uniform = jnp.full_like(actions, 1.0 / actions.shape[-1])
        return categorical.disturb(actions, uniform, much, noise)
    return jnp.clip(actions + much * noise, -1.0, 1.0)


def _seen(score: mppi.ScoreFn, see: See) -> mppi.ScoreFn:
    """A score that reports its arguments and results to `see`."""

    def reported(key: Array, actions: Array) -> Array:
        values = score(key, actions)
        found = {"actions": actions, "values": values}
        io_callback(functools.partial(see, "candidates"), None, found, ordered=True)
        return values

    return reported


def plan_targets(
    settings: Settings, model: WorldModel, params: Params, z: Array, key: Array
) -> Planned:
    """The training planner, from `z` `[B, L]`, without a warm start.

    With `training_planner.search` "policy", round 1 holds samples of the policy and every later
    round samples of the Gaussian refitted to them; without `training_planner.enabled` there is one
    round of horizon 1. "acting" searches as the acting planner does: the expert's spread does not
    shrink with the policy's (BMPC).

    With an "optimist" among the parameters, half of the policy's samples are its.
    Source: docs/sources.md, entries planner-targets and behaviour.
    """
    planner, keys = settings.training_planner.as_run, streams(key, "policy", "plan")
    acting, start = planner.search == "acting", {}
    shape = (z.shape[0], planner.horizon, model.config.action_dim)
    if acting:
        gaussian = jnp.zeros(shape), jnp.full(shape, planner.max_std)
    else:
        mean, log_std = model.policy(params, z)
        first = action_mean(model, mean), jnp.exp(log_std)
        gaussian = tuple(jnp.broadcast_to(x[:, None], shape) for x in first)
    if planner.policy_samples:
        eps = rng.normal(keys["policy"], (shape[1], shape[0], planner.policy_samples, shape[2]))
        bounds = planner.proposal_log_std if acting else ()
        drawn = _samples_of_policies(model, params, z, eps, bounds)
        start = {"proposals" if acting else "initial": drawn}
    score = score_function(settings, model, params, z, planner)
    config = search_config(planner)
    plan = search(planner, model, z, keys["plan"], score, *gaussian, config=config, **start)
    first = plan.mean[:, 0], plan.std[:, 0]
    return Planned(plan.actions[:, :, 0], plan.values, plan.chosen, *first)


def _samples_of_policies(
    model: WorldModel, params: Params, z: Array, eps: Array, log_std_bounds: tuple[float, ...] = ()
) -> Array:
    """`policy_trajectories`; with an optimist, the second half are its."""
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
