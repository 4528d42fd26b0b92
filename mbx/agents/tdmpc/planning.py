"""Planning in the latent model: what a candidate action sequence is worth, and two planners.

`mbx.mppi` knows no model; here it is handed the score. The acting planner looks a few steps ahead,
is warm-started and joined by policy trajectories; the training planner starts from the policy's
prior and hands back all candidates with their values (document 000). Axes: B states, N candidates,
P proposals, T horizon, A action dims, L latent dims, H dynamics heads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import mppi, networks
from mbx.agents.tdmpc import scoring
from mbx.agents.tdmpc.config import Scoring
from mbx.world_model import Params, WorldModel

Array = jax.Array


PLAIN = Scoring()


class Outlook(NamedTuple):
    """How far and how the model is trusted when it looks ahead.

    discount: of the agent, one number or one a task; scoring.discount replaces it where it is not
    0. num_heads: value heads averaged. termination: "hard" | "soft", see `alive_factor`.
    """

    discount: float | tuple[float, ...]
    num_heads: int
    termination: str = "hard"
    scoring: Scoring = PLAIN


class Planned(NamedTuple):
    """What the training planner found: candidates' first actions `[B, N, A]` with their values
    `[B, N]`, the chosen action, and the refitted mean and std of the first step, `[B, A]` each."""

    actions: Array
    values: Array
    action: Array
    mean: Array
    std: Array


def discount_of(model: WorldModel, discount: float | tuple[float, ...], z: Array) -> Any:
    """The discount of a latent's task: one number for all, or `[...]` where every task has its."""
    if isinstance(discount, tuple):
        return model.config.tasks.look_up(discount, z)
    return discount


def masked(model: WorldModel, action: Array, z: Array) -> Array:
    """`action` with zeros where the latent's task has no such action."""
    mask = model.action_mask(z)
    return action if mask is None else action * mask


def alive_factor(model: WorldModel, params: Params, z: Array, how: str) -> Array | None:
    """Probability that the episode goes on in `z` `[..., L]`: `[...]`, or None if never episodic.

    "hard": 1 where the termination head says p <= 0.5, else 0 (TD-MPC2); "soft": 1 - p.
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
    model: WorldModel, value_params: Params, z: Array, action: Array | None, heads: Array | None
) -> Array:
    """Decoded values of `heads` (None: all): `z [..., L] -> [V', ...]`."""
    used = value_params if heads is None else networks.take_heads(value_params, heads)
    return model.value_mean(used, z, action)


def mean_value(
    model: WorldModel, value_params: Params, z: Array, action: Array | None, heads: Array | None
) -> Array:
    """`head_values` averaged over the heads: `z [..., L] -> [...]`."""
    return jnp.mean(head_values(model, value_params, z, action, heads), axis=0)


def trajectory_value(
    model: WorldModel,
    params: Params,
    z: Array,
    actions: Array,
    *,
    discount: float | tuple[float, ...],
    eps: Array,
    heads: Array | None,
    termination: str = "hard",
    score: Scoring = PLAIN,
) -> Array:
    """Discounted predicted rewards plus the value of the last state, as `score` combines heads.

    z: `[B, L]`; actions: `[B, N, T, A]`; eps: `[B, N, A]`, noise of the bootstrap action (unused by
    a V critic); heads: the value heads averaged. Returns `[B, N]`. Source: TD-MPC2, equation 5;
    document 001, section 6.
    """
    steps = actions.shape[2]
    state = model.spread(z[:, None])
    discount = score.discount or discount_of(model, discount, state)
    rewards, values, factors = [], [], [1.0]
    for t in range(steps):
        action = actions[:, :, t]
        # Before the first step all heads are in the same state: one look at its reward is enough.
        rewards.append(model.reward_mean(params, state if t else state[:1], action))
        state = model.step(params, state, action)
        alive = alive_factor(model, params, state, termination)
        factor = factors[-1] * discount
        factors.append(factor if alive is None else factor * alive)
        if score.aggregate or t + 1 == steps:
            bootstrap = None
            if model.config.critic == "q":
                bootstrap = model.act(*model.policy(params, state), eps[None])
            values.append(head_values(model, params["value"], state, bootstrap, heads))
    estimate = scoring.trajectory_estimate(
        rewards, values, factors, std_coef=score.std_coef, aggregate=score.aggregate
    )
    if score.disagreement:
        latents = state[..., : model.config.latent]
        return estimate.value + score.disagreement * scoring.latent_disagreement(latents)
    return estimate.value


def policy_trajectories(model: WorldModel, params: Params, z: Array, eps: Array) -> Array:
    """Actions of the policy rolled out in the model (by its first dynamics head).

    z: `[B, L]`; eps: `[T, B, P, A]`. Returns `[B, P, T, A]`.
    """
    params = _first_head(model, params)
    state, actions = z[None, :, None], []
    for t in range(eps.shape[0]):
        action = masked(model, model.act(*model.policy(params, state[0]), eps[t]), state[0])
        actions.append(action)
        if t + 1 < eps.shape[0]:
            state = model.step(params, state, action)
    return jnp.stack(actions, axis=2)


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


def prior_weight(step: Array, start: int, end: int) -> Array:
    """1 before `start`, then falling by 1/end a step to 0 (NEWT, whose slope is 1/end, not
    1/(end - start))."""
    return jnp.where(step < start, 1.0, jnp.maximum(1.0 - (step - start) / max(end, 1), 0.0))


def blend(
    weight: Array, prior: tuple[Array, Array], base: tuple[Array, Array]
) -> tuple[Array, Array]:
    """weight * prior + (1 - weight) * base, of means and of standard deviations."""
    mean, std = (weight * p + (1.0 - weight) * b for p, b in zip(prior, base, strict=True))
    return mean, std


def _first_head(model: WorldModel, params: Params) -> Params:
    if model.config.num_dynamics == 1:
        return params
    return {**params, "dynamics": jax.tree.map(lambda p: p[:1], params["dynamics"])}


def score_function(model: WorldModel, params: Params, z: Array, outlook: Outlook) -> mppi.ScoreFn:
    """`trajectory_value` from states `z` `[B, L]`, in the form `mppi.plan` takes."""

    def score(key: Array, actions: Array) -> Array:
        eps_key, heads_key = jax.random.split(key)
        batch, num, _, action_dim = actions.shape
        return trajectory_value(
            model,
            params,
            z,
            actions,
            discount=outlook.discount,
            eps=jax.random.normal(eps_key, (batch, num, action_dim)),
            heads=choose_heads(heads_key, model.config.num_values, outlook.num_heads),
            termination=outlook.termination,
            score=outlook.scoring,
        )

    return score


def plan_to_act(
    model: WorldModel,
    params: Params,
    z: Array,
    mean: Array,
    key: Array,
    *,
    config: mppi.MPPIConfig,
    num_proposals: int,
    outlook: Outlook,
    proposal_noise: float = 0.0,
    prior: Array | None = None,
) -> mppi.Plan:
    """The acting planner: from `z` `[B, L]` and a warm-started mean `[B, T, A]`.

    proposal_noise: standard deviation of noise added to the policy's trajectories. prior: weight of
    the policy's own Gaussian in where the planner starts, None for none.
    """
    proposal_key, plan_key = jax.random.split(key)
    batch, horizon, action_dim = mean.shape
    proposals = None
    if num_proposals:
        eps = jax.random.normal(proposal_key, (horizon, batch, num_proposals, action_dim))
        proposals = policy_trajectories(model, params, z, eps)
    if num_proposals and proposal_noise:
        noise = jax.random.normal(jax.random.fold_in(proposal_key, 1), proposals.shape)
        proposals = jnp.clip(proposals + proposal_noise * noise, -1.0, 1.0)
        proposals = masked(model, proposals, z[:, None, None])
    score = score_function(model, params, z, outlook)
    std = jnp.full_like(mean, config.max_std)
    if prior is not None:
        mean, std = blend(prior, policy_gaussian(model, params, z, horizon), (mean, std))
    return mppi.plan(
        plan_key,
        score,
        mean,
        std,
        proposals=proposals,
        action_mask=model.action_mask(z),
        config=config,
    )


def plan_targets(
    model: WorldModel,
    params: Params,
    z: Array,
    key: Array,
    *,
    config: mppi.MPPIConfig,
    outlook: Outlook,
    horizon: int = 1,
) -> Planned:
    """The training planner, from `z` `[B, L]`. No warm start.

    Round 1 holds raw samples of the policy, so that one round of horizon 1 is exactly the imagined
    rollout that document 000 replaces. With an "optimist" among the parameters (document 001's
    second policy) half of them are its samples.
    """
    prior_key, plan_key = jax.random.split(key)
    mean, log_std = model.policy(params, z)
    num = config.num_samples
    eps = jax.random.normal(prior_key, (horizon, z.shape[0], num, mean.shape[-1]))
    if "optimist" in params:
        second = {**params, "policy": params["optimist"]}
        initial = jnp.concatenate(
            [
                policy_trajectories(model, params, z, eps[:, :, : num - num // 2]),
                policy_trajectories(model, second, z, eps[:, :, num - num // 2 :]),
            ],
            axis=1,
        )
    else:
        initial = policy_trajectories(model, params, z, eps)

    def repeat(x: Array) -> Array:
        return jnp.broadcast_to(x[:, None], (x.shape[0], horizon, x.shape[1]))

    plan = mppi.plan(
        plan_key,
        score_function(model, params, z, outlook),
        repeat(jnp.tanh(mean)),
        repeat(jnp.exp(log_std)),
        initial=initial,
        action_mask=model.action_mask(z),
        config=config,
    )
    return Planned(plan.actions[:, :, 0], plan.values, plan.action, plan.mean[:, 0], plan.std[:, 0])
