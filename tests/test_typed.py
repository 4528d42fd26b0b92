"""What type checkers and editors know of the stable interface: a project of a user's, checked."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PROJECT = ROOT / "tests" / "typed"


def stable_names() -> list[tuple[str, str]]:
    """Modules of docs/interface.md and the names that it lists of each."""
    found = []
    for row in (ROOT / "docs" / "interface.md").read_text().splitlines():
        cells = row.split("|")
        modules = re.findall(r"`(mbx[\w.]*)`", cells[1]) if len(cells) > 2 else []
        module = modules[0] if modules else ""
        for word in re.findall(r"`([\w.]+)`", cells[2]) if module else []:
            if word.startswith("mbx"):
                module = word
            else:
                found.append((module, word))
    return found


def test_every_stable_name_is_there_and_used_by_the_project():
    names, used = stable_names(), (PROJECT / "right.py").read_text()
    assert ("mbx.mppi", "plan") in names and len(names) > 50
    for module, name in names:
        last, held = name.split(".")[-1], importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(held, part):
                importlib.import_module(f"{module}.{part}")
            held = getattr(held, part)
        assert re.search(rf"\b{last}\b", used), f"{module}.{name}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> str:
    """The interpreter of an environment of its own that has an editable install and what it needs.

    A copy of the checkout is what is installed, since an installation leaves its metadata there.
    """
    folder = tmp_path_factory.mktemp("typed")
    ignore = shutil.ignore_patterns(".git*", "tests", "docs", "*.egg-info", "__pycache__", "runs")
    shutil.copytree(ROOT, folder / "sources", ignore=ignore)
    venv.create(folder / "venv", with_pip=True)
    python = str(folder / "venv" / "bin" / "python")
    pip_install(python, "-e", str(folder / "sources"))
    return python


def pip_install(python: str, *what: str) -> None:
    """`pip install`, by pip's own configuration."""
    command = [python, "-m", "pip", "install", "--quiet", *what]
    subprocess.run(command, env=environment(), check=True, capture_output=True)


def environment() -> dict[str, str]:
    """The variables of this process without the one that would show the checkout to Python."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def find_pyright(python: str) -> list[str]:
    """A command that runs pyright: this environment's, the machine's, or else one for `python`."""
    if importlib.util.find_spec("pyright"):
        return [sys.executable, "-m", "pyright"]
    if found := shutil.which("pyright"):
        return [found]
    try:
        pip_install(python, "pyright[nodejs]>=1.1.400")
    except subprocess.CalledProcessError:
        pytest.skip("needs pyright: pip install 'pyright[nodejs]'")
    return [python, "-m", "pyright"]


@pytest.mark.slow
def test_the_project_is_clean_and_every_planted_mistake_is_found(installed, tmp_path):
    """In pyright's strict mode, in which an unknown type of a name is an error, too.

    The project knows mbx as a user's does: by the environment that has an editable install of it.
    """
    for name in ("right.py", "wrong.py"):
        shutil.copy(PROJECT / name, tmp_path / name)
    settings = {"typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [*find_pyright(installed), "--outputjson", "--pythonpath", installed]
    report = subprocess.run(
        [*command, "-p", str(tmp_path)],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    errors = [
        e for e in json.loads(report.stdout)["generalDiagnostics"] if e["severity"] == "error"
    ]
    lines: dict[str, set[int]] = {"right.py": set(), "wrong.py": set()}
    for error in errors:
        lines[pathlib.Path(error["file"]).name].add(error["range"]["start"]["line"])
    assert not lines["right.py"], [e for e in errors if e["file"].endswith("right.py")]
    text = (PROJECT / "wrong.py").read_text().splitlines()
    planted = {i for i, line in enumerate(text) if line.endswith("# wrong")}
    assert len(planted) > 40 and lines["wrong.py"] == planted
