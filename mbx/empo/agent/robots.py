"""Robots to compare with, and the learned one: `evaluation.play` and games take them.

learned    the learner's policy
exact      the policy of the exact solution, of a listed world
helper     knows what humans want, and makes their ways as short as it can (listed worlds)
inferring  watches what humans do, and helps with what it takes them to want (listed worlds)
random     uniformly random actions
frozen     action 0 for ever, which is to stand still
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mbx.empo.agent.acting import acting_policy
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power import Solution, solve_assistance
from mbx.empo.power.named import NamedWorld
from mbx.empo.power.worlds import World, goal_distribution
from mbx.types import Array

ROBOTS = ("learned", "exact", "helper", "inferring", "random", "frozen")

Policy = Callable[[Any, Array], Array]


class Robot(NamedTuple):
    """Robots' policy with a memory, of one un-batched episode.

    begin: goals `[H]` -> memory; only a robot that is told what humans want reads them.
    act: (memory, state, key) -> joint robot action.
    observe: (memory, state, humans' actions `[H]`, the state that followed) -> memory.
    """

    begin: Callable[[Array], Any]
    act: Callable[[Any, Any, Array], Array]
    observe: Callable[[Any, Any, Array, Any], Any]


def as_robot(policy: Policy | Robot) -> Robot:
    """A policy as a robot without memory; a robot as it is."""
    if isinstance(policy, Robot):
        return policy
    return Robot(
        lambda goals: (),
        lambda memory, state, key: policy(state, key),
        lambda memory, state, humans, following: memory,
    )


def make_robot(
    name: str,
    found: NamedWorld,
    gamma: float,
    problem: Problem | None = None,
    train: TrainState | None = None,
) -> Robot:
    """A robot by its name, one of ROBOTS; helpers count steps by gamma, the humans' discount.
    Raises ValueError for an unknown name, "learned" without a train state, and a robot that needs a
    listed world where there is none, or one too large for it.
    """
    if name not in ROBOTS:
        raise ValueError(f"robot={name!r}: choose one of {ROBOTS}")
    if name in ("exact", "helper", "inferring") and found.solution is None:
        raise ValueError(
            f"robot={name!r}: this world's states are not listed; choose learned, random or frozen"
        )
    if name in ("helper", "inferring"):
        return helping_robot(found, gamma, told=name == "helper")
    if name == "exact":
        exact = exact_policy(found.solution)
        return as_robot(lambda state, key: exact(found.world.index(state), key))
    if name != "learned":
        return as_robot(random_policy(found.world) if name == "random" else frozen_policy)
    if problem is None or train is None:
        raise ValueError("robot='learned': needs a run")
    return as_robot(learned_policy(problem, train))


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


def helping_robot(found: NamedWorld, gamma: float, *, told: bool) -> Robot:
    """It lets humans arrive as soon as they can (`mbx.empo.power.assistance`).
    told: it knows what they want. Otherwise it holds a belief about each, by Bayes' rule from what
    the human does, which starts at the goals' weights, and acts as if it would know for certain
    after the next step (QMDP). Of actions that are equally good it takes the first, to stand still.
    """
    world, best = found.world, solve_assistance(found.table, found.solution.pi_h, gamma)
    humans = jnp.arange(world.num_humans)

    def begin(goals: Array) -> tuple[Array, Array]:
        weights = jax.nn.one_hot(goals, world.num_goals) if told else goal_distribution(world)
        return jnp.log(weights), jnp.zeros(weights.shape, bool)

    def act(memory: tuple[Array, Array], state: Any, key: Array) -> Array:
        belief, arrived = memory
        each = jax.nn.softmax(belief, axis=-1)[humans[None], best.goals]  # [C, H]
        done = jnp.sum(arrived[humans[None], best.goals] << humans[None], axis=1)
        worth = best.q[jnp.arange(len(best.goals)), done, world.index(state)]
        expected = jnp.sum(jnp.prod(each, axis=1)[:, None] * worth, axis=0)
        return jnp.argmax(expected).astype(jnp.int32)

    def observe(memory: tuple, state: Any, actions: Array, following: Any) -> tuple:
        belief, arrived = memory
        if not told:
            likely = world.human_policy(state)[humans, :, actions]  # [H, G]
            belief = belief + jnp.log(jnp.maximum(likely, 1e-9))
        return belief, arrived | world.achieved(following)

    return Robot(begin, act, observe)
