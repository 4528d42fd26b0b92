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
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

import jax
import numpy as np

from mbx.commands.arguments import add_run, at_least, make_parser, run_directory
from mbx.empo import agent as empo
from mbx.empo import named_world
from mbx.empo.agent.evaluation import make_robot
from mbx.empo.agent.game import Game
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


KEYS = {
    "w": "forward",
    "a": "left",
    "d": "right",
    "s": "still",
    " ": "still",
    "e": "toggle",
    "p": "pick up",
    "o": "drop",
}


def session(
    game: Game,
    keys: Iterable[str],
    out: TextIO,
    *,
    values: Callable[[Any], np.ndarray] | None = None,
) -> None:
    """Play by keys until they end, the world ends or `q`; the map is written before every key.
    values: state -> V_h^e `[H, G]`, the robots' estimate, shown for the player.
    """
    say = functools.partial(print, file=out, flush=True)

    def show(line: str) -> None:
        column, row = game.position
        say(
            f"\n{game.text()}\nstep {game.steps}: you are at column {column + 1}, line {row + 1}, "
            f"after goal {game.goal + 1} (=); {game.arrivals} reached"
        )
        if values is not None:
            each = enumerate(values(game.state)[game.human], 1)
            numbers = ", ".join(f"{number}: {v:.2f}" for number, v in each)
            say(f"the robots reckon that you reach goal {numbers}")
        say(line)

    known = {key: action for key, action in KEYS.items() if action in game.actions}
    explained = ", ".join(f"{k if k != ' ' else 'space'} {a}" for k, a in known.items())
    explained += ", q quit"
    show(explained)
    for key in keys:
        if key == "q" or game.over:
            break
        if key in known:
            turn = game.step(known[key])
            others = [f"human {n}: {action}" for n, action in enumerate(turn.humans, 1)]
            del others[game.human]
            others += [f"robot {n}: {action}" for n, action in enumerate(turn.robots, 1)]
            show(", ".join(others) + ("; YOU ARE THERE" if turn.reached else ""))
        elif not key.isspace():
            say(f"{key!r} is no key here: {explained}")
        if game.over:
            break
    ending = "the world has ended" if game.over else "you left"
    say(f"{ending} after {game.steps} steps, {game.arrivals} goals reached")


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
