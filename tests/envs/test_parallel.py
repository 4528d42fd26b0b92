"""Environments stepped by worker processes: the same numbers, errors with their traceback."""

from __future__ import annotations

import os
import signal
import threading
import time

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.spaces import Box

from mbx import envs
from mbx.commands import train
from mbx.envs import gymnasium as gymnasium_suite
from mbx.envs import snapshot, vector


class Drift(gymnasium.Env):
    max_episode_steps = 5
    action_space = Box(-1, 1, (1,))
    observation_space = Box(-9, 9, (2,))

    def __init__(self, fails_at=None, dies_at=None, meets=None):
        self.fails_at, self.dies_at, self.meets = fails_at, dies_at, meets
        self.count = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x = self.np_random.normal(size=2)
        return self.x.astype(np.float32), {}

    def step(self, action):
        self.count += 1
        if self.count == self.fails_at:
            return {}["level"]
        if self.count == self.dies_at:
            os._exit(3)
        if self.meets:
            self.meet()
        self.x = self.x + 0.1 * action[0] + 0.3 * self.np_random.normal(size=2)
        far = float(abs(self.x[0]))
        return self.x.astype(np.float32), -far, far > 1.5, False, {"far": far}

    def meet(self):
        worker, end = f"{os.getpid()}-{threading.get_ident()}", time.monotonic() + 30
        open(os.path.join(self.meets, f"{self.count}-{worker}"), "w").close()
        while sum(x.startswith(f"{self.count}-") for x in os.listdir(self.meets)) < 2:
            if time.monotonic() > end:
                raise TimeoutError("no other worker makes this step meanwhile")
            time.sleep(0.001)


NAME = f"gym:{__file__}:Drift"


class InThread:
    """A worker in a thread of this process, in the place of `subprocess.Popen`."""

    def __init__(self, command, *, pass_fds, env, start_new_session):
        assert command[1:3] == ["-m", "mbx.envs.vector"] and start_new_session
        assert env["JAX_PLATFORMS"] == "cpu" and os.getcwd() in env["PYTHONPATH"].split(os.pathsep)
        line = str(os.dup(pass_fds[0]))
        self._thread = threading.Thread(target=vector.main, args=([line],), daemon=True)
        self._thread.start()

    def wait(self, timeout=None):
        self._thread.join(timeout)
        assert not self._thread.is_alive()


def threads(monkeypatch):
    monkeypatch.setattr(vector.subprocess, "Popen", InThread)


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, tuple(one), tuple(other))


def actions(steps, num):
    return np.random.default_rng(0).uniform(-1, 1, (steps, num, 1))


def test_workers_make_the_same_steps_and_snapshots(monkeypatch):
    threads(monkeypatch)
    # Every reward is nearly the highest of such a range.
    monkeypatch.setattr(gymnasium_suite.Task, "reward_range", (-1e6, 0.0), raising=False)
    options = dict(seed=3, metrics=["far"], action_repeat=2, reset_solved=2, first=3)
    alone, shared = (envs.make(NAME, 5, workers=num, **options) for num in (0, 2))
    assert alone.spec == shared.spec and len(shared._workers) == 2
    np.testing.assert_array_equal(alone.reset(7), shared.reset(7))
    ends = 0
    for action in actions(9, 5):
        step = alone.step(action)
        same(step, shared.step(action))
        ends += int((step.terminated | step.truncated).sum())
    assert ends >= 10
    saved = shared.get_state()
    assert saved == alone.get_state()
    # Either continues the other, also with another number of workers.
    more, fewer = envs.make(NAME, 5, workers=9, **options), envs.make(NAME, 5, **options)
    assert len(more._workers) == 5
    more.set_state(saved)
    fewer.set_state(saved)
    for action in actions(9, 5):
        step = alone.step(action)
        same(step, more.step(action))
        same(step, fewer.step(action))
    more.close()
    shared.close()
    shared.close()


def test_a_foreign_snapshot_is_refused_and_episodes_begin_anew(monkeypatch):
    threads(monkeypatch)
    former = dict(tasks=[b""] * 4, length=np.zeros(4), total=np.zeros(4), solved=np.zeros(4))
    other = envs.make("gym:Pendulum-v1", 4).get_state()
    for workers in (0, 2):
        environment = envs.make(NAME, 4, workers=workers)
        first = environment.reset(3)
        for saved in (snapshot.encode(former), snapshot.encode([]), other):
            words = "a snapshot of another version or environment than gym:|it does not fit"
            with pytest.raises(snapshot.SnapshotError, match=words):
                environment.set_state(saved)
            np.testing.assert_array_equal(environment.reset(3), first)
        environment.close()


def test_workers_step_at_the_same_time(monkeypatch, tmp_path):
    """A step waits until the other worker is in it, too, as one after the other never is."""
    threads(monkeypatch)
    environment = envs.make(NAME, 2, workers=2, action_repeat=1, kwargs={"meets": str(tmp_path)})
    for action in actions(3, 2):
        environment.step(action)
    assert len(os.listdir(tmp_path)) >= 6  # two of each step, and of those that look it over
    environment.close()


def test_what_fails_in_a_worker_comes_with_its_traceback(monkeypatch):
    threads(monkeypatch)
    environment = envs.make(NAME, 2, workers=2, kwargs={"fails_at": 8})
    with pytest.raises(envs.EnvironmentFailure, match=r"step\(\) raised KeyError: 'level'") as e:
        for action in actions(9, 2):
            environment.step(action)
    words = train.in_words(e.value)
    assert 'return {}["level"]' in words and "EnvironmentFailure" not in words
    assert words.splitlines()[-1].startswith(f"error: env.name={NAME!r}")
    environment.close()
    with pytest.raises(ValueError, match="takes .*got an unexpected keyword argument 'mass'"):
        envs.make(NAME, 2, workers=2, kwargs={"mass": 1.0})
    with pytest.raises(FileNotFoundError, match="does not exist"):
        envs.make(NAME + "/none.py:X", 2, workers=2)


def test_there_is_a_snapshot_where_every_worker_has_one(monkeypatch):
    threads(monkeypatch)
    environment = envs.make(NAME, 2, workers=2)
    assert environment.get_state() is not None
    first = environment._workers[0].answer
    monkeypatch.setattr(environment._workers[0], "answer", lambda: first() and (None, None, ""))
    assert environment.get_state() is None
    environment.close()


@pytest.mark.parametrize(
    "name", ["gymnax:Pendulum-v1", "multi:gym:Pendulum-v1+dmc:cartpole-balance"]
)
def test_workers_are_for_single_tasks_on_the_host(name):
    with pytest.raises(
        ValueError, match=rf"env.workers=2: {name.replace('+', '.')} is not stepped"
    ):
        envs.make(name, 2, workers=2)


@pytest.mark.slow
def test_processes_make_the_same_steps_together_and_their_end_is_told(tmp_path):
    options, meets = dict(action_repeat=1, seed=1), {"meets": str(tmp_path)}
    alone = envs.make(NAME, 4, **options)
    shared = envs.make(NAME, 4, workers=2, kwargs=meets, **options)
    for action in actions(20, 4):
        same(alone.step(action), shared.step(action))
    shared.close()
    environment = envs.make(NAME, 2, workers=2, kwargs={"dies_at": 8})
    with pytest.raises(envs.EnvironmentFailure, match=r"a worker .* ended \(exit code 3; negative"):
        for action in actions(9, 2):
            environment.step(action)
    environment.close()
    environment = envs.make(NAME, 2, workers=2)
    os.kill(environment._workers[0]._process.pid, signal.SIGKILL)
    with pytest.raises(envs.EnvironmentFailure, match=r"ended \(exit code -9"):
        environment.reset(0)
    environment.close()
