"""From settings to the agent that they ask for. Nothing here loads JAX before an agent is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mbx.agents.settings import RunSettings
from mbx.config import load as read  # noqa: F401
from mbx.config.agents import maker
from mbx.config.agents import register as register
from mbx.config.agents import settings_class as settings_class

if TYPE_CHECKING:
    from mbx.agents.base import Agent
    from mbx.types import EnvSpec


def build_agent(settings: RunSettings, spec: EnvSpec) -> Agent:
    """The agent that settings ask for, for an environment.

    Its functions check what they return while they are traced (`mbx.training.agent_check`). Raises
    ValueError, naming the setting, its value and the remedy, for those that do not fit.

    Examples:
        >>> spec = mbx.types.EnvSpec("toy:small", (3,), jnp.float32, 2, 50, 1)
        >>> agent = build.build_agent(build.settings_class("tdmpc")(), spec)
        >>> agent.act_without_planner is None
        False
    """
    from mbx.training.agent_check import checked  # loads JAX

    return checked(maker(settings.agent)(settings, spec), settings.agent, spec)
