"""Checkpoints of a run, by orbax: atomic and verified; the newest and the best are kept.

`checkpoints/` holds the newest whole states, `best/` the train state with the best evaluation and
the previous best. Each has JSON metadata: format version, shape and dtype of every leaf, the
caller's metadata, a digest of all that and one of every leaf. A sharded array has one digest per
device's part, named by its place, so that every process checks what it reads.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from mbx.training import logging

FORMAT_VERSION = 2


class Checkpointer:
    """Saves and restores the states of the run in `workdir`; `keep`: newest checkpoints kept.
    Saving is asynchronous; `close` waits for it. A checkpoint that cannot be written (disk full, no
    permission) raises OSError at the next save, wait or close.
    """

    def __init__(self, workdir: str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: keep at least one checkpoint")
        logging.quiet_storage()
        workdir = os.path.abspath(workdir)
        self._opened = contextlib.ExitStack()
        place = _plain(workdir, self._opened)
        self._all = _Directory(workdir, place, "checkpoints", keep)
        self._best = _Directory(workdir, place, "best", 2)
        best = self._read_best()
        self._best_score = None if best is None else float(best["score"])

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_best(self) -> dict[str, Any] | None:
        for name in reversed(self._best.steps()):
            with contextlib.suppress(Exception):  # damaged: the next evaluation replaces it
                return self._best.record(name)["user"]
        return None

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Save the whole state at `step`; `meta` is JSON (ValueError if it is not).
        Checkpoints at this and later steps are removed: they are damaged or abandoned.
        """
        self._all.save(step, state, meta)

    def save_best(self, step: int, train_state: Any, score: float) -> bool:
        """Save `train_state` if `score` is finite and the best so far; True if saved."""
        score = float(score)
        if not math.isfinite(score) or (self._best_score is not None and score <= self._best_score):
            return False
        self._best_score = score
        # Named above the one before, whatever its step (a resumed run may find a better one
        # earlier): orbax then removes the old one only when the new one is complete.
        name = max([step, *(newest + 1 for newest in self._best.steps())])
        self._best.save(name, train_state, {"score": score, "step": step})
        return True

    def resume_at(self, step: int, best_score: float | None) -> None:
        """Continue from `step`; `best_score` replaces a best score of later steps."""
        found = self.best_step()
        if found is not None and found > step:
            self._best_score = best_score

    def restore(self, example: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The newest usable state (or that of `step`) and its meta.
        Damaged checkpoints are skipped with a warning; out-of-memory errors pass through. example:
        arrays or `jax.ShapeDtypeStruct`s of the same structure.

        Raises:
            FileNotFoundError: none is usable.
            ValueError: the structure differs (other settings) or the format is another version's.
        """
        return self._all.restore(example, step)

    def restore_best(self, example: Any) -> tuple[Any, dict[str, Any]]:
        """The best train state and its meta; raises as `restore`."""
        return self._best.restore(example, None)

    @staticmethod
    def saved_steps(workdir: str) -> list[int]:
        """Steps of the checkpoints of `workdir`, complete or not, without opening any."""
        path = os.path.join(workdir, "checkpoints")
        names = os.listdir(path) if os.path.isdir(path) else []
        return sorted(int(name) for name in names if name.isdigit())

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None if there is none."""
        return max(self._all.steps(), default=None)

    def best_step(self) -> int | None:
        """Step of the best train state, None if there is none."""
        best = self._read_best()
        return None if best is None else int(best["step"])

    def wait(self) -> None:
        """Wait until everything is on disk."""
        for directory in (self._all, self._best):
            with directory.writing():
                directory.manager.wait_until_finished()

    def close(self) -> None:
        """Wait for pending saves and release resources."""
        self.wait()
        self._all.manager.close()
        self._best.manager.close()
        self._opened.close()


def _plain(workdir: str, opened: contextlib.ExitStack) -> str:
    """A path of plain characters to `workdir`: itself, or a link until `opened` is closed.
    orbax reads special characters as a glob pattern ("lr=[0.1]", "a*b") or a URL ("gs:").
    """
    if re.fullmatch(r"[\w./ +=,@%-]*", workdir):
        return workdir
    os.makedirs(workdir, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="mbx-", ignore_cleanup_errors=True)
    link = os.path.join(opened.enter_context(folder), "run")
    os.symlink(workdir, link)
    return link


class _Damaged(Exception):
    """A readable checkpoint whose content differs from what was written."""


class _Directory:
    """One orbax directory of states with JSON."""

    def __init__(self, workdir: str, place: str, name: str, keep: int) -> None:
        self.path = os.path.join(workdir, name)
        # Processes meet at barriers that orbax names by the step alone: a best state and a
        # checkpoint of one step would meet at each other's.
        barriers = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, multiprocessing_options=barriers)
        handlers = dict(state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler())
        self.manager = ocp.CheckpointManager(
            os.path.join(place, name), options=options, item_handlers=handlers
        )
        self._inode = _inode(self.path)
        self._clean = False

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        record = {"format_version": FORMAT_VERSION, "leaves": _describe(state), "user": meta}
        try:
            json.dumps(meta)
        except TypeError as error:  # orbax would raise from a thread, saves later
            raise ValueError(
                f"meta of checkpoint {step} is not JSON ({error}): give numbers as int() or float()"
            ) from error
        if jax.process_index() == 0 and not self._clean:
            # What a killed process had half written, each as large as the replay. Not when opened:
            # a process that only reads must not remove what another is writing.
            for path in pathlib.Path(self.path).glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
        self._clean = True
        written = jax.tree.map(_writable, state)
        record["digests"] = digests_of(written)
        record["digest"] = digest_of_record(record)
        state, meta = ocp.args.StandardSave(written), ocp.args.JsonSave(record)
        with self.writing():  # errors are of this save, or of the one before in its thread
            # orbax leaves out, without a word, a step that is not above its newest one.
            for later in [s for s in self.steps() if s >= step]:
                self.manager.wait_until_finished()
                self.manager.delete(later)
            self.manager.save(step, args=ocp.args.Composite(state=state, meta=meta))

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turn orbax's errors about unwritable files into one OSError."""
        try:
            yield
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            if _inode(self.path) != self._inode:  # orbax may have made it again
                raise OSError(
                    f"{self.path} is gone: the run's directory was removed or moved while it ran; "
                    "put it back and resume"
                ) from error
            raise OSError(
                f"a checkpoint could not be written to {self.path} ({_first_line(error)}): free "
                "space there or correct its permissions, and resume; the ones before it are whole"
            ) from error

    def record(self, step: int) -> dict[str, Any]:
        """The metadata of a state. Raises _Damaged where it is not what was written."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        record = self.manager.restore(step, args=args)["meta"]
        content = {name: value for name, value in record.items() if name != "digest"}
        if record.get("digest") != digest_of_record(content):
            raise _Damaged("its metadata is not what was written")
        return record

    def restore(self, example: Any, step: int | None) -> tuple[Any, dict[str, Any]]:
        last_error: Exception | None = None
        for candidate in self.steps()[::-1] if step is None else [step]:
            try:
                record = self.record(candidate)
                self._check(candidate, record, _describe(example))
                return self._read(candidate, example, record), record["user"]
            except Exception as error:
                if isinstance(error, _OtherRun) or _is_out_of_memory(error):
                    raise
                last_error = error
                warnings.warn(
                    f"checkpoint {candidate} in {self.path} is damaged and skipped "
                    f"({_first_line(error)})",
                    stacklevel=3,
                )
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(
            f"{what} in {self.path} could be read: copy it there again, ask for another one, or "
            "start the run again in another workdir"
        ) from last_error

    def _check(self, step: int, record: dict[str, Any], wanted: dict[str, str]) -> None:
        """Raise ValueError for a checkpoint of another version or other settings."""
        version, saved = record["format_version"], record["leaves"]
        if version != FORMAT_VERSION:
            raise _OtherRun(
                f"checkpoint {step} in {self.path} has format version {version}, this code reads "
                f"{FORMAT_VERSION}: use the code that wrote it"
            )
        different = [
            f"{name}: saved {saved.get(name, 'nothing')}, wanted {wanted.get(name, 'nothing')}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if different:
            shown = "; ".join(different[:5] + ["..."] * (len(different) > 5))
            raise _OtherRun(
                f"the checkpoint in {self.path} was made with other settings, or by another "
                f"version ({shown}): resume with the run's own config.json and code, or start "
                "again in another workdir"
            )

    def _read(self, step: int, example: Any, record: dict[str, Any]) -> Any:
        wanted = ocp.args.StandardRestore(jax.tree.map(_abstract, example))
        try:
            state = self.manager.restore(step, args=ocp.args.Composite(state=wanted))["state"]
            name = damaged_leaf(state, record["digests"])
        except Exception:
            _agreed(False)
            raise
        if not _agreed(name is None):
            raise _Damaged(f"{name or 'what another process reads'} is not what was written")
        return jax.tree.map(_as_before, state, example)


class _OtherRun(ValueError):
    """A complete checkpoint of other settings or another version."""


def _agreed(flag: bool) -> bool:
    """Whether all processes agree."""
    if jax.process_count() == 1:
        return flag
    return bool(np.all(multihost_utils.process_allgather(np.array(flag))))


def _writable(x: Any) -> Any:
    """A leaf as it is written: typed keys as numbers, an empty array as one zero."""
    if _is_key(x):
        return jax.random.key_data(x)
    return jax.device_put(np.zeros((1,), x.dtype), _sharding(x)) if x.size == 0 else x


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, type and sharding of a leaf as it is written."""
    where = _sharding(x)
    if _is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
    return jax.ShapeDtypeStruct((1,) if 0 in x.shape else x.shape, x.dtype, sharding=where)


def _as_before(x: Any, like: Any) -> Any:
    """The inverse of `_writable`."""
    if _is_key(like):  # `jax.random.key_impl` does not take abstract keys
        found: list[Any] = []
        jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
        return jax.random.wrap_key_data(x, impl=found[0])
    if 0 in like.shape:
        return jax.device_put(np.zeros(like.shape, like.dtype), _sharding(like))
    return x


def _sharding(x: Any) -> jax.sharding.Sharding:
    where = getattr(x, "sharding", None)
    if isinstance(where, jax.sharding.NamedSharding):
        return where
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _describe(state: Any) -> dict[str, str]:
    return {name: f"{x.dtype}{list(x.shape)}" for name, x in _named(state)}


def _inode(path: str) -> int | None:
    return os.stat(path).st_ino if os.path.isdir(path) else None


def _is_out_of_memory(error: Exception) -> bool:
    device = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return device or isinstance(error, MemoryError)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


Digests = dict[str, dict[str, str]]  # of a tree: name of the leaf -> part -> digest


def crc_of(array: np.ndarray) -> str:
    """CRC-32 of an array's bytes, without shape and dtype.
    Faster than a cryptographic hash; detects every change within 32 neighbouring bits, and all but
    one in 4e9 others.
    """
    return f"{zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8)):08x}"


def digest_of_record(record: Mapping[str, Any]) -> str:
    """SHA-256 of a JSON object, independent of the order of its names."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def digests_of(tree: Any) -> Digests:
    """Digests of all leaves; collective over the processes that hold a share of them."""
    named = [(name, part, read(part)) for name, x in _named(tree) for part, read in _parts(x)]
    numbers = np.array([int(crc_of(d), 16) if d is not None else 0 for *_, d in named], np.uint32)
    if jax.process_count() > 1:
        # Whoever does not hold a part has a zero there, and all who do the same number.
        numbers = np.max(multihost_utils.process_allgather(numbers), axis=0)
    digests: Digests = {}
    for (name, part, _), number in zip(named, numbers.tolist(), strict=True):
        digests.setdefault(name, {})[part] = f"{number:08x}"
    return digests


def damaged_leaf(tree: Any, saved: Digests) -> str | None:
    """Name of the first leaf that differs from its digests; parts held elsewhere are skipped."""
    for name, x in _named(tree):
        read = _parts(x)[0][1]
        for part, number in saved[name].items():
            data = read(part)
            if data is not None and crc_of(data) != number:
                return name
    return None


def _named(tree: Any) -> Iterator[tuple[str, Any]]:
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path), x


def _parts(x: Any) -> list[tuple[str, Callable[[str], np.ndarray | None]]]:
    """An array's parts, equal on all processes, each with what reads a part: None for one that is
    held elsewhere."""
    if getattr(x, "is_fully_addressable", True):
        array = np.asarray(x)
        return [("", lambda part: array[_slices(part)])]
    held = {_place(shard.index, x.shape): shard.data for shard in x.addressable_shards}
    places = {_place(i, x.shape) for i in x.sharding.devices_indices_map(x.shape).values()}
    return [(place, lambda part: held.get(part)) for place in sorted(places)]


def _place(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    bounds = [s.indices(size)[:2] for s, size in zip(index, shape, strict=True)]
    return ",".join(f"{start}:{stop}" for start, stop in bounds)


def _slices(part: str) -> tuple[slice, ...]:
    bounds = [bound.split(":") for bound in part.split(",")] if part else []
    return tuple(slice(int(start), int(stop)) for start, stop in bounds)
