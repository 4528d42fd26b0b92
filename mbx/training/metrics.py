"""The log of a run: JSONL and CSV files, mirrored to other services.

metrics.jsonl has one object a row: kind ("setup", "train", "eval"), step (environment steps), time
(seconds since the epoch) and the values. metrics.csv holds kind, step, name, value in long form.
episodes.csv holds return and length of every evaluation episode, training_episodes.csv those of
training. Files are append-only; a resumed run first drops the rows after its checkpoint.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mbx.agents.settings import Log
from mbx.settings import flatten
from mbx.training import sinks
from mbx.training.files import atomic_write, parse_json, written

_EPISODE = ["step", "episode", "task", "return", "length"]
_COMPARED = ("eval/return_mean", "train/episode/return")  # by TensorBoard's hyperparameters
_TRAINING = ["step", "environment", "task", "return", "length"]


class RunLogger:
    """Writes the files of a run directory and mirrors their rows (`mbx.training.sinks`).

    Args:
        config: written to config.json when a run starts.
        log: services that also receive the rows.
        resume_step: the step to continue from, whose later rows are dropped; None for a new run.
        progress_total: environment steps of the run.
        quiet: show no progress.
        label: name of the shown part of a run ("seed 0").

    Raises:
        ImportError, ValueError: as `sinks.Wandb`.
    """

    def __init__(
        self,
        workdir: str,
        *,
        config: Mapping[str, Any],
        log: Log = Log(),  # noqa: B008
        resume_step: int | None = None,
        progress_total: int | None = None,
        quiet: bool = False,
        label: str = "",
    ) -> None:
        os.makedirs(workdir, exist_ok=True)
        self.workdir = workdir
        resumed = resume_step is not None
        # First: where it fails there is no run yet, and the next attempt finds the directory free.
        wandb = sinks.Wandb(workdir, log, config, resumed) if log.wandb else None
        self._jsonl = os.path.join(workdir, "metrics.jsonl")
        self._csv = os.path.join(workdir, "metrics.csv")
        self._episodes = os.path.join(workdir, "episodes.csv")
        self._training = os.path.join(workdir, "training_episodes.csv")
        self._write_config(config, resume_step)
        self._rewrite(-1 if resume_step is None else resume_step)
        purge = None if resume_step is None else resume_step + 1
        self._sinks = sinks.Sinks(
            TensorBoard=sinks.open_tensorboard(os.path.join(workdir, "tb"), purge),
            wandb=wandb,
            progress=None if quiet else sinks.Progress(progress_total, resume_step or 0, label),
        )
        if config:
            self._sinks.call("settings", dict(flatten(config)), _COMPARED)
        self._warned = False

    def _write_config(self, config: Mapping[str, Any], resume_step: int | None) -> None:
        """Write config.json; a resumed run's earlier one is kept as config-until-STEP.json."""
        path = os.path.join(self.workdir, "config.json")
        text = json.dumps({**config, "resume": False}, indent=2).encode()
        if resume_step is not None and os.path.exists(path):
            with open(path, "rb") as file:
                old = file.read()
            if old == text:
                return
            atomic_write(os.path.join(self.workdir, f"config-until-{resume_step}.json"), old)
        atomic_write(path, text)

    def _rewrite(self, last_step: int) -> None:
        """Keep complete rows up to `last_step`."""
        rows = [row for row in read_rows(self._jsonl) if row["step"] <= last_step]
        atomic_write(self._jsonl, b"".join(_line(row) for row in rows))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["kind", "step", "name", "value"])
        for row in rows:
            writer.writerows(_long(row))
        atomic_write(self._csv, text.getvalue().encode())
        for path, names in ((self._episodes, _EPISODE), (self._training, _TRAINING)):
            atomic_write(path, _episodes_until(path, names, last_step).encode())

    def log_episodes(
        self, step: int, returns: Sequence[float], lengths: Sequence[float], tasks: Sequence[str]
    ) -> None:
        """Append every episode of an evaluation to episodes.csv.
        tasks: names, each with an equal block of the episodes; () for a single task.
        """
        block = -(-len(returns) // max(len(tasks), 1))
        rows = [
            [step, i, tasks[i // block] if tasks else "", repr(float(total)), int(length)]
            for i, (total, length) in enumerate(zip(returns, lengths, strict=True))
        ]
        _append(self._episodes, rows)

    def log_training(
        self,
        steps: Sequence[int],
        environments: Sequence[int],
        tasks: Sequence[str],
        returns: Sequence[float],
        lengths: Sequence[int],
    ) -> None:
        """Append training episodes: final environment steps, environment numbers, task names (""
        for a single task), returns and lengths."""
        each = zip(steps, environments, tasks, returns, lengths, strict=True)
        rows = [[int(s), int(i), task, repr(float(x)), int(n)] for s, i, task, x, n in each]
        _append(self._training, rows)

    def log_picture(self, name: str, step: int, content: bytes) -> None:
        """Show a picture or film, given as a file's content, in TensorBoard."""
        self._sinks.call("picture", name, step, content)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append one row of numbers or one-element arrays.
        Non-finite values are written as null, with one warning a run. Raises ValueError for a value
        with the name of a row's field, OSError where the row cannot be written.
        """
        taken = sorted({"kind", "step", "time"} & values.keys())
        if taken:
            raise ValueError(f"value {taken[0]!r} has the name of a field of the row: rename it")
        values = {name: v if isinstance(v, int) else float(v) for name, v in values.items()}
        clean = {name: v if math.isfinite(v) else None for name, v in values.items()}
        self._warn_not_finite(kind, step, clean)
        row = {"kind": kind, "step": int(step), "time": time.time(), **clean}
        if not os.path.exists(self._jsonl):
            raise OSError(
                f"{self._jsonl} is gone: the run's directory was removed or moved while it ran; "
                "put it back and resume"
            )
        with written(self._jsonl), open(self._jsonl, "ab") as file:
            file.write(_line(row))
        _append(self._csv, _long(row))
        self._sinks.call("log", kind, int(step), values)

    def show_pretraining(self, values: Mapping[str, float], made: int, of: int) -> None:
        """Show the progress of the pretraining, which has no row until it ends."""
        self._sinks.call("pretraining", values, made, of)

    def _warn_not_finite(self, kind: str, step: int, clean: Mapping[str, Any]) -> None:
        bad = [name for name, value in clean.items() if value is None]
        if bad and not self._warned:
            self._warned = True
            warnings.warn(
                f"{kind}/{bad[0]} is not finite at step {step}: written as null, and so are later "
                "ones without a warning",
                stacklevel=3,
            )

    def close(self) -> None:
        """Flush and close."""
        self._sinks.call("close")


class NoLogger:
    """A logger that does nothing, for processes that do not write."""

    def __init__(self, workdir: str) -> None:
        self.workdir = workdir

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name not in vars(RunLogger):
            raise AttributeError(name)
        return lambda *_: None


def _append(path: str, rows: Sequence[Sequence[Any]]) -> None:
    with written(path), open(path, "a", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def _episodes_until(path: str, names: list[str], last_step: int) -> str:
    """The header and the valid rows of a file of episodes up to a step."""
    kept = [names]
    if os.path.exists(path):
        with open(path, newline="", errors="replace") as file:
            rows = [line.rstrip("\n").split(",") for line in file if line.endswith("\n")]
        kept += [
            row
            for row in rows
            if len(row) == len(names) and row[0].isdigit() and int(row[0]) <= last_step
        ]
    return "".join(",".join(row) + "\n" for row in kept)


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, without an unfinished last line; [] for a missing file.
    Raises ValueError, naming the file, line and field, for invalid rows.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, 1):
        field = _wrong_field(row)
        if field is not None:
            value = repr(row[field])[:40] if field in row else "missing"
            raise ValueError(f"{path}, line {number}: field {field!r} is {value}: mend the line")
    return rows


def read_lines(path: str) -> list[dict[str, Any]]:
    """JSON objects of a file, one a line, without an unfinished last line; [] for a missing file.
    Raises ValueError, naming the file and the line, for other lines.
    """
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    objects = []
    for number, line in enumerate(lines[:-1], 1):  # whatever is whole ends with a newline
        objects.append(parse_json(line, f"{path}, line {number}"))
    return objects


def _wrong_field(row: Mapping[str, Any]) -> str | None:
    """The first missing or mistyped field of a row."""
    if not isinstance(row.get("kind"), str):
        return "kind"
    step = row.get("step")
    if type(step) is not int or not 0 <= step < 2**63:
        return "step"
    for name, value in row.items():
        number = type(value) is float or (type(value) is int and abs(value) < 2**63)
        if name != "kind" and not number and (value is not None or name == "time"):
            return name
    return None


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row) + "\n").encode()


def _long(row: Mapping[str, Any]) -> list[list[Any]]:
    fields = {k: v for k, v in row.items() if k not in ("kind", "step", "time")}
    return [[row["kind"], row["step"], k, "" if v is None else repr(v)] for k, v in fields.items()]
