"""A world in which somebody plays one of the humans; robots and other humans act as ever."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.agent.evaluation import Policy
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
    """A world, its robots' policy, and a human (a number from 0) whose actions are given.
    A player that arrives takes another goal, drawn by the goals' weights, until the world ends.
    goal: the first one, from 0; None: drawn, as the others' are.
    Raises ValueError for a world without text, a human or a goal that does not exist.
    """

    def __init__(
        self,
        world: World,
        robot: Policy,
        key: Array,
        *,
        human: int = 0,
        goal: int | None = None,
    ) -> None:
        if world.views is None or world.views.text is None:
            raise ValueError("this world cannot be shown as text: play on a map, multigrid/NAME")
        if not 0 <= human < world.num_humans:
            raise ValueError(f"human={human + 1}: the world has humans 1 to {world.num_humans}")
        goals = np.asarray(world.goal_weight)[human] > 0
        if goal is not None and not (0 <= goal < len(goals) and goals[goal]):
            raise ValueError(f"goal={goal + 1}: the world has goals 1 to {world.num_goals}")
        self.world, self.human = world, human
        self.actions = world.views.actions  # what the player can do
        self._text, self._robot = world.views.text, robot
        self._move = jax.jit(self._moved)
        start_key, goal_key, self._key = jax.random.split(key, 3)
        self.state, self.goals = world.init(start_key), draw_goals(world, goal_key)
        if goal is not None:
            self.goals = self.goals.at[human].set(goal)
        self.steps = self.arrivals = 0
        self.over = bool(world.terminal(self.state))

    @property
    def goal(self) -> int:
        """What the player is after, from 0."""
        return int(self.goals[self.human])

    @property
    def position(self) -> tuple[int, int]:
        """The player's cell, column and row from 0."""
        x, y = np.asarray(self.world.views.positions(self.state))[self.human]
        return int(x), int(y)

    def text(self) -> str:
        """The map as it is now, the player's goal marked where cells are empty."""
        shown = [self.goal if h == self.human else -1 for h in range(self.world.num_humans)]
        return self._text(self.state, shown)

    def step(self, action: str) -> Turn:
        """One step of everybody, the player's as given.
        Raises ValueError for an action that there is not, and after the end.
        """
        if action not in self.actions:
            raise ValueError(f"action={action!r}: choose one of {self.actions}")
        if self.over:
            raise ValueError("the world has ended: make another game")
        move_key, goal_key, self._key = jax.random.split(self._key, 3)
        number = jnp.int32(self.actions.index(action))
        self.state, joint, there = self._move(self.state, self.goals, number, move_key)
        self.steps, self.over = self.steps + 1, bool(self.world.terminal(self.state))
        arrived = bool(there[self.human])
        self.arrivals += arrived
        if bool(jnp.any(there)):
            self.goals = jnp.where(there, draw_goals(self.world, goal_key), self.goals)
        names, humans = [self.actions[int(a)] for a in joint], self.world.num_humans
        return Turn(tuple(names[:humans]), tuple(names[humans:]), arrived)

    def _moved(self, state: Any, goals: Array, action: Array, key: Array) -> tuple:
        """The state that follows, everybody's actions, whose goals hold."""
        world = self.world
        human_key, robot_key, chance_key = jax.random.split(key, 3)
        humans = draw_actions(world, state, goals, human_key).at[self.human].set(action)
        robots = robot_actions(world, self._robot(state, robot_key))
        joint = jnp.concatenate([humans, robots])
        after = draw_successor(world, state, joint, chance_key)
        return after, joint, reached(world, after, goals)
