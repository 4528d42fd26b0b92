"""Value targets of the TD-MPC agent: what the value heads learn to predict.

    planner   one step ahead from the actions that the training planner stored
    td        TD-MPC2's target from the replay's reward and the policy's next action (Q critic), or
              rollouts of the policy in the model (V critic; BMPC)
    lambda    lambda return of the replay's rewards, bootstrapped from the planner's values

In: the latents of a batch of windows, the target network, stored plans and their weights. Out:
`ValueTarget`, samples `[V', T, B, n]` (V' = 1 where heads share a target) with weights `[T, B, n]`,
without gradient. Axes: T transitions, B batch, N planner actions, n of them in use, A action dims,
L latent dims, R, H, V reward, dynamics and value heads.
Sources: TD-MPC2 (arXiv 2310.16828), equation 3; BMPC (arXiv 2503.18871); docs/sources.md, entries
planner-targets, value-annotations and ensembles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx import networks, returns
from mbx.agents.tdmpc.types import Batch, Noise, TrainState, ValueTarget
from mbx.fast import collectives
from mbx.types import Array, Params
from mbx.world_model import WorldModel, continue_prob, discount_of, head_values

if TYPE_CHECKING:
    from mbx.agents.tdmpc.settings import Settings


def value_actions(
    settings: Settings, batch: Batch, weights: Array | None
) -> tuple[Array, Array | None]:
    """The planner actions that a value target averages over, and their weights.

    "uniform" and "weighted" (by `weights` `[T+1, B, N]`) use all N actions; "best_n" only the n
    best by stored value, which saves model evaluations.

    Returns:
        Actions `[T+1, B, n, A]` and weights `[T+1, B, n]`.
    """
    loss, actions, values = settings.loss, batch.plan_actions, batch.plan_values
    if loss.value_weighting == "weighted":
        return actions, weights
    if loss.value_weighting == "best_n" and loss.value_best_n < values.shape[-1]:
        values, index = collectives.top_k(values, loss.value_best_n)
        actions = jnp.take_along_axis(actions, index[..., None], axis=-2)
    return actions, jnp.full_like(values, 1.0 / values.shape[-1])


def bootstrap(
    settings: Settings, rewards: Array, values: Array, discount: float | Array, terminated: Array
) -> Array:
    """Targets from ensembles of rewards and next values. Source: docs/sources.md, ensembles.

    Args:
        rewards: `[R, H, ...]`.
        values: `[V, H, ...]`, of the next states; V = 1 with `loss.value_reduction="min"`.
        terminated: `[H, ...]`, whether, or how probably, the step ended the episode.

    Returns:
        `[V', ...]`; V' = V with `loss.value_reduction="local"`, else 1.
    """
    loss = settings.loss
    targets = returns.td_targets(
        rewards,
        values,
        discount,
        terminated,
        std_coef=loss.td_std_coef,
        dynamics_reduction=None,
        local_bootstrap=loss.value_reduction != "mean",
    )
    if loss.value_reduction != "local":
        targets = targets[:1]
    return returns.reduce_heads(
        jnp.swapaxes(targets, 0, 1), loss.td_dynamics_reduction, loss.td_std_coef
    )


class Inputs(NamedTuple):
    """What the rows of `VALUE_TARGETS` read."""

    settings: Settings
    model: WorldModel
    params: Params  # with the policy that acts in targets
    slow: Params  # the target network of the values
    z: Array  # latents of a window's states, `[T+1, B, L]`
    batch: Batch
    noise: Noise
    weights: Array | None = None  # of planner actions, `[T+1, B, N]`

    @property
    def discount(self) -> Any:
        """The discount of the next states' tasks: a number, or `[T, B]`."""
        return discount_of(self.model, self.settings.loss.discount, self.z[1:])

    def values(self, z: Array, action: Array | None) -> Array:
        """Target values `[V', ...]` of the heads drawn; V' = 1 with `loss.value_reduction="min"`
        (TD-MPC2, RedQ).
        """
        how = self.settings.loss.value_reduction
        return head_values(self.model, self.slow, z, action, self.noise.target_heads, reduction=how)


def next_values(x: Inputs, actions: Array | None = None) -> Array:
    """Target values of the next states: `[V', T, B]`, or `[V', T, B, n]` for planner actions
    `[T, B, n, A]`. A Q critic without actions takes the policy's.
    """
    z_next, model = x.z[1:], x.model
    if model.config.critic == "v":
        actions = None
    elif actions is None:
        actions = model.act(*model.policy(x.params, z_next), x.noise.target_eps)
    else:
        z_next = z_next[:, :, None]
    return x.values(z_next, actions)


def q_targets(x: Inputs) -> ValueTarget:
    """TD targets of the replay's own transitions: r + gamma (1 - terminated) Q(z', a').

    a' is the policy's (TD-MPC2). With planner targets Q is the weighted mean over the next row's
    stored actions; rows without a plan (an episode's last) take the policy's action.
    """
    loss, values = x.settings.loss, next_values(x)
    if loss.value_target == "planner":
        actions, weights = value_actions(x.settings, x.batch, x.weights)
        q = jnp.sum(weights[None, 1:] * next_values(x, actions[1:]), axis=-1)
        values = jnp.where(x.batch.plan_valid[None, 1:], q, values)
    reward, terminated = x.batch.reward[None, None], x.batch.terminated[None]
    return _single(bootstrap(x.settings, reward, values[:, None], x.discount, terminated))


def lambda_targets(x: Inputs) -> ValueTarget:
    """Lambda returns of the replay's own rewards and terminations.

    A row's value is the weighted mean of its planner actions' values, or the target network's
    without a plan; the trace is cut at an episode's end. Sources: docs/sources.md, entry
    value-annotations; `returns.lambda_returns`.
    """
    batch, own = x.batch, jnp.mean(next_values(x), axis=0)
    planned = jnp.sum(x.weights[1:] * batch.plan_values[1:], axis=-1)
    annotations = jnp.where(batch.plan_valid[1:], planned, own)
    # Row t+1 continues the trace only where its own transition is part of the episode.
    inside = jnp.concatenate([batch.mask[1:], jnp.zeros_like(batch.mask[:1])])
    discount, trace = x.discount * (1.0 - batch.terminated), x.settings.loss.lambda_ * inside
    return _single(returns.lambda_returns(batch.reward, discount, annotations, trace)[None])


def planned_targets(x: Inputs) -> ValueTarget:
    """A V critic's targets, one step in the model from each planner action."""
    states = len(x.batch.mask) + x.settings.loss.value_last_state
    actions, weights = value_actions(x.settings, x.batch, x.weights)
    return ValueTarget(v_targets(x, x.z[:states], actions[:states]), weights[:states])


def imagined_targets(x: Inputs) -> ValueTarget:
    """A V critic's targets from rollouts of the policy in the model."""
    z = x.z[: len(x.batch.mask) + x.settings.loss.value_last_state]
    mean, log_std = x.model.policy(x.params, z)
    actions = x.model.act(mean[..., None, :], log_std[..., None, :], x.noise.rollout_eps[0])
    samples = v_targets(x, z, actions, x.settings.loss.td_horizon)
    return ValueTarget(samples, jnp.full(samples.shape[1:], 1.0 / samples.shape[-1]))


# By `loss.value_target` and `model.critic`.
VALUE_TARGETS: dict[tuple[str, str], Callable[[Inputs], ValueTarget]] = {
    ("planner", "v"): planned_targets,
    ("td", "v"): imagined_targets,
    ("planner", "q"): q_targets,
    ("td", "q"): q_targets,
    ("lambda", "v"): lambda_targets,
    ("lambda", "q"): lambda_targets,
}


def _single(samples: Array) -> ValueTarget:
    """A target of one sample a state, from `[V', T, B]`."""
    return ValueTarget(samples[..., None], jnp.ones((*samples.shape[1:], 1)))


def v_targets(x: Inputs, z: Array, actions: Array, steps: int = 1) -> Array:
    """Imagined targets of a V critic, `[V', ..., n]`.

    Reward and termination are the model's: the replay's belong to another action.

    Args:
        z: `[..., L]`.
        actions: first actions, `[..., n, A]`; the policy acts in the later of `steps`.
    """
    model, params, noise = x.model, x.params, x.noise
    if noise.dynamics_head is not None:
        one = networks.take_heads(params["dynamics"], noise.dynamics_head[None])
        params = {**params, "dynamics": one}
    root = jnp.expand_dims(z, -2)[None]
    heads = networks.num_heads(params["dynamics"])
    state = jnp.broadcast_to(root, (heads, *root.shape[1:]))
    total, alive, factor = 0.0, jnp.ones(root.shape[:-1]), 1.0
    discount = discount_of(model, x.settings.loss.discount, root)
    for t in range(steps):
        if t:
            actions = model.act(*model.policy(params, state), noise.rollout_eps[t][None])
        reward = model.reward_mean(params, state if t else root, actions)
        total = total + factor * alive[None] * reward
        state = model.step(params, state, actions)
        now = continue_prob(model, params, state, x.settings.loss.termination)
        alive = alive if now is None else alive * now
        factor = factor * discount
    values = x.values(state, None)
    total = jnp.broadcast_to(total, (total.shape[0], *values.shape[1:]))
    ended = jnp.broadcast_to(1.0 - alive, values.shape[1:])
    return bootstrap(x.settings, total, values, factor, ended)


def aux_targets(x: Inputs) -> Array:
    """One-step targets of the auxiliary values, `[G, T, B]`: each with its own discount.

    A Q critic follows the replay's reward and the policy's next action; a V critic the policy's
    action in the model (first dynamics head, mean of the reward heads).
    """
    model, params, critic = x.model, x.params, x.model.config.critic
    z = x.z[1:] if critic == "q" else x.z[:-1]
    action = model.act(*model.policy(params, z), x.noise.target_eps)
    if critic == "q":
        value = model.decode(model.aux_value(x.slow, z, action))
        reward, alive = x.batch.reward, 1.0 - x.batch.terminated
    else:
        reward = jnp.mean(model.reward_mean(params, z[None], action), axis=(0, 1))
        stepped = model.step(params, model.tile_heads(z), action)[0]
        value = model.decode(model.aux_value(x.slow, stepped))
        alive = continue_prob(model, params, stepped, x.settings.loss.termination)
        alive = jnp.ones_like(reward) if alive is None else alive
    gammas = jnp.asarray(x.settings.loss.aux_gammas).reshape(-1, 1, 1)
    return reward[None] + gammas * alive[None] * value


def value_targets(
    settings: Settings,
    model: WorldModel,
    state: TrainState,
    encoded: Array,
    batch: Batch,
    noise: Noise,
    weights: Array | None,
) -> tuple[ValueTarget, Array | None]:
    """The targets that `loss.value_target` names, and the auxiliary ones, without gradient.

    Args:
        encoded: latents `[T+1, B, L]` of a window's states.
        weights: of planner actions, `[T+1, B, N]`; None where they are not used.

    Returns:
        The target of the value heads, and those of auxiliary ones `[G, T, B]`, None without any.
    """
    # The online or the EMA policy acts in targets.
    policy = state.target_policy if settings.loss.td_ema_policy else state.params["policy"]
    params = {**state.params, "policy": policy}
    x = Inputs(settings, model, params, state.target_value, encoded, batch, noise, weights)
    target = VALUE_TARGETS[settings.loss.value_target, model.config.critic](x)
    aux = aux_targets(x._replace(slow=state.target_aux)) if settings.loss.aux_gammas else None
    return jax.tree.map(jax.lax.stop_gradient, (target, aux))
