"""What environments of other packages need: limits of their own, text, symbols, success."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space

from mbx import envs
from mbx.agents.tdmpc.settings import Settings
from mbx.envs import custom
from tests.envs.toys import rollout

GRID = np.arange(147, dtype=np.uint8).reshape(7, 7, 3)


class Mission(Space):
    """Text of a class of its own, as MiniGrid's."""

    def sample(self, mask=None, probability=None):
        return "go to the door"

    def contains(self, x):
        return isinstance(x, str)


class Maze(gymnasium.Env):
    """Observes as MiniGrid does, truncates after `limit` steps, terminates after `end`."""

    action_space = Discrete(3)
    observation_space = Dict(direction=Discrete(4), image=Box(0, 255, (7, 7, 3), np.uint8))
    observation_space["mission"] = Mission()

    def __init__(self, limit=5, end=99, **fields):
        self.limit, self.end = limit, end
        vars(self).update(fields)

    def _seen(self):
        return {"direction": 2, "image": GRID, "mission": "go to the door"}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.count = 0
        return self._seen(), {}

    def step(self, action):
        self.count += 1
        info = {"is_success": np.bool_(self.count > 3), "solved": "no", "cost": 1.0}
        return self._seen(), 1.0, self.count >= self.end, self.count >= self.limit, info


@pytest.fixture(autouse=True)
def known(monkeypatch):
    monkeypatch.setitem(custom._GIVEN, "gym:python:Maze", Maze)


def make(**kwargs):
    return envs.make("gym:python:Maze", 1, kwargs=kwargs)


def test_symbols_are_numbers_text_is_left_out_and_success_is_logged():
    environment = make(limit=4)
    spec = environment.spec
    assert [tuple(part) for part in spec.parts] == [("direction", (4,)), ("image", (147,))]
    assert spec.metrics == ("is_success",)
    obs = environment.reset(0)
    np.testing.assert_array_equal(obs[0], [0, 0, 1, 0, *range(147)])
    step = rollout(environment, 4)[1][-1]
    found = {name: float(x[0]) for name, x in step.metrics.items()}
    assert found == {"is_success": 0.25, "is_success_last": 1.0} and step.truncated[0]
    for images, shape in ((envs.Images(stack=2), (7, 7, 6)), (envs.Images(size=9), (9, 9, 3))):
        pictured = envs.make("gym:python:Maze", 1, images=images, observe=["image"])
        assert pictured.spec.obs_shape == shape and pictured.spec.obs_dtype == np.uint8
    asked = envs.make("gym:python:Maze", 1, metrics=["cost", "is_success"], workers=0)
    assert asked.spec.metrics == ("cost", "is_success")
    # As a run prints it.
    chosen = Settings().for_task(spec).env
    assert chosen.observe == ("direction", "image") and chosen.metrics == ("is_success",)
    assert chosen.episode_length == 4


@pytest.mark.parametrize(
    ("kwargs", "limit"),
    [
        (dict(limit=7), 7),  # found by random steps
        (dict(max_steps=40), 40),
        (dict(config={"duration": 2.5, "policy_frequency": 15}), 38),
        (dict(config={"duration": 40}, limit=6), 6),
    ],
)
def test_a_time_limit_that_an_environment_keeps_itself(kwargs, limit):
    environment = make(**kwargs)
    assert environment.spec.episode_length == limit


def test_a_limit_in_frames(monkeypatch):
    gymnasium.register("MbxFrames-v0", Maze, kwargs=dict(limit=99))
    spec = gymnasium.registry["MbxFrames-v0"]
    spec.kwargs |= dict(max_num_frames_per_episode=108, frameskip=(4, 5))
    monkeypatch.setattr(custom, "is_own", lambda name: False)
    assert envs.make("gym:MbxFrames-v0", 1).spec.episode_length == 27


@pytest.mark.parametrize("kwargs", [dict(limit=10**9, end=10**9), dict(limit=10**9, end=3)])
def test_a_task_that_no_limit_ends_is_refused(kwargs, monkeypatch):
    steps = []
    step = Maze.step
    monkeypatch.setattr(Maze, "step", lambda self, a: steps.append(1) or step(self, a))
    with pytest.raises(ValueError, match="'gym:python:Maze' has no time limit: set env.episode_le"):
        make(**kwargs)
    assert 2000 <= len(steps) < 2010
    made = envs.make("gym:python:Maze", 1, kwargs=kwargs, episode_length=8)
    assert made.spec.episode_length == 8 and len(steps) < 2010


@pytest.mark.parametrize("lengths", [(6, 7, 8, 9), (6, 6, 9), (6, 6, 6, 10**9)])
def test_lengths_that_differ_are_no_time_limit(lengths):
    class Restless(Maze):
        def reset(self, *, seed=None, options=None):
            self.turn = getattr(self, "turn", -1) + 1
            self.limit = lengths[self.turn % len(lengths)]
            return super().reset(seed=seed)

    custom._GIVEN["gym:python:Restless"] = Restless
    with pytest.raises(ValueError, match="no time limit"):
        envs.make("gym:python:Restless", 1)


@pytest.mark.parametrize(
    ("name", "length", "metrics"),
    [
        ("gym:minigrid:MiniGrid-Empty-5x5-v0", 100, ()),
        ("gym:minigrid:BabyAI-GoToRedBallGrey-v0", 64, ()),
        ("gym:highway_env:parking-v0", 500, ("is_success",)),
        ("gym:ale_py:ALE/Pong-v5", 27_000, ()),
        ("gym:gymnasium_robotics:PointMaze_UMaze-v3", 300, ("success",)),
        ("gym:myosuite:myoElbowPose1D6MRandom-v0", 100, ("solved",)),
    ],
)
def test_packages_by_name(name, length, metrics):
    """Needs minigrid, highway-env, ale-py, gymnasium-robotics or myosuite."""
    pytest.importorskip(name.split(":")[1])
    spec = envs.make(name, 1).spec
    assert (spec.episode_length, spec.metrics) == (length, metrics)
