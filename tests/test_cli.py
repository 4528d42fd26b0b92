"""The command `mbx`, configurations by name, and what a wheel puts into an environment."""

from __future__ import annotations

import configparser
import importlib.metadata
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import types
import venv
import zipfile

import pytest

import mbx
from mbx import cli
from mbx.config import presets

ROOT = pathlib.Path(__file__).resolve().parents[1]


def test_a_configuration_is_found_by_name_and_by_path(tmp_path):
    assert presets.read("tdmpc2") == presets.read("configs/tdmpc2.py")
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from mbx import presets\n\n\ndef get_config():\n"
        "    config = presets.load('tdmpc2')\n    config.seed = 7\n    return config\n"
    )
    assert presets.find(str(mine)) == mine
    config = presets.load(str(mine))
    assert (config.seed, config.model.size) == (7, presets.load("tdmpc2").model.size)
    assert {"tdmpc", "tdmpc2", "bmpc", "dreamer", "empo"} <= set(presets.names())


@pytest.mark.parametrize("name", ["none", "configs/none.py", "elsewhere/tdmpc.py", "tdmpc.yaml"])
def test_a_configuration_that_is_not_there_is_named_with_those_that_are(name):
    with pytest.raises(ValueError, match=f"--config={name} does not exist.*'dreamer'"):
        presets.find(name)


def test_the_command_lists_the_commands_with_what_they_do(capsys):
    cli.run([])
    listed = capsys.readouterr().out
    assert "  train           Train an agent.\n" in listed and "  evaluate " in listed
    for name in ("jobs", "hotspots", "ablate"):  # a module without a command, developers' tools
        assert f"  {name} " not in listed
    with pytest.raises(SystemExit, match="mbx fly: unknown, choose one of .*train"):
        cli.run(["fly"])


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--config=tdmpc", "--help"]])
def test_help_where_signs_are_few_or_nobody_reads_on(arguments):
    command = [sys.executable, "-m", "mbx.cli", *arguments]
    ascii_only = dict(os.environ, PYTHONIOENCODING="ascii", PYTHONUNBUFFERED="1")
    done = subprocess.run(command, env=ascii_only, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.isascii() and "train" in done.stdout
    read, write = os.pipe()
    os.close(read)  # as `| head` does when it has seen enough
    with os.fdopen(write, "w") as pipe:
        done = subprocess.run(command, env=ascii_only, cwd=ROOT, stdout=pipe, stderr=-1, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sweep"], "nothing is swept: give --set=SETTING=VALUE,VALUE"),
        (["sweep", "--seeds=0"], "argument --seeds: 0: give a whole number, at least 1; see"),
        (["evaluate"], "give one run directory, as argument or --workdir, not 0"),
        (["evaluate", "a", "--workdir=b"], "give one run directory, as argument or --workdir, not"),
        (["evaluate", "nowhere"], ".*nowhere/config.json does not exist"),
        (["evaluate", "a", "--episodes=x"], "argument --episodes: x: give a whole number"),
        (["evaluate", "a", "--video_width=3"], "--video_width=3 is of a film: give --video=episod"),
        (["plot"], "the following arguments are required: runs; see mbx plot --help"),
        (["report", "nowhere"], ".*nowhere"),
        (["export", "nowhere", "--planer"], "unrecognized arguments: --planer; see mbx"),
        (["train", "--config=tdmpc", "--config.train.steps=ten"], "config.train.steps='ten': give"),
        (["train", "--import=nowhere.py", "--config=tdmpc"], "--import=nowhere.py: .* not exist"),
    ],
)
def test_a_mistake_ends_a_command_in_a_line(arguments, message):
    with pytest.raises(SystemExit) as e:
        cli.run(arguments)
    assert re.match(f"error: {message}", e.value.code) and "\n" not in e.value.code


def test_the_site_is_built_by_the_interpreter_that_runs_the_script(monkeypatch):
    """Not by what PATH holds: the script may be started without activating its environment."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    build_site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_site)
    asked = []
    monkeypatch.setattr(build_site, "write_pages", lambda folder: folder / "mkdocs.yml")
    monkeypatch.setattr(
        build_site.subprocess,
        "run",
        lambda command, check: asked.append(command) or types.SimpleNamespace(returncode=3),
    )
    assert build_site.main(["out"]) == 3 and asked[0][:4] == [
        sys.executable,
        "-m",
        "zensical",
        "build",
    ]


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    subprocess.run(command, check=True, capture_output=True)


def wheel_of_sources(folder: pathlib.Path) -> pathlib.Path:
    """A wheel in `folder`, built from a copy, so that building leaves nothing in the checkout."""
    ignored = shutil.ignore_patterns(".git*", "tests", "*.egg-info")
    copy = shutil.copytree(ROOT, folder / "sources", ignore=ignored)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(copy))
    return next(folder.glob("*.whl"))


def test_a_wheel_adds_one_name_and_trains_by_name_in_an_empty_directory(tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel_of_sources(tmp_path)) as wheel:
        wheel.extractall(site)
    assert {p.name for p in site.iterdir() if not p.name.endswith(".dist-info")} == {"mbx"}
    empty = tmp_path / "empty"
    empty.mkdir()
    code = "import sys; from mbx.cli import main; main(sys.argv[1:])"
    environment = dict(os.environ, PYTHONPATH=str(site))

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-P", "-c", code, *arguments]
        return subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)

    (made,) = importlib.metadata.distributions(path=[str(site)])
    declared = configparser.ConfigParser()
    declared.read(ROOT / "setup.cfg")
    assert (made.name, made.version) == ("mbx-rl", mbx.__version__)
    assert run("--version").stdout == f"{made.version}\n"
    assert made.metadata["Requires-Python"] == declared["options"]["python_requires"]
    assert set(made.metadata.get_all("Provides-Extra")) == {*declared["options.extras_require"]}
    shown = run("train", "--config=bmpc", "--help")
    assert shown.returncode == 0 and "--config.loss.policy_loss=kl" in shown.stdout, shown.stderr
    refused = run("train", "--config=tdmpc", "--config.train.steps=-1")
    assert refused.returncode == 1
    assert refused.stderr == "error: config.train.steps=-1: give at least 1\n"


def test_the_version_comes_from_one_place():
    cited = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {mbx.__version__}\n" in cited
    assert f"\n## {mbx.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert "version = attr: mbx.__version__\n" in (ROOT / "setup.cfg").read_text()


@pytest.mark.slow
def test_a_wheel_in_an_environment_of_its_own_trains_to_the_end(tmp_path):
    """What mbx needs is taken from this environment; mbx itself from the wheel alone."""
    wheel = wheel_of_sources(tmp_path)
    venv.create(tmp_path / "venv")
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    before = set(site.iterdir())
    python = str(tmp_path / "venv" / "bin" / "python")
    pip("--python", python, "install", "--no-deps", str(wheel))
    names = {p.name.partition("-")[0] for p in set(site.iterdir()) - before}
    assert names == {"mbx"}
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    small = ["train.steps=1200", "eval.episodes=1", "train.pretrain_updates=5"]
    for arguments in (
        ["train", "--config=tdmpc", "--workdir=run", *(f"--config.{x}" for x in small)],
        ["evaluate", "run", "--episodes=1"],
        ["plot", "run", "--out=curve.png"],
        ["export", "run", "--out=policy.mbx"],
    ):
        command = [str(tmp_path / "venv" / "bin" / "mbx"), *arguments]
        done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert {p.name for p in empty.iterdir()} == {"run", "curve.png", "policy.mbx"}


def test_what_xla_logs_is_not_shown_by_commands():
    """Its alarm about slow compiling, six lines high, which asks for a bug report."""
    code = "import mbx.cli; mbx.cli.main(['--version']); import jax; jax.jit(lambda: 0)()"
    loud = {**os.environ, "XLA_FLAGS": "--xla_dump_to=/proc/nowhere"}  # of which XLA complains
    loud.pop("TF_CPP_MIN_LOG_LEVEL", None)  # which importing jax has set here
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=loud
    )
    assert "dump" not in done.stderr
