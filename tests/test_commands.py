"""Every command in README and docs starts: the module takes its flags and the settings fit."""

from __future__ import annotations

import pathlib
import re
import shlex

import jax
import pytest

from mbx import config
from mbx.agents.settings import RunSettings
from mbx.config import extensions
from mbx.settings import to_dict
from mbx.training import run
from mbx.training.logging import read_rows
from tests.helpers import active_only

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = ("python -m ", "python docs/", "python examples/", "bash ", "pip install ")


def commands(text: str) -> list[str]:
    """Lines of indented and fenced code, with their continuations and without comments."""
    joined = re.sub(r"\\\n\s*", "", text)
    found = []
    for line in joined.splitlines():
        if not line.startswith("    ") and not line.startswith("python -m "):
            continue
        for part in re.sub(r"\s#\s.*", "", line).split("&&"):
            if part.strip().startswith(PROGRAMS):
                found.append(part.strip().rstrip('"'))  # of a command inside a command
    return found


EVERY = sorted(
    {(path.relative_to(ROOT).as_posix(), c) for path in PAGES for c in commands(path.read_text())}
)


def declared(module: str) -> set[str]:
    """Names of the flags that a module declares, read from its source."""
    own = ROOT / "mbx" / "commands" / f"{module.rpartition('.')[2]}.py"
    source = (own if own.exists() else ROOT / f"{module.replace('.', '/')}.py").read_text()
    if "parse_arguments(" in source:
        return {"config", "workdir", "help"}
    if "add_run(" in source:
        source += (own.parent / "arguments.py").read_text()
    if "config.load(rest" in source or "config.load([*rest" in source:
        source += 'add("config"'
    return set(re.findall(r'(?:DEFINE_\w+\(|\badd\w*\()\s*"(?:--)?([\w-]+)"', source))


def check_flags(module: str, arguments: list[str]) -> None:
    """Every `--name=value` is a flag of the module."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and not name.startswith("config."):
            assert name in declared(module), f"{module} has no flag --{name}"


def read_settings(words: list[str]) -> RunSettings:
    """What the flags of a command that are settings ask for."""
    return config.load([word for word in words if word.startswith("--config")])


@pytest.fixture(autouse=True)
def nothing_imported(monkeypatch):
    """What a command imports is no other test's."""
    monkeypatch.setattr(extensions, "_LOADED", {})


def test_there_are_commands_to_test():
    pages = {page for page, _ in EVERY}
    assert len(EVERY) > 30 and {"README.md", "docs/tdmpc.md", "docs/empo.md"} <= pages


@pytest.mark.parametrize(("page", "command"), EVERY, ids=[c[:60] for _, c in EVERY])
def test_a_command_of_the_documents_starts(page, command):
    program, *words = shlex.split(re.sub(r"\$\w+|…\S*|\.\.\.", "", command))
    if program == "pip":
        extras = re.search(r"\.\[(.*)\]", command)
        for extra in extras[1].split(",") if extras else ():
            assert f"\n{extra} =\n" in (ROOT / "setup.cfg").read_text(), extra
    elif words[0] != "-m":
        assert (ROOT / words[0]).exists()
    elif words[1].startswith(("experiments.", "benchmarks.")) and "--help" not in words:
        words = [*words[:2], *extensions.load(words[2:])]
        check_flags(words[1], words[2:])
        if any(word.startswith("--config=") for word in words) and "ablate" not in words[1]:
            read_settings(words)


# What a command is made small by; a number is only ever lowered.
SMALL = {
    "env.num_envs": 4,
    "env.episode_length": 20,
    "train.steps": 160,
    "train.seed_steps": 80,
    "train.pretrain_updates": 2,
    "train.log_interval": 40,
    "train.train_ratio": 4,
    "train.utd_ratio": 0.1,
    "eval.interval": 80,
    "eval.episodes": 2,
    "eval.review_episodes": 2,
    "checkpoint.interval": 80,
    "replay.capacity": 2000,
    "loss.batch_size": 8,
    "loss.batch_length": 8,
    "planner.num_samples": 32,
    "planner.num_elites": 8,
    "planner.num_proposals": 4,
    "training_planner.num_samples": 16,
    "training_planner.num_elites": 8,
    "training_planner.num_proposals": 4,
    "reanalyze.min_step": 80,
    "imagination.rows": 8,
    "optimizer.warmup": 10,
}


def small(settings: RunSettings) -> RunSettings:
    """The same run at sizes that take seconds."""
    values = to_dict(settings)
    for name, least in SMALL.items():
        section, _, last = name.partition(".")
        if last in values.get(section, {}) and values[section][last]:
            values[section][last] = min(values[section][last], least)
    if settings.env.name.startswith("multi:"):  # a multiple of the tasks
        values["env"]["num_envs"] = settings.env.num_envs
    elif settings.agent != "empo" and values["env"]["num_envs"] % 2:
        values["env"]["num_envs"] = 2
    if "model" in values and "size" in values["model"]:
        values["model"]["size"] = "tiny"
    return config.load(active_only(type(settings)(), values))


def trained() -> list[str]:
    """Training commands that this machine can run: one process, packages that the tests have."""
    found = []
    for _, command in EVERY:
        trains = "experiments.train --" in command and "--config=" in command
        other = ("--help", "playground:", "coordinator=", "path/to/", "/shared/", "$")
        preset = "efficient_tdmpc.py" in command  # of playground's cartpole, which is an extra
        if trains and not preset and not any(word in command for word in other):
            found.append(re.sub(r" --workdir=\S+", "", command))
    return sorted(set(found))


@pytest.mark.slow
@pytest.mark.parametrize("command", trained(), ids=lambda c: c[29:110])
def test_a_training_command_of_the_documents_trains(command, tmp_path, monkeypatch):
    words = extensions.load(shlex.split(command)[3:])
    settings = small(read_settings(words))
    if settings.env.name.endswith("/two_rooms.yaml"):  # as the page shows it
        page = (ROOT / "docs" / "empo.md").read_text()
        (tmp_path / "two_rooms.yaml").write_text(re.search(r"```yaml\n(.*?)```", page, re.S)[1])
        monkeypatch.chdir(tmp_path)
    with jax.numpy_rank_promotion("allow"):  # brax needs it
        result = run.train(settings, str(tmp_path / "run"))
    rows = read_rows(str(tmp_path / "run" / "metrics.jsonl"))
    assert result.evaluations and sum(row.get("updates") or 0 for row in rows) > 0
