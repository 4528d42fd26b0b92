"""Files that appear whole or not at all, directories that one process writes at a time, JSON that
others may have written, and output that nobody reads any more."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def atomic_write(path: str, data: bytes) -> None:
    """Write a file so that at any moment either the old or the whole new content is there.
    A link at `path` is replaced, not followed. Raises OSError, naming the file and the remedy.
    """
    temporary = f"{path}.tmp-{os.getpid()}"  # not mkstemp: its files only their owner may read
    try:
        with written(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def written(path: str) -> Iterator[None]:
    """Add path and remedy to the system's errors about writing a file."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = "free space there" if full else "correct its directory or permissions"
        reason = error.strerror or error
        raise OSError(f"{path} cannot be written ({reason}): {remedy}") from error


def prepare_output(path: str) -> None:
    """Create the folder of an output file. Raises OSError where writing will fail."""
    folder = os.path.dirname(os.path.abspath(path))
    with written(path):
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, "no permission")
        if os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "it is a directory")


def read_json(path: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ValueError, naming the file, for other content."""
    with open(path, "rb") as file:
        return parse_json(file.read(), path)


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """A JSON object from bytes found at `where`, which the ValueError for others names."""
    try:
        found = json.loads(data)
    except RecursionError:
        raise ValueError(f"{where} is no JSON that can be read: it nests too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds {type(found).__name__}, not a JSON object")
    return found


@contextlib.contextmanager
def sole_writer(directory: str) -> Iterator[None]:
    """Lock a directory for this process, until it ends.
    Raises ValueError where another process holds it, or where the directory is not writable or its
    lock is a link. File systems without locks are not guarded.
    """
    path = os.path.join(directory, ".lock")
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        os.makedirs(directory, exist_ok=True)
        lock = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError(f"{path} is a link: remove it, a run's lock is a file") from None
        raise ValueError(
            f"workdir={directory} cannot be written to ({error.strerror}): choose another "
            "directory, or fix its permissions"
        ) from None
    try:
        with contextlib.suppress(ImportError):  # not on Windows
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(lock)
            raise ValueError(
                f"workdir={directory} is being written by another run: wait for it to end, or "
                "choose another directory"
            ) from None
    try:
        yield
    finally:
        os.close(lock)


def tolerate_closed_output() -> None:
    """Continue, discarding output, after a pipe's reader or a terminal has closed.
    Replaces `sys.stdout` and `sys.stderr`; call it at the start of a command.
    """
    sys.stdout, sys.stderr = _Output(sys.stdout), _Output(sys.stderr)


class _Output:
    """A text stream that discards everything after the first failed write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._close()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._close()

    def _close(self) -> None:
        """Redirect the stream's file descriptor, which libraries also use, to the null device."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
