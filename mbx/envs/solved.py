"""Where training begins another episode because the task is solved (`train.reset_solved`).

Once an agent can do a task, most of a long episode shows it the same few states, while each reset
shows it another beginning (docs/results/learning_history.md, values where nobody has been).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mbx.types import EnvSpec


class Solved(NamedTuple):
    """When environments truncate an episode in which nothing is left to be learned.

    Attributes:
        reward: of an agent step that counts, nine tenths of the way to the highest.
        after: agent steps in a row `[E]` with that reward.
    """

    reward: float
    after: np.ndarray

    def so_far(self, count: Any, reward: Any) -> Any:
        """Such steps in a row `[E]`, with one that earned `reward`, of `count` before it."""
        return (count + 1) * (reward >= self.reward)


def with_usual(spec: EnvSpec, reset_solved: int | None) -> EnvSpec:
    """A task's spec, with `EnvSpec.reset_solved` where None leaves that to the task.

    50 where rewards are known and an episode is at least four times as long, else 0. 0, too, where
    a task ends an episode that fails: the reward of such a one is the highest from its beginning
    on, and what it asks for is that this goes on.
    """
    known = bool(spec.reward_range) and not spec.can_terminate
    usual = 50 if known and spec.episode_length >= 200 else 0
    return spec._replace(reset_solved=usual) if reset_solved is None else spec


def solved(spec: EnvSpec, reset_solved: int | None, numbers: Sequence[int]) -> Solved | None:
    """Of three environments in four; numbers 0, 4, 8, … still see what only a whole episode shows.

    Args:
        spec: of the task.
        reset_solved: agent steps in a row; 0: there is no such end, and the answer is None; None:
            `spec.reset_solved`.
        numbers: of the environments.

    Raises ValueError for a task that does not say what its rewards can be, or whose episodes are
    over before.
    """
    if reset_solved is None:
        reset_solved = spec.reset_solved
    if not reset_solved:
        return None
    if not spec.reward_range:
        raise ValueError(
            f"train.reset_solved={reset_solved}: {spec.name} does not say what its rewards can be "
            "(EnvSpec.reward_range), leave it 0"
        )
    if reset_solved >= spec.episode_length:
        raise ValueError(
            f"train.reset_solved={reset_solved}: an episode of {spec.name} is over after "
            f"{spec.episode_length} agent steps, lower it or leave it 0"
        )
    low, high = spec.reward_range
    whole = np.asarray(numbers) % 4 == 0
    after = np.where(whole, np.iinfo(np.int32).max, reset_solved).astype(np.int32)
    return Solved((low + 0.9 * (high - low)) * spec.action_repeat, after)
