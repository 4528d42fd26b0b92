"""What the readers of configurations share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]


def section(name: str, kind: type, values: Mapping[str, Any]) -> Any:
    """`kind(**values)`, a mistake told under the name of the configuration's section."""
    try:
        return kind(**values)
    except ValueError as error:
        raise ValueError(f"config.{name}: {error}") from error
