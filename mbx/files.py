"""Files that appear whole or not at all, and directories that one process writes at a time."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator


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


@contextlib.contextmanager
def sole_writer(directory: str) -> Iterator[None]:
    """Hold a directory for this process; the lock ends with the process, however that ends.

    Raises ValueError where another process holds it. File systems without locks are not guarded.
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, ".lock"), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise ValueError(
                    f"workdir={directory} is being written by another run: wait for it to end, or "
                    "choose another directory"
                ) from None
        yield
