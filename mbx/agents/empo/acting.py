"""The robot's policy, by a train state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mbx import power
from mbx.agents.base import Act
from mbx.agents.empo.types import Problem, TrainState
from mbx.power.codec import make_codec
from mbx.power.equations import PowerParams
from mbx.types import Array


def params_at(problem: Problem, step: Array) -> PowerParams:
    """The parameters in force at a learner's step: discounts and beta_r may still rise."""
    plan, p = problem.curriculum, problem.params
    return p._replace(
        gamma_h=power.curriculum.gamma_h(plan, step, p.gamma_h),
        gamma_r=power.curriculum.gamma_r(plan, step, p.gamma_r),
        beta_r=power.curriculum.beta_r(plan, step, p.beta_r),
    )


def policy_of(problem: Problem, train: TrainState, states: Any) -> Array:
    """pi_r `[N, R]` of states at the learner's beta_r."""
    model, params = problem.model, train.frozen
    q = model.q_r(params, model.trunk(params, model.encode(states)))
    return power.robot_policy(q, params_at(problem, train.step).beta_r)


def make_act(problem: Problem) -> Act:
    """`Agent.act`: draws from the policy, of which a share is uniform while learning."""
    unpack, num_robot_actions = (
        jax.vmap(make_codec(problem.world).unpack),
        problem.num_robot_actions,
    )

    def act(
        train: TrainState, actor: Array, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Array]:
        policy = policy_of(problem, train, unpack(obs)[0])
        if not evaluate:
            epsilon = power.curriculum.epsilon(problem.curriculum, train.step)
            policy = (1.0 - epsilon) * policy + epsilon / num_robot_actions
        chosen = jax.random.categorical(key, jnp.log(policy))
        return jax.nn.one_hot(chosen, num_robot_actions), actor

    return act
