"""`--help` of the training command says what the classes of settings declare."""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
import shlex
import subprocess
import sys

import pytest

from mbx import cli
from mbx.config import help, load, presets
from mbx.config.agents import PACKAGES
from mbx.settings import describe, flatten
from mbx.training.build import settings_class

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", presets.names())
def test_help_of_a_file_lists_every_setting_with_its_default(path):
    text, values = help.of(path), dict(flatten(presets.load(path).to_dict()))
    shown = [line.split("=", 1)[0] for line in text.splitlines() if line.startswith("  --config.")]
    assert sorted(shown) == sorted(f"  --config.{name}" for name in values)
    for name, value in values.items():
        assert f"  --config.{name}={shlex.quote(str(value))}" in text


def test_settings_come_in_the_order_of_their_classes_with_the_words_beside_them():
    text = help.of("configs/tdmpc.py")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    names = [line.split("=")[0] for line in lines if line.startswith("--config.")]
    declared = [found.name for found in describe(settings_class("tdmpc")()) if not found.is_section]
    assert names == [f"--config.{name}" for name in declared]
    assert any(x.lower().startswith("eval: evaluations during training.") for x in lines)
    assert any(x.startswith("--config.eval.episodes=20 Episodes per evaluation") for x in lines)
    assert "--config.env.pad_to='(0, 0)'" in text  # a value that a shell would split is quoted


def test_choices_are_named_where_the_help_does_not_name_them():
    text = help.of("configs/tdmpc.py")
    assert "Precision of float32 products. (default, high, highest)" in " ".join(text.split())


_NO_BEGINNING = "of|by|over|which|that|the same|those|their|likewise|it".split("|")


def understood_alone(text: str) -> bool:
    """Whether a help text is a sentence or a noun phrase that needs no other text."""
    begins = any(text.lower().startswith(f"{word} ") for word in _NO_BEGINNING)
    return text[0].isupper() and text[-1] == "." and len(text.split()) > 2 and not begins


def test_every_help_text_is_understood_alone():
    declared = [one for agent in PACKAGES for one in describe(settings_class(agent)())]
    assert {one.name: one.help for one in declared if not understood_alone(one.help)} == {}


def test_every_option_of_a_command_has_a_help_text_that_is_understood_alone(monkeypatch):
    parsers = []

    def parse_args(parser, *_):
        parsers.append(parser)
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    for name in cli.COMMANDS[1:]:  # train has the settings
        with pytest.raises(InterruptedError):
            importlib.import_module(f"mbx.commands.{name}").main([])
    texts = [one.help for parser in parsers for one in parser._actions if one.dest != "help"]
    assert len(texts) > 50 and [text for text in texts if not understood_alone(text)] == []


def test_a_file_of_ones_own_may_bring_its_own_agent(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        '''"""Mine."""
import dataclasses
from ml_collections import config_dict
from mbx.agents.settings import RunSettings
from mbx.settings import setting, to_dict
from mbx.training import build


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    agent: str = setting("mine", "Name of the agent.")
    depth: int = setting(3, "of the tree")

    def updates_per_step(self):
        return 1.0


build.register("mine", Settings, None)


def get_config():
    return config_dict.ConfigDict(to_dict(Settings(seed=7)))
'''
    )
    text = help.of(str(path))
    assert text.startswith("Mine.") and "--config.seed=7 " in text
    assert "--config.depth=3" in text and "of the tree" in text
    assert load(str(path), ["depth=4"]).depth == 4
    with pytest.raises(ValueError, match="config.deph is not a setting of .*: did you mean depth"):
        load(str(path), ["deph=4"])


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command where neither JAX nor a simulator can be imported."""
    blocked = "import sys; sys.modules.update(dict.fromkeys(['jax', 'mujoco', 'numpy'])); "
    code = (
        "import runpy; runpy.run_module('experiments.train', run_name='__main__', alter_sys=True)"
    )
    return subprocess.run(
        [sys.executable, "-c", blocked + code, *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )


def test_help_without_a_file_says_how_to_go_on():
    result = command("--help")
    assert result.returncode == 0, result.stderr
    for name in presets.names():
        assert f"  configs/{name}.py " in result.stdout
    for words in (
        "--workdir=DIR",
        "--config.train.steps=10000",
        "brax:inverted_pendulum",
        "--help",
    ):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_help_for_a_file_that_is_not_there_names_those_that_are():
    result = command("--config=configs/none.py", "--help")
    assert result.returncode == 1
    assert "--config=configs/none.py does not exist" in result.stderr
    assert "'dreamer'" in result.stderr
