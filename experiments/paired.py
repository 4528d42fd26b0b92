"""Two checkouts timed in turn: what a change made an operation slower or faster by.

    git worktree add /tmp/before main~20
    python -m experiments.paired --before=/tmp/before --rounds=6
    python -m experiments.paired --before=/tmp/before --only=update --json=pairs.json

Each round runs `experiments.benchmark` once in either checkout, in turn first, so that a machine
that gets slower or faster does not count for one of them. Run it on a quiet machine.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from absl import app, flags

from mbx.files import atomic_write


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_string("before", None, "Checkout to compare with.", required=True)
    flags.DEFINE_string("after", os.getcwd(), "The other one.")
    flags.DEFINE_integer("rounds", 6, "Runs of either.", lower_bound=1)
    flags.DEFINE_string("preset", "default", "Of experiments.benchmark.")
    flags.DEFINE_string("only", "fused step", "Operation to time.")
    flags.DEFINE_string("json", None, "Also write the numbers here.")


def alternate(measure: Callable[[str], float], before: str, after: str, rounds: int) -> Any:
    """Milliseconds of either in every round, `[rounds, 2]`, measured in turn first."""
    times = []
    for i in range(rounds):
        order = (before, after) if i % 2 == 0 else (after, before)
        found = {where: measure(where) for where in order}
        times.append((found[before], found[after]))
        print(f"round {i + 1}: before {times[-1][0]:.3f} ms, after {times[-1][1]:.3f} ms")
    return np.array(times)


def summary(times: Any) -> dict[str, float]:
    """Medians of `[rounds, 2]`, and median, least and largest ratio after / before of a round."""
    ratios = times[:, 1] / times[:, 0]
    before, after = np.median(times, axis=0)
    return dict(
        before_ms=float(before),
        after_ms=float(after),
        ratio=float(np.median(ratios)),
        least=float(ratios.min()),
        largest=float(ratios.max()),
        rounds=len(times),
    )


def benchmark(checkout: str, arguments: list[str], name: str) -> float:
    """The median milliseconds that `experiments.benchmark` says in a checkout.

    Raises:
        RuntimeError: with what it printed, where it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "result.json")
        command = [sys.executable, "-m", "experiments.benchmark", *arguments, f"--json={path}"]
        environment = dict(os.environ, PYTHONPATH=checkout)
        done = subprocess.run(
            command, cwd=checkout, env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{checkout}: {done.stderr or done.stdout}")
        (row,) = [row for row in json.loads(path.read_text())["rows"] if row["name"] == name]
    return row["median_ms"]


def main(_: list[str]) -> None:
    """Time, and say the ratio."""
    given = flags.FLAGS
    before, after = os.path.abspath(given.before), os.path.abspath(given.after)
    if before == after or not os.path.isfile(os.path.join(before, "experiments", "benchmark.py")):
        sys.exit(f"error: --before={given.before}: give another checkout of mbx")
    arguments = [f"--preset={given.preset}", f"--only={given.only}"]
    try:
        times = alternate(
            lambda where: benchmark(where, arguments, given.only), before, after, given.rounds
        )
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    found = summary(times)
    print(
        f"{given.only}: before {found['before_ms']:.3f} ms, after {found['after_ms']:.3f} ms "
        f"(medians of {given.rounds}); after / before {found['ratio']:.3f}, in single rounds "
        f"{found['least']:.3f} to {found['largest']:.3f}"
    )
    if given.json:
        content = found | {"times_ms": times.tolist(), "preset": given.preset, "only": given.only}
        atomic_write(given.json, json.dumps(content, indent=2).encode())


if __name__ == "__main__":
    define_flags()
    app.run(main)
