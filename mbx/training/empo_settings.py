"""`configs/empo.py` as the EMPO agent's settings, and the world it is about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mbx.agents import empo
from mbx.agents.base import Agent
from mbx.agents.empo.diagnostics import make_diagnostics
from mbx.envs.base import EnvSpec
from mbx.envs.empo import TIME_LIMIT, NamedWorld, named_world
from mbx.power.curriculum import Curriculum
from mbx.power.equations import PowerParams
from mbx.power.worlds import World
from mbx.training.settings import section

Config = Mapping[str, Any]


def empo_world(spec: EnvSpec) -> NamedWorld:
    """The world of an `empo:` environment. Raises ValueError for any other environment."""
    suite, _, name = spec.name.partition(":")
    if suite != "empo":
        raise ValueError(
            f"env.name={spec.name!r}: agent 'empo' needs a world that lists its successors, for "
            "example empo:grid_rock_1h1r"
        )
    return named_world(name.partition("@")[0])


def empo_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent, with its diagnostics."""
    own, world = empo_config(config, spec), empo_world(spec).world
    agent, episodes = empo.make_agent(own, world), config["eval"]["review_episodes"]
    if not episodes:
        return agent
    length = config["env"]["episode_length"] or TIME_LIMIT
    return agent._replace(
        diagnostics=make_diagnostics(own, world, episodes=episodes, length=length)
    )


def _capacity(room: float, loss: Mapping[str, Any], world: World) -> int:
    """Successors of a whole batch: `room` a joint action; 0 where that is all there can be."""
    if room < 0:
        raise ValueError(f"loss.room={room}: must not be negative (0 is every slot)")
    exact = loss["human_expectation"] == "exact"
    drawn = loss["human_samples"] if loss["human_expectation"] == "fresh" else 1
    profiles = world.num_actions**world.num_humans if exact else drawn
    pairs = loss["batch_size"] * profiles * world.num_actions**world.num_robots
    return math.ceil(room * pairs) if room < world.max_successors else 0


def empo_config(config: Config, spec: EnvSpec) -> empo.EmpoConfig:
    """`configs/empo.py` as the agent's own settings."""
    model, setting = config["model"], dict(config["power"])
    source, own = setting.pop("source"), empo_world(spec).params
    if source not in ("world", "config"):
        raise ValueError(f"power.source={source!r}: choose world or config")
    curriculum = section(
        "curriculum", Curriculum, {**config["curriculum"], "use_x_h": model["x_h"] == "network"}
    )
    loss = dict(config["loss"])
    loss["capacity"] = _capacity(loss.pop("room"), loss, empo_world(spec).world)
    loss["target_interval"] = loss["target_interval"] or (1 if model["kind"] == "tables" else 20)
    return section(
        "model, loss or optimizer",
        empo.EmpoConfig,
        {
            "params": own if source == "world" and own is not None else PowerParams(**setting),
            "curriculum": curriculum,
            "stored_successors": spec.name.endswith("@stored"),
            **model,
            **loss,
            **config["optimizer"],
        },
    )
