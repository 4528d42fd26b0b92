"""What passes between the parts of one learner step.

Axes: T transitions of a window and S = T+1 states, B batch windows, N planner actions, n of them in
use, H dynamics heads, V value heads, K bins, L latent dims, A action dims.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx import returns
from mbx.types import Array, Params, Record

if TYPE_CHECKING:
    from mbx import replay


class Rows(NamedTuple):
    """Rows of a batch that count in a loss, with their number in the whole batch.

    Parts of a batch on several devices have their own mask and the whole batch's count, so that
    their means add up to the whole batch's mean, and no loss has to know of devices.

    Attributes:
        mask: 1 or 0, `[T, B]`.
        count: rows of the whole batch in each step, `[T]`.
        rho: weight of a step relative to the one before it.
    """

    mask: Array
    count: Array
    rho: float

    def mean(self, x: Array) -> Array:
        """Mean over time of rho^t times the batch mean (TD-MPC2): `[T, B]` -> scalar."""
        per_step = jnp.sum(x * self.mask, axis=1) / jnp.maximum(self.count, 1.0)
        return jnp.mean(self.rho ** jnp.arange(x.shape[0]) * per_step)

    def even(self, x: Array) -> Array:
        """Mean of all rows: `[T, B]` -> scalar."""
        return jnp.sum(x * self.mask) / jnp.maximum(jnp.sum(self.count), 1.0)

    def first(self, steps: int) -> Rows:
        """The rows of the first `steps` steps."""
        return Rows(self.mask[:steps], self.count[:steps], self.rho)

    def repeated(self, times: int) -> Rows:
        """The rows `times` times side by side."""
        return Rows(jnp.concatenate([self.mask] * times, axis=1), times * self.count, self.rho)


class Weights(NamedTuple):
    """Which rows of a batch count, in which loss.

    Attributes:
        rows: transitions, T steps.
        states: those that they lead from and to, T+1 steps.
        values: states with a value target, T steps, or T+1 with `loss.value_last_state`.
        plans: states with a plan, T+1 steps; None without plans.
    """

    rows: Rows
    states: Rows
    values: Rows
    plans: Rows | None


class Batch(NamedTuple):
    """Windows of the replay.

    Attributes:
        obs: `[T+1, B, ...]`.
        action: `[T, B, A]`.
        reward: `[T, B]`, of that action.
        terminated: `[T, B]`, 1 where it ended the episode by itself.
        mask: `[T, B]`, 0 for transitions behind the episode's end.
        plan_actions: actions that the training planner found in each state, `[T+1, B, N, A]`; None,
            as all below, where the agent uses none.
        plan_values: their values, `[T+1, B, N]`.
        plan_valid: `[T+1, B]`, False where a row has no plan.
        plan_step: updates made when it was planned, `[T+1, B]`; None where nothing is stored.
        expert: mean and standard deviation to distil, `[T+1, B, 2, A]`.
    """

    obs: Array
    action: Array
    reward: Array
    terminated: Array
    mask: Array
    plan_actions: Array | None = None
    plan_values: Array | None = None
    plan_valid: Array | None = None
    plan_step: Array | None = None
    expert: Array | None = None


def make_batch(sample: replay.Sample) -> Batch:
    """Windows of rows, in which reward and flags arrive with the row, as a learner's batch."""
    rows, plans = sample.rows, sample.targets
    planned: dict[str, Array | None] = {}
    if plans is not None:
        planned = dict(
            plan_actions=plans.actions,
            plan_values=plans.values,
            plan_valid=plans.valid,
            plan_step=plans.step,
            expert=plans.expert,
        )
    return Batch(
        obs=rows["obs"],
        action=rows["action"][:-1],
        reward=rows["reward"][1:],
        terminated=rows["terminated"][1:].astype(jnp.float32),
        mask=sample.mask.astype(jnp.float32),
        **planned,
    )


class Noise(NamedTuple):
    """Every random number of one update.

    Attributes:
        target_eps: of the TD target's action, `[T, B, A]`.
        target_heads: value heads in targets, None for all.
        policy_eps: of the policy loss, `[S, B', A]`.
        policy_heads: value heads in the policy loss, None for all.
        dropout: a key for the values' loss, or None.
        rollout_eps: of imagined rollouts, `[td_horizon, T, B, n, A]`.
        dynamics_head: index of the dynamics head in targets, None for all.
        optimist_eps: as policy_eps, for the second policy.
        policy_dropout, optimist_dropout: keys for the values in the policies' losses, or None.
    """

    target_eps: Array | None
    target_heads: Array | None
    policy_eps: Array | None
    policy_heads: Array | None
    dropout: Array | None = None
    rollout_eps: Array | None = None
    dynamics_head: Array | None = None
    optimist_eps: Array | None = None
    policy_dropout: Array | None = None
    optimist_dropout: Array | None = None


# The axis of each that is the batch's.
BATCH_AXES = Noise(
    target_eps=1, target_heads=None, policy_eps=1, policy_heads=None, rollout_eps=2, optimist_eps=1
)


class ValueTarget(NamedTuple):
    """What the value heads learn to predict.

    Attributes:
        samples: `[V', T, B, n]`; V' is 1 where the heads share them. T+1 states in place of T with
            `loss.value_last_state`.
        weights: of the samples, `[T, B, n]`, sum 1 over n.
    """

    samples: Array
    weights: Array

    def mean(self) -> Array:
        """`[T, B]`, over samples and heads."""
        return jnp.mean(jnp.sum(self.weights[None] * self.samples, axis=-1), axis=0)

    def two_hot(self, bins: Array) -> Array:
        """The mean of the samples' two-hot codes, `[V', T, B, K]`.

        Cross-entropy is linear in the target, so the mean over samples of the cross-entropies is
        the cross-entropy with the mean code: one instead of n.
        """
        weights = jnp.broadcast_to(self.weights, self.samples.shape)

        def add(code: Array, sample: tuple[Array, Array]) -> tuple[Array, None]:
            x, weight = sample
            return code + weight[..., None] * dist.two_hot(x, bins), None

        # One sample after another: a sum over an axis inside of [..., n, K] takes a processor
        # eight times as long.
        samples = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (self.samples, weights))
        dtype = jnp.result_type(weights, jnp.float32)
        none = jnp.zeros((*self.samples.shape[:-1], bins.shape[0]), dtype)
        return jax.lax.scan(add, none, samples)[0]


class ValueScales(NamedTuple):
    """The unit of values, in both forms: one of them moves (`loss.value_scale`)."""

    running: returns.RunningScale
    ema: returns.ReturnEMA


class Scales(NamedTuple):
    """Running scales of the policy losses' units: of values, of the KL, of the trust region."""

    value: ValueScales
    kl: returns.RunningScale
    trust: returns.RunningScale


class PolicyInputs(NamedTuple):
    """What the policy losses read, states of all dynamics heads in use side by side (B').

    Attributes:
        zs: latents `[S, B', L]`, without gradient.
        states: which of them count.
        eps: the policy's noise, `[S, B', A]`.
        heads: value heads in use, None for all.
        dropout: a key for their values, None for none.
        plans: which of them have a plan; None, as all below, where they are not in use.
        actions: the planner's, `[S, B', N, A]`.
        weights: of those, `[S, B', N]`.
        expert: mean and standard deviation, `[S, B', 2, A]`.
        behaviour: the replay's actions, `[T, B', A]`.
    """

    zs: Array
    states: Rows
    eps: Array
    heads: Array | None
    dropout: Array | None = None
    plans: Rows | None = None
    actions: Array | None = None
    weights: Array | None = None
    expert: Array | None = None
    behaviour: Array | None = None


@flax.struct.dataclass
class TrainState(Record):
    """All that learning changes; fields that the settings have no use for are None.

    Attributes:
        params: the world model's, with a second policy "optimist" where asked for.
        target_value, target_aux, target_policy: EMA copies.
        opt_state, policy_opt_state, optimist_opt_state: of model and values, of the policies.
        scale: running range of values.
        kl_scale, trust_scale: units of those losses.
        return_ema: percentiles of values.
        step: updates made, int32.
    """

    params: Params
    target_value: Params
    target_aux: Params | None
    target_policy: Params | None
    opt_state: Any
    policy_opt_state: Any
    optimist_opt_state: Any
    scale: returns.RunningScale
    kl_scale: returns.RunningScale
    trust_scale: returns.RunningScale
    return_ema: returns.ReturnEMA
    step: Array


@flax.struct.dataclass
class ActorState(Record):
    """What acting carries between steps where its planner is the expert.

    Attributes:
        mean: the plan's mean, a warm start for the next, `[E, T, A]`.
        gaussian: the expert's mean and standard deviation, `[E, 2, A]`.
        planned: whether there was a plan at all, `[E]`.
    """

    mean: Array
    gaussian: Array
    planned: Array
