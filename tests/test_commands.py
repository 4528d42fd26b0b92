"""Every command in README and docs starts: the module takes its flags and the settings fit."""

from __future__ import annotations

import pathlib
import re
import shlex

import pytest

from experiments import usage
from mbx import extensions, presets
from mbx.training import build

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
    """Names of the flags that a module, or one of `experiments` that it imports, declares.

    Read from the sources: two commands declare flags of one name and cannot both be imported.
    """
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    names = set(re.findall(r'(?:DEFINE_\w+\(|add_argument\()\s*"(?:--)?([\w-]+)"', source))
    for imported in re.findall(r"from experiments(?: import |\.)([\w, ]+)", source):
        for other in imported.replace(" import", ",").split(","):
            if (ROOT / "experiments" / f"{other.strip()}.py").exists():
                names |= declared(f"experiments.{other.strip()}")
    return names


def check_flags(module: str, arguments: list[str]) -> None:
    """Every `--name=value` is a flag of the module."""
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--")
        if argument.startswith("--") and not name.startswith("config."):
            assert name in declared(module), f"{module} has no flag --{name}"


def check_settings(arguments: list[str]) -> None:
    """The file exists, and every flag is one of its settings with a value that it may have."""
    assert usage.unknown_flag(arguments) is None
    path = usage.config_argument(arguments)
    config = presets.load(path)
    for argument in arguments:
        name, _, value = argument.removeprefix("--config.").partition("=")
        if argument.startswith("--config."):
            *sections, last = name.split(".")
            if sections == ["env", "kwargs"]:  # the environment's own
                config.env.kwargs[last] = value
                continue
            section = config
            for one in sections:
                section = section[one]
            old = section[last]
            section[last] = type(old)(value) if not isinstance(old, bool) else value == "True"
    build.read(config.to_dict())


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
    elif words[1].startswith("experiments.") and "--help" not in words:
        words = [*words[:2], *extensions.load(words[2:])]
        check_flags(words[1], words[2:])
        if any(word.startswith("--config=") for word in words) and "ablate" not in words[1]:
            check_settings(words[2:])
