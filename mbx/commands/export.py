"""Write a trained policy to one file that runs with jax and numpy, without mbx or the environment.

    mbx export runs/pendulum --out=policy.mbx
    mbx export runs/pendulum --out=policy.mbx --no-planner
    python examples/run_exported.py policy.mbx

The file holds the program for CPUs, NVIDIA GPUs and TPUs, the parameters and the units of actions.
"""

from __future__ import annotations

import os

from mbx.commands.arguments import add_run, at_least, make_parser, run_directory
from mbx.training.files import prepare_output
from mbx.training.policy import PLATFORMS, load_policy


def main(arguments: list[str]) -> None:
    """Run `mbx export`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add_run(parser, trust=False)
    add = parser.add_argument
    add("--out", default="policy.mbx", help="Path of the file to write.")
    add("--no-planner", "--noplanner", action="store_true", help="The policy network alone.")
    add(
        "--batch",
        type=at_least(1),
        help="Number of observations of a call (default: a single one).",
    )
    options = parser.parse_args(arguments)
    out, workdir = os.path.abspath(options.out), run_directory(options)
    prepare_output(out)
    plans = not options.no_planner
    policy = load_policy(workdir, plans, batch=options.batch, which=options.checkpoint)
    size = policy.save(out)
    print(
        f"{options.out}: {size / 1e3:.0f} kB for {', '.join(PLATFORMS)}; observations "
        f"{policy.spec.obs_shape}, {'with' if plans else 'without'} the planner"
    )
