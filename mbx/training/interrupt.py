"""Stopping a run from outside without losing it."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any


class Interrupt:
    """Turns Ctrl-C and SIGTERM into a flag that is read between intervals; twice stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupt:
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._old[number] = signal.signal(number, self._handle)
            except ValueError:  # not the main thread: leave signals alone
                break
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        print("\nstopping: saving after this interval (again to stop at once)", flush=True)

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)
