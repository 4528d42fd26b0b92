"""What type checkers and editors know of the stable interface: a project of a user's, checked."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pathlib
import re
import shutil
import subprocess
import sys

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


@pytest.mark.slow
def test_the_project_is_clean_and_every_planted_mistake_is_found():
    """In pyright's strict mode, in which an unknown type of a name is an error, too."""
    if importlib.util.find_spec("pyright"):
        pyright = [sys.executable, "-m", "pyright"]
    elif found := shutil.which("pyright"):
        pyright = [found]
    else:
        pytest.skip("needs pyright: pip install 'pyright[nodejs]'")
    command = [*pyright, "--outputjson", "--pythonpath", sys.executable, "-p", str(PROJECT)]
    report = subprocess.run(command, capture_output=True, text=True, check=False)
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
