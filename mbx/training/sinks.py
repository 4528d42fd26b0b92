"""Sinks of a run's rows besides its files: TensorBoard, Weights & Biases, the terminal.

A sink that fails is dropped with a warning; the run continues.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import struct
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mbx.agents.settings import Log
from mbx.training.files import atomic_write, read_json

STEPS = "environment_steps"
_FLUSH_SECONDS = 30
# What the terminal shows of a training row, in this order; of an evaluation.
_TRAIN = {
    "episode/return": "return",
    "episode/length": "length",
    "loss/consistency": "consistency",
    "loss/reward": "reward",
    "loss/value": "value",
    "loss/policy": "policy",
    "steps_per_second": "steps/s",
}
_EVAL = {"return_mean": "return", "return_std": "±", "length_mean": "length"}


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


class Wandb:
    """A Weights & Biases run (extra `wandb`) that mirrors the rows of one run directory.
    Its id is kept in wandb.json for resuming (`resume`). Curves are drawn over `environment_steps`,
    since wandb's own step counter cannot be set back. WANDB_MODE=offline keeps the rows in the run
    directory for `wandb sync`.

    Raises:
        ImportError: the package is missing.
        ValueError: wandb does not open the run (no key, no network).
    """

    def __init__(self, workdir: str, log: Log, config: Mapping[str, Any], resume: bool) -> None:
        wandb = require_wandb(log)
        path = os.path.join(workdir, "wandb.json")
        known = read_json(path) if resume and os.path.exists(path) else {}
        run_id = known.get("id") or secrets.token_hex(8)
        above, name = os.path.split(os.path.abspath(workdir))
        try:
            self._run = wandb.init(
                project=log.wandb,
                entity=log.wandb_entity or None,
                id=run_id,
                resume="allow",
                reinit="create_new",  # several seeds are several runs in one process
                dir=workdir,
                name=f"{os.path.basename(above)}/{name}" if name.startswith("seed-") else name,
                config=dict(config),
            )
            self._run.define_metric(STEPS)
            self._run.define_metric("*", step_metric=STEPS)
        except Exception as error:
            raise ValueError(
                f"log.wandb={log.wandb!r}: {error}: run `wandb login`, set WANDB_MODE=offline "
                "to upload later, or leave log.wandb empty"
            ) from error
        atomic_write(path, json.dumps({"id": run_id, "project": log.wandb}).encode())

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Mirror one row; names are KIND/NAME, as in TensorBoard."""
        self._run.log({STEPS: step, **{f"{kind}/{name}": v for name, v in values.items()}})

    def close(self) -> None:
        """Send what is left and end the run."""
        self._run.finish()


def require_wandb(log: Log) -> Any:
    """The package wandb, if the settings need it. Raises ImportError if it is missing."""
    if not log.wandb:
        return None
    try:
        import wandb
    except ImportError as error:
        raise ImportError(
            f"log.wandb={log.wandb!r} needs the package wandb: pip install -e '.[wandb]', or "
            "leave log.wandb empty"
        ) from error
    return wandb


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
        if kind == "setup":
            if self._bar is None:
                sizes = (f"{name} {value:,.15g}" for name, value in values.items())
                _print("  ".join(("setup", *sizes)))
            return
        shown = _numbers(_EVAL if kind == "eval" else _TRAIN, values)
        if self._bar is not None:
            if kind == "eval":
                self._evaluated = f"eval at {step:,}: {shown}"
            else:
                self._bar.set_postfix_str(f"{self._label}{shown}  {self._evaluated}", refresh=False)
            self._bar.update(max(0, step - self._bar.n))
            self._bar.refresh()
            return
        place = f"step {step:,}" + (f" of {self._total:,}" if self._total else "")
        learning = values.get("updates", 1.0) > 0.0
        left = self._left(step) if kind == "train" and learning else ""
        _print(f"{kind:5s} {place}  {self._label}{shown}{left}")

    def pretraining(self, values: Mapping[str, float], made: int, of: int) -> None:
        """Show the progress of the pretraining and its newest losses."""
        place = f"pretraining {made:,} of {of:,}"
        shown = _numbers(_TRAIN, values)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._label}{place}  {shown}")
            return
        _print(f"      {place}  {self._label}{shown}")

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
