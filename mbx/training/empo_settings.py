"""`configs/empo.py` as the EMPO agent's settings, and the world it is about."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mbx.agents import empo
from mbx.curriculum import Curriculum
from mbx.envs.base import EnvSpec
from mbx.envs.empo import NamedWorld, named_world
from mbx.power_equations import PowerParams
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
    loss["target_interval"] = loss["target_interval"] or (1 if model["kind"] == "tables" else 20)
    return section("model, loss or optimizer", empo.EmpoConfig, {
        "params": own if source == "world" and own is not None else PowerParams(**setting),
        "curriculum": curriculum,
        "stored_successors": spec.name.endswith("@stored"),
        **model, **loss, **config["optimizer"],
    })  # fmt: skip
