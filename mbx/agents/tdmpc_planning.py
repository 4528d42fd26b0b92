"""The two planners of the TD-MPC agent: one acts, one makes training targets.

Both are `mbx.mppi.plan` with the world model's trajectory value as the score. The acting planner
looks a few steps ahead, is warm-started and joined by policy trajectories; the training planner
refines single actions from the policy's prior and hands back all candidates with their values
(document 000). Axes: B states, N candidates, P proposals, T horizon, A action dims, L latent dims.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mbx import mppi, networks
from mbx.world_model import Params, WorldModel

Array = jax.Array

TERMINATIONS = ("hard", "soft")


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


def mean_value(
    model: WorldModel, value_params: Params, z: Array, action: Array | None, heads: Array | None
) -> Array:
    """Decoded value, averaged over `heads` (None: all): `z [..., L] -> [...]`."""
    used = value_params if heads is None else networks.take_heads(value_params, heads)
    return jnp.mean(model.decode(model.value(used, z, action)), axis=0)


def trajectory_value(
    model: WorldModel,
    params: Params,
    z: Array,
    actions: Array,
    *,
    discount: float | Array,
    eps: Array,
    heads: Array | None,
    termination: str = "hard",
) -> Array:
    """Discounted predicted rewards plus the value of the last state.

    z: `[B, L]`; actions: `[B, N, T, A]`; eps: `[B, N, A]`, noise of the bootstrap action (unused by
    a V critic); heads: the value heads averaged. Returns `[B, N]`. Source: TD-MPC2, equation 5.
    """
    state = z[:, None]
    total = jnp.zeros(actions.shape[:2])
    factor: Array | float = 1.0
    for t in range(actions.shape[2]):
        action = actions[:, :, t]
        total = total + factor * model.decode(model.reward(params, state, action))
        state = model.step(params, state, action)
        alive = alive_factor(model, params, state, termination)
        factor = factor * discount if alive is None else factor * discount * alive
    bootstrap_action = None
    if model.config.critic == "q":
        bootstrap_action = model.act(*model.policy(params, state), eps)
    return total + factor * mean_value(model, params["value"], state, bootstrap_action, heads)


def policy_trajectories(model: WorldModel, params: Params, z: Array, eps: Array) -> Array:
    """Actions of the policy rolled out in the model.

    z: `[B, L]`; eps: `[T, B, P, A]`. Returns `[B, P, T, A]`.
    """
    state, actions = z[:, None], []
    for t in range(eps.shape[0]):
        action = model.act(*model.policy(params, state), eps[t])
        actions.append(action)
        if t + 1 < eps.shape[0]:
            state = model.step(params, state, action)
    return jnp.stack(actions, axis=2)


def score_function(
    model: WorldModel,
    params: Params,
    z: Array,
    *,
    discount: float,
    num_heads: int,
    termination: str,
) -> mppi.ScoreFn:
    """`trajectory_value` from states `z` `[B, L]`, in the form `mppi.plan` takes."""

    def score(key: Array, actions: Array) -> Array:
        eps_key, heads_key = jax.random.split(key)
        batch, num, _, action_dim = actions.shape
        return trajectory_value(
            model, params, z, actions, discount=discount,
            eps=jax.random.normal(eps_key, (batch, num, action_dim)),
            heads=choose_heads(heads_key, model.config.num_values, num_heads),
            termination=termination,
        )  # fmt: skip

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
    discount: float,
    num_heads: int,
    termination: str,
) -> mppi.Plan:
    """The acting planner: from `z` `[B, L]` and a warm-started mean `[B, T, A]`."""
    proposal_key, plan_key = jax.random.split(key)
    batch, horizon, action_dim = mean.shape
    proposals = None
    if num_proposals:
        eps = jax.random.normal(proposal_key, (horizon, batch, num_proposals, action_dim))
        proposals = policy_trajectories(model, params, z, eps)
    score = score_function(
        model, params, z, discount=discount, num_heads=num_heads, termination=termination
    )
    std = jnp.full_like(mean, config.max_std)
    return mppi.plan(plan_key, score, mean, std, proposals=proposals, config=config)


def plan_targets(
    model: WorldModel,
    params: Params,
    z: Array,
    key: Array,
    *,
    config: mppi.MPPIConfig,
    discount: float,
    num_heads: int,
    termination: str,
) -> tuple[Array, Array]:
    """The training planner: refined actions `[B, N, A]` and their values `[B, N]` for `z` `[B, L]`.

    Horizon 1, no warm start. Round 1 holds raw samples of the policy, so that one round is exactly
    the imagined rollout that document 000 replaces.
    """
    prior_key, plan_key = jax.random.split(key)
    mean, log_std = model.policy(params, z)
    shape = (z.shape[0], config.num_samples, mean.shape[-1])
    eps = jax.random.normal(prior_key, shape)
    initial = model.act(mean[:, None], log_std[:, None], eps)
    score = score_function(
        model, params, z, discount=discount, num_heads=num_heads, termination=termination
    )
    plan = mppi.plan(
        plan_key, score, jnp.tanh(mean)[:, None], jnp.exp(log_std)[:, None],
        initial=initial[:, :, None], config=config,
    )  # fmt: skip
    return plan.actions[:, :, 0], plan.values
