"""The robot's policy by a train state: what learning explores with, and what evaluations act by."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mbx.agents.base import Act
from mbx.empo import power
from mbx.empo.agent import targets as empo_targets
from mbx.empo.agent.types import Problem, TrainState
from mbx.empo.power.codec import make_codec
from mbx.empo.power.curriculum import RAMP_STAGE
from mbx.empo.power.equations import PowerParams
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
    """pi_r `[N, R]` of states by Q_r's network or table, at the learner's beta_r."""
    model, params = problem.model, train.frozen
    q = model.q_r(params, model.trunk(params, model.encode(states)))
    return power.robot_policy(q, params_at(problem, train.step).beta_r)


def acting_policy(problem: Problem, train: TrainState, states: Any) -> Array:
    """pi_r `[N, R]` of states where the robot does not learn: by `eval.lookahead` a step ahead."""
    if not problem.settings.eval.lookahead:
        return policy_of(problem, train, states)
    return power.robot_policy(
        q_ahead(problem, train, states), params_at(problem, train.step).beta_r
    )


def q_ahead(problem: Problem, train: TrainState, states: Any) -> Array:
    """Q_r `[N, R]` of states by eq. (4), from the values that the networks give the successors.

    The expectation is over all joint human actions, by their prior, and all that may follow each
    joint action. A state some of whose successors are missing or not finite has the network's own.
    """
    model, world, params = problem.model, problem.world, train.frozen
    targets, _ = empo_targets.make_targets(
        model,
        world,
        params,
        states,
        empo_targets.exact_profiles(world, states),
        params_at(problem, train.step),
        jnp.ones(jax.tree.leaves(states)[0].shape[:1], bool),
        use_v_r=power.curriculum.stage(problem.curriculum, train.step) >= RAMP_STAGE,
    )
    own = model.q_r(params, model.trunk(params, model.encode(states)))
    return jnp.where(jnp.all(targets.known, axis=1, keepdims=True), targets.q_r, own)


def make_act(problem: Problem) -> Act:
    """`Agent.act`: draws from the policy; while learning a share of actions is uniform."""
    unpack, num_robot_actions = (
        jax.vmap(make_codec(problem.world).unpack),
        problem.num_robot_actions,
    )

    def act(
        train: TrainState, actor: Array, obs: Array, is_first: Array, key: Array, evaluate: bool
    ) -> tuple[Array, Array]:
        states = unpack(obs)[0]
        if evaluate:
            policy = acting_policy(problem, train, states)
        else:
            policy = policy_of(problem, train, states)
            epsilon = power.curriculum.epsilon(problem.curriculum, train.step)
            policy = (1.0 - epsilon) * policy + epsilon / num_robot_actions
        chosen = jax.random.categorical(key, jnp.log(policy))
        return jax.nn.one_hot(chosen, num_robot_actions), actor

    return act
