"""What robots can do at best for humans whose goals they know: an oracle, and an upper bound.

The robots choose, in every state of a listed world, what makes the mean over humans of
gamma^(steps - 1) at the first arrival largest: humans' ways are made as short as they can be. No
robot lets humans arrive sooner, in that mean; one that does not know the goals, as EMPO's, has to
keep all of them within reach instead. Public names are those of `mbx.power`.

Axes: C combinations of goals (human 0 fastest), M sets of humans that have arrived (bit h: human
h), S states, R joint robot actions, P joint human actions, K successors.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx.empo.power.solver import iterate, warn_of_error
from mbx.empo.power.worlds import (
    TabularWorld,
    check_world,
    dense_successors,
    policy_array,
    profiles,
)

LARGEST = 200_000_000  # numbers of one array


class Assistance(NamedTuple):
    """The best values that robots can give to humans with known goals."""

    q: Array  # `[C, M, S, R]`, of a joint robot action, the best ones following
    goals: Array  # `[C, H]` int, the goals of each combination
    residual: Array  # the largest change that another sweep would make


def solve_assistance(
    world: TabularWorld,
    human_policy: Any,
    gamma: float,
    *,
    tol: float = 1e-6,
    max_iterations: int = 10_000,
) -> Assistance:
    """Value iteration over states, goals and who has arrived.

    Args:
        world: its transitions.
        human_policy: `[H, G, S, A]`, how humans act, `Solution.pi_h` say.
        gamma: discount of an arrival, below 1.
        tol: residual to stop at.
        max_iterations: sweeps at most.

    Warns, as `solve`, where values may be off.
    Raises ValueError for an inconsistent world, a policy of another shape, and a world with too
    many goals, humans or states for arrays of at most LARGEST numbers.
    """
    check_world(world)
    humans, robots = np.asarray(world.humans), np.asarray(world.robots)
    num_goals, num_actions = np.asarray(world.goal_weight).shape[1], int(world.num_actions)
    policy = policy_array(human_policy, world)
    if not 0.0 < gamma < 1.0:
        raise ValueError(f"gamma={gamma}: give a discount above 0 and below 1")
    human_actions = profiles(len(humans), num_actions)
    joint = (human_actions @ num_actions**humans)[:, None]
    joint = joint + profiles(len(robots), num_actions) @ num_actions**robots
    following, prob = (x[:, joint] for x in dense_successors(world))  # [S, P, R, K]
    goals = profiles(len(humans), num_goals)
    kept = len(goals) * 2 ** len(humans) * int(world.num_states) * joint.shape[1]
    if max(kept, 2 ** len(humans) * following.size) > LARGEST:
        raise ValueError(
            f"{len(humans)} humans with {num_goals} goals in {int(world.num_states)} states: too "
            f"many for the best help to be computed, {LARGEST:,} numbers at most"
        )
    dtype = jax.dtypes.canonicalize_dtype(jnp.float64)  # the precision that JAX is set to
    prob = np.where(np.asarray(world.terminal)[:, None, None, None], 0.0, prob)
    achieved = jnp.moveaxis(jnp.asarray(world.achieved, bool), -1, 0)
    numbers = (jnp.asarray(x, dtype) for x in (policy, prob, gamma, tol))
    arrays = (jnp.asarray(x) for x in (goals, human_actions, following, achieved))
    q, residual = _solve(*numbers, *arrays, max_iterations=max_iterations)
    warn_of_error("solve_assistance", float(jnp.max(residual)), tol, gamma)
    return Assistance(q, jnp.asarray(goals), jnp.max(residual))


@functools.partial(jax.jit, static_argnames="max_iterations")
def _solve(
    policy: Array,
    prob: Array,
    gamma: Array,
    tol: Array,
    combinations: Array,
    human_actions: Array,
    following: Array,
    achieved: Array,
    *,
    max_iterations: int,
) -> tuple[Array, Array]:
    """`[C, M, S, R]` and `[C]` of one combination after the other."""
    num = policy.shape[0]
    every, sets = jnp.arange(num), jnp.arange(2**num)
    count = jnp.sum(sets[:, None] >> every[None] & 1, axis=1, dtype=jnp.int32)

    def of_goals(goals: Array) -> tuple[Array, Array]:
        own = policy[every, goals]  # [H, S, A]
        chance = jnp.prod(own[every[:, None], :, human_actions.T], axis=0).T  # [S, P]
        weight = chance[:, :, None, None] * prob
        arriving = jnp.sum(achieved[:, every, goals] << every[None], axis=1, dtype=jnp.int32)  # [S]
        after = sets[:, None, None, None, None] | arriving[following][None]
        gain = (count[after] - count[:, None, None, None, None]).astype(gamma.dtype) / num

        def sweep(values: Array) -> Array:
            worth = gain + gamma * values[after, following[None]]
            return jnp.einsum("sprk,msprk->msr", weight, worth)

        values, residual, _ = iterate(
            lambda values: jnp.max(sweep(values), axis=-1),
            jnp.zeros((len(sets), len(following)), gamma.dtype),
            tol=tol,
            max_iterations=max_iterations,
        )
        return sweep(values), residual

    return jax.lax.map(of_goals, combinations)
