"""Write a trained policy to one file that runs without mbx or the environment.

    mbx export runs/pendulum --out=policy.mbx
    mbx export runs/pendulum --out=policy.mbx --no-planner
    mbx export runs/pendulum --out=policy.onnx --format=onnx

The file holds the program for CPUs, NVIDIA GPUs and TPUs, the parameters and the units of actions;
examples/run_exported.py runs it. An ONNX file needs onnxruntime and numpy (examples/run_onnx.py).
"""

from __future__ import annotations

import os

from mbx.commands.arguments import add_run, at_least, make_parser, run_directory
from mbx.training import onnx_file
from mbx.training.files import prepare_output
from mbx.training.policy import PLATFORMS, load_policy


def main(arguments: list[str]) -> None:
    """Run `mbx export`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add_run(parser, trust=False)
    add = parser.add_argument
    add("--out", help="Path of the file to write (default: policy.mbx or policy.onnx).")
    add("--format", choices=("mbx", "onnx"), default="mbx", help="Program for jax, or ONNX graph.")
    add("--no-planner", "--noplanner", action="store_true", help="The policy network alone.")
    add(
        "--batch",
        type=at_least(1),
        help="Number of observations of a call (default: a single one).",
    )
    options = parser.parse_args(arguments)
    path = options.out or f"policy.{options.format}"
    out, workdir = os.path.abspath(path), run_directory(options)
    prepare_output(out)
    plans = not options.no_planner
    policy = load_policy(workdir, plans, batch=options.batch, which=options.checkpoint)
    if options.format == "onnx":
        words = onnx_file.save(policy, out)
    else:
        words = f"{policy.save(out) / 1e3:.0f} kB for {', '.join(PLATFORMS)}"
    print(
        f"{path}: {words}; observations {policy.spec.obs_shape}, "
        f"{'with' if plans else 'without'} the planner"
    )
