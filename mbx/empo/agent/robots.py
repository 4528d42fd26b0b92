"""Robots to compare with, and the learned one: `evaluation.play` and games take them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mbx.empo.agent.acting import acting_policy
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power import Solution
from mbx.empo.power.named import NamedWorld
from mbx.empo.power.worlds import World
from mbx.types import Array

ROBOTS = ("learned", "exact", "random", "frozen")

Policy = Callable[[Any, Array], Array]  # (state, key) -> joint robot action, both un-batched


def make_robot(
    name: str, found: NamedWorld, problem: Problem | None = None, train: TrainState | None = None
) -> Policy:
    """A robot by its name, one of ROBOTS.
    Raises ValueError for an unknown name, a missing train state, and "exact" of an unlisted world.
    """
    if name not in ROBOTS:
        raise ValueError(f"robot={name!r}: choose one of {ROBOTS}")
    if name == "exact":
        if found.solution is None:
            raise ValueError(
                "robot='exact': this world's states are not listed; choose learned, random or "
                "frozen"
            )
        exact = exact_policy(found.solution)
        return lambda state, key: exact(found.world.index(state), key)
    if name != "learned":
        return random_policy(found.world) if name == "random" else frozen_policy
    if problem is None or train is None:
        raise ValueError("robot='learned': needs a run")
    return learned_policy(problem, train)


def learned_policy(problem: Problem, train: TrainState) -> Policy:
    """The learner's robot, as it acts where it does not learn."""

    def policy(state: Any, key: Array) -> Array:
        one = jax.tree.map(lambda x: jnp.asarray(x)[None], state)
        return jax.random.categorical(key, jnp.log(acting_policy(problem, train, one)[0]))

    return policy


def exact_policy(solution: Solution) -> Policy:
    """The robot of an exact solution, of a world whose states are numbers (`tabular_world`)."""
    return lambda state, key: jax.random.categorical(key, jnp.log(solution.pi_r[state]))


def random_policy(world: World) -> Policy:
    """Uniformly random joint robot actions."""
    return lambda state, key: jax.random.randint(key, (), 0, world.num_actions**world.num_robots)


def frozen_policy(state: Any, key: Array) -> Array:
    """Every robot does action 0."""
    return jnp.int32(0)
