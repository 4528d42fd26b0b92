"""A world in which somebody plays one of the humans; the robots and the other humans act as ever.

game = Game(world, robot, jax.random.key(0), human=0)
turn = game.step("forward")        # turn.robots: what the robots did
session(game, keys, sys.stdout)    # by keys; `python -m experiments.play RUN`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.agent.robots import Policy, Robot, as_robot
from mbx.empo.power.worlds import (
    World,
    draw_actions,
    draw_goals,
    draw_successor,
    reached,
    robot_actions,
)
from mbx.types import Array


class Turn(NamedTuple):
    """Names of the actions in a step, and whether the player arrived at its goal."""

    humans: tuple[str, ...]
    robots: tuple[str, ...]
    reached: bool


class Game:
    """A world, its robots, and a human whose actions are given.

    A player that arrives takes another goal, drawn by the goals' weights, until the world ends;
    robots that know the goals are told, robots that infer them start again.

    Args:
        world: one that can be shown as text.
        robot: the robots' policy.
        key: of chance.
        human: which human is played, from 0.
        goal: the first goal, from 0; None: drawn, as the others' are.

    Raises:
        ValueError: for a world without text, a human or a goal that does not exist.

    Attributes:
        state, goals `[H]`, steps, arrivals (of the player), over.
    """

    def __init__(
        self,
        world: World,
        robot: Policy | Robot,
        key: Array,
        *,
        human: int = 0,
        goal: int | None = None,
    ) -> None:
        if world.views is None or world.views.text is None:
            raise ValueError("this world cannot be shown as text: play on a map, multigrid/NAME")
        if not 0 <= human < world.num_humans:
            raise ValueError(f"human={human + 1}: the world has humans 1 to {world.num_humans}")
        if goal is not None and not (
            0 <= goal < world.num_goals and world.goal_weight[human, goal] > 0
        ):
            raise ValueError(f"goal={goal + 1}: the world has goals 1 to {world.num_goals}")
        self.world, self.human, self._views = world, human, world.views
        self._robot = as_robot(robot)
        self._move = jax.jit(self._moved)
        start_key, goal_key, self._key = jax.random.split(key, 3)
        self.state = world.init(start_key)
        self.goals = draw_goals(world, goal_key)
        if goal is not None:
            self.goals = self.goals.at[human].set(goal)
        self._memory = self._robot.begin(self.goals)
        self.steps = self.arrivals = 0
        self.over = bool(world.terminal(self.state))

    @property
    def actions(self) -> tuple[str, ...]:
        """What the player can do."""
        return self._views.actions

    @property
    def goal(self) -> int:
        """What the player is after, from 0."""
        return int(self.goals[self.human])

    @property
    def position(self) -> tuple[int, int]:
        """The player's cell, column and row from 0."""
        x, y = np.asarray(self._views.positions(self.state))[self.human]
        return int(x), int(y)

    def text(self) -> str:
        """The map as it is now, the player's goal marked where cells are empty."""
        shown = [self.goal if h == self.human else -1 for h in range(self.world.num_humans)]
        assert self._views.text is not None
        return self._views.text(self.state, shown)

    def step(self, action: str) -> Turn:
        """One step of everybody, the player's as given.

        Raises:
            ValueError: for an action that there is not, and after the end.
        """
        if action not in self.actions:
            raise ValueError(f"action={action!r}: choose one of {self.actions}")
        if self.over:
            raise ValueError("the world has ended: make another game")
        move_key, goal_key, self._key = jax.random.split(self._key, 3)
        number = jnp.int32(self.actions.index(action))
        self.state, self._memory, humans, robots, reached, over = self._move(
            self.state, self._memory, self.goals, number, move_key
        )
        self.steps, self.over = self.steps + 1, bool(over)
        arrived = bool(reached[self.human])
        if bool(jnp.any(reached)):
            self.arrivals += arrived
            self.goals = jnp.where(reached, draw_goals(self.world, goal_key), self.goals)
            self._memory = self._robot.begin(self.goals)
        names = [tuple(self.actions[int(a)] for a in each) for each in (humans, robots)]
        return Turn(*names, reached=arrived)

    def _moved(self, state: Any, memory: Any, goals: Array, action: Array, key: Array) -> tuple:
        world = self.world
        human_key, robot_key, chance_key = jax.random.split(key, 3)
        humans = draw_actions(world, state, goals, human_key).at[self.human].set(action)
        robots = robot_actions(world, self._robot.act(memory, state, robot_key))
        after = draw_successor(world, state, jnp.concatenate([humans, robots]), chance_key)
        memory = self._robot.observe(memory, state, humans, after)
        there = reached(world, after, goals)
        return after, memory, humans, robots, there, world.terminal(after)


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

    Args:
        game: what is played.
        keys: one character each; unknown ones are explained.
        out: where the map goes.
        values: state -> V_h^e `[H, G]`, the robots' estimate, shown for the player.
    """

    def show(line: str) -> None:
        column, row = game.position
        print(
            f"\n{game.text()}\nstep {game.steps}: you are at column {column + 1}, line {row + 1}, "
            f"after goal {game.goal + 1} (=); {game.arrivals} reached",
            file=out,
        )
        if values is not None:
            each = enumerate(values(game.state)[game.human])
            numbers = ", ".join(f"{number + 1}: {v:.2f}" for number, v in each)
            print(f"the robots reckon that you reach goal {numbers}", file=out)
        print(line, file=out, flush=True)

    known = {key: action for key, action in KEYS.items() if action in game.actions}
    explained = ", ".join(f"{k if k != ' ' else 'space'} {a}" for k, a in known.items())
    explained += ", q quit"
    show(explained)
    for key in keys:
        if key == "q" or game.over:
            break
        if key in known:
            turn = game.step(known[key])
            others = [
                f"human {number + 1}: {action}"
                for number, action in enumerate(turn.humans)
                if number != game.human
            ]
            others += [f"robot {number + 1}: {action}" for number, action in enumerate(turn.robots)]
            show(", ".join(others) + ("; YOU ARE THERE" if turn.reached else ""))
        elif not key.isspace():
            print(f"{key!r} is no key here: {explained}", file=out, flush=True)
        if game.over:
            break
    ending = "the world has ended" if game.over else "you left"
    print(f"{ending} after {game.steps} steps, {game.arrivals} goals reached", file=out)
