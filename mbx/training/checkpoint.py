"""Checkpoints of a run: everything, newest first to be tried, torn ones skipped.

`checkpoints/` holds the newest states (orbax writes each into a temporary directory and renames it
when it is complete), `best/` the train state that evaluated best and the best before it. Each comes
with JSON: the format version, the shapes and dtypes of all leaves, what the caller adds, and
digests of all of that and of every leaf, by which a checkpoint that was damaged later is known.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax import struct
from jax.experimental import multihost_utils

from mbx.agents.settings import RunSettings
from mbx.config import extensions
from mbx.files import read_json
from mbx.settings import from_dict
from mbx.training import digests, inputs, notices
from mbx.training.build import settings_class

FORMAT_VERSION = 2
_WITHOUT_DIGESTS = 1  # an older format: read, and said
_ONCE_CALLED = {"update_debt": "credit"}  # fields of a state, in checkpoints of before


class Checkpointer:
    """Saves and restores the states of the run in `workdir`.

    Saving is asynchronous; `close` waits for it. A checkpoint that cannot be written (disk full, no
    permission) raises OSError at the next save, wait or close.

    Args:
        keep: newest checkpoints kept.
    """

    def __init__(self, workdir: str, *, keep: int = 3) -> None:
        if keep < 1:
            raise ValueError(f"checkpoint.keep={keep}: keep at least one checkpoint")
        notices.ignore_closed_loops()
        workdir = os.path.abspath(workdir)
        self._opened = contextlib.ExitStack()
        place = _plain(workdir, self._opened)
        self._all = _Directory(workdir, place, "checkpoints", keep)
        self._best = _Directory(workdir, place, "best", 2)
        best = self._read_best()
        self._best_score = None if best is None else float(best["score"])

    def _read_best(self) -> dict[str, Any] | None:
        for name in reversed(self._best.steps()):
            try:
                return self._best.meta(name)
            except Exception:  # a torn best: the next evaluation replaces it
                continue
        return None

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        """Save the whole state at `step`; `meta` is JSON (ValueError if it is not).

        Checkpoints at this step and later ones are removed: they are damaged, or of a future that
        falling back to an older checkpoint gave up.
        """
        self._all.save(step, state, meta)

    def save_best(self, step: int, train_state: Any, score: float) -> bool:
        """Save `train_state` if `score` is the best so far; returns whether it was.

        A score that is not finite is never the best.
        """
        score = float(score)
        if not math.isfinite(score):
            return False
        if self._best_score is not None and score <= self._best_score:
            return False
        self._best_score = score
        # Named above the one before, whatever its step (a resumed run may find a better one
        # earlier): orbax then removes the old one only when the new one is complete.
        name = max([step, *(newest + 1 for newest in self._best.steps())])
        self._best.save(name, train_state, {"score": score, "step": step})
        return True

    def resume_at(self, step: int, best_score: float | None) -> None:
        """Continue from `step`: a best of later steps, which are made again, has to be beaten no
        more, only `best_score`, the best evaluation up to there."""
        found = self.best_step()
        if found is not None and found > step:
            self._best_score = best_score

    def restore(self, example: Any, step: int | None = None) -> tuple[Any, dict[str, Any]]:
        """The newest usable state (or that of `step`) and its meta.

        Damaged checkpoints are skipped with a warning; running out of memory is no damage and
        raises what it raises.

        Args:
            example: arrays or `jax.ShapeDtypeStruct`s of the same structure.

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
        """Steps of the checkpoints of `workdir`, whole or not; nothing is opened or made."""
        path = os.path.join(workdir, "checkpoints")
        names = os.listdir(path) if os.path.isdir(path) else []
        return sorted(int(name) for name in names if name.isdigit())

    def latest_step(self) -> int | None:
        """Step of the newest checkpoint, None if there is none."""
        steps = self._all.steps()
        return steps[-1] if steps else None

    def best_step(self) -> int | None:
        """Step of the best train state, None if there is none."""
        best = self._read_best()
        return None if best is None else int(best["step"])

    def wait(self) -> None:
        """Wait until everything is on disk."""
        for directory in (self._all, self._best):
            with directory.told():
                directory.manager.wait_until_finished()

    def close(self) -> None:
        """Wait and free."""
        self.wait()
        self._all.manager.close()
        self._best.manager.close()
        self._opened.close()


def _plain(workdir: str, opened: contextlib.ExitStack) -> str:
    """A path of plain characters to `workdir`: itself, or a link until `opened` is closed.

    orbax takes a path for a pattern of names ("lr=[0.1]" matches no folder, "a*b" its neighbours)
    and for a URL ("gs:"): what it wrote there could not be read again.
    """
    if re.fullmatch(r"[\w./ +=,@%-]*", workdir):
        return workdir
    os.makedirs(workdir, exist_ok=True)
    folder = tempfile.TemporaryDirectory(prefix="mbx-", ignore_cleanup_errors=True)
    link = os.path.join(opened.enter_context(folder), "run")
    os.symlink(workdir, link)
    return link


class _Directory:
    """One orbax directory of states with JSON beside them."""

    def __init__(self, workdir: str, place: str, name: str, keep: int) -> None:
        self.path = path = os.path.join(workdir, name)
        # Several processes meet at barriers that orbax names by the step alone: a best state and a
        # checkpoint of one step, saved beside each other, would meet at each other's.
        own = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=name)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            create=True,
            enable_async_checkpointing=True,
            multiprocessing_options=own,
        )
        handlers = dict(state=ocp.StandardCheckpointHandler(), meta=ocp.JsonCheckpointHandler())
        self.manager = ocp.CheckpointManager(
            os.path.join(place, name), options=options, item_handlers=handlers
        )
        self._inode = _inode(path)
        self._clean = False

    def _remove_leftovers(self) -> None:
        """Remove what a killed process had half written; each may be as large as the replay.

        Not at construction: a process that only reads must not remove what another is writing.
        """
        if not self._clean:
            for path in pathlib.Path(self.path).glob("*.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
        self._clean = True

    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: Any, meta: dict[str, Any]) -> None:
        record = {"format_version": FORMAT_VERSION, "leaves": _describe(state), "user": meta}
        try:
            json.dumps(meta)
        except TypeError as error:  # told here: orbax would raise from a thread, saves later
            raise ValueError(
                f"meta of checkpoint {step} is not JSON ({error}): give numbers as int() or float()"
            ) from error
        if jax.process_index() == 0:
            self._remove_leftovers()
        written = jax.tree.map(_writable, state)
        record["digests"] = digests.of_tree(written)
        record["digest"] = digests.of_record(record)
        # orbax leaves out, without a word, a step that is not above its newest one.
        state = ocp.args.StandardSave(written)
        with self.told():  # of this save, or of the one before, which ran beside the training
            for later in [s for s in self.steps() if s >= step]:
                self.manager.wait_until_finished()
                self.manager.delete(later)
            self.manager.save(
                step, args=ocp.args.Composite(state=state, meta=ocp.args.JsonSave(record))
            )

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Turns what orbax raises where a file could not be written into one OSError."""
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
                "space there or mend its permissions, and resume; the ones before it are whole"
            ) from error

    def meta(self, step: int) -> dict[str, Any]:
        return self._record(step)["user"]

    def _record(self, step: int) -> dict[str, Any]:
        """What is written beside a state. Raises _Damaged where it is not what was written."""
        args = ocp.args.Composite(meta=ocp.args.JsonRestore())
        record = self.manager.restore(step, args=args)["meta"]
        content = {name: value for name, value in record.items() if name != "digest"}
        if record.get("digest") != digests.of_record(content):
            if "digest" in record or record["format_version"] != _WITHOUT_DIGESTS:
                raise _Damaged("its metadata is not what was written")
        return record

    def restore(self, example: Any, step: int | None) -> tuple[Any, dict[str, Any]]:
        candidates = self.steps()[::-1] if step is None else [step]
        last_error: Exception | None = None
        for candidate in candidates:
            try:
                record = self._record(candidate)
                version = record["format_version"]
            except Exception as error:
                last_error = error
                _warn_damaged(self.path, candidate, error)
                continue
            if version not in (FORMAT_VERSION, _WITHOUT_DIGESTS):
                raise ValueError(
                    f"checkpoint {candidate} in {self.path} has format version {version}, this "
                    f"code reads {FORMAT_VERSION}: use the code that wrote it"
                )
            written, renamed = _as_written(example, record["leaves"])
            _check_leaves(self.path, record["leaves"], _describe(written))
            try:
                return renamed(self._read(candidate, written, record)), record["user"]
            except Exception as error:
                if _is_out_of_memory(error):
                    raise
                last_error = error
                _warn_damaged(self.path, candidate, error)
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise FileNotFoundError(
            f"{what} in {self.path} could be read: copy it there again, ask for another one, or "
            "start the run again in another workdir"
        ) from last_error

    def _read(self, step: int, example: Any, record: dict[str, Any]) -> Any:
        def abstract(x: Any) -> jax.ShapeDtypeStruct:
            where = _sharding(x)
            if _is_key(x):
                x = jax.eval_shape(jax.random.key_data, x)
            shape = (1,) if 0 in x.shape else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=where)

        wanted = jax.tree.map(abstract, example)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(wanted))
        try:
            state = self.manager.restore(step, args=args)["state"]
            name = digests.damaged(state, record["digests"]) if "digests" in record else None
        except Exception:
            _agreed(False)
            raise
        if not _agreed(name is None):
            raise _Damaged(f"{name or 'what another process reads'} is not what was written")
        if "digests" not in record:
            warnings.warn(
                f"checkpoint {step} in {self.path} is of an older format, without digests: damage "
                "to it would not be noticed",
                stacklevel=4,
            )

        def rebuild(x: Any, like: Any) -> Any:
            if _is_key(like):
                return jax.random.wrap_key_data(x, impl=_key_impl(like))
            if 0 in like.shape:
                return jax.device_put(np.zeros(like.shape, like.dtype), _sharding(like))
            return x

        return jax.tree.map(rebuild, state, example)


class _Damaged(Exception):
    """A checkpoint that can be read and is not what was written."""


def _agreed(flag: bool) -> bool:
    """Whether all processes say so: either all of them take a checkpoint or none."""
    if jax.process_count() == 1:
        return flag
    return bool(np.all(multihost_utils.process_allgather(np.array(flag))))


def load_config(workdir: str) -> dict[str, Any]:
    """The configuration a run was started with.

    Raises FileNotFoundError if `workdir` holds no run, and ValueError if its file is malformed.
    """
    path = os.path.join(workdir, "config.json")
    if not os.path.exists(path):
        raise FileNotFoundError(
            f"{path} does not exist: workdir={workdir} holds no run: mend the path, or train one "
            "there"
        )
    config = read_json(path)
    for section in ("env", "train", "eval", "checkpoint", "replay"):
        if not isinstance(config.get(section), dict):
            raise ValueError(f"{path}: section {section!r} is missing or no section")
    for section, name, kind in (("env", "name", str), ("env", "num_envs", int)):
        if not isinstance(config[section].get(name), kind):
            raise ValueError(f"{path}: field '{section}.{name}' is missing or no {kind.__name__}")
    if not isinstance(config.get("agent"), str):
        raise ValueError(f"{path}: field 'agent' is missing or no name")
    return config


def load_settings(workdir: str) -> RunSettings:
    """The settings a run was started with, with its own copies of the files they name.

    Raises FileNotFoundError if `workdir` holds no run, and ValueError in one line where its
    settings are of an older format or it has no such copies.
    """
    values = load_config(workdir)
    extensions.require(values.get("imports", ()), os.path.join(workdir, "config.json"))
    kind = settings_class(values["agent"])
    try:
        settings = from_dict(kind(), values, check_effects=False)
    except ValueError as error:
        raise ValueError(
            f"{workdir}/config.json is of an older format ({error}): use the code that wrote it"
        ) from error
    return inputs.kept(settings, workdir)


def _sharding(x: Any) -> jax.sharding.Sharding:
    """Where a leaf lies: the devices of its mesh, or the first one of this process."""
    where = getattr(x, "sharding", None)
    if isinstance(where, jax.sharding.NamedSharding):
        return where
    return jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _inode(path: str) -> int | None:
    return os.stat(path).st_ino if os.path.isdir(path) else None


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _key_impl(like: Any) -> Any:
    """Implementation of a key that may be abstract; `jax.random.key_impl` takes only real ones."""
    found = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), like)
    return found[0]


def _writable(x: Any) -> Any:
    """A leaf as it is written: typed keys as their numbers, an empty array as one zero."""
    if _is_key(x):
        return jax.random.key_data(x)
    return jax.device_put(np.zeros((1,), x.dtype), _sharding(x)) if x.size == 0 else x


def _describe(state: Any) -> dict[str, str]:
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in leaves}


def _as_written(example: Any, leaves: dict[str, str]) -> tuple[Any, Callable[[Any], Any]]:
    """`example` with its fields called as they are in `leaves`, and the way back."""
    fields = [f.name for f in dataclasses.fields(example)] if _is_struct(example) else []
    old = {new: old for new, old in _ONCE_CALLED.items() if new in fields and f".{old}" in leaves}
    if not old:
        return example, lambda state: state
    values = {old.get(name, name): getattr(example, name) for name in fields}
    kind = struct.dataclass(type("Older", (), {"__annotations__": dict.fromkeys(values, Any)}))
    return kind(**values), lambda state: type(example)(
        **{name: getattr(state, old.get(name, name)) for name in fields}
    )


def _is_struct(x: Any) -> bool:
    return dataclasses.is_dataclass(x) and not isinstance(x, type)


def _check_leaves(path: str, saved: dict[str, str], wanted: dict[str, str]) -> None:
    different = [
        f"{name}: saved {saved.get(name, 'nothing')}, wanted {wanted.get(name, 'nothing')}"
        for name in sorted(saved.keys() | wanted.keys())
        if saved.get(name) != wanted.get(name)
    ]
    if different:
        shown = "; ".join(different[:5]) + ("; ..." if len(different) > 5 else "")
        raise ValueError(
            f"the checkpoint in {path} was made with other settings ({shown}): resume with the "
            "run's own config.json, or start again in another workdir"
        )


def _is_out_of_memory(error: Exception) -> bool:
    device = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
    return device or isinstance(error, MemoryError)


def _warn_damaged(path: str, step: int, error: Exception) -> None:
    warnings.warn(
        f"checkpoint {step} in {path} is damaged and skipped ({_first_line(error)})", stacklevel=4
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
