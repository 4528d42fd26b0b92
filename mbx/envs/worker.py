"""A process of `mbx.envs.vector`: steps its share of host environments, as it is asked.

python -m mbx.envs.worker FILE_DESCRIPTOR [--import=MODULE ...]
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mbx import envs
from mbx.config import extensions
from mbx.envs import snapshot
from mbx.envs.host import SteppedEnvironment


def make(given: dict[str, Any]) -> tuple[SteppedEnvironment, dict[str, Any]]:
    """The share's environment, and what it says of itself."""
    environment = envs.make_share(**given)
    spec = environment.spec
    fields = spec._asdict() | {
        "obs_dtype": np.dtype(spec.obs_dtype).name,
        "parts": [tuple(part) for part in spec.parts],
    }
    return environment, fields


def main(arguments: list[str]) -> None:
    """Answer until the line ends."""
    rest = extensions.load(arguments)
    line, environment = Connection(int(rest[0])), None
    while True:
        try:
            what, given = snapshot.decode(line.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            if what == "make":
                environment, found = make(given)
            elif what == "reset":
                found = environment.reset_each(given)
            elif what == "step":
                found = environment.step(given)._asdict()
            elif what == "get_state":
                found = environment.get_state()
            else:
                found = environment.set_state(given)
            reply = snapshot.encode(["found", found])
        except Exception as error:  # whoever asked is told
            reply = snapshot.encode([type(error).__name__, _told(error)])
        try:
            line.send_bytes(reply)
        except OSError:
            break
    if environment is not None:
        environment.close()


def _told(error: Exception) -> dict[str, str]:
    """An error in words: an environment's own one with the traceback of its code."""
    origin = error.__cause__ if isinstance(error, envs.EnvironmentFailure) else error
    return {
        "message": str(error),
        "traceback": "".join(traceback.format_exception(origin or error)),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
