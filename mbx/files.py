"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import os


def atomic_write(path: str, data: bytes) -> None:
    """Write a file so that at any moment either the old or the whole new content is there."""
    temporary = f"{path}.tmp-{os.getpid()}"  # not mkstemp: its files only their owner may read
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
