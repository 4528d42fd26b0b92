"""Modules that commands import first: recorded, asked for, and never imported by themselves."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mbx
from mbx import config, mppi, planners
from mbx.commands import jobs
from mbx.config import extensions
from mbx.training import build, run
from mbx.training.rundir import load_settings
from tests.helpers import tiny_config


@pytest.fixture
def clean(monkeypatch, tmp_path):
    """Nothing imported yet; a module and a file to import, which count how often they are."""
    monkeypatch.setattr(extensions, "_LOADED", {})
    monkeypatch.chdir(tmp_path)
    for name in ("by_name", "by_file"):
        (tmp_path / f"{name}.py").write_text("import sys\nsys.count_of_imports += 1\n")
    monkeypatch.setattr(sys, "count_of_imports", 0, raising=False)
    yield tmp_path
    for name in ("by_name", "by_file"):
        sys.modules.pop(name, None)


def test_modules_and_files_are_imported_once_and_taken_off_the_command_line(clean):
    given = ["--import=by_name", "--config=tdmpc", "--import=by_file.py", "--import=./by_file.py"]
    assert extensions.load(given) == ["--config=tdmpc"]
    assert sys.count_of_imports == 2
    assert extensions.loaded() == ("by_name", str(clean / "by_file.py"))
    assert extensions.flags() == ("--import=by_name", f"--import={clean / 'by_file.py'}")
    job = jobs.make_job("a", 0, "runs/a", config="tdmpc", steps=1)
    assert job.command[-2:] == extensions.flags()


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--import=nowhere.py", "--import=nowhere.py: .*nowhere.py does not exist"),
        ("--import=no_such_module", "--import=no_such_module: no such module"),
        ("--import", "--import: give a module or a file"),
        ("--import=", "--import=: give a module or a file"),
    ],
)
def test_what_is_not_there_is_said(clean, flag, message):
    with pytest.raises(ValueError, match=message):
        extensions.load([flag])


def test_a_run_asks_for_its_modules_and_imports_nothing_itself(clean):
    (clean / "run").mkdir()
    config = tiny_config() | {"imports": [str(clean / "by_file.py"), "by_name"]}
    (clean / "run" / "config.json").write_text(json.dumps(config))
    words = "config.json needs custom modules: give --import=.*by_file.py --import=by_name"
    for read in (load_settings, run.load):
        with pytest.raises(ValueError, match=words):
            read(str(clean / "run"))
    with pytest.raises(ValueError, match="config.imports needs custom modules"):
        build.read(config)
    assert sys.count_of_imports == 0
    extensions.load(["--import=by_file.py", "--import=by_name"])
    assert load_settings(str(clean / "run")).imports == tuple(config["imports"])


def by_flag(name):
    extensions.load([f"--import={name}"])


def by_keyword(name):
    assert config.load(tiny_config(), {"imports": [name]}).imports == extensions.loaded()


def by_hand(name):
    sys.path.insert(0, "")
    importlib.import_module(name.removesuffix(".py"))
    sys.path.remove("")


def of_a_policy(name):
    with pytest.raises(FileNotFoundError):  # the run is not there, but the module is
        mbx.load_policy("nowhere", imports=[name])


@pytest.mark.parametrize("door", [by_flag, by_keyword, by_hand, of_a_policy])
@pytest.mark.parametrize("name", ["by_name", "by_file.py"])
def test_a_module_counts_whichever_way_it_was_imported(clean, door, name):
    recorded = str(clean / name) if name.endswith(".py") else name
    values = tiny_config() | {"imports": (recorded,)}
    with pytest.raises(ValueError, match="give --import=.*in Python, import them first"):
        config.load(values)
    (clean / "mine.py").write_text(f"def get_config():\n    return {values!r}\n")
    with pytest.raises(ValueError, match="config.imports needs custom modules"):
        config.load("mine.py")
    door(name)
    assert recorded in config.load(values).imports == config.load("mine.py").imports
    door(name)
    assert sys.count_of_imports == 1


def test_a_module_of_the_working_directory_comes_before_others_of_its_name(clean, monkeypatch):
    (clean / "elsewhere").mkdir()
    (clean / "elsewhere" / "by_name.py").write_text("")
    monkeypatch.syspath_prepend(str(clean / "elsewhere"))
    before = list(sys.path)
    extensions.load(["--import=by_name"])
    assert sys.count_of_imports == 1 and sys.path == before


@pytest.mark.parametrize("names", [3, "by_name", [7]])
def test_a_list_of_names_is_wanted(names):
    with pytest.raises(ValueError, match="config.imports: imports="):
        extensions.require(names, "config.imports")


def test_the_example_planner_takes_the_best_of_its_candidates():
    from examples import own_planner

    def score(key, actions):
        return -jnp.sum(jnp.square(actions - 0.3), axis=(-2, -1))

    mean = jnp.zeros((2, 3, 1))
    proposals = jnp.full((2, 1, 3, 1), 0.9)
    plan = planners.find("shooting").plan(
        jax.random.key(0),
        score,
        mean,
        mean + 0.5,
        proposals=proposals,
        config=mppi.MPPIConfig(num_samples=30, num_elites=1),
    )
    assert planners.find("shooting").plan is own_planner.shoot
    assert plan.actions.shape == (2, 30, 3, 1)
    for b in range(2):
        best = np.argmax(plan.values[b])
        np.testing.assert_array_equal(plan.action[b], plan.actions[b, best, 0])


@pytest.mark.slow
def test_an_agent_from_outside_trains_resumes_and_is_evaluated_by_the_ordinary_commands(tmp_path):
    own, workdir = "--import=examples/own_agent.py", str(tmp_path / "run")
    train = [sys.executable, "-m", "experiments.train", "--config=examples/own_config.py", own]
    train += [f"--workdir={workdir}", "--config.train.seed_steps=40", "--config.eval.episodes=2"]
    for steps, more in ((400, []), (800, ["--config.resume=True"])):
        subprocess.run([*train, f"--config.train.steps={steps}", *more], check=True)
    evaluate = [sys.executable, "-m", "experiments.evaluate", workdir, "--episodes=2"]
    asked = subprocess.run(evaluate, capture_output=True, text=True, check=False)
    assert asked.returncode == 1 and "own_agent.py again, if you trust" in asked.stderr
    done = subprocess.run([*evaluate, own], capture_output=True, text=True, check=True)
    assert "over 2 episodes" in done.stdout
