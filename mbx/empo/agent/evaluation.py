"""Robots by their names, and how well they do: exact errors, and what humans reach next to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mbx.empo.agent.acting import acting_policy
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power import Solution, worlds
from mbx.empo.power.named import NamedWorld
from mbx.empo.power.worlds import World, draw_actions, draw_goals, draw_successor, robot_actions
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


class Episodes(NamedTuple):
    """Episodes `[E]` in which every human keeps one goal."""

    goals: Array  # `[E, H]`
    reached: Array  # `[E, H]` bool, at some step after the first state
    value: Array  # `[E, H]`, gamma^(steps - 1) where reached, else 0: what V_h^e is
    states: Any  # `[E, length + 1, ...]`
    over: Array  # `[E, length + 1]` bool: the episode had ended before, the state is its last


def play(
    world: World,
    policy: Policy,
    key: Array,
    *,
    episodes: int,
    length: int,
    gamma: float = 0.99,
) -> Episodes:
    """Episodes beside a robot: goals drawn by the goal weights, humans acting by their prior."""

    def step(carry: tuple, key: Array) -> tuple[tuple, tuple]:
        state, goals, reached, value, discount, over = carry
        human_key, robot_key, chance_key = jax.random.split(key, 3)
        humans = draw_actions(world, state, goals, human_key)
        robots = robot_actions(world, policy(state, robot_key))
        following = draw_successor(world, state, jnp.concatenate([humans, robots]), chance_key)
        state = jax.tree.map(lambda old, new: jnp.where(over, old, new), state, following)
        there = worlds.reached(world, state, goals) & ~over
        value = jnp.where(there & ~reached, discount, value)
        seen = state, over
        over = over | world.terminal(state)
        return (state, goals, reached | there, value, gamma * discount, over), seen

    def episode(key: Array) -> Episodes:
        world_key, goal_key, step_key = jax.random.split(key, 3)
        state, goals = world.init(world_key), draw_goals(world, goal_key)
        none = jnp.zeros(world.num_humans, bool)
        value, over = jnp.zeros(world.num_humans), jnp.bool_(False)
        start = (state, goals, none, value, jnp.float32(1), over)
        carry, (states, over) = jax.lax.scan(step, start, jax.random.split(step_key, length))
        states = jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), state, states)
        over = jnp.concatenate([jnp.zeros(1, bool), over])
        return Episodes(goals, carry[2], carry[3], states, over)

    return jax.vmap(episode)(jax.random.split(key, episodes))


def goal_reaching(world: World, policy: Policy, key: Array, **sizes: Any) -> dict[str, float]:
    """What humans reach with a robot; sizes: `episodes`, `length` and `gamma` of `play`.
    Returns `reached`, the share of (episode, human) pairs that arrive after the first state;
    `discounted`, the mean of `Episodes.value`; `all_reached`, the share of episodes in which every
    human does; and standard errors over episodes.
    """

    @jax.jit
    def compute(key: Array) -> tuple[Array, Array]:
        played = play(world, policy, key, **sizes)
        return played.reached, played.value

    return summarise(*compute(key))


def summarise(reached: Array, value: Array) -> dict[str, float]:
    """The numbers of `goal_reaching` from `[E, H]` each."""
    numbers = {}
    for name, x in (("reached", reached), ("discounted", value)):
        each = np.asarray(x, np.float64).mean(axis=1)
        numbers[name] = float(each.mean())
        numbers[f"{name}_error"] = float(each.std() / np.sqrt(len(each)))
    return numbers | {"all_reached": float(np.asarray(reached, np.float64).min(axis=1).mean())}
