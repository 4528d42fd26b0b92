"""Numbers, settings, pictures and films for TensorBoard, written by whoever logs them.

`tensorboardX.SummaryWriter` writes from a thread of its own: where the disk is full that thread
ends, and the run waits forever for room in its queue. Here the error reaches the run.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import hparams, scalar

from mbx.files import written

_FLUSH_SECONDS = 30


class Scalars:
    """An event file in a directory.

    Args:
        path: the directory; it is made.
        purge_step: the reader hides what earlier files have from this step on; None: nothing.

    Raises:
        OSError: here, in `log` and in `close`: naming the directory, where it cannot be written.
    """

    def __init__(self, path: str, purge_step: int | None) -> None:
        self._path = path
        with written(path):
            os.makedirs(path, exist_ok=True)
            # The name ends in the second: two processes must not share it.
            self._writer = EventsWriter(os.path.join(path, "events"), f".{os.getpid()}")
        if purge_step is not None:
            self._write(Event(step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        self._flush()

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append values at a step, as KIND/NAME."""
        for name, value in values.items():
            self._write(Event(step=step, summary=scalar(f"{kind}/{name}", value)))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._flush()

    def settings(self, values: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """The run's settings by dotted name, for the page of hyperparameters.

        Args:
            values: numbers and truths as they are, all else as text.
            metrics: names of the numbers that runs are compared by, as `log` writes them.
        """
        plain = {n: x if isinstance(x, int | float) else str(x) for n, x in values.items()}
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
            self._write(Event(step=0, summary=summary))

    def picture(self, name: str, step: int, content: bytes) -> None:
        """A picture, or a film, of the content of a PNG or GIF file. Others are left out."""
        if content.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", content[16:24])
        elif content.startswith(b"GIF8"):
            width, height = struct.unpack("<HH", content[6:10])
        else:
            return
        fields = dict(height=height, width=width, colorspace=3, encoded_image_string=content)
        value = Summary.Value(tag=name, image=Summary.Image(**fields))
        self._write(Event(step=step, summary=Summary(value=[value])))

    def close(self) -> None:
        """Write what is left."""
        with written(self._path):
            self._writer.close()

    def _write(self, event: Event) -> None:
        event.wall_time = time.time()
        with written(self._path):
            self._writer.write_event(event)

    def _flush(self) -> None:
        with written(self._path):
            self._writer.flush()
        self._flushed = time.monotonic()
