"""The notebooks run from the first cell to the last, and show what they say."""

from __future__ import annotations

import json
import pathlib
import sys
import types

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "notebooks"


def run(path, monkeypatch):
    """(variables, things displayed) after all code cells."""
    notebook, shown = json.loads(path.read_text()), []
    assert notebook["nbformat"] == 4 and len({c["id"] for c in notebook["cells"]}) == len(
        notebook["cells"]
    )
    # The tests do without a kernel; what would be displayed is kept.
    display = types.ModuleType("IPython.display")
    display.Image = lambda data: data
    display.display = shown.append
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    kernel = types.ModuleType("IPython")
    kernel.version_info = (9, 0)  # matplotlib asks
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    variables: dict = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), variables)
    return variables, shown


def test_empo_shows_a_robot_that_makes_way(monkeypatch):
    variables, shown = run(FOLDER / "empo.ipynb", monkeypatch)
    shares = variables["shares"]
    assert shares["solved"] > max(shares["random"], shares["frozen"]) + 0.1
    assert [x[:4] for x in shown] == [b"\x89PNG", b"GIF8", b"\x89PNG"]
    # The rock ends in the niche above the corridor, and the human beyond it.
    flat = variables["played"].states[variables["episode"]]
    start, end = (variables["frames"][i] for i in (0, -1))
    assert (start != end).any() and len(set(flat.tolist())) > 5
