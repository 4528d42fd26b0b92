"""Agents by name: from a configuration to its settings, and from them to the agent.

An agent is a package (of `PACKAGES`) with `make_agent(settings, spec)` and, in its module
`settings`, the class `Settings`. `register` adds one's own (examples/own_agent.py). Nothing here
loads JAX before an agent is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from mbx import extensions
from mbx.agents.settings import RunSettings
from mbx.settings import from_dict

if TYPE_CHECKING:
    from mbx.agents.base import Agent
    from mbx.types import EnvSpec

Config = RunSettings | Mapping[str, Any]
MakeAgent = Callable[[Any, "EnvSpec"], "Agent"]

PACKAGES = {"tdmpc": "mbx.agents.tdmpc", "dreamer": "mbx.agents.dreamer", "empo": "mbx.empo.agent"}
_REGISTERED: dict[str, tuple[type[RunSettings], MakeAgent]] = {}


def register(name: str, settings: type[RunSettings], make_agent: MakeAgent) -> None:
    """Add an agent of one's own: what `agent=NAME` stands for in a configuration.

    Examples:
        >>> build.register("mine", Settings, make_agent)  # doctest: +SKIP
    """
    _REGISTERED[name] = settings, make_agent


def settings_class(name: str) -> type[RunSettings]:
    """The class of an agent's settings. Raises ValueError for an unknown agent.

    Examples:
        >>> build.settings_class("tdmpc")().agent
        'tdmpc'
    """
    if name in _REGISTERED:
        return _REGISTERED[name][0]
    if name not in PACKAGES:
        raise ValueError(
            f"config.agent={name!r}: choose one of {(*PACKAGES, *_REGISTERED)}, or register your "
            "own before"
        )
    return importlib.import_module(f"{PACKAGES[name]}.settings").Settings


def read(config: Config) -> RunSettings:
    """The settings that nested mappings (of a configuration file, say) hold, checked.

    Settings come back as they are. Raises ValueError, naming the setting, its value and the remedy,
    for those that no run can have.

    Examples:
        >>> build.read(presets.load("tdmpc").to_dict()).env.name
        'gymnax:Pendulum-v1'
    """
    if isinstance(config, RunSettings):
        return config
    extensions.require(config.get("imports", ()), "config.imports")
    return from_dict(settings_class(config.get("agent", ""))(), config)


def build_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent that a configuration asks for, for an environment.

    Its functions check what they return while they are traced (`mbx.training.agent_check`). Raises
    ValueError, naming the setting, its value and the remedy, for those that do not fit.

    Examples:
        >>> spec = mbx.types.EnvSpec("toy:small", (3,), jnp.float32, 2, 50, 1)
        >>> agent = build.build_agent(presets.load("tdmpc").to_dict(), spec)
        >>> agent.act_without_planner is None
        False
    """
    from mbx.training.agent_check import checked  # loads JAX

    settings = read(config)
    if settings.agent in _REGISTERED:
        make_agent = _REGISTERED[settings.agent][1]
    else:
        make_agent = importlib.import_module(PACKAGES[settings.agent]).make_agent
    return checked(make_agent(settings, spec), settings.agent, spec)
