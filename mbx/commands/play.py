"""Play one of the humans of a world with the robots of a run.

    mbx play runs/a                                   # with its learned robots
    mbx play runs/a --robot=exact --human=2 --goal=1
    mbx play --world=multigrid/rock_gate --robot=exact    # without a run
    echo "wwdwwq" | mbx play runs/a                   # keys from a pipe

Keys: w forward, a turn left, d turn right, s or space stand still, e toggle, p pick up, o drop, q
quit; in a terminal followed by Enter. `=` marks your goal, other symbols are those of map files
(docs/empo.md).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax

from mbx.commands.arguments import add_run, at_least, make_parser, run_directory
from mbx.empo import agent as empo
from mbx.empo import named_world
from mbx.empo.agent.game import Game, session
from mbx.empo.agent.robots import make_robot
from mbx.power import PowerParams
from mbx.training import build, run


def make(workdir: str | None, options: argparse.Namespace) -> tuple[Any, Callable | None]:
    """(game, values) from the options. Raises ValueError for invalid ones."""
    problem = train = values = None
    if options.world is not None:
        found = named_world(options.world, default=PowerParams())
    else:
        assert workdir is not None
        _, train, settings = run.load(workdir, which=options.checkpoint, trusted=options.trust)
        if settings.agent != "empo":
            raise ValueError(f"{workdir} is a run of agent {settings.agent!r}, not empo")
        spec = build.make_environment(settings, 1, seed=0).spec
        problem, found = empo.resolve(settings, spec), spec.world
        model = problem.model

        @jax.jit
        def values(state: Any) -> jax.Array:
            codes = model.encode(jax.tree.map(lambda x: jax.numpy.asarray(x)[None], state))
            return model.v_h_e(train.params, model.trunk(train.params, codes))[0].clip(0.0, 1.0)

    name = options.robot or ("exact" if train is None else "learned")
    robot = make_robot(name, found, problem, train)
    goal = options.goal - 1 if options.goal else None
    key = jax.random.key(options.seed)
    game = Game(found.world, robot, key, human=options.human - 1, goal=goal)
    return game, values if name == "learned" else None


def main(arguments: list[str]) -> None:
    """Run `mbx play`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    add_run(parser)
    add = parser.add_argument
    add("--world", help="A world instead of a run: multigrid/NAME or a path.")
    add(
        "--robot",
        help="One of learned, exact, random, frozen (default: learned; without a run: exact).",
    )
    add("--human", type=at_least(1), default=1, help="Number of the human that you play.")
    add("--goal", type=at_least(0), default=0, help="Your first goal; 0: drawn.")
    add("--seed", type=int, default=0, help="Seed of chance and of the other humans.")
    add("--keys", help="Keys to play by, instead of yours.")
    options = parser.parse_args(arguments)
    workdir = None
    if options.world is None:
        workdir = run_directory(options)
    elif options.run or options.workdir:
        raise ValueError("give a run directory or --world, not both")
    run.set_up_jax()
    game, values = make(workdir, options)
    # Without --keys characters come as a terminal or a pipe hands them on.
    keys = iter(lambda: sys.stdin.read(1), "") if options.keys is None else options.keys
    with contextlib.suppress(KeyboardInterrupt):
        session(game, keys, sys.stdout, values=values)
