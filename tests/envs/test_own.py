"""Environments of one's own: found by file, module or object, and looked at before use."""

from __future__ import annotations

import functools
import os
import sys
import textwrap

import gymnasium
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, Text

from examples.own_gymnasium import Tank
from mbx import config, envs
from mbx.commands import train
from mbx.envs import custom
from mbx.envs.base import RawEnvironment
from mbx.envs.checks import check_raw
from mbx.training import run
from mbx.training.logging import read_rows
from tests.envs.toys import rollout
from tests.faults.small import small_config

SOURCE = textwrap.dedent(
    """
    import gymnasium
    import numpy as np
    from gymnasium.spaces import Box

    import gauge

    class Scale(gymnasium.Env):
        max_episode_steps = 9
        action_space = Box(np.float32([0, -4]), np.float32([2, 4]))
        observation_space = Box(-np.inf, np.inf, (2,), np.float32)

        def __init__(self, mass=1.0, parts=(), task="", seed=0):
            self.mass, self.parts = mass + seed + len(task), list(parts)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return np.full(2, self.mass, np.float32), {}

        def step(self, action):
            return np.asarray(action, np.float32), gauge.READING, False, False, {}

    def heavy():
        return Scale(mass=100.0)

    gymnasium.register("OwnScale-v0", entry_point=Scale, max_episode_steps=6)
    """
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """scale.py and gauge.py, which it imports, in a folder that Python does not know."""
    path = tmp_path_factory.mktemp("own")
    (path / "scale.py").write_text(SOURCE)
    (path / "gauge.py").write_text("READING = 3.0\n")
    (path / "rail.py").write_text(
        "import jax.numpy as jnp\nfrom mbx import envs\n\n"
        "def make(limit=5, task=0, film=0):\n"
        "    def step(key, state, action):\n"
        "        return state + 1, state + 1, action[0], jnp.bool_(False)\n"
        "    zeros = lambda key: (jnp.zeros(2), jnp.zeros(2))\n"
        "    return envs.RawEnvironment('r', (2,), jnp.float32, 1, limit, zeros, step)\n"
    )
    return path


def test_a_class_in_a_file_is_stepped_in_its_own_units(folder):
    name = f"gym:{folder}/scale.py:Scale"
    environment = envs.make(name, 2, kwargs={"mass": 4.0, "seed": 1, "task": "of"})
    assert environment.spec[:6] == (name, (2,), np.float32, 2, 9, 1)
    np.testing.assert_array_equal(environment.reset(0), np.full((2, 2), 7.0))
    step = environment.step(np.array([[-1.0, 0.5], [1.0, -1.0]]))
    np.testing.assert_array_equal(step.obs, [[0.0, 2.0], [2.0, -4.0]])  # low + half the width
    assert step.reward.tolist() == [3.0, 3.0]


@pytest.mark.parametrize(("what", "limit", "first"), [("heavy", 9, 100.0), ("OwnScale-v0", 6, 1.0)])
def test_functions_and_registered_ids_of_a_module(folder, monkeypatch, what, limit, first):
    monkeypatch.chdir(folder)
    name = custom.located(f"gym:scale:{what}")
    assert name == f"gym:{folder}/scale.py:{what}"  # as a run records it
    monkeypatch.chdir("/")
    environment = envs.make(name, 1)
    assert environment.spec.episode_length == limit and environment.reset(0)[0, 0] == first
    if limit == 6:
        flags = [bool(row.truncated[0]) for row in rollout(environment, 7)[1]]
        assert flags == [False] * 5 + [True, False]


def test_modules_that_are_installed_keep_their_names():
    name = "gym:gymnasium.envs:Pendulum-v1"
    assert custom.located(name) == name and envs.make(name, 1).spec.episode_length == 200
    assert custom.located("brax:fast") == "brax:fast"
    assert (
        custom.label("gym:/a/b/tank.py:Tank") == "gym-Tank"
        and custom.label("brax:fast") == "brax-fast"
    )


def test_a_jax_environment_in_a_file(folder):
    environment = envs.make(
        f"jax:{folder}/rail.py:make", 3, kwargs={"limit": 4, "task": 1, "film": 2}
    )
    assert environment.spec.episode_length == 4 and environment.spec.obs_shape == (2,)
    step = rollout(environment, 1, action=0.25)[1][0]
    assert step.reward.tolist() == [0.25] * 3 and step.obs[0].tolist() == [1.0, 1.0]


def test_gymnax_objects_are_taken_as_gymnax_itself_is():
    from gymnax.environments.classic_control.pendulum import Pendulum

    given, kwargs = custom.name_of(Pendulum)
    own_one, its = envs.make(given, 2, kwargs=kwargs), envs.make("gymnax:Pendulum-v1", 2)
    a, b = (rollout(e, 1, action=[[0.3], [-1.0]])[1][0] for e in (own_one, its))
    np.testing.assert_array_equal(a.obs, b.obs)
    np.testing.assert_array_equal(a.reward, b.reward)


def test_names_of_what_python_gives():
    path = os.path.abspath(sys.modules[Tank.__module__].__file__)
    assert custom.name_of(Tank) == (f"gym:{path}:Tank", {})
    assert custom.name_of(functools.partial(Tank, leak=0.2)) == (f"gym:{path}:Tank", {"leak": 0.2})
    pendulum = gymnasium.make("Pendulum-v1", g=9.0)
    assert custom.name_of(pendulum) == ("gym:Pendulum-v1", {"g": 9.0})

    def made():
        return Tank(leak=0.3)

    made.__module__ = "executed"  # and no entry of sys.modules
    name, _ = custom.name_of(made)
    assert envs.make(name, 1)._tasks[0]._env.leak == 0.3
    custom._GIVEN.clear()  # as in another process
    with pytest.raises(FileNotFoundError, match="given from Python .* give it again"):
        envs.make(name, 1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gym:nowhere.py:Scale", "file .*/nowhere.py does not exist: put it there"),
        ("gym:nowhere:Scale", "no module 'nowhere'.*path/to/file.py:Class"),
        ("gym:{}/scale.py:Scala", r"scale.py has no 'Scala': did you mean \['Scale'"),
        ("gym:{}/scale.py:Box", "env.kwargs={}: .*takes"),
        ("gym:{}/scale.py:np", "leave them out|without reset"),
        ("jax:{}/scale.py:heavy", "is a Scale without reset_env: give a mbx.envs.RawEnvironment"),
        ("jax:os:system", "module of Python's own"),
        ("jax:make", "jax:path/to/file.py:make"),
    ],
)
def test_names_that_lead_nowhere(folder, name, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        envs.make(name.format(folder), 1)


def test_arguments_that_an_environment_does_not_take(folder):
    with pytest.raises(ValueError, match=r"env.kwargs={'mas': 1}: .*takes \(mass=1.0.*'mas'"):
        envs.make(f"gym:{folder}/scale.py:Scale", 1, kwargs={"mas": 1})
    for name in ("images", "film"):
        with pytest.raises(
            ValueError, match=rf"env.kwargs={{'{name}'}}: gym:.* gets these from mbx"
        ):
            envs.make(f"gym:{folder}/scale.py:Scale", 1, kwargs={name: 1})
    with pytest.raises(ValueError, match=r"env.kwargs={'mass': 1}: brax:fast takes no arguments"):
        envs.make("brax:fast", 1, kwargs={"mass": 1})


def test_arguments_on_the_command_line():
    found = config.load(
        ["--config=tdmpc", "--config.env.kwargs.mass=2.5", "--config.env.kwargs.kind=steel"]
        + ["--config.env.kwargs.parts=[1, 'b']", "--config.env.kwargs.loud"]
    )
    assert found.env.kwargs == {"mass": 2.5, "kind": "steel", "parts": [1, "b"], "loud": True}


def test_a_run_is_found_again_from_elsewhere_and_a_strangers_code_is_not_run(
    folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(folder)
    config = small_config(env=dict(name="gym:scale.py:Scale", kwargs={"mass": 0.5}))
    workdir = str(tmp_path / "run")
    run.train(config, workdir)
    monkeypatch.chdir("/")
    _, _, settings = run.load(workdir)
    assert settings.env.name == f"gym:{folder}/scale.py:Scale"
    assert settings.env.kwargs == {"mass": 0.5}
    rows = read_rows(os.path.join(workdir, "metrics.jsonl"))
    assert [r["return_mean"] for r in rows if r["kind"] == "eval"] == [27.0, 27.0]  # 9 readings
    config["env"]["name"], config["resume"] = settings.env.name, True
    config["train"]["steps"] = 100
    assert run.train(config, workdir).steps == 100
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another user's"))
    with pytest.raises(ValueError, match="which no run of yours was made with: .* --trust"):
        run.load(workdir)
    run.load(workdir, trusted=True)
    (folder / "scale.py").rename(folder / "moved.py")
    with pytest.raises(FileNotFoundError, match="scale.py does not exist: put it there"):
        run.load(workdir, trusted=True)
    (folder / "moved.py").rename(folder / "scale.py")


# -------------------------------------------------------------------------------------------------
# Looked at before anything compiles


class Good(gymnasium.Env):
    """What the faulty ones below change a line of."""

    max_episode_steps = 5
    action_space = Box(-1.0, 1.0, (1,), np.float32)
    observation_space = Box(-1.0, 1.0, (5,), np.float32)
    result: tuple = (np.zeros(5, np.float32), 0.0, False, False, {})

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.result[0], {}

    def step(self, action):
        return self.result


def wrong(**fields):
    return type("Wrong", (Good,), fields)


def gives(position, value):
    result = list(Good.result)
    result[position] = value
    return wrong(result=tuple(result))


FAULTY = {
    "old reset": (
        wrong(reset=lambda self: np.zeros(5)),
        r"reset.* takes no seed: write it as reset\(self, \*, seed=None",
    ),
    "reset without info": (
        wrong(reset=lambda self, *, seed=None: np.zeros(5)),
        r"reset\(\) gave a ndarray, wanted \(observation, info\)",
    ),
    "old step": (
        wrong(step=lambda self, action: Good.result[:4]),
        r"step\(\) gave 4 values, wanted 5: observation, reward, terminated",
    ),
    "shape": (
        gives(0, np.zeros(4, np.float32)),
        r"reset\(\) gave observation of shape \(4,\), wanted \(5,\), as observation_space",
    ),
    "text": (gives(0, np.array(["a"] * 5)), "of type <U1, wanted numbers"),
    "nan observation": (gives(0, np.full(5, np.nan)), "observation=.*nan.*wanted finite"),
    "nan reward": (gives(1, float("nan")), "step.* number 1 gave reward=nan, wanted finite"),
    "reward of shape": (gives(1, np.zeros(1)), r"reward=array.*, wanted a single number"),
    "terminated": (gives(2, 0.5), "terminated=0.5, wanted True or False"),
    "info": (gives(4, None), "info=None, wanted a dictionary"),
    "unbounded actions": (
        wrong(action_space=Box(-np.inf, np.inf, (1,))),
        "action_space is .*: bounded Box or discrete spaces, or a Dict or Tuple",
    ),
    "strings": (
        wrong(observation_space=Dict(a=Text(5)), result=({"a": "left"}, 0.0, False, False, {})),
        "the observation's 'a' is text: numbers are needed; name the other parts by env.observe",
    ),
    "float image in a dictionary": (
        wrong(
            observation_space=Dict(a=Box(0, 1, (2, 2, 3), np.float32)),
            result=({"a": np.ones((2, 2, 3), np.float32)}, 0.0, False, False, {}),
        ),
        r"the observation's 'a' is float32\[2, 2, 3\]: three axes are an image, which is uint8",
    ),
    "images of two sizes": (
        wrong(
            observation_space=Dict({n: Box(0, 255, (n, 2, 3), np.uint8) for n in (16, 32)}),
            result=({n: np.ones((n, 2, 3), np.uint8) for n in (16, 32)}, 0.0, False, False, {}),
        ),
        r"the observation's images are of different sizes, {'16': \(16, 2\), '32': \(32, 2\)}",
    ),
    "keys": (
        wrong(observation_space=Dict(a=Discrete(2)), result=({"b": 0}, 0.0, False, False, {})),
        r"gave observation with \['b'\], wanted \['a'\]",
    ),
    "whole numbers": (
        wrong(observation_space=Box(0, 255, (5,), np.uint8)),
        "observation of type float32, wanted uint8",
    ),
    "too many choices": (
        wrong(action_space=MultiBinary(11)),
        "action_space is .*: its 2,048 combinations are one choice to agents, .* up to 1,024",
    ),
    "choices and numbers": (
        wrong(action_space=Dict(a=Discrete(2), b=Box(0, 1))),
        "action_space is .*: all its parts must be Box, or all discrete: divide the Box",
    ),
    "no action": (wrong(action_space=Dict()), "action_space is .*: bounded Box or discrete"),
    "no space": (wrong(action_space=None), "action_space is a builtins.NoneType"),
    "no environment": (type("Nothing", (), {}), "is a Nothing without reset"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_a_faulty_environment_is_refused_in_words(fault, monkeypatch):
    kind, message = FAULTY[fault]
    name = f"gym:python:{fault}"
    monkeypatch.setitem(custom._GIVEN, name, kind)
    with pytest.raises(ValueError, match=message) as told:
        envs.make(name, 1)
    assert str(told.value).startswith(f"env.name={name!r}") and "\n" not in str(told.value)


def test_errors_of_an_environment_keep_their_traceback(monkeypatch):
    def broken(self, action):
        return {}["level"]

    monkeypatch.setitem(custom._GIVEN, "gym:python:Broken", wrong(step=broken))
    with pytest.raises(envs.EnvironmentFailure, match=r"step\(\).* raised KeyError: 'level'") as e:
        envs.make("gym:python:Broken", 1)
    words = train.in_words(e.value)
    assert "in broken" in words and 'return {}["level"]' in words
    assert words.splitlines()[-1].startswith("error: env.name='gym:python:Broken'")
    assert "in _import" not in words and train.in_words(ValueError("x")) == "error: x"


def raw_with(**changes):
    def reset(key):
        return jnp.zeros(2), jnp.zeros(2)

    def step(key, state, action):
        return state, state, jnp.float32(1.0), jnp.bool_(False)

    return RawEnvironment("mine:x", (2,), jnp.float32, 1, 5, reset, step)._replace(**changes)


def stepping(state, obs, reward, terminated):
    return {"step": lambda key, old, action: (state, obs, reward, terminated)}


TWO = jnp.zeros(2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(obs_shape=(3,)), r"observation of reset\(\) is float32\[2\], wanted float32\[3\]"),
        (dict(obs_dtype=jnp.uint8), r"is float32\[2\], wanted uint8\[2\] \(obs_shape, obs_dtype\)"),
        (dict(reset=lambda key: TWO), r"wanted \(state, observation\)"),
        (
            stepping(TWO, jnp.zeros(3), 1.0, False),
            r"of step\(\) is float32\[3\], wanted float32\[2\]",
        ),
        (stepping(TWO, TWO, jnp.zeros(1), False), r"reward of step\(\) is of shape \(1,\)"),
        (stepping(TWO, TWO, 1.0, jnp.zeros(2, bool)), r"terminated of step\(\) is of shape"),
        (
            stepping((TWO, TWO), TWO, 1.0, False),
            r"the state of step\(\) is {'\[0\]'.*reset\(\) gives, {''",
        ),
        (
            dict(
                reset=lambda key: ((TWO, TWO), TWO),
                step=lambda key, old, action: (list(old), TWO, 1.0, False),
            ),
            r"state of step\(\) is PyTreeDef\(\[\*.*reset\(\) gives, PyTreeDef\(\(\*",
        ),
        (stepping(TWO, (TWO, TWO), 1.0, False), r"is a tuple of 2, wanted float32\[2\]"),
        (stepping(TWO, None, 1.0, False), r"is a NoneType, wanted float32\[2\]"),
        (
            dict(obs_shape=(100_000,), reset=lambda key: (TWO, jnp.full(100_000, jnp.nan))),
            r"observation of reset\(\)=\[nan nan nan \.\.\. nan nan nan\], wanted finite",
        ),
        (
            dict(
                obs_dtype=jnp.bfloat16,
                reset=lambda key: (TWO, jnp.full(2, jnp.inf, jnp.bfloat16)),
            ),
            r"observation of reset\(\)=\[inf inf\], wanted finite",
        ),
        (stepping(jnp.zeros(3), TWO, 1.0, False), r"float32\[3\]'}, wanted what reset\(\) gives"),
        (stepping(TWO, TWO, jnp.nan, False), r"reward of step\(\) 1=nan, wanted finite"),
        (dict(step=lambda key, old, action: (TWO, TWO, 1.0)), "is a tuple of 3, wanted"),
    ],
)
def test_a_faulty_raw_environment_is_refused_in_words(changes, message):
    check_raw(raw_with())
    with pytest.raises(ValueError, match=message) as told:
        check_raw(raw_with(**changes))
    assert len(str(told.value)) < 400 and "\n" not in str(told.value)
    envs.register("mine", envs.Suite(raw=lambda task: raw_with(**changes)))
    with pytest.raises(ValueError, match="env.name='mine:x'"):
        envs.make("mine:x", 1)


def test_declared_shapes_may_be_numpys_and_nested():
    for see in (lambda x: x, lambda x: {"arm": {"angle": x}}):
        raw = raw_with(
            obs_shape=see((np.int64(2),)),
            obs_dtype=see(jnp.float32),
            reset=lambda key, see=see: (TWO, see(TWO)),
            step=lambda key, old, action, see=see: (old, see(old + 1), 1.0, False),
        )
        envs.register("mine", envs.Suite(raw=lambda task, raw=raw: raw))
        made = envs.make("mine:x", 1)
        assert [part.name for part in made.spec.parts] == ["arm/angle"] * (see(0) != 0)
        assert made.spec.obs_shape == (2,) and type(made.spec.obs_shape[0]) is int
        assert rollout(made, 1)[1][0].obs.tolist() == [[1, 1]]
