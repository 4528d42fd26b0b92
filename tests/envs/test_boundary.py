"""What reaches `step`, what comes back and what is handed over, over kinds of spaces."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import types
import warnings

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces, wrappers
from hypothesis import given, settings
from hypothesis import strategies as st

from mbx import envs
from mbx.envs import custom
from mbx.envs.base import in_space, in_units
from mbx.envs.gymnax import adapt
from mbx.training import rundir
from mbx.training.build import opened
from tests.envs.spaces import ACTIONS, OBSERVATIONS, Recorder, boxes
from tests.envs.test_parallel import threads
from tests.envs.toys import counting, rollout

INFOS = st.lists(
    st.one_of(
        st.just({}),
        st.just({"cost": None}),
        st.builds(lambda x: {"cost": x}, st.integers(-9, 9)),
    ),
    min_size=1,
    max_size=5,
)


def named(what, name="gym:python:Recorder"):
    custom._GIVEN[name] = what
    return name


def agent_actions(spec, steps, seed=0):
    """Both ends, the middle and random ones: `[steps, 1, A]`."""
    rng = np.random.default_rng(seed)
    if spec.discrete:
        return np.eye(spec.action_dim, dtype=np.float32)[
            rng.integers(0, spec.action_dim, (steps, 1))
        ]
    found = rng.uniform(-1, 1, (steps, 1, spec.action_dim)).astype(np.float32)
    found[0], found[1], found[2] = -1, 1, 0
    return found


@settings(max_examples=80, deadline=None)
@given(OBSERVATIONS, ACTIONS, INFOS, st.integers(1, 3))
def test_what_a_host_environment_is_given_and_gives(observed, acted, infos, repeat):
    log = []
    name = named(functools.partial(Recorder, observed, acted, infos, log))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "env.metrics=")  # where no step has it
        made = envs.make(name, 1, action_repeat=repeat, metrics=["cost"])
        spec, length = made.spec, -(-7 // repeat)
        with tempfile.TemporaryDirectory() as folder:
            rundir.save_spec(spec, folder)
            assert rundir.load_spec(folder) == spec._replace(obs_dtype=np.dtype(spec.obs_dtype))
        assert spec.episode_length == length
        log.clear()
        for i, action in enumerate(agent_actions(spec, length)):
            step = made.step(action)
            done = min(7, (i + 1) * repeat)
            assert len(log) == done and step.reward == done - i * repeat
            given = [a for a, _ in log[i * repeat :]]
            for one in given:  # each repeat the same
                jax.tree.map(np.testing.assert_array_equal, one, given[0])
            wanted = spaces.flatten(observed, log[-1][1]).astype(np.float32)
            np.testing.assert_array_equal(step.final_obs[0].ravel(), wanted)
            assert step.final_obs.dtype == np.float32 and step.obs[0].shape == spec.obs_shape
            numbers = [infos[n % len(infos)].get("cost") for n in range(done)]
            numbers = [x for x in numbers if x is not None]
            mean = np.mean(numbers) if numbers else np.nan if i == length - 1 else 0.0
            np.testing.assert_allclose(step.metrics["cost"][0], mean, rtol=1e-6)
            last = numbers[-1] if numbers else mean
            np.testing.assert_allclose(step.metrics["cost_last"][0], last)
        # A policy's action is in the space, too, after its program in float32.
        for action in agent_actions(spec, 3, seed=1):
            found = in_space(spec, np.asarray(in_units(spec, jnp.asarray(action))))
            assert acted.contains(
                jax.tree.map(lambda x: x[0] if spec.discrete else x[0, ...], found)
            )
        if isinstance(acted, spaces.Box):  # the ends of the agent's range are those of the space
            np.testing.assert_allclose(log[0][0], acted.low, atol=1e-6)
            if repeat < 7 and length > 1:
                np.testing.assert_allclose(log[repeat][0], acted.high, atol=1e-6)


@settings(max_examples=8, deadline=None)
@given(OBSERVATIONS, ACTIONS)
def test_workers_are_given_and_give_the_same(observed, acted):
    name = named(functools.partial(Recorder, observed, acted, [{}, {"cost": 2.0}]))
    with pytest.MonkeyPatch.context() as patch:
        threads(patch)
        made = [envs.make(name, 2, workers=n, metrics=["cost"], seed=5) for n in (0, 2)]
    assert made[0].spec == made[1].spec
    for action in agent_actions(made[0].spec, 8).repeat(2, axis=1):
        one, other = (environment.step(action) for environment in made)
        jax.tree.map(np.testing.assert_array_equal, tuple(one), tuple(other))
    made[1].close()


def test_every_whole_number_of_a_box_is_reached():
    space = spaces.Box(np.array([0, -3]), np.array([10, 3]), dtype=np.int64)
    log = []
    name = named(functools.partial(Recorder, spaces.Discrete(2), space, ({},), log))
    made = envs.make(name, 1, episode_length=500)
    for x in np.linspace(-1, 1, 101):
        made.step(np.full((1, 2), x))
    seen = np.array([action for action, _ in log])
    assert sorted(set(seen[:, 0])) == list(range(11))
    assert sorted(set(seen[:, 1])) == list(range(-3, 4))


@settings(max_examples=25, deadline=None)
@given(boxes(), st.integers(0, 9))
def test_what_a_jax_environment_is_given(space, seed):
    class Env:
        default_params = type("Params", (), {"max_steps_in_episode": 9})()

        def action_space(self, params):
            return space

        def observation_space(self, params):
            return spaces.Box(-1, 1, (1,))

        def reset_env(self, key, params):
            return jnp.zeros(1), jnp.zeros(())

        def step_env(self, key, state, action, params):
            self.action = action
            return jnp.zeros(1), state, 0.0, False, {}

    env = Env()
    raw = adapt("jax:python:Env", env, env.default_params)
    low, high = (x.astype(np.float32) for x in (space.low, space.high))
    for action in agent_actions(envs.episodic(raw, 1).spec, 4, seed)[:, 0]:
        raw.step(jax.random.key(0), jnp.zeros(()), jnp.asarray(action))
        assert env.action.shape == space.shape
        assert (env.action >= low).all() and (env.action <= high).all()
        assert env.action.dtype.kind == space.dtype.kind
        if (action == 1).all():
            np.testing.assert_allclose(env.action, high, atol=1e-6)


class TenTimes(gymnasium.RewardWrapper):
    def reward(self, reward):
        return 10.0 * reward


WRAPPED = {
    "as registered": lambda env: env,
    "a shorter limit": lambda env: wrappers.TimeLimit(env, 3),
    "made shorter": lambda _: gymnasium.make("Pendulum-v1", max_episode_steps=3, g=2.0),
    "without a limit": lambda _: gymnasium.make("Pendulum-v1", max_episode_steps=-1),
    "its own wrapper": TenTimes,
    "a wrapper inside": lambda env: wrappers.TimeLimit(TenTimes(env), 3),
    "Gymnasium's wrapper": lambda env: wrappers.TransformReward(env, lambda x: -x),
    "of no registered one": lambda _: TenTimes(Recorder(spaces.Box(-1, 1), spaces.Box(-1, 1))),
}


@pytest.mark.parametrize("how", WRAPPED)
def test_an_instance_is_trained_in_as_it_is_or_refused(how):
    instance = WRAPPED[how](gymnasium.make("Pendulum-v1", g=3.0))
    try:
        name, kwargs = custom.name_of(instance)
    except ValueError as error:
        assert "put around" in str(error) and "or a function that makes it" in str(error)
        assert how in list(WRAPPED)[4:]
        return
    assert how in list(WRAPPED)[:4]
    limit = instance.spec.max_episode_steps
    made = envs.make(name, 1, kwargs=kwargs, episode_length=None if limit else 5)
    assert made.spec.episode_length == (limit or 5)
    instance.reset(seed=5)
    made.set_state(envs.make(name, 1, kwargs=kwargs, episode_length=9).get_state())
    state = made._tasks[0]._env.unwrapped.state
    instance.unwrapped.state = state.copy()
    wanted = instance.step(np.float32([0.5]))
    step = made.step(np.float32([[0.25]]))
    np.testing.assert_array_equal(step.final_obs[0], wanted[0])
    assert step.reward[0] == np.float32(wanted[1])


def test_instances_that_cannot_be_copied_are_refused():
    with pytest.raises(
        ValueError, match=r"=Recorder\(…\): .* its arguments: give a class, functoo"
    ):
        custom.name_of(Recorder(spaces.Box(-1, 1), spaces.Box(-1, 1)))
    with pytest.raises(ValueError, match=r"vector environment: .*env.num_envs"):
        custom.name_of(gymnasium.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync"))
    name = named(lambda: gymnasium.make_vec("Pendulum-v1", 2, vectorization_mode="sync"))
    with pytest.raises(ValueError, match="SyncVectorEnv, a vector environment: .*env.num_envs"):
        envs.make(name, 1)


class Counted(Recorder):
    open = 0

    def __init__(self, fails=False):
        Counted.open += 1
        self.fails = fails
        super().__init__(spaces.Box(-1, 1), spaces.Box(-1, 1))

    def close(self):
        Counted.open -= 1
        if self.fails:
            raise RuntimeError("not connected")


def test_what_is_opened_is_closed():
    name, _ = custom.name_of(Counted)
    assert Counted.open == 0
    with envs.make(name, 3) as made:
        assert Counted.open == 3
    made.close()
    assert Counted.open == 0
    both = envs.make(f"multi:{name}+gym:Pendulum-v1", 2, episode_length=5)
    both.close()
    assert Counted.open == 0
    for failing in (name, f"multi:{name}+gym:CartPole-v1"):  # while several are made
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Counted, "max_episode_steps", None)
            with pytest.raises(ValueError, match="no time limit"):
                envs.make(failing, 2)
    with pytest.raises(ValueError, match="discrete actions"):
        envs.make(f"multi:{name}+gym:CartPole-v1", 2)
    assert Counted.open == 0
    with pytest.warns(UserWarning, match=r"close\(\) raised RuntimeError: not connected"):
        envs.make(name, 2, kwargs={"fails": True}).close()
    assert Counted.open == 0
    with pytest.warns(UserWarning, match="not connected") as told:
        with opened(types.SimpleNamespace(spec=made.spec, close=Counted(fails=True).close)):
            pass
    assert told[0].filename == __file__


HELD = {  # what an environment keeps besides a counter, and whether a snapshot holds it
    "nothing": (lambda env: {}, True),
    "plain numbers called env": (lambda env: dict(env={"place": 0}, spec=None), True),
    "a simulator called env": (lambda env: dict(env=object()), False),
    "a simulator called model": (lambda env: dict.fromkeys(("model", "data"), object()), False),
    "one array twice": (lambda env: dict(again=env.shared), False),
    "a view": (lambda env: dict(part=[env.shared[1:]]), False),
    "a shared generator": (lambda env: dict(rng=env.np_random), False),
}


class Holding(gymnasium.Env):
    observation_space, action_space = spaces.Box(-1, 99, (1,)), spaces.Box(-1, 1)
    max_episode_steps = 50

    def __init__(self, what):
        self.what, self.count, self.shared = what, 0, np.zeros(4)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        vars(self).update(HELD[self.what][0](self))
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += 1
        if isinstance(getattr(self, "env", None), dict):
            self.env["place"] += 1
        if self.count == 3:
            self.later = True
        return np.full(1, self.count, np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("what", HELD)
def test_a_snapshot_continues_exactly_or_there_is_none(what):
    one, other = (envs.make(named(Holding), 1, kwargs={"what": what}) for _ in range(2))
    rollout(one, 2)
    rollout(other, 5)
    state, saved = one.get_state(), HELD[what][1]
    assert (state is not None) == saved
    if saved:
        other.set_state(state)
        inner, wanted = (vars(made._tasks[0]._env) for made in (other, one))
        assert "later" not in inner and inner["count"] == wanted["count"] == 2
        assert inner.get("env") == wanted.get("env")


@pytest.mark.parametrize("task", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"])
def test_toy_texts_are_saved(task):
    assert envs.make(f"gym:{task}", 1, episode_length=9).get_state() is not None


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gym:ALE/Pong-v5", {}, "Namespace ALE not found.*gym:PACKAGE:ALE/Pong-v5"),
        ("gym:MiniGrid-Empty-5x5-v0", {}, "gym:PACKAGE:MiniGrid-Empty-5x5-v0"),
        ("gym:Pendulum-v0", {}, "deprecated. Please use `Pendulum-v1`"),
        ("gym:Pendulum-v1", dict(kwargs={"gravitiy": 3.0}), "env.kwargs=.*'gravitiy'"),
        ("gym:HalfCheetah-v3", {}, "moved to the gymnasium-robotics"),
    ],
)
def test_gymnasiums_own_words_are_passed_on(name, options, words):
    with pytest.raises((ValueError, ImportError), match=words):
        envs.make(name, 1, **options)


def test_a_limit_given_as_gymnasium_takes_it():
    for name in ("gym:Pendulum-v1", "gym:gymnasium.envs:Pendulum-v1"):
        made = envs.make(name, 1, kwargs={"max_episode_steps": 50})
        assert made.spec.episode_length == 50
    with pytest.raises(ValueError, match="no time limit: set env.episode_length"):
        envs.make("gym:Pendulum-v1", 1, kwargs={"max_episode_steps": -1})


def seen_as(space, obs, **fields):
    class Env(Recorder):
        def __init__(self):
            super().__init__(space, spaces.Box(-1, 1))

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return obs, {}

        def step(self, action):
            return obs, fields.get("reward", 0.0), False, False, {}

    return named(Env)


def test_pictures_and_boards():
    grey = np.full((84, 84), 200, np.uint8)
    name = seen_as(spaces.Box(0, 255, (84, 84), np.uint8), grey)
    with pytest.raises(ValueError, match=r"Recorder.*grey picture, uint8\[84, 84\]: add an axis"):
        envs.make(name, 1)
    both = spaces.Dict(grey=spaces.Box(0, 255, (84, 84), np.uint8), x=spaces.Box(-1, 1))
    name = seen_as(both, {"grey": grey, "x": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="observation 'grey' is a grey picture"):
        envs.make(name, 1)
    assert envs.make(name, 1, observe=["x"]).spec.obs_shape == (1,)
    for size in (0, 64):
        first = np.zeros((3, 96, 96), np.uint8)
        name = seen_as(spaces.Box(0, 255, (3, 96, 96), np.uint8), first)
        with pytest.raises(ValueError, match="Recorder.*has its channels first: give them last"):
            envs.make(name, 1, images=envs.Images(size=size))
    board = np.arange(12, dtype=np.float32).reshape(2, 3, 2) - 5
    for space, shape in (
        (spaces.Box(-9, 9, (2, 3, 2)), (12,)),  # numbers: a vector
        (spaces.Box(-9, 9, (2, 3, 2), np.int64), (12,)),
        (spaces.Box(0, 1, (2, 3, 2)), (2, 3, 2)),
    ):
        obs = board.astype(space.dtype) if shape == (12,) else np.ones((2, 3, 2), np.float32)
        made = envs.make(seen_as(space, obs), 1)
        assert made.spec.obs_shape == shape
        np.testing.assert_array_equal(made.reset(0).ravel(), obs.ravel())


def test_numbers_that_are_far_from_one_are_said():
    name = seen_as(spaces.Box(-np.inf, np.inf, (2,)), np.float32([1e6, 0]), reward=1e7)
    with pytest.warns(UserWarning) as told:
        envs.make(name, 1)
    said = " ".join(str(one.message) for one in told)
    assert "rewards of 1e+07: what lies beyond 22,025" in said and "observations of 1e+06" in said

    raw = counting(lambda count: jnp.full(2, 1e6), lambda count: 1e7)
    envs.register("mine", envs.Suite(raw=lambda task: raw))
    with pytest.warns(UserWarning) as told:
        envs.make("mine:x", 1)
    assert len(told) == 2


SCRIPT = """
import os
with open(os.environ["COUNT"], "a") as file:
    file.write("x")
from tests.envs.test_parallel import threads
from tests.envs.spaces import Recorder
from gymnasium import spaces, register, make
from mbx import envs
from mbx.envs import custom
class Env(Recorder):
    def __init__(self):
        super().__init__(spaces.Box(-1, 1), spaces.Box(-1, 1))
register("Scripted-v0", Env, max_episode_steps=20)
name, kwargs = custom.name_of(make("Scripted-v0"))
print(name, envs.make(name, 1, kwargs=kwargs).spec.episode_length)
name, kwargs = custom.name_of(Env)
print(name, envs.make(name, 1, kwargs=kwargs).spec.episode_length)
envs.make(name, 1, workers=1).close()
"""


@pytest.mark.parametrize("place", ["script", "cell"])
def test_environments_of_a_script_and_of_a_cell(tmp_path, place):
    path, count = tmp_path / "script.py", tmp_path / "count"
    path.write_text(SCRIPT)
    command = [str(path)] if place == "script" else ["-c", SCRIPT]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *command],
        env=os.environ | {"COUNT": str(count), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    where = path if place == "script" else "python"
    assert done.stdout.splitlines() == [
        f"gym:{where}:Scripted-v0 20",
        f"gym:{where}:Env 7",
    ], done.stderr
    if place == "script":  # the worker imports it once, and it says what to do
        assert 'guard it with if __name__ == "__main__"' in done.stderr
        assert count.read_text() == "xx"
    else:
        assert "given from Python" in done.stderr
