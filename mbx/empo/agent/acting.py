"""The robot's policy by a train state: what learning explores with, and what evaluations act by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mbx.agents.base import Act
from mbx.empo import power
from mbx.empo.agent import targets as empo_targets
from mbx.empo.agent.types import Problem, TrainState
from mbx.types import Array


def q_of(problem: Problem, train: TrainState, states: Any) -> Array:
    """Q_r `[N, R]` of states by its network or table."""
    model, params = problem.model, train.frozen
    return model.q_r(params, model.trunk(params, model.encode(states)))


def q_ahead(problem: Problem, train: TrainState, states: Any) -> Array:
    """Q_r `[N, R]` of states by eq. (4), from the values that the networks give all successors.
    A state some of whose successors are missing or not finite has the network's own.
    """
    human = empo_targets.exact_profiles(problem.world, states)
    every = jnp.ones(human.weight.shape[:1], bool)
    targets, _ = empo_targets.make_targets(problem, train, states, human, every)
    known = jnp.all(targets.known, axis=1, keepdims=True)
    return jnp.where(known, targets.q_r, q_of(problem, train, states))


def policy_of(problem: Problem, train: TrainState, states: Any) -> Array:
    """pi_r `[N, R]` of states by Q_r's network or table, at the learner's beta_r."""
    return power.robot_policy(q_of(problem, train, states), problem.at(train.step).beta_r)


def acting_policy(problem: Problem, train: TrainState, states: Any) -> Array:
    """pi_r `[N, R]` where the robot does not learn. With `eval.lookahead` Q_r is the geometric mean
    of its network and a step ahead, as their errors differ."""
    q = q_of(problem, train, states)
    if problem.settings.eval.lookahead:
        q = -jnp.sqrt(q * q_ahead(problem, train, states))
    return power.robot_policy(q, problem.at(train.step).beta_r)


def make_act(problem: Problem) -> Act:
    """`Agent.act`: draws from the policy; while learning a share of actions is uniform."""
    unpack, num_robot_actions = jax.vmap(problem.codec.unpack), problem.num_robot_actions

    def act(
        train: TrainState, actor: Array, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Array]:
        states = unpack(obs)[0]
        if evaluate:
            policy = acting_policy(problem, train, states)
        else:
            epsilon = power.curriculum.epsilon(problem.curriculum, train.step)
            policy = policy_of(problem, train, states)
            policy = (1.0 - epsilon) * policy + epsilon / num_robot_actions
        chosen = jax.random.categorical(key, jnp.log(policy))
        return jax.nn.one_hot(chosen, num_robot_actions), actor

    return act
