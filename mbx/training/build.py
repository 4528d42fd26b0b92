"""From a configuration to an agent and a schedule, with every mistake told before any compile."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from mbx import dreamer_networks, mppi, returns
from mbx.agents import dreamer, empo, tdmpc
from mbx.agents.base import Agent
from mbx.curriculum import Curriculum
from mbx.envs.base import EnvSpec
from mbx.envs.empo import NamedWorld, named_world
from mbx.power_equations import PowerParams
from mbx.training.loop import Schedule
from mbx.world_model import sized

Config = Mapping[str, Any]

# Tasks that only ever end by their time limit: no termination head is needed for them.
_NEVER_TERMINATE = ("Pendulum-v1", "Reacher-misc", "Swimmer-misc", "HalfCheetah", "Swimmer-v")
_NEVER_TERMINATING_SUITES = ("dmc", "playground")
# Fields of a planner's section that say how plans are scored.
_SCORING = ("std_coef", "aggregate", "disagreement", "discount")


def build_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent that `config["agent"]` names, for an environment.

    Raises ValueError, naming the field, the value and what would do, for impossible settings.
    """
    builders = {
        "tdmpc": lambda: tdmpc.make_agent(tdmpc_config(config, spec)),
        "empo": lambda: empo.make_agent(empo_config(config, spec), empo_world(spec).world),
        "dreamer": lambda: dreamer.make_agent(dreamer_config(config, spec)),
    }
    if config["agent"] not in builders:
        raise ValueError(f"config.agent={config['agent']!r}: choose one of {tuple(builders)}")
    return builders[config["agent"]]()


def tdmpc_config(config: Config, spec: EnvSpec) -> tdmpc.TDMPCConfig:
    """`configs/tdmpc.py` and its kin as the agent's own settings."""
    if spec.discrete:
        raise ValueError(
            f"env.name={spec.name!r} has discrete actions: agent 'tdmpc' needs continuous ones, "
            "for example gymnax:Pendulum-v1"
        )
    model, planner = config["model"], dict(config["planner"])
    training, reanalyze, loss = (
        dict(config["training_planner"]), config["reanalyze"], dict(config["loss"]),
    )  # fmt: skip
    world = sized(
        model["size"],
        obs_shape=tuple(spec.obs_shape),
        action_dim=spec.action_dim,
        num_values=model["num_values"] or None,
        num_aux=len(config["loss"]["aux_gammas"]),
        aux_joint=config["loss"]["aux_joint"],
        episodic=is_episodic(model["episodic"], spec.name),
        **{name: model[name] for name in (
            "critic", "policy", "num_bins", "bin_min", "bin_max", "log_std_min", "log_std_max",
            "dropout", "dtype", "num_dynamics", "num_rewards", "prior_scale", "prior_div",
        )},
    )  # fmt: skip
    own = {name: planner.pop(name) for name in (
        "horizon", "num_proposals", "proposal_noise", "evaluation_selection", "prior_start",
        "prior_updates",
    )}  # fmt: skip
    scoring = tdmpc.Scoring(**{name: planner.pop(name) for name in _SCORING})
    careful = dataclasses.replace(scoring, std_coef=planner.pop("evaluation_std_coef"))
    imagined = tdmpc.Scoring(**{name: training.pop(name) for name in _SCORING})
    stored, target_horizon = training.pop("enabled"), training.pop("horizon")
    batch = loss["batch_size"]
    capacity = config["replay"]["capacity"]
    if reanalyze["enabled"] and reanalyze["batch_size"] > capacity:
        raise ValueError(
            f"reanalyze.batch_size={reanalyze['batch_size']} exceeds replay.capacity={capacity}: "
            "lower the one or raise the other"
        )
    if batch > capacity:
        raise ValueError(f"loss.batch_size={batch} exceeds replay.capacity={capacity}: lower it")
    loss["aux_gammas"] = tuple(loss["aux_gammas"])
    discount = loss.pop("discount") or returns.discount_from_episode_length(spec.episode_length)
    if not 0.0 < discount < 1.0:
        raise ValueError(f"loss.discount={discount}: must lie in (0, 1), or 0 to derive it")
    return tdmpc.TDMPCConfig(
        world=world,
        discount=float(discount),
        planner=_section("planner", mppi.MPPIConfig, planner),
        training_planner=_section("training_planner", mppi.MPPIConfig, training),
        scoring=scoring,
        evaluation_scoring=careful,
        target_scoring=imagined,
        planner_horizon=own.pop("horizon"),
        target_horizon=target_horizon,
        **own,
        stored_targets=stored,
        keep_targets=config["replay"]["keep_targets"] or None,
        target_actions_dtype=config["replay"]["actions_dtype"],
        target_values_dtype=config["replay"]["values_dtype"],
        reanalyze_batch=reanalyze["batch_size"],
        stale_exponent=reanalyze["stale_exponent"],
        reanalyze_slices=reanalyze["slices"],
        total_updates=_total_updates(config, spec),
        **loss,
        **config["optimizer"],
    )


def _total_updates(config: Config, spec: EnvSpec) -> int:
    """Learner updates of the whole run, which schedules are shares of."""
    train = config["train"]
    steps = max(train["steps"] - train["seed_steps"], 0) // spec.action_repeat
    return max(int(steps * train["utd_ratio"]) + train["pretrain_updates"], 1)


def empo_world(spec: EnvSpec) -> NamedWorld:
    """The world of an `empo:` environment. Raises ValueError for any other environment."""
    suite, _, name = spec.name.partition(":")
    if suite != "empo":
        raise ValueError(
            f"env.name={spec.name!r}: agent 'empo' needs a world that lists its successors, for "
            "example empo:grid_rock_1h1r"
        )
    return named_world(name.partition("@")[0])


def empo_config(config: Config, spec: EnvSpec) -> empo.EmpoConfig:
    """`configs/empo.py` as the agent's own settings."""
    model, setting = config["model"], dict(config["power"])
    source, own = setting.pop("source"), empo_world(spec).params
    if source not in ("world", "config"):
        raise ValueError(f"power.source={source!r}: choose world or config")
    curriculum = _section(
        "curriculum", Curriculum, {**config["curriculum"], "use_x_h": model["x_h"] == "network"}
    )
    loss = dict(config["loss"])
    loss["target_interval"] = loss["target_interval"] or (1 if model["kind"] == "tables" else 20)
    return _section("model, loss or optimizer", empo.EmpoConfig, {
        "params": own if source == "world" and own is not None else PowerParams(**setting),
        "curriculum": curriculum,
        "stored_successors": spec.name.endswith("@stored"),
        **model, **loss, **config["optimizer"],
    })  # fmt: skip


def dreamer_model(config: Config, spec: EnvSpec) -> dreamer_networks.ModelConfig:
    """The world model, actor and critic for an environment; what is no image is a flat vector."""
    model, shape = dict(config["model"]), tuple(spec.obs_shape)
    size = model.pop("size")
    if len(shape) == 3:
        integers = np.issubdtype(np.dtype(spec.obs_dtype), np.integer)
        seen = dict(image_shape=shape, image_scale=255.0 if integers else 1.0)
    else:
        seen = dict(vector_dim=math.prod(shape), vector_shape=shape)
    if model["core"] == "dense":
        model["blocks"] = 1
    return dreamer_networks.sized(
        size, action_dim=spec.action_dim, factors=(spec.action_dim,) if spec.discrete else (),
        **seen, **model,
    )  # fmt: skip


def dreamer_config(config: Config, spec: EnvSpec) -> dreamer.DreamerConfig:
    """`configs/dreamer.py` and its kin as the agent's own settings."""
    loss, dreams, actor, critic, optimizer = (
        dict(config[name]) for name in ("loss", "imagination", "actor", "critic", "optimizer")
    )
    gradient = actor.pop("gradient")
    if gradient == "auto":
        gradient = "reinforce" if spec.discrete else "reparam"
    name = optimizer.pop("name")
    rows = config["replay"]["capacity"] // config["env"]["num_envs"]
    if loss["batch_length"] + 1 > rows:
        raise ValueError(
            f"loss.batch_length={loss['batch_length']} needs one row more than that in every "
            f"environment, but replay.capacity gives {rows}: raise it"
        )
    return dreamer.DreamerConfig(
        model=dreamer_model(config, spec),
        horizon=dreams["horizon"],
        dream_rows=dreams["rows"],
        continues=dreams["continues"],
        first_continue=dreams["first_continue"],
        actor_gradient=gradient,
        gamma=critic["gamma"],
        lambda_=critic["lambda_"],
        critic_tau=critic["tau"],
        critic_every=critic["target_update_freq"],
        critic_regularizer=critic["regularizer"],
        replay_loss=critic["replay_loss"],
        replay_coef=critic["replay_coef"],
        replay_gradient=critic["replay_gradient"],
        replay_context=config["replay"]["context"],
        fresh=config["replay"]["fresh"],
        evaluation=config["eval"]["action"],
        optimizer=name,
        **{key: tuple(x) if isinstance(x, list) else x for key, x in optimizer.items()},
        **loss,
        **actor,
    )


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


def build_schedule(config: Config, spec: EnvSpec, num_envs: int) -> Schedule:
    """Step counts of the configuration (environment steps) as agent steps.

    Raises ValueError when the seed phase is too short to sample from or the ratio is negative.
    """
    train, seed_steps = config["train"], config["train"]["seed_steps"] // spec.action_repeat
    if config["agent"] == "dreamer":
        return _dreamer_schedule(config, seed_steps, num_envs)
    reanalyze, needed = config["reanalyze"], 2 * num_envs
    if seed_steps < needed:
        raise ValueError(
            f"train.seed_steps={train['seed_steps']} gives {seed_steps} agent steps, but "
            f"{num_envs} environments need at least {needed} before learning: raise it"
        )
    if train["utd_ratio"] < 0:
        raise ValueError(f"train.utd_ratio={train['utd_ratio']}: must not be negative")
    return Schedule(
        seed_steps=seed_steps,
        pretrain_updates=train["pretrain_updates"],
        utd_ratio=train["utd_ratio"],
        reanalyze_interval=reanalyze["interval"] if reanalyze["enabled"] else 0,
        reanalyze_min_step=reanalyze["min_step"] // spec.action_repeat,
    )


def _dreamer_schedule(config: Config, seed_steps: int, num_envs: int) -> Schedule:
    """The train ratio counts replayed steps per agent step: divided by the rows of a batch."""
    train, loss = config["train"], config["loss"]
    needed = (loss["batch_length"] + 1) * num_envs
    if seed_steps < needed:
        raise ValueError(
            f"train.seed_steps={train['seed_steps']} gives {seed_steps} agent steps, but sequences "
            f"of {loss['batch_length']} rows in {num_envs} environments need {needed}: raise it"
        )
    if train["train_ratio"] < 0:
        raise ValueError(f"train.train_ratio={train['train_ratio']}: must not be negative")
    return Schedule(
        seed_steps=seed_steps,
        pretrain_updates=train["pretrain_updates"],
        utd_ratio=train["train_ratio"] / (loss["batch_size"] * loss["batch_length"]),
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )


def _section(name: str, kind: type, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"config.{name}: {error}") from error
