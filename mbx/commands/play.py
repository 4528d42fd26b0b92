"""Play one of the humans of a world, beside the robots of a run.

    python -m experiments.play runs/a                                   # beside its learned robots
    python -m experiments.play runs/a --robot=helper --human=2 --goal=1
    python -m experiments.play --world=multigrid/rock_gate --robot=exact    # without a run
    echo "wwdwwq" | python -m experiments.play runs/a                   # keys from elsewhere

Keys: w forward, a turn left, d turn right, s or space stand still, e toggle, p pick up, o drop,
q quit. `=` marks your goal, the map's symbols are those of map files (docs/empo.md).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import jax
from absl import app, flags, logging

from mbx.config.help import run_directory

WORKDIR = flags.DEFINE_string(
    "workdir", None, "Run directory (or the first argument).", allow_override=True
)
WORLD = flags.DEFINE_string("world", None, "A world instead of a run: multigrid/NAME or a path.")
CHECKPOINT = flags.DEFINE_string("checkpoint", "best", "best, latest, or a step.")
ROBOT = flags.DEFINE_string(
    "robot", None, "learned, exact, helper, inferring, random or frozen (learned, or exact)."
)
HUMAN = flags.DEFINE_integer("human", 1, "Which human you are.", lower_bound=1)
GOAL = flags.DEFINE_integer("goal", 0, "Your first goal; 0: drawn.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Seed of chance and of the other humans.")
KEYS = flags.DEFINE_string("keys", None, "Keys to play by, instead of yours.")
TRUST = flags.DEFINE_bool("trust", False, "Run the environment's file of somebody else's run.")


def make(workdir: str | None, world: str | None) -> tuple[Any, Callable | None]:
    """(game, values) as the flags say. Raises ValueError for what they cannot mean."""
    from mbx.empo import agent as empo
    from mbx.empo import named_world
    from mbx.empo.agent.game import Game
    from mbx.empo.agent.robots import make_robot
    from mbx.power import PowerParams
    from mbx.training import environments, run

    problem = train = values = None
    if world is not None:
        found = named_world(world, default=PowerParams())
        params = found.params or PowerParams()
    else:
        assert workdir is not None
        _, train, settings = run.load(workdir, which=CHECKPOINT.value, trusted=TRUST.value)
        if settings.agent != "empo":
            raise ValueError(f"{workdir} is a run of agent {settings.agent!r}, not empo")
        spec = environments.make_environment(settings, 1, seed=0).spec
        problem, found = empo.resolve(settings, spec), spec.world
        params, model = problem.params, problem.model

        @jax.jit
        def values(state: Any) -> jax.Array:
            codes = model.encode(jax.tree.map(lambda x: jax.numpy.asarray(x)[None], state))
            return model.v_h_e(train.params, model.trunk(train.params, codes))[0].clip(0.0, 1.0)

    name = ROBOT.value or ("exact" if train is None else "learned")
    robot = make_robot(name, found, float(params.gamma_h), problem, train)
    goal = GOAL.value - 1 if GOAL.value else None
    key = jax.random.key(SEED.value)
    game = Game(found.world, robot, key, human=HUMAN.value - 1, goal=goal)
    return game, values if name == "learned" else None


def main(arguments: list[str]) -> None:
    from mbx.empo.agent.playing import pressed, session
    from mbx.training import run

    logging.set_verbosity(logging.WARNING)
    run.set_up_jax()
    try:
        workdir = None
        if WORLD.value is None:
            workdir = run_directory(arguments[1:], WORKDIR.value)
        elif arguments[1:] or WORKDIR.value:
            raise ValueError("give a run directory or --world, not both")
        game, values = make(workdir, WORLD.value)
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"error: {error}")
    keys = pressed(sys.stdin) if KEYS.value is None else KEYS.value
    with contextlib.suppress(KeyboardInterrupt):
        session(game, keys, sys.stdout, values=values, color=sys.stdout.isatty())


if __name__ == "__main__":
    app.run(main)
