"""`--help` of the training command says what the configuration files say."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from experiments import usage

ROOT = pathlib.Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("path", usage.config_files())
def test_help_of_a_file_lists_every_setting_with_its_default(path):
    text, values = usage.config_help(path), usage.settings(path)
    shown = [line.split("=", 1)[0] for line in text.splitlines() if line.startswith("  --config.")]
    assert sorted(shown) == sorted(f"  --config.{name}" for name in values)
    assert f"  --config.env.name={values['env.name']} " in text


def test_settings_come_in_the_order_of_the_source_with_the_words_beside_them():
    text = usage.config_help("configs/tdmpc.py")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at = lines.index("--config.loss.entropy_start=0.0 from this share of the run")
    assert lines[at + 1] == "--config.loss.entropy_end=1.0 to this"
    assert "planner: acts in the environment" in lines
    assert "--config.env.pad_to='(0, 0)'" in text  # a value that a shell would split is quoted


def test_derived_files_take_words_from_their_base_and_values_from_themselves():
    text = " ".join(usage.config_help("configs/bmpc.py").split())
    assert "--config.replay.keep_targets=1 planner actions stored with a transition" in text
    assert "--config.distributed.enabled=False divide environments and batches" in text


def test_a_file_of_ones_own_may_use_functions_and_sections(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        '''"""Mine."""
from ml_collections import config_dict
from configs import tdmpc as base


def part():
    section = config_dict.ConfigDict()
    section.depth = 3  # of the part
    section.names = (
        "a",
    )
    return section


def get_config():
    config = base.get_config()
    config.part = part()  # a part
    config.seed = 7  # says less than the base's comment
    config.odd = "#"
    return config
'''
    )
    words = usage.comments(path)
    assert words["part"] == "a part" and words["part.depth"] == "of the part"
    assert words["part.names"] == "" and words["odd"] == ""
    text = usage.help_text(["--help", "--config", str(path)])
    assert text.startswith("Mine.") and "--config.seed=7 " in text and "\npart: a part\n" in text


def test_the_arguments_that_ask_for_help():
    assert usage.wants_help(["--config=a.py", "--help"]) and usage.wants_help(["-h"])
    assert not usage.wants_help(["--helpfull"]) and not usage.wants_help([])
    assert usage.config_argument(["--config.seed=1", "--config", "a.py"]) == "a.py"
    assert usage.config_argument(["--config"]) is None


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
    for path in usage.config_files():
        assert f"  {path} " in result.stdout
    for words in (
        "--workdir=DIR",
        "--config.train.steps=30000",
        "brax:inverted_pendulum",
        "--help",
    ):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_help_for_a_file_that_is_not_there_names_those_that_are():
    result = command("--config=configs/none.py", "--help")
    assert result.returncode == 1
    assert "--config=configs/none.py does not exist" in result.stderr
    assert "configs/dreamer.py" in result.stderr
