"""Episodes of random actions that are held for some steps, as in the seed phase of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mbx import envs
from mbx.envs.base import EnvSpec, random_actions, wide_actions
from mbx.training.evaluation import make_evaluate

DRAWS = {"uniform": random_actions, "wide": wide_actions}


def held(draw: Callable, hold: int, spec: EnvSpec) -> tuple[Callable, Callable]:
    """`act` and `init_actor` of actions that are drawn at every `hold`-th step."""

    def init_actor(num_envs: int) -> tuple[jax.Array, jax.Array]:
        return jnp.int32(0), jnp.zeros((num_envs, spec.action_dim))

    def act(
        train: Any, actor: Any, obs: Any, is_first: Any, key: jax.Array, evaluate: bool
    ) -> tuple[jax.Array, Any]:
        count, last = actor
        action = jnp.where(count % hold == 0, draw(spec, key, last.shape[0]), last)
        return action, (count + 1, action)

    return act, init_actor


def measure(task: str, draw: str, hold: int, episodes: int, seed: int) -> dict[str, Any]:
    """A row: mean return, and the share of episodes with any reward."""
    environment = envs.make(task, episodes, seed=seed)
    act, init_actor = held(DRAWS[draw], hold, environment.spec)
    returns = make_evaluate(act, init_actor, environment)(None, jax.random.key(seed)).returns
    return dict(
        task=task,
        draw=draw,
        hold=hold,
        mean=float(returns.mean()),
        rewarded=float((returns != 0.0).mean()),
    )
