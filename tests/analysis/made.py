"""Directories of runs that nobody trained."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from mbx.settings import to_dict


def write_run(path: pathlib.Path, settings: Any, rows: list[dict], **changes: Any) -> str:
    """A run directory with these rows and nothing else; changes by dotted name with __ for dots."""
    config = to_dict(settings)
    for name, value in changes.items():
        *sections, last = name.split("__")
        inner = config
        for section in sections:
            inner = inner[section]
        inner[last] = value
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    text = "".join(json.dumps({"time": 0} | row) + "\n" for row in rows)
    (path / "metrics.jsonl").write_text(text)
    return str(path)
