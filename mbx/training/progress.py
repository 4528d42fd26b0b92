"""What a run shows of itself while it goes: a bar on a terminal, one whole line a row elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping

# Of a training row, in this order; of an evaluation.
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


class Progress:
    """Shows the rows of a run.

    Args:
        total: environment steps of the run, None where nobody knows.
        initial: those that lie behind it.
        label: what the numbers are of ("seed 0"), where that is not the whole run.
    """

    def __init__(self, total: int | None, initial: int, label: str = "") -> None:
        self._bar = None
        self._total, self._label = total, f"{label}  " if label else ""
        self._first: tuple[int, float] | None = None  # the first row with updates, and its time
        self._evaluated = ""
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, initial=initial, unit="step", dynamic_ncols=True)

    def show(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        """Show a row: its own numbers and nothing of an earlier one."""
        if kind == "setup":
            if self._bar is None:
                sizes = (f"{name} {value:,.15g}" for name, value in values.items())
                print("  ".join(("setup", *sizes)), flush=True)
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
        print(f"{kind:5s} {place}  {self._label}{shown}{left}", flush=True)

    def pretraining(self, values: Mapping[str, float], made: int, of: int) -> None:
        """Show how far the updates are that are made at once, and the losses of the latest."""
        place = f"{made:,} of {of:,} first updates"
        shown = _numbers(_TRAIN, values)
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self._label}{place}  {shown}")
            return
        print(f"      {place}  {self._label}{shown}", flush=True)

    def _left(self, step: int) -> str:
        """The time that is left at the speed since the first row with updates.

        Rows before it say nothing of it: random actions cost a hundredth of a learning step, and
        the first updates come at once.
        """
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        if self._total is None or step <= self._first[0] or step >= self._total:
            return ""
        seconds = (now - self._first[1]) / (step - self._first[0]) * (self._total - step)
        return f"  {duration(seconds)} left"

    def close(self) -> None:
        """End the bar."""
        if self._bar is not None:
            self._bar.close()


def duration(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min."""
    if not math.isfinite(seconds) or seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def _numbers(names: Mapping[str, str], values: Mapping[str, float]) -> str:
    return "  ".join(f"{short} {values[n]:.4g}" for n, short in names.items() if n in values)
