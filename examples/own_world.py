"""Your own world for EMPO: a map as text, trained on, and walked through by hand.

    python examples/own_world.py

A rock closes the corridor between a human and its far end; only the robot can push it away, and
has to step aside again. The map is listed (1701 states), so tables learn it and an exact solution
is there to compare with. `python -m experiments.play` is the same with you as the human.
"""

from __future__ import annotations

import jax

from configs import empo
from mbx.empo import multigrid, register_world
from mbx.empo.agent import resolve
from mbx.empo.agent.evaluation import exact_policy, goal_reaching, learned_policy, random_policy
from mbx.empo.agent.game import Game
from mbx.power import PowerParams
from mbx.training import build, run

MAP = """
#######
###.###
#>.o..#
###4###
#######
"""
GOALS = [[1, 1, 5, 3], [4, 2, 5, 2]]  # x1, y1, x2, y2: anywhere, so that power is never nothing
STEPS = 9


def corridor():
    """What `--config.env.name=empo:corridor` stands for."""
    layout = multigrid.parse_map(MAP, goals=GOALS, horizon=STEPS)
    return multigrid.make_world(layout, params=PowerParams(beta_r=40.0))


def configuration() -> dict:
    """EMPO's, with tables and all human actions weighed: that is exact in a world this small."""
    config = empo.get_config()
    config.env.update(name="empo:corridor", varied_starts=0.5, episode_length=0)
    config.train.update(steps=96_000, log_interval=9_600)
    config.eval.interval = 48_000
    config.model.update(kind="tables", table_min_rate=1.0)
    config.loss.human_expectation = "exact"
    return config.to_dict()


def walk(world, robot, human_actions):
    """A human that does as told, and what the robot does meanwhile: the maps, one a step."""
    game = Game(world, robot, jax.random.key(0), goal=1)
    maps = [game.text()]
    for action in human_actions:
        turn = game.step(action)
        maps.append(game.text())
        print(f"{maps[-1]}\nhuman {action}, robot {turn.robots[0]}, arrived: {turn.reached}\n")
    return maps


def main(workdir: str = "runs/corridor", config: dict | None = None) -> dict[str, float]:
    """Train, load, compare, walk: the share of goals that humans reach beside each robot."""
    register_world("corridor", corridor)
    run.train(config or configuration(), workdir)
    _, train, settings = run.load(workdir)
    spec = build.make_environment(settings, 1, seed=0).spec
    world, robot = spec.world.world, learned_policy(resolve(settings, spec), train)
    walk(world, robot, ["still"] * 4 + ["forward"] * 3)
    robots = dict(
        learned=robot, exact=exact_policy(spec.world.solution), random=random_policy(world)
    )
    key = jax.random.key(1)
    return {
        name: goal_reaching(world, policy, key, episodes=2_000, length=STEPS)["reached"]
        for name, policy in robots.items()
    }


if __name__ == "__main__":
    print(main())
