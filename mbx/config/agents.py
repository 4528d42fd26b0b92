"""Agents by name: the class of their settings and the function that makes them.

An agent is a package (of `PACKAGES`) with `make_agent(settings, spec)` and, in its module
`settings`, the class `Settings`; `register` adds a custom one (examples/own_agent.py). Nothing here
loads JAX before an agent is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mbx.agents.settings import RunSettings

if TYPE_CHECKING:
    from mbx.agents.base import Agent
    from mbx.types import EnvSpec

MakeAgent = Callable[[Any, "EnvSpec"], "Agent"]

PACKAGES = {"tdmpc": "mbx.agents.tdmpc", "dreamer": "mbx.agents.dreamer", "empo": "mbx.empo.agent"}
_REGISTERED: dict[str, tuple[type[RunSettings], MakeAgent]] = {}


def register(name: str, settings: type[RunSettings], make_agent: MakeAgent) -> None:
    """Add a custom agent, selected by `agent=NAME` in a configuration."""
    _REGISTERED[name] = settings, make_agent


def settings_class(name: str) -> type[RunSettings]:
    """The class of an agent's settings. Raises ValueError for an unknown agent."""
    if name in _REGISTERED:
        return _REGISTERED[name][0]
    if name not in PACKAGES:
        raise ValueError(
            f"config.agent={name!r}: choose one of {(*PACKAGES, *_REGISTERED)}, or register your "
            "own before"
        )
    return importlib.import_module(f"{PACKAGES[name]}.settings").Settings


def maker(name: str) -> MakeAgent:
    """The function that makes an agent of its settings and a task."""
    if name in _REGISTERED:
        return _REGISTERED[name][1]
    return importlib.import_module(PACKAGES[name]).make_agent
