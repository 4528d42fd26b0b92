"""DreamerV3: a recurrent world model learned from replay, behaviour learned from imagination.

Read one train step top to bottom: `update` -> `world_model`, `behaviour` -> `rssm`, `encoders`,
`policy`; `sequences` draws runs of replay rows, `agent` acts, `settings` declares every setting,
`types` holds what crosses files.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mbx.agents.dreamer.agent import make_agent
    from mbx.agents.dreamer.settings import Settings
    from mbx.agents.dreamer.types import TrainState

__all__ = ["Settings", "TrainState", "make_agent"]
_HOME = {"Settings": "settings", "TrainState": "types", "make_agent": "agent"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:  # lazily, so that settings load without JAX
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
