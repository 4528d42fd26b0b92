"""TD-MPC on planner-made targets; with other settings TD-MPC2, BMPC, or ensembles with priors.

Read one training step in this order: `agent` (act, targets, update), `update` (one learner step),
`losses`, `value_targets`, `planning`, `scoring`, `reanalyze`. `types` holds what passes between
them, `settings` what can be set.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mbx.agents.tdmpc.agent import make_agent
    from mbx.agents.tdmpc.settings import Settings
    from mbx.agents.tdmpc.types import TrainState

__all__ = ["Settings", "TrainState", "make_agent"]

_HOMES = {"Settings": "settings", "TrainState": "types", "make_agent": "agent"}


def __getattr__(name: str) -> Any:
    """Import a name on first use: settings alone need no JAX."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
