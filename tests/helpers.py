"""What several tests use."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import numpy as np

FIXTURES = pathlib.Path(__file__).parent / "fixtures"


def load_fixture(group: str, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and configuration of a golden fixture: tests/fixtures/GROUP/NAME.npz and .json."""
    arrays = dict(np.load(FIXTURES / group / f"{name}.npz"))
    sidecar = json.loads((FIXTURES / group / f"{name}.json").read_text())
    return arrays, sidecar["config"]
