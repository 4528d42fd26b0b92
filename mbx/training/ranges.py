"""What numbers a configuration may hold: one table for the settings of all agents.

Every number must be finite and not negative, unless LIMITS says otherwise for its name. Checked
before anything is built, so that no run is lost to a sign. What depends on the task or on several
settings together is checked where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mbx.agents.dreamer.settings import Settings as DreamerSettings
from mbx.settings import from_dict

Config = Mapping[str, Any]

_AT_LEAST_ONE = (1, math.inf)
_POSITIVE = (1e-8, math.inf)
_SHARE = (0, 1)
_ANY = (-math.inf, math.inf)

# Least and most, by SECTION.NAME.
LIMITS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            "num_seeds",
            "distributed.heartbeat_timeout",
            "env.num_envs",
            "train.steps",
            "train.log_interval",
            "eval.episodes",
            "checkpoint.keep",
            "replay.capacity",
            "planner.horizon",
            "planner.iterations",
            "planner.num_samples",
            "planner.num_elites",
            "training_planner.horizon",
            "training_planner.iterations",
            "training_planner.num_samples",
            "training_planner.num_elites",
            "reanalyze.batch_size",
            "loss.batch_size",
            "loss.horizon",
            "loss.td_rollouts",
            "loss.td_horizon",
            "loss.num_heads",
            "loss.value_best_n",
            "optimizer.value_every",
            "optimizer.policy_every",
            "model.hidden",
            "model.num_bins",
        ),
        _AT_LEAST_ONE,
    ),
    **dict.fromkeys(
        (
            "planner.temperature",
            "planner.min_std",
            "training_planner.temperature",
            "training_planner.min_std",
            "loss.awr_temperature",
            "model.prior_div",
        ),
        _POSITIVE,
    ),
    **dict.fromkeys(
        (
            "model.dropout",
            "planner.discount",
            "training_planner.discount",
            "loss.rho",
            "loss.final_rho",
            "loss.lambda_",
            "loss.discount",
            "loss.jacobian",
            "loss.encoder_consistency_warmup",
            "loss.entropy_start",
            "loss.entropy_end",
            "optimizer.tau",
            "optimizer.policy_tau",
            "optimizer.encoder_lr_step_at",
            "power.gamma_h",
            "power.gamma_r",
            "curriculum.epsilon_start",
            "curriculum.epsilon_end",
            "curriculum.gamma_h_start",
            "curriculum.gamma_r_start",
            "curriculum.constant_fraction",
            "model.table_min_rate",
        ),
        _SHARE,
    ),
    **dict.fromkeys(
        (
            "model.bin_min",
            "model.bin_max",
            "model.log_std_min",
            "model.log_std_max",
            "planner.std_coef",
            "planner.evaluation_std_coef",
            "planner.disagreement",
            "training_planner.std_coef",
            "training_planner.disagreement",
            "loss.td_std_coef",
            "loss.policy_std_coef",
            "loss.optimist_std_coef",
            "loss.entropy_coef_end",
            "loss.entropy_action_dim_power",
            "power.terminal_v_r",
        ),
        _ANY,
    ),
    "distributed.process_id": (-1, math.inf),
}

# The first of two settings must not exceed the second.
ORDERED = (
    ("model.bin_min", "model.bin_max"),
    ("model.log_std_min", "model.log_std_max"),
    ("planner.min_std", "planner.max_std"),
    ("training_planner.min_std", "training_planner.max_std"),
    ("loss.entropy_start", "loss.entropy_end"),
)

CHOICES = {
    "matmul_precision": ("default", "high", "highest"),
    "replay.actions_dtype": ("float32", "bfloat16", "int8"),
    "replay.values_dtype": ("float32", "bfloat16"),
}


def check_ranges(config: Config) -> None:
    """Raises ValueError for the first setting that no run can have, with what it could be."""
    if config.get("agent") == "dreamer":
        from_dict(DreamerSettings(), config)
        return
    settings = dict(flat(config))
    for name, value in settings.items():
        for number in value if isinstance(value, list | tuple) else (value,):
            if isinstance(number, int | float) and not isinstance(number, bool):
                _check_number(name, number)
        if name in CHOICES and value not in CHOICES[name]:
            raise ValueError(f"config.{name}={value!r}: choose one of {CHOICES[name]}")
    for low, high in ORDERED:
        if low in settings and settings[low] > settings[high]:
            raise ValueError(
                f"config.{low}={settings[low]} is more than config.{high}={settings[high]}: "
                "exchange them"
            )


def _check_number(name: str, number: float) -> None:
    least, most = LIMITS.get(name, (0, math.inf))
    if not math.isfinite(number):
        raise ValueError(f"config.{name}={number}: give a finite number")
    if not least <= number <= most:
        allowed = f"at least {least:g}" + (f" and at most {most:g}" if most < math.inf else "")
        raise ValueError(f"config.{name}={number}: give {allowed}")


def flat(config: Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting as (SECTION.NAME, value), in the configuration's order."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
