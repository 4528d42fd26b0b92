"""EMPO phase 2: a robot policy that softly maximises the power of the humans around it.

`make_agent(settings, spec)`; the theory is in `mbx.empo.power`, sources in docs/sources.md#empo."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mbx.empo.agent.agent import make_agent, resolve
    from mbx.empo.agent.types import Problem, TrainState

__all__ = ["Problem", "TrainState", "make_agent", "resolve"]

_HOMES = {"make_agent": "agent", "Problem": "types", "TrainState": "types", "resolve": "agent"}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used: `mbx.empo.agent.settings` loads no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
