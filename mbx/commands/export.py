"""Write a trained policy to one file that runs with jax and numpy, without mbx or the environment.

    python -m experiments.export runs/pendulum --out=policy.mbx
    python -m experiments.export runs/pendulum --out=policy.mbx --no-planner
    python examples/run_exported.py policy.mbx

The file holds the program for CPUs, NVIDIA GPUs and TPUs, the parameters and the units of actions.
"""

from __future__ import annotations

import sys

from absl import app, flags, logging

from mbx.config.help import run_directory

OUT = flags.DEFINE_string("out", "policy.mbx", "File to write.")
PLANNER = flags.DEFINE_bool("planner", True, "Plan every action; --no-planner: the network alone.")
BATCH = flags.DEFINE_integer("batch", None, "Observations of a call; none: a single one.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest, or a step.")


def main(arguments: list[str]) -> None:
    from mbx import files
    from mbx.training.policy import PLATFORMS, load_policy

    logging.set_verbosity(logging.WARNING)
    try:
        workdir = run_directory(arguments[1:], None)
        files.prepare_output(OUT.value)
        policy = load_policy(workdir, PLANNER.value, batch=BATCH.value, which=CHECKPOINT.value)
        size = policy.save(OUT.value)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    print(
        f"{OUT.value}: {size / 1e3:.0f} kB for {', '.join(PLATFORMS)}; observations "
        f"{policy.spec.obs_shape}, {'with' if PLANNER.value else 'without'} the planner"
    )


if __name__ == "__main__":
    # absl writes noplanner.
    sys.argv = ["--noplanner" if a == "--no-planner" else a for a in sys.argv]
    app.run(main)
