"""Names of settings at every door: flags, a sweep's texts, keywords of Python, mappings."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from ml_collections import config_dict

import mbx
from mbx import api, config
from mbx.agents import tdmpc
from mbx.commands import sweep, train
from mbx.config import loading, presets
from mbx.settings import section, setting
from mbx.training import seeds


def by_flag(name, value):
    return train.chosen(["--config=tdmpc", "--workdir=x", f"--config.{name}={value}"])[0]


def by_sweep(name, value):
    (job,) = sweep.make_jobs("tdmpc", [f"{name}={value}"], seeds=1, folder="x", metric="y")
    return config.load(["--config=tdmpc", *(a for a in job.command if a.startswith("--config."))])


def by_keyword(name, value):
    return api._settings("gymnax:Pendulum-v1", "configs/tdmpc.py", None, {name: value})


DOORS = (by_flag, by_sweep, by_keyword)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("optimizer.learning_rate", 1e-3, ("optimizer", "learning_rate", 1e-3)),
        ("learning_rate", 1e-3, ("optimizer", "learning_rate", 1e-3)),
        ("train.utd_ratio", 1, ("train", "utd_ratio", 1.0)),
        ("utd_ratio", 1, ("train", "utd_ratio", 1.0)),
        ("train.steps", 2e3, ("train", "steps", 2000)),
        ("env.kwargs.g", 9.5, ("env", "kwargs", {"g": 9.5})),
        ("env.metrics", ("cost", "success"), ("env", "metrics", ("cost", "success"))),
        ("model.size", "1", ("model", "size", "1")),
    ],
)
def test_a_name_is_taken(door, name, value, wanted):
    part, last, expected = wanted
    found = getattr(getattr(door(name, value), part), last)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "learnig_rate",
            1e-3,
            "learnig_rate is not a setting of .*: did you mean optimizer.learnin",
        ),
        ("optimizer.learnig_rate", 1e-3, "not a setting of .*: did you mean optimizer.learning_ra"),
        ("model.learning_rate", 1e-3, "not a setting of .*: did you mean optimizer.learning_rate"),
        ("mine.x", 1, "config.mine.x is not a setting of .*: --help with --config lists them all"),
        ("horizon", 2, "config.horizon is 3 settings: say which of planner.horizon, training_pl"),
        ("model", 3, "config.model='?3'? is a section: give a setting of it a value"),
        ("train.steps", "ten", "config.train.steps='ten': give a whole number"),
        ("train.steps", 1.5, r"config.train.steps=1.5: give a whole number"),
        ("optimizer.learning_rate", "fast", "optimizer.learning_rate='fast': give a number"),
        ("train.steps", -1, "config.train.steps=-1: give at least 1"),
        ("model.critic", "w", "config.model.critic='w': choose one of"),
        ("agent", "robot", "config.agent='robot': choose one of .*'dreamer'"),
    ],
)
def test_a_mistake_is_refused_in_the_same_words(door, name, value, message):
    with pytest.raises(ValueError, match=message) as e:
        door(name, value)
    assert "[" not in str(e.value) and "FLAG" not in str(e.value)


def test_sections_and_numbers_of_numpy_are_taken_from_python():
    found = config.load(
        "tdmpc",
        {"model": {"size": "1"}, "planner": {"horizon": np.int64(2)}, "utd_ratio": np.float32(0.5)},
    )
    assert (found.model.size, found.planner.horizon, found.train.utd_ratio) == ("1", 2, 0.5)
    assert config.load(found) == found


def test_a_mapping_and_a_configuration_file_mean_the_same():
    values = presets.load("tdmpc")
    values.train.steps = 70
    assert isinstance(values, config_dict.ConfigDict)
    assert config.load(values) == config.load(values.to_dict())


@pytest.mark.parametrize("text", ["True", "true", "1"])
def test_a_flag_may_follow_as_the_next_argument_or_stand_alone(text):
    for arguments in ([f"--config.resume={text}"], ["--config.resume", text], ["--config.resume"]):
        assert config.load(["--config", "tdmpc", *arguments]).resume is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--confg=tdmpc"], "--confg is unknown: did you mean --config"),
        (["--config=tdmpc", "steps=3"], "steps=3 is no option: write --NAME=VALUE"),
        (["--config=tdmpc", "--steps=3"], "--steps is unknown: did you mean --config.SETTING"),
        (["--config=none"], "--config=none does not exist: choose one of .*'dreamer'"),
        (["--config.resume=True"], "needs --workdir, the run to continue"),
        (["--config.seed=1"], "no configuration is given: --config=configs/tdmpc.py trains"),
    ],
)
def test_command_lines_that_mean_nothing_are_refused_in_a_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as e:
        train.main(arguments)
    assert "Traceback" not in capsys.readouterr().err
    assert str(e.value.code).startswith("error: ")
    with pytest.raises(ValueError, match=message):
        train.chosen(arguments)


@dataclasses.dataclass(frozen=True)
class Mine:
    x: float = setting(0.0, "A number.")


@dataclasses.dataclass(frozen=True)
class Settings(tdmpc.Settings):
    agent: str = setting("mine-of-a-test", "Agent.")
    mine: Mine = section(Mine(), "Custom.")


@pytest.fixture
def registered(monkeypatch):
    from mbx.config import agents

    monkeypatch.setitem(agents._REGISTERED, "mine-of-a-test", (Settings, None))


@pytest.mark.parametrize("of", ["tdmpc", "tdmpc2"])
def test_a_custom_agent_takes_a_configuration_with_its_own_settings(registered, of):
    flags = ["--config.agent=mine-of-a-test", "--config.mine.x=1"]
    by_flags = config.load([f"--config={of}", *flags])
    by_keywords = config.load(of, {"agent": "mine-of-a-test", "mine": {"x": 1}})
    assert by_flags == by_keywords and isinstance(by_flags, Settings) and by_flags.mine.x == 1.0
    usual = config.load(of)
    assert (by_flags.model, by_flags.train, by_flags.env) == (usual.model, usual.train, usual.env)
    message = "agent='mine-of-a-test': .* of agent 'dreamer' and sets .*own_config.py"
    with pytest.raises(ValueError, match=message):
        config.load("dreamerv3", ["agent=mine-of-a-test"])


def test_numbers_of_a_pure_run_have_the_same_names():
    base = config.load("tdmpc")
    for name in ("optimizer.learning_rate", "learning_rate"):
        assert seeds.with_numbers(base, {name: 0.1}).optimizer.learning_rate == 0.1
    with pytest.raises(ValueError, match="learnig_rate is not a setting: did you mean optimizer.l"):
        seeds.with_numbers(base, {"learnig_rate": 0.1})


@pytest.mark.parametrize("environment", [None, 3, {"name": "gymnax:Pendulum-v1"}])
def test_what_is_no_environment_is_named(environment):
    with pytest.raises(ValueError, match="environment=.*: give a task's name"):
        mbx.train(environment, steps=10, workdir="/nonexistent/x")


def test_importing_the_commands_changes_nothing_of_the_process():
    code = (
        "import sys; sys.argv[1:] = ['--import=nowhere.py']; import experiments, mbx.cli; "
        "from mbx.commands import train, sweep; import mbx.fast.allocator as memory;"
        " print(sys.argv[1:], memory._kept)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['--import=nowhere.py'] False\n"


def test_a_configuration_file_is_executed_once_and_must_return_settings(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executions", 0, raising=False)
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\nfrom configs import tdmpc\n\ndef get_config():\n    sys.executions += 1\n"
        "    config = tdmpc.get_config()\n    config.seed = 4\n    return config\n"
    )
    assert train.chosen([f"--config={path}", "--config.train.steps=7"])[0].seed == 4
    assert sys.executions == 1
    path.write_text("from configs import tdmpc\n\ndef get_config():\n    tdmpc.get_config()\n")
    with pytest.raises(ValueError, match="mine.py: get_config.. returned NoneType.* end it with"):
        loading.load(str(path))
    path.write_text("x = 1\n")
    with pytest.raises(ValueError, match="mine.py: define get_config"):
        loading.load(str(path))
