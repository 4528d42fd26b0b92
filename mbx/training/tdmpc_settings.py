"""`configs/tdmpc.py` and its kin as the TD-MPC agent's settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mbx import mppi, returns
from mbx.agents import tdmpc
from mbx.envs.base import EnvSpec
from mbx.tasks import TaskSet
from mbx.training.settings import section
from mbx.world_model import WorldModelConfig, sized

Config = Mapping[str, Any]

# Tasks that only ever end by their time limit: no termination head is needed for them.
_NEVER_TERMINATE = ("Pendulum-v1", "Reacher-misc", "Swimmer-misc", "HalfCheetah", "Swimmer-v")
_NEVER_TERMINATING_SUITES = ("dmc", "playground")
# Fields of a planner's section that say how plans are scored.
_SCORING = ("std_coef", "aggregate", "disagreement", "discount")


def tdmpc_config(config: Config, spec: EnvSpec) -> tdmpc.TDMPCConfig:
    """`configs/tdmpc.py` and its kin as the agent's own settings."""
    if spec.discrete:
        raise ValueError(
            f"env.name={spec.name!r} has discrete actions: agent 'tdmpc' needs continuous ones, "
            "for example gymnax:Pendulum-v1"
        )
    _check_capacity(config)
    loss, stored = dict(config["loss"]), config["replay"]
    discount = _discount(loss.pop("discount"), spec)
    loss["aux_gammas"] = tuple(loss["aux_gammas"])
    return tdmpc.TDMPCConfig(
        world=_world(config, spec),
        discount=discount,
        keep_targets=stored["keep_targets"] or None,
        target_actions_dtype=stored["actions_dtype"],
        target_values_dtype=stored["values_dtype"],
        total_updates=_total_updates(config, spec),
        **_planners(config),
        **_reanalyze(config["reanalyze"]),
        **loss,
        **config["optimizer"],
    )


def _world(config: Config, spec: EnvSpec) -> WorldModelConfig:
    model = config["model"]
    return sized(
        model["size"],
        obs_shape=tuple(spec.obs_shape),
        action_dim=spec.action_dim,
        num_values=model["num_values"] or None,
        num_aux=len(config["loss"]["aux_gammas"]),
        aux_joint=config["loss"]["aux_joint"],
        episodic=any(is_episodic(model["episodic"], s.name) for s in spec.tasks or (spec,)),
        tasks=_task_set(spec, model["task_dim"]),
        **{
            name: model[name]
            for name in (
                "critic",
                "policy",
                "num_bins",
                "bin_min",
                "bin_max",
                "log_std_min",
                "log_std_max",
                "dropout",
                "dtype",
                "num_dynamics",
                "num_rewards",
                "prior_scale",
                "prior_div",
            )
        },
    )


def _planners(config: Config) -> dict[str, Any]:
    """Settings of the acting and the training planner: search, scoring, and what is the agent's."""
    planner, training = dict(config["planner"]), dict(config["training_planner"])
    own = {
        name: planner.pop(name)
        for name in (
            "num_proposals",
            "proposal_noise",
            "evaluation_selection",
            "prior_start",
            "prior_updates",
        )
    }
    scoring = tdmpc.Scoring(**{name: planner.pop(name) for name in _SCORING})
    return dict(
        scoring=scoring,
        evaluation_scoring=dataclasses.replace(
            scoring, std_coef=planner.pop("evaluation_std_coef")
        ),
        target_scoring=tdmpc.Scoring(**{name: training.pop(name) for name in _SCORING}),
        planner_horizon=planner.pop("horizon"),
        target_horizon=training.pop("horizon"),
        stored_targets=training.pop("enabled"),
        planner=section("planner", mppi.MPPIConfig, planner),
        training_planner=section("training_planner", mppi.MPPIConfig, training),
        **own,
    )


def _reanalyze(reanalyze: Config) -> dict[str, Any]:
    current = reanalyze["enabled"] and reanalyze["current_batch"]
    return dict(
        reanalyze_batch=reanalyze["batch_size"],
        stale_exponent=reanalyze["stale_exponent"],
        reanalyze_slices=reanalyze["slices"],
        reanalyze_current=reanalyze["interval"] if current else 0,
    )


def _check_capacity(config: Config) -> None:
    capacity, reanalyze = config["replay"]["capacity"], config["reanalyze"]
    if reanalyze["enabled"] and reanalyze["batch_size"] > capacity:
        raise ValueError(
            f"reanalyze.batch_size={reanalyze['batch_size']} exceeds replay.capacity={capacity}: "
            "lower the one or raise the other"
        )
    batch = config["loss"]["batch_size"]
    if batch > capacity:
        raise ValueError(f"loss.batch_size={batch} exceeds replay.capacity={capacity}: lower it")


def _task_set(spec: EnvSpec, embedding_dim: int) -> TaskSet | None:
    if not spec.tasks:
        return None
    names, dims = zip(*((task.name, task.action_dim) for task in spec.tasks), strict=True)
    return TaskSet(names, dims, embedding_dim)


def _discount(given: float, spec: EnvSpec) -> float | tuple[float, ...]:
    """As given, or by the episode length; one a task where there are several."""
    if not 0.0 <= given < 1.0:
        raise ValueError(f"loss.discount={given}: must lie in (0, 1), or 0 to derive it")
    lengths = [task.episode_length for task in spec.tasks or (spec,)]
    each = tuple(float(given or returns.discount_from_episode_length(n)) for n in lengths)
    return each if spec.tasks else each[0]


def _total_updates(config: Config, spec: EnvSpec) -> int:
    """Learner updates of the whole run, which schedules are shares of."""
    train = config["train"]
    steps = max(train["steps"] - train["seed_steps"], 0) // spec.action_repeat
    return max(int(steps * train["utd_ratio"]) + train["pretrain_updates"], 1)


def is_episodic(setting: str | bool, env_name: str) -> bool:
    """Whether to learn a termination head: as told, or by what the task can do."""
    if str(setting).lower() in ("true", "false"):
        return str(setting).lower() == "true"
    if setting != "auto":
        raise ValueError(f"model.episodic={setting!r}: choose auto, True or False")
    suite, _, task = env_name.partition(":")
    if suite in _NEVER_TERMINATING_SUITES:
        return False
    return not any(task.startswith(name) for name in _NEVER_TERMINATE)
