"""What a checkpoint costs with its digests and without: seconds and processor seconds of a save.

    python -m experiments.checkpoint_cost                       # TD-MPC's 5M model
    python -m experiments.checkpoint_cost --size=48 --pairs=5 --json=cost.json

A state of random numbers is saved by turns in both ways, in one process, with two saves before to
warm up. On a machine with other work only the processor seconds say anything.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import tempfile
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging

from mbx.files import atomic_write
from mbx.training import build, digests, run
from mbx.training.checkpoint import Checkpointer
from mbx.training.job import prepare


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_string("config", "tdmpc", "Of the agent whose state is saved.")
    flags.DEFINE_string("size", "5", "Its model.size.")
    flags.DEFINE_integer("pairs", 15, "Saves of either kind.", lower_bound=1)
    flags.DEFINE_string("json", None, "Also write the numbers here.")


def random_state(config: str, size: str) -> Any:
    """A training state of a configuration on its own task, its floats drawn at random."""
    from mbx.config import presets

    settings = presets.load(config)
    settings.model.size = size
    resolved = build.read(settings.to_dict())
    rng = np.random.default_rng(0)

    def fill(x: Any) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(rng.standard_normal(x.shape, np.float32), x.dtype)

    return jax.block_until_ready(
        jax.tree.map(fill, run.abstract_state(resolved, prepare(resolved)))
    )


def measure(state: Any, directory: str, pairs: int) -> dict[str, list[list[float]]]:
    """`{"with": rows, "without": rows}` of wall seconds and processor seconds, one a save."""
    rows: dict[str, list[list[float]]] = {"without": [], "with": []}
    checkpointer, steps = Checkpointer(directory, keep=2), itertools.count(1)
    plain = mock.patch.object(digests, "of_tree", lambda tree: {})

    def save() -> list[float]:
        step, wall, processor = next(steps), time.perf_counter(), time.process_time()
        checkpointer.save(step, state, {"interval": step})
        checkpointer.wait()
        return [time.perf_counter() - wall, time.process_time() - processor]

    for i in range(pairs + 1):
        for name in sorted(rows, reverse=i % 2 == 0):  # in turn first
            with plain if name == "without" else contextlib.nullcontext():
                row = save()
            if i:
                rows[name].append(row)
    checkpointer.close()
    return rows


def summary(rows: dict[str, list[list[float]]]) -> dict[str, float]:
    """Medians by kind, and the median of the pairs' ratios with / without."""
    found: dict[str, float] = {}
    for column, unit in enumerate(("seconds", "processor_seconds")):
        kinds = {name: [row[column] for row in rows[name]] for name in rows}
        found |= {f"{unit}_{name}": statistics.median(x) for name, x in kinds.items()}
        ratios = [a / b for a, b in zip(kinds["with"], kinds["without"], strict=True)]
        found[f"{unit}_ratio"] = statistics.median(ratios)
    return found


def main(argv: list[str]) -> None:
    """Measures one model's size."""
    del argv
    values = flags.FLAGS
    logging.set_verbosity(logging.ERROR)
    state = random_state(values.config, values.size)
    megabytes = sum(x.nbytes for x in jax.tree.leaves(state)) / 1e6
    with tempfile.TemporaryDirectory() as directory:
        found = summary(measure(state, directory, values.pairs)) | {"megabytes": megabytes}
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    if values.json:
        atomic_write(values.json, json.dumps(found))


if __name__ == "__main__":
    define_flags()
    app.run(main)
