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
Losses = dict[str, Array]  # per row, before their coefficients
Norms = dict[str, returns.RunningNorm] | None  # "value", "advantage"


class State(NamedTuple):
    """A latent state: deter `[..., D]`, stoch `[..., S, K]` one-hot."""

    deter: Array
    stoch: Array


class Batch(NamedTuple):
    """Replay rows `[T, B, ...]`; reward and flags arrive with a row."""

    obs: Observation
    action: Array  # that led to the row, `[T, B, A]`
    reward: Array  # float32
    is_first: Array  # bool, as the next two
    is_last: Array
    terminated: Array


class Given(NamedTuple):
    """A draw that is the sample itself, where uniform or normal numbers would make one."""

    sample: Array


class Noise(NamedTuple):
    """Random numbers of an update; each may be `Given` samples instead."""

    posterior: Array | Given  # uniform, `[T, B, S]`
    prior: Array | Given  # uniform, `[H, N, S]`
    action: Array | Given  # what `policy.draw` makes, `[H + 1, N, ...]`


@flax.struct.dataclass
class TrainState(Record):
    """All that learning changes."""

    params: Params  # "model" (encoder, rssm, decoder, reward, continue), "actor", "critic"
    slow_critic: Params  # moving average of the critic
    opt_state: Params  # of every group of parameters
    ema: returns.ReturnEMA  # percentiles of imagined returns
    step: Array  # int32, updates made
    norms: Norms = None  # of values and advantages, as far as they are normalised


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
    """What the world model says about a batch; losses `[T, B]`, features `[T, B, F]`."""

    losses: Losses
    observed: Observed
    features: Array
    metrics: Metrics


class Imagined(NamedTuple):
    """Trajectories: features `[H+1, N, F]`, actions `[H+1, N, A]`, the others `[H+1, N]`."""

    features: Array
    actions: Array
    rewards: Array  # row 0 is unused
    continues: Array  # row 0 is the replay row's own, or predicted


class Behaviour(NamedTuple):
    """What imagination gives: losses "policy" and "value" `[H, N]`, "replay_value" `[K-1, B]`."""

    losses: Losses
    returns: Array  # lambda returns `[H, N]`
    ema: returns.ReturnEMA
    metrics: Metrics
    norms: Norms = None


class Step(NamedTuple):
    """What one learner step computed; the first three by group of parameters."""

    grads: Params
    params: Params
    opt_state: Params
    output: ModelOutput
    result: Behaviour
    metrics: Metrics
