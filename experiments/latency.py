"""How long a run's policy takes for an action, here: first call, median, 99th percentile, worst.

    python -m experiments.latency runs/a                       # with the planner
    python -m experiments.latency runs/a --no-planner --calls=10000 --json=latency.json

Measure on the machine that will act, with nothing else on it. Observations are drawn before the
clock starts, normal with deviation 1: a policy takes as long for them as for real ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags, logging

from mbx.files import atomic_write
from mbx.training.policy import Policy, load_policy


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_bool("planner", True, "Plan every action; --no-planner: the network alone.")
    flags.DEFINE_integer("calls", 10_000, "Actions.", lower_bound=2)
    flags.DEFINE_string("json", None, "Also write the numbers here.")


def seconds(
    policy: Policy, calls: int, clock: Callable[[], float] = time.perf_counter
) -> np.ndarray:
    """`[calls]` seconds of single actions, the first one included."""
    shape = policy.observation_shape
    drawn = np.random.default_rng(0).standard_normal((min(calls, 1_000), *shape))
    observations = drawn.astype(policy.spec.obs_dtype)
    taken = np.empty(calls)
    policy.reset()
    for i in range(calls):
        observation = observations[i % len(observations)]
        start = clock()
        policy(observation)
        taken[i] = clock() - start
    return taken


def summary(taken: np.ndarray) -> dict[str, float]:
    """Milliseconds: `first`, then `median`, `p99`, `worst` of the calls after it; and `calls`."""
    later = 1e3 * taken[1:]
    return dict(
        first=1e3 * float(taken[0]),
        median=float(np.median(later)),
        p99=float(np.percentile(later, 99)),
        worst=float(later.max()),
        calls=len(taken),
    )


def main(argv: list[str]) -> None:
    """Measures each run directory given."""
    if len(argv) < 2:
        sys.exit("error: no run directory given: python -m experiments.latency runs/a")
    logging.set_verbosity(logging.WARNING)
    found: dict[str, dict[str, float]] = {}
    for directory in argv[1:]:
        try:
            policy = load_policy(directory, planner=flags.FLAGS.planner)
        except (ValueError, OSError) as error:
            sys.exit(f"error: {error}")
        found[directory] = row = summary(seconds(policy, flags.FLAGS.calls))
        numbers = ", ".join(f"{k} {row[k]:.2f}" for k in ("first", "median", "p99", "worst"))
        print(f"{directory}: {numbers} ms of {row['calls']:,} actions")
    if flags.FLAGS.json:
        atomic_write(flags.FLAGS.json, json.dumps(found, indent=1))


if __name__ == "__main__":
    define_flags()
    # absl writes noplanner.
    sys.argv = ["--noplanner" if a == "--no-planner" else a for a in sys.argv]
    app.run(main)
