"""Show an agent's plans: one episode as an HTML file with sliders over steps and rounds.

    mbx watch runs/a --out=plans.html
    mbx watch runs/a --seed=3 --steps=60 --candidates=32

The page shows each round's candidates, elites and refitted mean, the executed action, and predicted
and actual return. It loads nothing from the network. For agents that plan, in environments written
in JAX.
"""

from __future__ import annotations

import os
import sys

import jax

from mbx import envs
from mbx.analysis import watch
from mbx.commands.arguments import add_run, at_least, make_parser, run_directory
from mbx.training import run
from mbx.training.files import atomic_write, prepare_output


def main(arguments: list[str]) -> None:
    """Run `mbx watch`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add_run(parser)
    add = parser.add_argument
    add("--out", default="plans.html", help="Path of the file to write.")
    add("--seed", type=int, default=12345, help="Seed of the environment and the planner.")
    add("--steps", type=at_least(1), default=100, help="Steps that are shown at most.")
    add("--candidates", type=at_least(1), default=48, help="Candidates shown of a round at most.")
    add("--most", type=at_least(1), default=1000, help="Steps that are played at most.")
    options = parser.parse_args(arguments)
    workdir, out = run_directory(options), os.path.abspath(options.out)
    prepare_output(out)
    run.set_up_jax()
    agent, train_state, settings = run.load(
        workdir, which=options.checkpoint, trusted=options.trust
    )
    try:
        renderer = envs.make_renderer(settings.env.name)
    except (ValueError, envs.NoRenderer) as error:
        print(f"without pictures: {error}", file=sys.stderr)
        renderer = None
    key = jax.random.key(options.seed)
    with run.matmul_precision(settings.matmul_precision):
        episode = watch.record(
            agent, train_state, settings, key, renderer=renderer, most=options.most
        )
    title = f"{settings.agent} on {settings.env.name}"
    text = watch.page(episode, title, candidates=options.candidates, steps=options.steps)
    atomic_write(out, text.encode())
    print(f"{options.out}: {len(episode.steps)} steps, {len(text) / 1e3:.0f} kB")
