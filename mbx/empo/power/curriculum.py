"""What changes over EMPO training: warm-up stages, beta_r ramp, rates, discounts, exploration.

Everything is a function of the learner's step, a number or a traced array."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import Array

NETWORKS = ("v_h_e", "x_h", "u_r", "q_r", "v_r")
RAMP_STAGE = 5


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Durations in learner steps; defaults are the original trainer's.
    Stages: 0 V_h^e alone, 1 also X_h, 2 also U_r, 3 also Q_r, 4 also V_r, 5 beta_r rises, 6 all.
    A stage whose network does not exist (`use_x_h`, ...) has no length.
    """

    steps: int = 100_000
    v_h_e_steps: int = 10_000
    x_h_steps: int = 10_000
    u_r_steps: int = 5_000
    q_r_steps: int = 10_000
    v_r_steps: int = 5_000
    ramp_steps: int = 20_000
    use_x_h: bool = True
    use_u_r: bool = False
    use_v_r: bool = False
    gamma_h_ramp: int = 0  # steps of a linear rise from `gamma_h_start`
    gamma_h_start: float = 0.0
    gamma_r_ramp: int = 0  # likewise, beginning with Q_r
    gamma_r_start: float = 0.0
    epsilon_start: float = 1.0
    epsilon_end: float = 0.01
    epsilon_steps: int = 10_000
    constant_fraction: float = 0.7  # share of `steps` before rates fall, at the ramp's end or later

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("steps") and value < 0:
                raise ValueError(f"curriculum.{field.name}={value}: must not be negative")

    @property
    def ends(self) -> tuple[int, ...]:
        """Last step (exclusive) of stages 0..5."""
        durations = (
            self.v_h_e_steps,
            self.x_h_steps if self.use_x_h else 0,
            self.u_r_steps if self.use_u_r else 0,
            self.q_r_steps,
            self.v_r_steps if self.use_v_r else 0,
            self.ramp_steps,
        )
        return tuple(itertools.accumulate(durations))

    @property
    def decay_start(self) -> float:
        """Step at which learning rates begin to fall."""
        return max(self.ends[RAMP_STAGE], self.constant_fraction * self.steps)


def stage(c: Curriculum, step: Array) -> Array:
    """Stage 0..6 at a step."""
    begun = [jnp.asarray(step) >= end for end in c.ends]
    return jnp.sum(jnp.stack(begun), axis=0).astype(jnp.int32)


def active(c: Curriculum, step: Array) -> Array:
    """`[..., 5]` bool: which of NETWORKS are trained."""
    now, exists = stage(c, step), (True, c.use_x_h, c.use_u_r, True, c.use_v_r)
    return jnp.stack([(now >= first) & one for first, one in enumerate(exists)], axis=-1)


def beta_r(c: Curriculum, step: Array, nominal: Array | float) -> Array:
    """0 in warm-up, then a sigmoid-shaped rise over `ramp_steps` to `nominal`."""
    since = jnp.asarray(step) - c.ends[RAMP_STAGE - 1]
    x = 6.0 * (since / max(c.ramp_steps, 1) - 0.5)
    low, high = jax.nn.sigmoid(-3.0), jax.nn.sigmoid(3.0)
    rise = jnp.clip((jax.nn.sigmoid(x) - low) / (high - low), 0.0, 1.0)
    return nominal * jnp.where(since < 0, 0.0, jnp.where(since >= c.ramp_steps, 1.0, rise))


def learning_rate(c: Curriculum, step: Array, base: float) -> Array:
    """Constant, then base * t0/t from t0 = `decay_start`."""
    start = max(c.decay_start, 1.0)  # a run that decays at once does so from its first update
    ratio = start / jnp.maximum(jnp.asarray(step), start)
    return base * jnp.where(jnp.asarray(step) < start, 1.0, ratio)


def gamma_h(c: Curriculum, step: Array, nominal: float) -> Array:
    """The humans' discount in force, rising from step 0 where a curriculum is set."""
    return _rise(jnp.asarray(step), c.gamma_h_ramp, c.gamma_h_start, nominal)


def gamma_r(c: Curriculum, step: Array, nominal: float) -> Array:
    """The robot's discount in force, rising from the start of Q_r's stage."""
    return _rise(jnp.asarray(step) - c.ends[2], c.gamma_r_ramp, c.gamma_r_start, nominal)


def epsilon(c: Curriculum, step: Array) -> Array:
    """Share of uniformly random actions, linear."""
    done = jnp.clip(jnp.asarray(step) / max(c.epsilon_steps, 1), 0.0, 1.0)
    return c.epsilon_start + done * (c.epsilon_end - c.epsilon_start)


def _rise(since: Array, length: int, start: float, nominal: float) -> Array:
    if not length:
        return jnp.full(since.shape, nominal)
    return start + (nominal - start) * jnp.clip(since / length, 0.0, 1.0)
