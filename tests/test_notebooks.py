"""The notebooks run from the first cell to the last, and show what they say.

A kernel runs each as it would a reader's, but for two cells. In place of the one tagged `install`
there is one that makes warnings of our code errors; after the one tagged `parameters` another makes
the sizes small.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import json
import pathlib
import re
import subprocess
from typing import Any, NamedTuple

import jax
import nbclient
import nbformat
import numpy as np
import pytest

from mbx.training.job import Intervals, Job

ROOT = pathlib.Path(__file__).resolve().parents[1]
NAMES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
STRICT = (
    r"import warnings; warnings.filterwarnings('error', module=r'(mbx|configs|__main__)(\.|$)')"
)


class Outcome(NamedTuple):
    """The values asked for, and the pictures shown, as their files' contents."""

    values: dict[str, Any]
    pictures: list[bytes]


def read(name: str) -> Any:
    return nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)


def tagged(notebook: Any, tag: str) -> list[int]:
    return [i for i, c in enumerate(notebook.cells) if tag in c.metadata.get("tags", ())]


def assigned(source: str) -> set[str]:
    """Names that a cell assigns."""
    nodes = ast.walk(ast.parse(source))
    return {x.id for x in nodes if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


@pytest.fixture
def execute(monkeypatch, tmp_path):
    """`execute(name, sizes, values)`: run a notebook and evaluate expressions behind its end.

    until: a heading at which it ends.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("MPLBACKEND", raising=False)  # a kernel shows figures by itself
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("JAX_NUMPY_RANK_PROMOTION", "raise")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")

    def run(name: str, sizes: dict[str, int], values: dict[str, str], until: str = "") -> Outcome:
        notebook = read(name)
        if until:
            starts = [i for i, c in enumerate(notebook.cells) if c.source.startswith(until)]
            notebook.cells = notebook.cells[: starts[0]]
        (install,) = tagged(notebook, "install")
        notebook.cells[install].source = STRICT
        if sizes:
            (parameters,) = tagged(notebook, "parameters")
            assert sizes.keys() <= assigned(notebook.cells[parameters].source)
            small = "\n".join(f"{key} = {value}" for key, value in sizes.items())
            notebook.cells.insert(parameters + 1, nbformat.v4.new_code_cell(small))
        asked = ", ".join(f"{key!r}: {code}" for key, code in values.items())
        last = f"import json; print(json.dumps({{{asked}}}))"
        notebook.cells.append(nbformat.v4.new_code_cell(last))
        place = {"metadata": {"path": str(ROOT / "notebooks")}}
        nbclient.NotebookClient(notebook, timeout=1800, resources=place).execute()
        shown = [x for cell in notebook.cells for x in cell.get("outputs", ())]
        data = [x["data"] for x in shown if "data" in x]
        images = [x[kind] for x in data for kind in ("image/png", "image/gif") if kind in x]
        answer = notebook.cells[-1].outputs[0]["text"]
        return Outcome(json.loads(answer), [base64.b64decode(image) for image in images])

    return run


def kinds(pictures: list[bytes]) -> list[str]:
    return ["gif" if x.startswith(b"GIF8") else x[1:4].decode().lower() for x in pictures]


@pytest.fixture(scope="module")
def store():
    """notebooks/store.py, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("store", ROOT / "notebooks" / "store.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_what_is_stored_of_a_notebook_is_of_its_code(name, store):
    notebook = read(name)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if "mbx" in notebook.metadata:
        again = f"its outputs are of other code: python notebooks/store.py {name}"
        assert notebook.metadata["mbx"]["outputs_of"] == store.digest(notebook), again
        assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
        assert any(cell.outputs for cell in code)
        shown = json.dumps([cell.outputs for cell in code])
        assert not re.search(r"/(tmp|work|root|home)/|Traceback", shown)
    else:
        assert all(not cell.outputs and cell.execution_count is None for cell in code)
    # The same installation everywhere, before anything else.
    first = tagged(notebook, "install")
    assert first == [1] and code[0] is notebook.cells[1]
    assert code[0].source == store.install_cell(store.address()), (
        "python notebooks/store.py --cells"
    )
    assert store.badge(name, store.address()) in notebook.cells[0].source
    assert len(tagged(notebook, "parameters")) <= 1


def test_notebooks_ask_a_run_for_what_it_has():
    """Most of them are run by slow tests alone."""
    sources = [c.source for name in NAMES for c in read(name).cells if c.cell_type == "code"]
    asked = set(re.findall(r"\bjob\.([\w.]+)", "\n".join(sources)))
    assert asked >= {"agent", "interval", "intervals.number"}
    fields = {*Job._fields, *(f"intervals.{name}" for name in Intervals.__annotations__)}
    assert {name for name in asked if not name.startswith("environment.")} <= fields


def test_a_badge_leads_to_the_notebook(store):
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Title\n\nText"), nbformat.v4.new_code_cell("")]
    )
    for where in ("https://github.com/some/one.git", "https://github.com/some/one"):
        store.share("tdmpc", notebook, where)
        title, empty, badge, *rest = notebook.cells[0].source.split("\n")
        assert (title, empty, rest) == ("# Title", "", ["", "Text"])
        assert badge.endswith("/github/some/one/blob/main/notebooks/tdmpc.ipynb)")
        assert f'ADDRESS = "{where}"' in notebook.cells[1].source
    assert store.badge("tdmpc", "") == ""


@pytest.fixture
def install(monkeypatch, tmp_path, store):
    """`install(where, address)`: what the first cell hands to pip in a directory without mbx."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    asked = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: asked.append(command[-1]))

    def run(where, address=""):
        monkeypatch.chdir(where)
        exec(compile(store.install_cell(address), "cell", "exec"), {})
        return asked.pop()

    return run


def test_the_first_cell_installs_from_what_there_is(install, tmp_path):
    with pytest.raises(
        RuntimeError, match=r"nothing here to install .*Upload a wheel.*set ADDRESS"
    ):
        install(tmp_path)
    published = "https://github.com/some/one"
    assert install(tmp_path, published) == f"git+{published}"
    for version in ("0.1.0", "0.2.0"):
        (tmp_path / f"mbx_rl-{version}-py3-none-any.whl").touch()
    assert install(tmp_path, published) == str(tmp_path / "mbx_rl-0.2.0-py3-none-any.whl")
    assert install(ROOT / "notebooks", published) == str(ROOT)


def test_empo_shows_a_robot_that_makes_way(execute):
    values, pictures = execute(
        "empo",
        {},
        {
            "shares": "{name: float(share) for name, share in shares.items()}",
            "moved": "bool((frames[0] != frames[-1]).any())",
            "states": "len(set(played.states[episode].tolist()))",
        },
        until="## A custom world",
    )
    shares = values["shares"]
    assert shares["solved"] > max(shares["random"], shares["frozen"]) + 0.1
    assert kinds(pictures) == ["png", "gif", "png"]
    # The rock ends in the niche above the corridor, and the human beyond it.
    assert values["moved"] and values["states"] > 5


@pytest.mark.slow
def test_empo_learns_to_make_way_in_a_world_of_ones_own(execute):
    values, _ = execute(
        "empo",
        dict(EPISODES=300),
        {
            "reached": "reached",
            "walk": "[text.splitlines()[2][1:4] for text in maps]",
            "came": "[arrived, game.arrivals]",
        },
    )
    reached = values["reached"]
    assert reached["learned"] > reached["exact"] - 0.05 > reached["random"] + 0.2
    # The human goes to the far end, and again where it is played.
    assert values["walk"][-1] == "..>" and values["came"] == [True, 1]


def test_planner_swings_up_without_learning(execute):
    values, pictures = execute(
        "planner",
        dict(EPISODES=4, SAMPLES=64, ROUNDS=3),
        {
            "returns": "{name: value.tolist() for name, value in returns.items()}",
            "height": "np.cos(played['planned'][0][-20:]).min().item()",
            "elites": "elite_returns",
        },
    )
    planned, random = (np.array(values["returns"][name]) for name in ("planned", "random"))
    assert planned.min() > -450 and planned.mean() > random.mean() + 600
    assert values["height"] > 0.98  # of every pendulum at the end: upright
    assert values["elites"][-1] > values["elites"][0] + 2
    assert kinds(pictures) == ["png", "png", "gif"]


@pytest.mark.slow
def test_tdmpc_plans_get_better_round_by_round(execute):
    sizes = dict(
        STEPS=600, SEED_STEPS=200, PRETRAIN=150, LOG_EVERY=200, EPISODES=2, ROUNDS=3, FILM_STEPS=12
    )
    values, pictures = execute(
        "tdmpc",
        sizes,
        {
            "losses": "losses",
            "returns": "returns",
            "rounds": "round_values",
            "best": "[float(plan.values.max()) for plan in plans]",
            "spread": "[float(plan.std[0, 0, 0]) for plan in plans]",
            "shapes": "[thoughts.values.shape, seen.shape, len(frames)]",
        },
    )
    assert np.isfinite(values["returns"]).all() and len(values["returns"]) == 3
    assert values["losses"][-1] < values["losses"][0]
    assert values["rounds"][-1] > values["rounds"][0]
    assert values["spread"][-1] < values["spread"][0]
    assert values["shapes"] == [[12, 1, 128], [12, 1, 3], 6]
    assert kinds(pictures) == ["png", "png", "gif"]


@pytest.mark.slow
def test_dreamer_learns_to_foresee(execute):
    values, pictures = execute(
        "dreamer",
        dict(STEPS=800, SEED_STEPS=160, STAGES=2, BATCH=4, LENGTH=16),
        {
            "errors": "{str(name): error.tolist() for name, error in errors.items()}",
            "frames": "[len(frames), list(frames[0].shape)]",
        },
    )
    errors = {name: np.array(error) for name, error in values["errors"].items()}
    untrained, *_, trained, still = errors.values()
    assert trained.shape == (11,)
    assert trained.mean() < 0.7 * untrained.mean()
    assert trained.mean() < still.mean()
    assert values["frames"] == [16, [96, 192, 3]]
    assert kinds(pictures) == ["png", "png", "gif"]


@pytest.mark.slow
def test_planner_targets_stay_young_with_reanalyze(execute):
    values, pictures = execute(
        "planner_targets",
        dict(STEPS=800, SEED_STEPS=200, PRETRAIN=60),
        {
            "ages": "{name: float(age.mean()) for name, age in ages.items()}",
            "errors": "{name: float(error.mean()) for name, error in errors.items()}",
            "floors": "{name: float(floor.mean()) for name, floor in floors.items()}",
            "rows": "[len(age) for age in ages.values()]",
        },
    )
    ages, errors, floors = values["ages"], values["errors"], values["floors"]
    assert ages["on"] < 0.5 * ages["off"]
    assert floors["on"] < errors["on"] < errors["off"]
    assert values["rows"] == [800, 800]
    assert kinds(pictures) == ["png"]
