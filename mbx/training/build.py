"""From settings to the agent that they ask for. Nothing here loads JAX before an agent is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mbx.agents.settings import RunSettings
from mbx.config.agents import maker, read
from mbx.config.agents import register as register
from mbx.config.agents import settings_class as settings_class

if TYPE_CHECKING:
    from mbx.agents.base import Agent
    from mbx.types import EnvSpec

Config = RunSettings | Mapping[str, Any]


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
    return checked(maker(settings.agent)(settings, spec), settings.agent, spec)
