"""Numbers that an environment gives beside the reward, averaged over episodes into the log."""

from __future__ import annotations

import os

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box

from mbx import envs
from mbx.envs import custom
from mbx.envs.checks import check_raw
from mbx.training import build, evaluation, run
from mbx.training.logging import read_rows
from tests.envs import toys
from tests.envs.toys import rollout
from tests.faults.small import small_config


def counting(metrics=("cost",)):
    """Episodes of four steps, whose n-th costs n."""
    raw = toys.counting(lambda count: jnp.full(2, count), time_limit=4, metrics=metrics)
    return raw._replace(step=lambda *given: (*raw.step(*given), {"cost": given[1] + 1}))


class Counting(gymnasium.Env):
    """The same on the host; success is told at the end alone."""

    action_space, observation_space = Box(-1.0, 1.0), Box(-9.0, 9.0, (2,))
    max_episode_steps = 4

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.count += 1
        info = {"cost": self.count} | ({"success": True} if self.count == 4 else {})
        return np.full(2, self.count, np.float32), 1.0, False, False, info


def on_host(num_envs, metrics, **options):
    custom._GIVEN["gym:python:Counting"] = Counting
    return envs.make("gym:python:Counting", num_envs, metrics=metrics, **options)


def stepped(environment, num):
    return rollout(environment, num)[1]


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_means_of_the_episode_so_far_and_newest_values(kind):
    for repeat, mean, last in (
        (1, [1.0, 1.5, 2.0, 2.5, 1.0], [1.0, 2.0, 3.0, 4.0, 1.0]),
        (2, [1.5, 2.5, 1.5], [2.0, 4.0, 2.0]),  # over environment steps, as rewards are summed
        (3, [2.0, 2.5, 2.0], [3.0, 4.0, 3.0]),  # the last agent step is a single one
    ):
        environment = (
            envs.episodic(counting(), 2, action_repeat=repeat)
            if kind == "jax"
            else on_host(2, ["cost"], action_repeat=repeat)
        )
        steps = stepped(environment, len(mean))
        assert [s.metrics["cost"].tolist() for s in steps] == [[x, x] for x in mean]
        assert [s.metrics["cost_last"].tolist() for s in steps] == [[x, x] for x in last]


def test_a_number_that_only_some_steps_have_is_averaged_over_these():
    steps = stepped(on_host(1, ["success"]), 8)
    assert [s.metrics["success"][0] for s in steps] == [0, 0, 0, 1] * 2


def test_episodes_without_a_number_do_not_count():
    with pytest.warns(UserWarning, match=r"had 'succes' \(.*\['cost', 'success'\]\).*misspelt"):
        environment = on_host(1, ["succes", "cost"])
        steps = stepped(environment, 8)  # a warning once, and no error
    assert np.isnan([steps[3].metrics[n][0] for n in ("succes", "succes_last")]).all()
    assert steps[3].metrics["cost"] == 2.5
    found = evaluation.Evaluation(np.ones(3), np.ones(3), metrics={"a": np.float32([1, np.nan, 4])})
    assert found.summary()["episode/a"] == 2.5


def test_none_is_no_number_yet_and_text_is_none(monkeypatch):
    given = [None, 3.0, np.float32(5.0), "far"]

    class Late(Counting):
        def step(self, action):
            obs, reward, terminated, truncated, _ = super().step(action)
            return obs, reward, terminated, truncated, {"cost": given[(self.count - 1) % 4]}

    monkeypatch.setitem(custom._GIVEN, "gym:python:Late", Late)
    environment = envs.make("gym:python:Late", 1, metrics=["cost"])
    assert [s.metrics["cost"][0] for s in stepped(environment, 3)] == [0.0, 3.0, 4.0]
    with pytest.raises(ValueError, match=r"info\['cost'\] of gym:python:Late is 'far'"):
        environment.step(np.zeros((1, 1)))


@pytest.mark.parametrize("kind", ["jax", "host"])
def test_an_evaluation_has_those_of_whole_episodes(kind):
    environment = envs.episodic(counting(), 3) if kind == "jax" else on_host(3, ["cost"])
    summary = evaluation.make_random(environment)(jax.random.key(0)).summary()
    assert summary["episode/cost"] == 2.5 and summary["episode/cost_last"] == 4.0


def test_a_run_logs_them(tmp_path):
    def factory(task, num_envs, *, action_repeat, episode_length, seed):
        return envs.episodic(counting(), num_envs)

    envs.register("counting", factory)
    run.train(small_config(env=dict(name="counting:x"), num_seeds=2), str(tmp_path))
    rows = read_rows(os.path.join(tmp_path, "seed-1", "metrics.jsonl"))
    for kind in ("train", "eval"):
        assert {r["episode/cost"] for r in rows if r["kind"] == kind} == {2.5}
        assert {r["episode/cost_last"] for r in rows if r["kind"] == kind} == {4.0}


def test_names_that_do_not_fit():
    with pytest.raises(ValueError, match="'return' stands twice in the log"):
        envs.episodic(counting(("return",)), 1)
    with pytest.raises(
        ValueError, match=r"metrics of step\(\) is \['cost'\], wanted .*\['speed'\]"
    ):
        check_raw(counting(("speed",)))
    with pytest.raises(ValueError, match=r"tuple of 5, .*RawEnvironment\(metrics=\('cost',\)\)"):
        check_raw(counting(()))
    check_raw(counting())
    with pytest.raises(ValueError, match=r"config.env.metrics=\(2.0,\): give names"):
        build.read(small_config(env=dict(metrics=(2.0,))))
    with pytest.raises(ValueError, match="config.env.kwargs=.*: give numbers, text"):
        build.read(small_config(env=dict(kwargs={"a": {1}})))
    with pytest.raises(ValueError, match="env.metrics=.*brax:fast has no `info`"):
        envs.make("brax:fast", 1, metrics=["cost"])
