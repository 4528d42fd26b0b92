"""What passes between the parts of one learner step.

Axes: T transitions of a window and S = T+1 states, B batch windows, N planner actions, n of them in
use, H dynamics heads, V value heads, K bins, L latent dims, A action dims, E environments.
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

    On several devices each part has its own mask and the whole batch's count, so that the parts'
    means add up to the whole batch's mean.
    """

    mask: Array  # 1 or 0, `[T, B]`
    count: Array  # rows of the whole batch in each step, `[T]`
    rho: float  # weight of a step relative to the one before it

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


class Weights(NamedTuple):
    """Which rows of a batch count in which loss."""

    rows: Rows  # transitions, T steps
    states: Rows  # T+1 steps
    values: Rows  # states with a value target, T steps, or T+1 with `loss.value_last_state`
    plans: Rows | None = None  # states with a plan, T+1 steps


class Batch(NamedTuple):
    """Windows of the replay."""

    obs: Array  # `[T+1, B, ...]`
    action: Array  # `[T, B, A]`
    reward: Array  # of that action, `[T, B]`
    terminated: Array  # 1 where the action ended the episode by itself, `[T, B]`
    mask: Array  # 0 for transitions after the episode's end, `[T, B]`
    plan_actions: Array | None = None  # the training planner's in each state, `[T+1, B, N, A]`
    plan_values: Array | None = None  # `[T+1, B, N]`
    plan_valid: Array | None = None  # False where a row has no plan, `[T+1, B]`
    plan_step: Array | None = None  # updates made when it was planned, `[T+1, B]`
    expert: Array | None = None  # mean and standard deviation to distil, `[T+1, B, 2, A]`


def make_batch(sample: replay.Sample) -> Batch:
    """A learner's batch of windows: a row stores the reward and flags it arrived with."""
    rows, plans = sample.rows, sample.targets
    batch = Batch(
        obs=rows["obs"],
        action=rows["action"][:-1],
        reward=rows["reward"][1:],
        terminated=rows["terminated"][1:].astype(jnp.float32),
        mask=sample.mask.astype(jnp.float32),
    )
    if plans is None:
        return batch
    planned = (plans.actions, plans.values, plans.valid, plans.step, plans.expert)
    return Batch(*batch[:5], *planned)


class Noise(NamedTuple):
    """Every random number of one update; None for heads: all of them."""

    target_eps: Array | None  # of the TD target's action, `[T, B, A]`
    target_heads: Array | None  # value heads in targets
    policy_eps: Array | None  # `[S, B, A]`
    policy_heads: Array | None  # value heads in the policy loss
    dropout: Array | None = None  # a key for the values' loss
    rollout_eps: Array | None = None  # of imagined rollouts, `[td_horizon, T, B, n, A]`
    dynamics_head: Array | None = None  # index of the dynamics head in targets
    optimist_eps: Array | None = None  # as policy_eps, for the second policy
    policy_dropout: Array | None = None  # a key for the values in the policy's loss
    optimist_dropout: Array | None = None


# The batch axis of each.
BATCH_AXES = Noise(
    target_eps=1, target_heads=None, policy_eps=1, policy_heads=None, rollout_eps=2, optimist_eps=1
)


class ValueTarget(NamedTuple):
    """What the value heads learn to predict."""

    samples: Array  # `[V', T or T+1, B, n]`; V' = 1 where the heads share them
    weights: Array  # of the samples, `[T or T+1, B, n]`, sum 1 over n

    def mean(self) -> Array:
        """Mean over samples and heads, `[T, B]`."""
        return jnp.mean(jnp.sum(self.weights[None] * self.samples, axis=-1), axis=0)

    def two_hot(self, bins: Array) -> Array:
        """The mean of the samples' two-hot codes, `[V', T, B, K]`.

        Cross-entropy is linear in the target: one with the mean code replaces n.
        """
        weights = jnp.broadcast_to(self.weights, self.samples.shape)

        def add(code: Array, sample: tuple[Array, Array]) -> tuple[Array, None]:
            x, weight = sample
            return code + weight[..., None] * dist.two_hot(x, bins), None

        # One sample at a time: a sum over the inner axis of [..., n, K] is 8x slower on a CPU.
        samples = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 0), (self.samples, weights))
        dtype = jnp.result_type(weights, jnp.float32)
        none = jnp.zeros((*self.samples.shape[:-1], bins.shape[0]), dtype)
        return jax.lax.scan(add, none, samples)[0]


class Scales(NamedTuple):
    """Units of the policy losses: fields of the train state, as `TrainState` describes them."""

    scale: returns.RunningScale
    kl_scale: returns.RunningScale
    trust_scale: returns.RunningScale
    return_ema: returns.ReturnEMA


class PolicyInputs(NamedTuple):
    """Inputs of the policy losses."""

    zs: Array  # latents `[S, B, L]`, without gradient
    states: Rows  # those that count
    eps: Array  # the policy's noise, `[S, B, A]`
    heads: Array | None  # value heads in use, None for all
    dropout: Array | None = None  # a key for the values
    plans: Rows | None = None  # states that have a plan
    actions: Array | None = None  # the planner's, `[S, B, N, A]`
    weights: Array | None = None  # `[S, B, N]`
    expert: Array | None = None  # mean and standard deviation, `[S, B, 2, A]`
    behaviour: Array | None = None  # the replay's actions, `[T, B, A]`


@flax.struct.dataclass
class TrainState(Record):
    """All that learning changes; fields that the settings do not use are None."""

    params: Params  # the world model's, with a second policy "optimist" where enabled
    target_value: Params  # EMA copies
    target_aux: Params | None
    target_policy: Params | None
    opt_state: Any  # of model and values
    policy_opt_state: Any
    optimist_opt_state: Any
    scale: returns.RunningScale  # running range of values, their unit in the policy's loss
    kl_scale: returns.RunningScale  # units of the KL to an expert and to the EMA policy
    trust_scale: returns.RunningScale
    return_ema: returns.ReturnEMA  # percentiles of values, with `loss.value_scale="return_ema"`
    step: Array  # updates made, int32


@flax.struct.dataclass
class ActorState(Record):
    """What acting carries between steps where the acting planner is the expert."""

    mean: Array  # the plan's mean, a warm start for the next, `[E, T, A]`
    gaussian: Array  # the expert's mean and standard deviation, `[E, 2, A]`
    planned: Array  # whether there was a plan, `[E]`


@flax.struct.dataclass
class KeptPlan(Record):
    """What acting carries between steps where it follows a plan (`planner.reuse`)."""

    mean: Array  # the plan from the next step on, `[E, T, A]`
    std: Array
    expected: Array  # latent that it leads to next, `[E, L]`
    left: Array  # steps that it has, int32 `[E]`
