"""EMPO: robots that softly maximise the power of the humans around them, whole in one folder."""

import importlib
from typing import Any

_SUITE = ("TIME_LIMIT", "make", "make_renderer", "named_world", "register_world", "solved_world")


def __getattr__(name: str) -> Any:
    """The public names of `suite`, loaded on first use: `mbx.empo.agent.settings` needs no JAX."""
    if name not in _SUITE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.suite"), name)
