"""Resuming around host environments: where they go on, and where they begin again."""

from __future__ import annotations

import numpy as np
import pytest

from mbx import envs
from mbx.envs import snapshot
from mbx.envs.base import HostEnvironment, Timestep
from mbx.training import run
from mbx.training.checkpoint import Checkpointer
from mbx.training.job import begin, prepare
from mbx.types import EnvSpec
from tests.faults.small import small_config


class Counter(HostEnvironment):
    """Episodes of seven steps: observations (number of the episode, step in it), rewards 1."""

    def __init__(self, num_envs: int, saves: bool) -> None:
        self.spec = EnvSpec("counter", (2,), np.float32, 2, 7, 1)
        self.num_envs, self._saves = num_envs, saves

    def reset(self, seed: int) -> np.ndarray:
        self._state = np.zeros((self.num_envs, 2), np.float32)
        self._state[:, 0] = seed % 10
        return self._state.copy()

    def step(self, action: np.ndarray) -> Timestep:
        self._state[:, 1] += 1
        final, length = self._state.copy(), self._state[:, 1].astype(np.int32)
        done = length == 7
        self._state[done] += (1, -7)
        no, one = np.zeros(self.num_envs, bool), np.ones(self.num_envs, np.float32)
        total = length.astype(np.float32)
        return Timestep(self._state.copy(), final, one, no, done, total, length, no)

    def get_state(self) -> bytes | None:
        return snapshot.encode(self._state) if self._saves else None

    def set_state(self, data: bytes) -> None:
        self._state = snapshot.decode(data)

    def close(self) -> None:
        pass


def config_of(task: str, **sections):
    """A tiny run on a counter that saves its state, or does not."""

    def factory(task, num_envs, *, action_repeat, episode_length, seed):
        return Counter(num_envs, saves=task == "saves")

    envs.register("counter", factory)
    return small_config(env=dict(name=f"counter:{task}"), **sections)


def stored(config, workdir) -> dict[str, np.ndarray]:
    """Rows of the first environment in a run's newest checkpoint."""
    config = {**config, "resume": True}
    checkpointer = Checkpointer(str(workdir))
    state, _ = begin(prepare(config), checkpointer)
    checkpointer.close()
    size = int(state.replay.size[0])
    return {name: np.asarray(x[0, :size]) for name, x in state.replay.data.items()}


@pytest.mark.parametrize("task", ["saves", "forgets"])
def test_no_transition_leads_from_one_episode_into_another(task, tmp_path):
    """After 20 steps an environment is in its third episode, 6 steps into it."""
    run.train(config_of(task, train=dict(steps=40), eval=dict(interval=0)), str(tmp_path))
    config = config_of(task, train=dict(steps=60), eval=dict(interval=0), resume=True)
    if task == "forgets":
        with pytest.warns(UserWarning, match="cannot save its state.*begins new"):
            run.train(config, str(tmp_path))
        with pytest.warns(UserWarning, match="cannot save its state"):
            rows = stored(config, tmp_path)
    else:
        run.train(config, str(tmp_path))
        rows = stored(config, tmp_path)
    episode, step = rows["obs"].T
    first = rows["is_first"]
    np.testing.assert_array_equal(first, step == 0)
    np.testing.assert_array_equal(rows["reward"], np.where(first, 0.0, 1.0))
    follows = ~first[1:]
    np.testing.assert_array_equal(np.diff(episode)[follows], 0)
    np.testing.assert_array_equal(np.diff(step)[follows], 1)
    # 30 steps: whole episodes of eight rows, or a new one after step 20.
    starts = np.flatnonzero(first).tolist()
    assert starts == ([0, 8, 16, 24, 32] if task == "saves" else [0, 8, 16, 22, 30])
