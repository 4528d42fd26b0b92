"""The cross-entropy method, plain and improved (iCEM): planners with the signature of `mppi.plan`.

    plan = cem.icem(key, score, mean, std, config=cem.ICEMConfig(noise_beta=2.0))

Both refit a Gaussian to the elites of each round, with equal weights. iCEM also draws noise that is
correlated in time, keeps the best candidates of a round for the next, and updates mean and
deviation with momentum.

Axes: B states planned for at once, N candidates, P proposals, K elites, T horizon, A action dims.
Sources: Rubinstein 1999 (CEM); Pinneri et al. 2020, arXiv 2008.06389 (iCEM).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mbx import mppi
from mbx.mppi import Array, Key, MPPIConfig, Plan, Refit, ScoreFn
from mbx.planners import Planner


@dataclasses.dataclass(frozen=True)
class ICEMConfig(MPPIConfig):
    """Settings of iCEM in addition to those of every planner; `temperature` is not used."""

    noise_beta: float | Array = 2.0  # noise power at frequency f is f^-noise_beta; 0: white
    keep_elites: float = 0.3  # share of elites that stay candidates in the next round
    momentum: float | Array = 0.1  # share of the old mean and deviation in the new ones

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_ranges(
            ("noise_beta", "0 or more", lambda x: x >= 0.0),
            ("keep_elites", "0 to 1", lambda x: 0.0 <= x <= 1.0),
            ("momentum", "0 to 0.999", lambda x: 0.0 <= x <= 0.999),
        )


def cem(
    key: Key, score_fn: ScoreFn, mean: Array, std: Array, *, config: MPPIConfig, **given: Any
) -> Plan:
    """The cross-entropy method; arguments, result and errors are those of `mppi.plan`.
    Elites have equal weights: `config.temperature` is not used.
    """
    return mppi.plan(key, score_fn, mean, std, config=_equal_weights(config), **given)


def icem(
    key: Key, score_fn: ScoreFn, mean: Array, std: Array, *, config: ICEMConfig, **given: Any
) -> Plan:
    """iCEM; arguments, result and errors are those of `mppi.plan`.
    In contrast to the paper, every round has as many candidates (shapes are static), and elites are
    not kept for the next environment step.
    """
    return mppi.plan(
        key, score_fn, mean, std, method=_rounds, config=_equal_weights(config), **given
    )


def _rounds(frame: mppi.Frame) -> mppi.Rounds:
    config, horizon = frame.config, frame.mean.shape[1]
    mix = jnp.asarray(noise_matrix(horizon, config.noise_beta), jnp.float32)
    # The mean is one candidate of the last round.
    kept = min(round(config.keep_elites * config.num_elites), frame.num - 1)

    def sample(i: Array, last: Refit) -> Array:
        noise = jnp.einsum("ts,bnsa->bnta", mix, frame.draws.candidate(i))
        actions = last.mean[:, None] + last.std[:, None] * noise
        if kept:
            again = jnp.where(i == 0, actions[:, :kept], last.elite_actions[:, :kept])
            actions = jnp.concatenate([again, actions[:, kept:]], axis=1)
        middle = jnp.where((i == frame.rounds - 1) & (i > 0), last.mean, actions[:, -1])
        return jnp.concatenate([actions[:, :-1], middle[:, None]], axis=1)

    def blend(last: Refit, new: Refit) -> Refit:
        old = config.momentum
        return new._replace(
            mean=old * last.mean + (1.0 - old) * new.mean,
            std=old * last.std + (1.0 - old) * new.std,
        )

    return mppi.Rounds(sample, blend)


def noise_matrix(horizon: int, beta: ArrayLike) -> Any:
    """Matrix `[T, T]` that turns white noise over T steps into noise of power f^-beta.
    Every step keeps variance 1. Frequency 0 counts as the lowest other one.
    """
    own: Any = np if isinstance(beta, int | float) else jnp  # a traced one stays in the program
    scale = own.maximum(np.arange(horizon // 2 + 1), 1.0) ** (-beta / 2.0)
    matrix = own.fft.irfft(scale[:, None] * np.fft.rfft(np.eye(horizon), axis=0), horizon, axis=0)
    return matrix / own.linalg.norm(matrix, axis=1, keepdims=True)


def _equal_weights(config: MPPIConfig) -> MPPIConfig:
    return dataclasses.replace(config, temperature=0.0, temperature_mode="multiply")


PLANNERS = {"cem": Planner(cem), "icem": Planner(icem, ICEMConfig)}
