"""Host environments stepped by worker processes: `env.workers`, for slow simulators.

Every worker (`python -m mbx.envs.vector FILE_DESCRIPTOR`) steps a share of the environments one
after the other. Seeds and snapshots belong to environments, so that runs with and without workers
are equal bit for bit and resume each other. Messages are plain data (`mbx.envs.snapshot`).
Gymnasium's AsyncVectorEnv instead steps one environment a process, by pickles, without snapshots.
"""

from __future__ import annotations

import builtins
import os
import socket
import subprocess
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mbx.config import extensions
from mbx.envs import custom, registry, snapshot
from mbx.envs.base import EnvSpec, HostEnvironment, Timestep
from mbx.envs.custom import EnvironmentFailure
from mbx.types import Part

_PATIENCE = 5.0  # seconds that a worker has to end


class InWorker(RuntimeError):
    """Traceback of an error in a worker."""


class ParallelEnvironment(HostEnvironment):
    """`num_envs` tasks as one `HostEnvironment`, stepped by worker processes.
    options are further arguments of `mbx.envs.make_share`, as plain data. Raises as
    `mbx.envs.make`, and EnvironmentFailure where a worker fails, also later.
    """

    def __init__(
        self, name: str, num_envs: int, workers: int, *, seed: int = 0, options: Mapping[str, Any]
    ) -> None:
        custom.check_guard()
        self.num_envs = num_envs
        shares = np.array_split(np.arange(num_envs), min(workers, num_envs))
        self._shares = [slice(int(one[0]), int(one[-1]) + 1) for one in shares]
        seeds = np.random.SeedSequence(seed).generate_state(num_envs)
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _close, self._workers)
        try:
            for _ in self._shares:
                self._workers.append(_Worker(name))
            common = dict(options, name=name, seed=None)  # they wait for their reset
            made = [
                dict(seeds=seeds[share].tolist(), first=options.get("first", 0) + share.start)
                for share in self._shares
            ]
            found = self._all("make", [common | one for one in made])[0]
            parts = tuple(Part(*one) for one in found.pop("parts"))
            found["obs_dtype"] = np.dtype(found["obs_dtype"]).type
            self.spec = EnvSpec(**found, parts=parts)
            self.reset(seed)
        except BaseException:
            self.close()
            raise

    def reset(self, seed: int) -> np.ndarray:
        seeds = np.random.SeedSequence(seed).generate_state(self.num_envs)
        return np.concatenate(self._all("reset_each", [seeds[share] for share in self._shares]))

    def step(self, action: np.ndarray) -> Timestep:
        action = np.asarray(action)
        found = self._all("step", [action[share] for share in self._shares])
        metrics = [one.pop("metrics") for one in found]
        fields = {name: np.concatenate([one[name] for one in found]) for name in found[0]}
        joined = {name: np.concatenate([one[name] for one in metrics]) for name in metrics[0]}
        return Timestep(**fields, metrics=joined)

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
        """Call a method in all workers, each with its share; results in order."""
        for i, worker in enumerate(self._workers):
            worker.ask(what, [] if given is None else [given[i]])
        # All are read before one raises, so that none is taken for the next request's.
        answers = [worker.answer() for worker in self._workers]
        return [_found(*one) for one in answers]


def _found(kind: str, found: Any) -> Any:
    """The result in an answer. Raises the worker's error, with its traceback."""
    if kind == "found":
        return found
    known = getattr(builtins, kind, getattr(snapshot, kind, EnvironmentFailure))
    if not (isinstance(known, type) and issubclass(known, Exception)):
        known = EnvironmentFailure
    raise known(found["message"]) from InWorker("in a worker\n" + found["traceback"])


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

    def ask(self, what: str, given: Sequence[Any]) -> None:
        try:
            self._line.send_bytes(snapshot.encode([what, list(given)]))
        except OSError as error:
            raise self._gone() from error

    def answer(self) -> tuple[str, Any]:
        """Answer to the last request: "found" and its result, or an error's class and words."""
        try:
            return snapshot.decode(self._line.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._gone() from error

    def _gone(self) -> EnvironmentFailure:
        try:
            code = self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            code = "none yet"
        return EnvironmentFailure(
            f"env.name={self._name!r}: a worker of env.workers ended (exit code {code}; negative: "
            "a signal); what it wrote stands above, env.workers=0 steps in one process"
        )

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
    while True:
        try:
            what, given = snapshot.decode(line.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            if what == "make":
                environment = registry.make_share(**given[0])
                found = environment.spec._asdict()
                found["obs_dtype"] = np.dtype(found["obs_dtype"]).name
                found["parts"] = [tuple(part) for part in found["parts"]]
            else:
                found = getattr(environment, what)(*given)
            found = found._asdict() if isinstance(found, Timestep) else found
            reply = snapshot.encode(["found", found])
        except Exception as error:  # who asked raises it again
            reply = snapshot.encode([type(error).__name__, _in_words(error)])
        try:
            line.send_bytes(reply)
        except OSError:
            break
    if environment is not None:
        environment.close()


def _in_words(error: Exception) -> dict[str, str]:
    """Message and traceback of an error; the traceback of the environment's own code, if any."""
    origin = error.__cause__ if isinstance(error, EnvironmentFailure) else error
    told = "".join(traceback.format_exception(origin or error))
    return {"message": str(error), "traceback": told}


if __name__ == "__main__":
    main(sys.argv[1:])
