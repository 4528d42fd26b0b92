"""What random actions find: mean returns by how long each action is held and how it is drawn.

    python -m experiments.random_actions --tasks=dmc:finger-spin,dmc:reacher-hard --out=held.csv

A run begins with such actions (`train.seed_steps`, `train.seed_hold`), and where they meet no
reward there is nothing to learn from. Minutes a task on a laptop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from mbx import envs
from mbx.envs.base import EnvSpec, random_actions, wide_actions
from mbx.training.evaluation import make_evaluate

from .results import write_rows

TASKS = flags.DEFINE_list("tasks", ["dmc:finger-spin"], "SUITE:TASK,SUITE:TASK.")
HOLDS = flags.DEFINE_list("holds", ["1", "4", "8"], "Agent steps that an action is held.")
EPISODES = flags.DEFINE_integer("episodes", 12, "Episodes of each.", lower_bound=1)
SEED = flags.DEFINE_integer("seed", 1, "Of resets and actions.")
OUT = flags.DEFINE_string("out", "random_actions.csv", "File to write.")

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


def main(_: list[str]) -> None:
    """Measure every combination, print and write it."""
    rows = []
    for task in TASKS.value:
        for draw in DRAWS:
            for hold in map(int, HOLDS.value):
                rows.append(measure(task, draw, hold, EPISODES.value, SEED.value))
                print(*rows[-1].values(), flush=True)
                write_rows(OUT.value, rows)


if __name__ == "__main__":
    app.run(main)
