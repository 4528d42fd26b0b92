"""Host environments stepped by worker processes: `env.workers`, for slow simulators.

Every worker (`python -m mbx.envs.vector FILE_DESCRIPTOR`) steps a share of the environments one
after the other. Seeds and snapshots belong to environments, so that runs with and without workers
are equal bit for bit and resume each other. Gymnasium's AsyncVectorEnv instead steps one
environment a process, without snapshots.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mbx.config import extensions
from mbx.envs import custom, registry, snapshot
from mbx.envs.base import HostEnvironment, Timestep, seeds_of
from mbx.envs.custom import EnvironmentFailure

_PATIENCE = 5.0  # seconds that a worker has to end


class InWorker(RuntimeError):
    """Traceback of an error in a worker."""


class ParallelEnvironment(HostEnvironment):
    """`num_envs` tasks as one `HostEnvironment`, stepped by worker processes.
    options are further arguments of `mbx.envs.make_share`. Raises as `mbx.envs.make`, and
    EnvironmentFailure where a worker fails, also later.
    """

    def __init__(
        self, name: str, num_envs: int, workers: int, *, seed: int = 0, first: int, **options: Any
    ) -> None:
        custom.check_guard()
        self.num_envs = num_envs
        shares = np.array_split(np.arange(num_envs), min(workers, num_envs))
        self._shares = [slice(int(one[0]), int(one[-1]) + 1) for one in shares]
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _close, self._workers)
        options |= dict(name=name, seed=None)  # they wait for their reset
        try:
            for _ in self._shares:
                self._workers.append(_Worker(name))
            seeds = seeds_of(seed, num_envs)
            made = [dict(seeds=seeds[s], first=first + s.start, **options) for s in self._shares]
            self.spec = self._all("make", made)[0]
            self.reset(seed)
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int) -> np.ndarray:
        seeds = seeds_of(seed, self.num_envs)
        return np.concatenate(self._all("reset_each", [seeds[share] for share in self._shares]))

    def step(self, action: np.ndarray) -> Timestep:
        found = self._all("step", [np.asarray(action)[share] for share in self._shares])
        *fields, metrics = zip(*found, strict=True)
        joined = {name: np.concatenate([one[name] for one in metrics]) for name in metrics[0]}
        return Timestep(*map(np.concatenate, fields), joined)

    def get_state(self) -> bytes | None:
        found = self._all("get_state")
        if None in found:
            return None
        return snapshot.encode([row for one in found for row in snapshot.decode(one)])

    def set_state(self, snapshot_: bytes) -> None:
        with snapshot.fitting(self.spec.name):
            saved = snapshot.decode(snapshot_)
            if not isinstance(saved, list) or len(saved) != self.num_envs:
                raise ValueError(f"it is not a list of {self.num_envs} environments")
            shares = [snapshot.encode(saved[share]) for share in self._shares]
        self._all("set_state", shares)

    def close(self) -> None:
        self._end()

    def _all(self, what: str, given: Sequence[Any] | None = None) -> list[Any]:
        """Call a method in all workers, each with its share; results in order.
        Raises the first worker's error, with its traceback.
        """
        for i, worker in enumerate(self._workers):
            worker.ask(what, *([] if given is None else [given[i]]))
        # All are read before one raises, so that none is taken for the next request's.
        answers = [worker.answer() for worker in self._workers]
        for kind, words, told in answers:
            if kind:
                raise kind(words) from InWorker("in a worker\n" + told)
        return [found for _, found, _ in answers]


def _close(workers: list[_Worker]) -> None:
    while workers:
        workers.pop().close()


class _Worker:
    """A process and the connection to it."""

    def __init__(self, name: str) -> None:
        self._name = name
        here, there = socket.socketpair()
        places = os.pathsep.join(path or os.getcwd() for path in sys.path)
        # Signals to this process's group do not reach it: the end of the connection ends it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mbx.envs.vector", str(there.fileno()), *extensions.flags()],
            pass_fds=[there.fileno()],
            env=os.environ | {"PYTHONPATH": places, "JAX_PLATFORMS": "cpu", custom.WORKER: "1"},
            start_new_session=True,
        )
        there.close()
        self._line = Connection(here.detach())

    def ask(self, what: str, *given: Any) -> None:
        with self._alive():
            self._line.send((what, given))

    def answer(self) -> tuple[type[Exception] | None, Any, str]:
        """Answer to the last request: class, message and traceback of an error, or a result."""
        with self._alive():
            return self._line.recv()

    @contextlib.contextmanager
    def _alive(self) -> Any:
        """Raise EnvironmentFailure where the process has ended."""
        try:
            yield
        except (EOFError, OSError) as error:
            try:
                code: Any = self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                code = "none yet"
            raise EnvironmentFailure(
                f"env.name={self._name!r}: a worker of env.workers ended (exit code {code}; "
                "negative: a signal); what it wrote stands above, env.workers=0 steps in one "
                "process"
            ) from error

    def close(self) -> None:
        self._line.close()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# -------------------------------------------------------------------------------------------------
# In a worker


def main(arguments: list[str]) -> None:
    """Answer requests until the connection ends."""
    line, environment = Connection(int(extensions.load(arguments)[0])), None
    with contextlib.suppress(EOFError, OSError):
        while True:
            what, given = line.recv()
            try:
                if what == "make":
                    environment = registry.make_share(**given[0])
                    reply: tuple = None, environment.spec, ""
                else:
                    reply = None, getattr(environment, what)(*given), ""
            except Exception as error:  # who asked raises it again
                known = type(error).__module__.partition(".")[0] in ("builtins", "mbx")
                # Only the traceback of the environment's own code, if any.
                origin = error.__cause__ if isinstance(error, EnvironmentFailure) else error
                told = "".join(traceback.format_exception(origin or error))
                reply = type(error) if known else EnvironmentFailure, str(error), told
            line.send(reply)
    if environment is not None:
        environment.close()


if __name__ == "__main__":
    main(sys.argv[1:])
