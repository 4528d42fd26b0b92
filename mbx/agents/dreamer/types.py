"""Types that several files of the agent share: what is learned from, what is drawn, what results.

Axes: E environments, T time, B batch, N imagined trajectories, H imagined steps, D deter, S latents
of K classes, F features, A action dims.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct

from mbx import returns
from mbx.types import Array, Metrics, Params, Record

Observation = dict[str, Array]  # "vector" [..., D] and / or "image" [..., H, W, C]


class State(NamedTuple):
    """A latent state: deter `[..., D]`, stoch `[..., S, K]` one-hot."""

    deter: Array
    stoch: Array


class Batch(NamedTuple):
    """Replay rows `[T, B, ...]`; reward and flags arrive with a row.

    Attributes:
        obs: what is seen at the row.
        action: the action that led to the row, `[T, B, A]`.
        reward: float32.
        is_first, is_last, terminated: bool.
    """

    obs: Observation
    action: Array
    reward: Array
    is_first: Array
    is_last: Array
    terminated: Array


class Given(NamedTuple):
    """A draw that is the sample itself, where uniform or normal numbers would make one."""

    sample: Array


class Noise(NamedTuple):
    """Random numbers of an update; each may be `Given` samples instead.

    Attributes:
        posterior: uniform, `[T, B, S]`.
        prior: uniform, `[H, N, S]`.
        action: what `policy.draw` makes, `[H + 1, N, ...]`.
    """

    posterior: Array | Given
    prior: Array | Given
    action: Array | Given


@flax.struct.dataclass
class TrainState(Record):
    """All that learning changes.

    Attributes:
        params: "model" (encoder, rssm, decoder, reward, continue), "actor", "critic".
        slow_critic: moving average of the critic.
        opt_state: of every group of parameters.
        ema: percentiles of imagined returns.
        step: int32, updates made.
    """

    params: Params
    slow_critic: Params
    opt_state: Params
    ema: returns.ReturnEMA
    step: Array


@flax.struct.dataclass
class ActorState(Record):
    """Latent state and the action taken at it, `[E, ...]`."""

    deter: Array
    stoch: Array
    action: Array


class Observed(NamedTuple):
    """States `[T, B, ...]` and the raw logits `[T, B, S, K]` of posterior and prior."""

    states: State
    posterior: Array
    prior: Array


class ModelOutput(NamedTuple):
    """Losses per row by name `[T, B]`, the observed sequence, its features `[T, B, F]`, metrics."""

    losses: dict[str, Array]
    observed: Observed
    features: Array
    metrics: Metrics


class Imagined(NamedTuple):
    """features `[H+1, N, F]`, actions `[H+1, N, A]`, rewards and continues `[H+1, N]`.
    Row 0 of the rewards is unused; row 0 of the continues is the replay row's own, or predicted.
    """

    features: Array
    actions: Array
    rewards: Array
    continues: Array


class Behaviour(NamedTuple):
    """Losses per row: actor, critic `[H, N]`; lambda returns `[H, N]`; moved ReturnEMA; metrics."""

    actor: Array
    critic: Array
    returns: Array
    ema: returns.ReturnEMA
    metrics: Metrics


class Step(NamedTuple):
    """What one learner step computed.

    Attributes:
        grads, params, opt_state: gradients, moved parameters and optimiser states by group.
        output: the world model's.
        result: the behaviour's.
        terms: the behaviour's losses by name.
        metrics: scalars to log of both.
    """

    grads: Params
    params: Params
    opt_state: Params
    output: ModelOutput
    result: Behaviour
    terms: dict[str, Array]
    metrics: Metrics
