"""The log of a run: JSONL and CSV files, mirrored to other services; and messages on stderr.

metrics.jsonl has one object a row: kind ("setup", "train", "eval"), step (environment steps), time
(seconds since the epoch) and the values. metrics.csv holds kind, step, name, value in long form.
episodes.csv holds return and length of every evaluation episode, training_episodes.csv those of
training. Files are append-only; a resumed run first drops the rows after its checkpoint.
TensorBoard, Weights & Biases, Trackio and the terminal mirror the rows; one that fails is dropped
with a warning.
"""

from __future__ import annotations

import contextlib
import csv
import glob
import importlib
import io
import json
import logging
import math
import os
import secrets
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mbx.agents.settings import Log, RunSettings
from mbx.settings import flatten, to_dict
from mbx.training.files import atomic_write, parse_json, read_json, written
from mbx.types import EnvSpec

_COMPARED = ("eval/return_mean", "train/episode/return")  # by TensorBoard's hyperparameters
_EPISODES = {  # by kind: file and columns
    "eval": ("episodes.csv", ["step", "episode", "task", "return", "length"]),
    "train": ("training_episodes.csv", ["step", "environment", "task", "return", "length"]),
}


class RunLogger:
    """Writes the files of a run directory and mirrors their rows (`mbx.training.logging`).

    Args:
        config: written to config.json when a run starts.
        log: services that also receive the rows.
        resume_step: the step to continue from, whose later rows are dropped; None for a new run.
        progress_total: environment steps of the run.
        quiet: show no progress.
        label: name of the shown part of a run ("seed 0").

    Raises:
        ImportError, ValueError: as `Tracker`.
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
        trackers = {
            service: Tracker(service, workdir, log, config, resumed)
            for service in TRACKERS
            if getattr(log, service)
        }
        self._jsonl = os.path.join(workdir, "metrics.jsonl")
        self._csv = os.path.join(workdir, "metrics.csv")
        self._write_config(config, resume_step)
        self._rewrite(-1 if resume_step is None else resume_step)
        purge = None if resume_step is None else resume_step + 1
        self._sinks = Sinks(
            TensorBoard=open_tensorboard(os.path.join(workdir, "tb"), purge),
            **trackers,
            progress=None if quiet else Progress(progress_total, resume_step or 0, label),
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
        long = [["kind", "step", "name", "value"], *(line for row in rows for line in _long(row))]
        atomic_write(self._csv, _csv(long))
        for name, columns in _EPISODES.values():
            path = os.path.join(self.workdir, name)
            atomic_write(path, _csv([columns, *read_episodes(path, last_step)]))

    def log_episodes(
        self,
        kind: str,
        steps: Iterable[int],
        numbers: Iterable[int],
        returns: Iterable[float],
        lengths: Iterable[float],
        tasks: Sequence[str] = (),
        number: int = 1,
    ) -> None:
        """Append episodes to episodes.csv (kind "eval") or training_episodes.csv ("train").

        Args:
            steps: environment steps at which the evaluation was made, or the episode ended.
            numbers: of the episodes of an evaluation, or of the environments.
            tasks: names, each with an equal block of the numbers; () for a single task.
            number: how many numbers there are in all.
        """
        block = -(-number // max(len(tasks), 1))
        rows = [
            [int(step), int(i), tasks[i // block] if tasks else "", repr(float(total)), int(length)]
            for step, i, total, length in zip(steps, numbers, returns, lengths, strict=True)
        ]
        _append(os.path.join(self.workdir, _EPISODES[kind][0]), rows)

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
        bad = [name for name, value in clean.items() if value is None]
        if bad and not self._warned:
            self._warned = True
            warnings.warn(
                f"{kind}/{bad[0]} is not finite at step {step}: written as null, and so are later "
                "ones without a warning",
                stacklevel=2,
            )
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


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _append(path: str, rows: Sequence[Sequence[Any]]) -> None:
    with written(path), open(path, "ab") as file:
        file.write(_csv(rows))


def read_episodes(path: str, last_step: int) -> list[list[str]]:
    """The complete rows of a file of episodes up to a step; [] for a missing file."""
    if not os.path.exists(path):
        return []
    width = len(_EPISODES["eval"][1])
    with open(path, newline="", errors="replace") as file:
        # Line by line: an open quote in a damaged one would swallow those after it. A longer one
        # than csv takes is a hole of zeros.
        whole = [line for line in file if line.endswith("\n") and len(line) < 100_000]
        rows = [next(csv.reader([line])) for line in whole]
        return [x for x in rows if len(x) == width and x[0].isdigit() and int(x[0]) <= last_step]


def read_rows(path: str) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl, without an unfinished last line; [] for a missing file.
    Raises ValueError, naming the file, line and field, for invalid rows.
    """
    rows = read_lines(path)
    for number, row in enumerate(rows, 1):
        field = _wrong_field(row)
        if field is not None:
            value = repr(row[field])[:40] if field in row else "missing"
            raise ValueError(f"{path}, line {number}: field {field!r} is {value}: fix the line")
    return rows


def read_lines(path: str) -> list[dict[str, Any]]:
    """JSON objects of a file, one a line, without an unfinished last line; [] for a missing file.
    Raises ValueError, naming the file and the line, for other lines.
    """
    if not os.path.exists(path):
        return []
    with open(path, "rb") as file:
        lines = file.read().split(b"\n")
    # A complete line ends with a newline.
    return [parse_json(line, f"{path}, line {i}") for i, line in enumerate(lines[:-1], 1)]


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


STEPS = "environment_steps"
TRACKERS = ("wandb", "trackio")
_FLUSH_SECONDS = 30
# What the terminal shows of a training row, in this order; of an evaluation.
_TRAIN_SHOWN = {
    "episode/return": "return",
    "episode/length": "length",
    "loss/consistency": "consistency",
    "loss/reward": "reward",
    "loss/value": "value",
    "loss/policy": "policy",
    "steps_per_second": "steps/s",
}
_EVAL_SHOWN = {"return_mean": "return", "return_std": "±", "length_mean": "length"}


class Sinks:
    """Sinks by name with one interface; the first error of one drops it with a warning."""

    def __init__(self, **sinks: Any) -> None:
        self.open = {name: sink for name, sink in sinks.items() if sink is not None}

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every sink that has it."""
        for name, sink in list(self.open.items()):
            try:
                getattr(sink, method, lambda *_: None)(*arguments)
            except Exception as error:
                del self.open[name]
                warnings.warn(
                    f"{name} failed ({type(error).__name__}: {error}) and gets no more of this "
                    "run, which continues: its rows are in metrics.jsonl",
                    stacklevel=3,
                )


class TensorBoard:
    """An event file in the directory `path`.
    `tensorboardX.SummaryWriter` writes in a thread that ends when the disk is full, after which the
    run would block on its queue; here the error is raised. purge_step: hide earlier files' events
    from this step on; None: keep all.
    """

    def __init__(self, path: str, purge_step: int | None) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary, self._flushed = Event, Summary, 0.0
        os.makedirs(path, exist_ok=True)
        # The name ends in the second: two processes must not share it.
        self._writer = EventsWriter(os.path.join(path, "events"), f".{os.getpid()}")
        if purge_step is not None:
            self._write(step=purge_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Append the finite values at a step, as KIND/NAME."""
        from tensorboardX.summary import scalar

        for name, value in values.items():
            if math.isfinite(value):
                self._write(step=step, summary=scalar(f"{kind}/{name}", value))

    def settings(self, values: Mapping[str, Any], metrics: Sequence[str]) -> None:
        """Write the run's settings by dotted name, for the page of hyperparameters.
        metrics: names of the numbers to compare runs by, as `log` writes them.
        """
        from tensorboardX.summary import hparams

        plain = {n: x if isinstance(x, int | float) else str(x) for n, x in values.items()}
        for summary in hparams(plain, dict.fromkeys(metrics, 0.0)):
            self._write(step=0, summary=summary)

    def picture(self, name: str, step: int, content: bytes) -> None:
        """Append a PNG or GIF file's content as an image; other formats are ignored."""
        if content.startswith(b"\x89PNG"):
            width, height = struct.unpack(">II", content[16:24])
        elif content.startswith(b"GIF8"):
            width, height = struct.unpack("<HH", content[6:10])
        else:
            return
        fields = dict(height=height, width=width, colorspace=3, encoded_image_string=content)
        value = self._summary.Value(tag=name, image=self._summary.Image(**fields))
        self._write(step=step, summary=self._summary(value=[value]))

    def close(self) -> None:
        """Write pending events and close the file."""
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._writer.flush()
            self._flushed = time.monotonic()


def open_tensorboard(path: str, purge_step: int | None) -> TensorBoard | None:
    """The event file of a run; None where tensorboardX is missing or, with a warning, fails."""
    try:
        return TensorBoard(path, purge_step)
    except ImportError:
        return None
    except Exception as error:
        warnings.warn(f"TensorBoard gets nothing of this run ({error})", stacklevel=2)
        return None


class Tracker:
    """A run of Weights & Biases or Trackio (extras) that mirrors the rows of one run directory.
    Its id is kept in wandb.json or trackio.json for resuming (`resume`). Curves are drawn over
    `environment_steps`, since wandb's own step counter cannot be set back. WANDB_MODE=offline keeps
    the rows in the run directory for `wandb sync`.

    Args:
        service: "wandb" or "trackio", which has its interface.

    Raises:
        ImportError: the package is missing.
        ValueError: it does not open the run (no key, no network).
    """

    def __init__(
        self, service: str, workdir: str, log: Log, config: Mapping[str, Any], resume: bool
    ) -> None:
        package, project = require_tracker(service, log), getattr(log, service)
        path, self._counts = os.path.join(workdir, f"{service}.json"), service == "trackio"
        known = read_json(path) if resume and os.path.exists(path) else {}
        run_id = known.get("id") or secrets.token_hex(8)
        above, name = os.path.split(os.path.abspath(workdir))
        name = f"{os.path.basename(above)}/{name}" if name.startswith("seed-") else name
        options = dict(project=project, resume="allow", config=dict(config))
        if self._counts:  # it knows a run by its name
            options |= dict(name=f"{name}-{run_id[:6]}")
        else:  # several seeds are several runs in one process
            options |= dict(name=name, id=run_id, reinit="create_new", dir=workdir)
            options |= dict(entity=log.wandb_entity or None)
        try:
            self._run = package.init(**options)
            if not self._counts:
                self._run.define_metric(STEPS)
                self._run.define_metric("*", step_metric=STEPS)
        except Exception as error:
            offline = "run `wandb login`, set WANDB_MODE=offline to upload later, or "
            raise ValueError(
                f"log.{service}={project!r}: {error}: {'' if self._counts else offline}leave "
                f"log.{service} empty"
            ) from error
        atomic_write(path, json.dumps({"id": run_id, "project": project}).encode())

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Mirror one row; names are KIND/NAME, as in TensorBoard."""
        row = {STEPS: step, **{f"{kind}/{name}": v for name, v in values.items()}}
        self._run.log(row, **(dict(step=step) if self._counts else {}))

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


def require_tracker(service: str, log: Log) -> Any:
    """The package of a service, if the settings need it. Raises ImportError if it is missing."""
    if not getattr(log, service):
        return None
    try:
        return importlib.import_module(service)
    except ImportError as error:
        raise ImportError(
            f"log.{service}={getattr(log, service)!r} needs the package {service}: pip install "
            f"'mbx-rl[{service}]', or leave log.{service} empty"
        ) from error


class Progress:
    """Shows the rows of a run: a bar on a terminal, one line a row elsewhere.
    total: environment steps of the run, None if unknown. initial: earlier steps. label: name of a
    part of the run ("seed 0").
    """

    def __init__(self, total: int | None, initial: int, label: str = "") -> None:
        self._bar = None
        self._total, self._label = total, f"{label}  " if label else ""
        self._first: tuple[int, float] | None = None  # the first row with updates, and its time
        self._evaluated = ""
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=initial, unit="step", dynamic_ncols=True)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Show one row."""
        if kind == "setup":
            if self._bar is None:
                sizes = (f"{name} {value:,.15g}" for name, value in values.items())
                _print("  ".join(("setup", *sizes)))
            return
        shown = _numbers(_EVAL_SHOWN if kind == "eval" else _TRAIN_SHOWN, values)
        if self._bar is None:
            place = f"step {step:,}" + (f" of {self._total:,}" if self._total else "")
            learning = kind == "train" and values.get("updates", 1.0) > 0.0
            left = self._left(step) if learning else ""
            _print(f"{kind:5s} {place}  {self._label}{shown}{left}")
            return
        if kind == "eval":
            self._evaluated = f"eval at {step:,}: {shown}"
        else:
            self._bar.set_postfix_str(f"{self._label}{shown}  {self._evaluated}", refresh=False)
        self._bar.update(max(0, step - self._bar.n))
        self._bar.refresh()

    def pretraining(self, values: Mapping[str, float], made: int, of: int) -> None:
        """Show the progress of the pretraining and its newest losses."""
        place, shown = f"pretraining {made:,} of {of:,}", _numbers(_TRAIN_SHOWN, values)
        if self._bar is None:
            _print(f"      {place}  {self._label}{shown}")
        else:
            self._bar.set_postfix_str(f"{self._label}{place}  {shown}")

    def _left(self, step: int) -> str:
        """The remaining time at the speed since the first row with updates.
        Earlier rows are unrepresentative: random actions are much cheaper than learning steps.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        if self._total is None or step <= self._first[0] or step >= self._total:
            return ""
        seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
        return f"  {duration(seconds)} left"

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """A time in words: 45 s, 12 min, 3 h 20 min."""
    if not math.isfinite(seconds) or seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _numbers(names: Mapping[str, str], values: Mapping[str, float]) -> str:
    return "  ".join(f"{short} {values[n]:.4g}" for n, short in names.items() if n in values)


def _print(text: str) -> None:
    """Print a line in the output's encoding."""
    coding = getattr(sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(coding, "replace").decode(coding), flush=True)


_COMPILING = "/jax/core/compile/"  # tracing, lowering, making machine code
_FOREIGN = (
    *("absl", "brax", "dm_control", "dm_env", "etils", "flax", "gymnasium", "gymnax", "imageio"),
    *("jax", "labmaze", "matplotlib", "ml_collections", "mujoco", "mujoco_playground", "numpy"),
    *("optax", "orbax", "OpenGL", "tensorboardX", "tqdm", "trackio", "wandb"),
)
_NVIDIA = "/dev/nvidia[0-9]*"


def print_devices() -> None:
    """Print the devices of the run."""
    device, count = jax.devices()[0], jax.device_count()
    kind = f" ({device.device_kind})" if device.platform != "cpu" else ""
    devices = f"{count} {device.platform.upper()} device{'s' * (count > 1)}{kind}"
    say(f"running on {devices}, jax {jax.__version__}{missed_gpu(jax.config.jax_platforms)}")


def print_task_settings(settings: RunSettings, chosen: RunSettings, spec: EnvSpec) -> None:
    """Print the settings that `RunSettings.for_task` filled in, and how actions are joined."""
    before, after = (dict(flatten(to_dict(one))) for one in (settings, chosen))
    found = [f"{name}={after[name]}" for name in after if after[name] != before[name]]
    if parts := spec.action_parts:
        names = (f"{p.name} {[n for _, n in p.choices] or list(p.shape)}".strip() for p in parts)
        joined = f"one choice of {spec.action_dim}" if spec.discrete else "joined numbers"
        found.append(f"actions are {joined}, {', '.join(names)}")
    if found:
        say(f"for {settings.env.name}: {', '.join(found)}")


@contextlib.contextmanager
def printed_compilation(what: str, talk: bool = True, kept: bool = True) -> Iterator[None]:
    """Print, if `talk`, that the first use of a program compiles it, and the time that took.
    kept: whether the program goes to the compilation cache.
    """
    if not talk:
        yield
        return
    seconds: list[float] = []
    began = time.monotonic()

    def listen(event: str, duration: float, **_: Any) -> None:
        if event.startswith(_COMPILING):
            seconds.append(duration)

    takes = "half a minute to some minutes" if jax.default_backend() == "gpu" else "20 s or more"
    when = "the first time, kept for the next" if kept else "at every start"
    say(f"compiling {what} ({takes} {when})")
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    # Of programs inside programs the tracing is reported twice.
    took = min(sum(seconds), time.monotonic() - began)
    say(f"compiled {what} in {took:.0f} s")


@contextlib.contextmanager
def without_foreign_deprecations() -> Iterator[None]:
    """Hide deprecation warnings of other packages, unless warnings were chosen (`python -W`)."""
    with warnings.catch_warnings():
        if not sys.warnoptions:
            for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning):
                for package in _FOREIGN:
                    warnings.filterwarnings("ignore", category=kind, module=rf"{package}(\.|$)")
        yield


def missed_gpu(chosen: str | None) -> str:
    """A remark where this machine has a GPU that the installed jaxlib cannot use; else "".
    chosen: the requested platforms (`JAX_PLATFORMS`), if any.
    """
    if jax.default_backend() != "cpu" or chosen or not glob.glob(_NVIDIA):
        return ""
    return (
        "; this machine has an NVIDIA GPU, but jaxlib is built for CPUs: "
        "pip install -U 'jax[cuda12]' (in a checkout: pip install -e '.[cuda]')"
    )


def quiet_storage() -> None:
    """Hide the storage library's log of errors that it also raises.
    After one failed file it logs a traceback and closes an event loop: every other file then logs
    another traceback, possibly much later, or asyncio does for it if it failed before the closing.
    """
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_of_storage)
    shown = sys.unraisablehook
    if getattr(shown, "quiet_storage", False):
        return

    def show(found: Any) -> None:
        error = found.exc_value
        if not (type(error) is RuntimeError and str(error) == "Event loop is closed"):
            shown(found)

    show.quiet_storage = True  # type: ignore[attr-defined]
    sys.unraisablehook = show


def _not_of_storage(record: logging.LogRecord) -> bool:
    unread = record.getMessage().startswith(
        ("Future exception was never retrieved", "Task exception was never retrieved")
    )
    error = record.exc_info and record.exc_info[1]
    of_storage = f"{os.sep}orbax{os.sep}" in record.pathname
    return not (of_storage or (unread and "[tensorstore_spec" in str(error)))


def say(text: str) -> None:
    """Print a line about the run that is none of its rows."""
    print(f"mbx: {text}", file=sys.stderr, flush=True)
