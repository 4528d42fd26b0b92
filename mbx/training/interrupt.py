"""Stopping a run from outside without losing it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP")


class Interrupt:
    """Turns Ctrl-C, SIGTERM and SIGHUP into a request that is read between intervals.

    The second signal ends at once: the process where `ends_process`, which a command asks for,
    otherwise with a KeyboardInterrupt as soon as Python runs. A SIGHUP that is ignored when this
    begins (nohup) stays ignored. Outside of the main thread signals are left alone.

    Attributes:
        number: the signal that asked for an end, None while there was none.
        unsaved: whether the run has something to save. Until then a command ends at the first
            signal, with `farewell`: a program may be compiling, which can take minutes.
        farewell: what is said then.
    """

    def __init__(self, *, ends_process: bool = False) -> None:
        self.number: int | None = None
        self.unsaved = False
        self.farewell = "stopped before the first step: nothing is lost"
        self._ends_process = ends_process
        self._depth = 0
        self._old: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run is to end."""
        return self.number is not None

    def __enter__(self) -> Interrupt:
        self._depth += 1
        if self._depth == 1 and threading.current_thread() is threading.main_thread():
            for name in [name for name in _NAMES if hasattr(signal, name)]:
                number = getattr(signal, name)
                if name != "SIGHUP" or signal.getsignal(number) is not signal.SIG_IGN:
                    self._old[number] = signal.signal(number, self._handle)
            if self._ends_process:
                self._watch()
        return self

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        if self._ends_process and self._old:
            signal.set_wakeup_fd(self._old_wakeup)
            os.close(self._sender)
        for number, old in self._old.items():
            signal.signal(number, old)
        self._old = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ends_process:
            return  # the watching thread has it
        if self.requested:
            raise KeyboardInterrupt
        self._request(number)

    def _watch(self) -> None:
        """See signals in a thread: Python's own handlers wait until compiled code returns."""
        receiver, self._sender = os.pipe()
        os.set_blocking(self._sender, False)
        self._old_wakeup = signal.set_wakeup_fd(self._sender, warn_on_full_buffer=False)
        watched = frozenset(self._old)

        def watch() -> None:
            while numbers := os.read(receiver, 64):
                for number in watched.intersection(numbers):
                    self._seen(number)
            os.close(receiver)

        threading.Thread(target=watch, daemon=True).start()

    def _seen(self, number: int) -> None:
        if self.requested:
            os._exit(128 + number)
        if not self.unsaved:
            say(self.farewell)
            os._exit(128 + number)
        self._request(number)

    def _request(self, number: int) -> None:
        self.number = number
        say("stopping: saving after what is computed now (again to stop at once)")


def say(text: str) -> None:
    """Print a line, if anybody reads it."""
    with contextlib.suppress(OSError):
        print(f"\n{text}", flush=True)
