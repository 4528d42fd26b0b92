"""Imports inside mbx only go down, and the kit and the agents load without what is above them."""

from __future__ import annotations

import ast
import importlib
import os
import pathlib
import subprocess
import sys

import pytest

import mbx

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Ground first. A module may import from lower floors, and a package from itself. Training knows
# environments and they do not know it, so it has a floor of its own.
FLOORS = (
    ("empo", "types"),
    ("fast",),
    ("settings", "distributions", "networks", "observations", "optim", "replay_storage"),
    ("returns", "mppi", "successors"),
    ("replay", "categorical", "heads"),
    ("world_model", "empo.power", "planners", "replay_sequences"),
    ("power", "agents"),
    ("empo.agent",),
    ("config",),
    ("envs",),
    ("empo.multigrid",),
    ("empo.suite",),
    ("training",),
    ("analysis",),
    ("api",),
    ("commands",),
    ("cli",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}
AGENTS = FLOOR_OF["empo.agent"]  # agents and what they are made of

# Command lines, configuration files, loggers and simulators.
ABOVE = frozenset(
    "absl ml_collections tensorboardX wandb gymnasium brax gymnax mujoco_playground "
    "dm_control".split()
)


def module_name(path: pathlib.Path) -> str:
    """mbx/agents/base.py -> mbx.agents.base; mbx/agents/__init__.py -> mbx.agents.__init__."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def source_modules() -> dict[str, str]:
    """Source text by module name, of every file of mbx."""
    return {module_name(path): path.read_text() for path in sorted((ROOT / "mbx").rglob("*.py"))}


def room(module: str) -> str:
    """The part of mbx that has a floor: mbx.agents.base -> agents; '' for mbx itself.

    EMPO's folder reaches over several floors, so its parts have one each.
    """
    parts = [part for part in module.split(".")[1:] if part != "__init__"]
    return ".".join(parts[: 2 if parts[:1] == ["empo"] else 1])


def imported(module: str, source: str) -> set[str]:
    """Dotted names a module imports, at its top or inside functions; `from a import b` is a.b."""
    names, tree = set(), ast.parse(source)
    if module == "mbx.__init__":  # tells type checkers what it imports when that is first used
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # Level 1 is the package the file lies in, each further level one package up.
            base = module.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            names |= {".".join([*base, alias.name]) for alias in node.names}
    return names


def faults(module: str, source: str) -> list[str]:
    """What a module imports and must not, a sentence each."""
    here = room(module)
    if here and here not in FLOOR_OF:
        return [f"{module} is on no floor: give mbx.{here} one in FLOORS"]
    floor = FLOOR_OF.get(here, -1)  # mbx/__init__.py lies below everything
    found = []
    for name in sorted(imported(module, source)):
        top, there = name.split(".")[0], room(name)
        if top in ("configs", "experiments"):
            found.append(f"{module} imports {name}, which is above mbx")
        elif top in ABOVE and floor <= AGENTS:
            found.append(f"{module} imports {name}, which only envs and training may")
        elif top == "mbx" and there in FLOOR_OF and there != here and FLOOR_OF[there] >= floor:
            found.append(f"{module} imports {name}, which is not below it")
    return found


def test_imports_only_go_down():
    modules = source_modules()
    assert {"mbx.mppi", "mbx.agents.tdmpc.agent", "mbx.training.run"} <= modules.keys()
    assert [fault for module, source in modules.items() for fault in faults(module, source)] == []


def circles(modules: dict[str, str]) -> list[list[str]]:
    """Modules that import each other in a circle, at their top; a package's parts by themselves."""
    known = {name.removesuffix(".__init__"): name for name in modules}
    graph = {}
    for module, source in modules.items():
        top = ast.Module([n for n in ast.parse(source).body], [])
        top.body = [n for n in top.body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = imported(module, ast.unparse(top))
        found = {known.get(name) or known.get(name.rpartition(".")[0]) for name in names}
        graph[module] = {name for name in found if name and not name.endswith("__init__")}
        # `from package import part` loads the package, whose own imports are what can close a ring.
        graph[module] |= {
            known[name] for name in names if name in known and known[name].endswith("__init__")
        }
    rings, done = [], set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            rings.append(path[path.index(module) :])
        elif module not in done:
            for name in sorted(graph[module]):
                visit(name, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return rings


def test_no_modules_import_each_other_in_a_circle():
    assert circles(source_modules()) == []
    ring = {"mbx.a": "from mbx import b", "mbx.b": "from mbx.c import x", "mbx.c": "import mbx.a"}
    assert circles(ring) == [["mbx.a", "mbx.b", "mbx.c"]]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("mbx.networks", "from mbx import distributions"),  # sideways
        ("mbx.networks", "from . import mppi"),
        ("mbx.mppi", "def f():\n    import mbx.world_model"),
        ("mbx.agents.tdmpc", "from mbx.envs.base import EnvSpec"),
        ("mbx.agents.tdmpc", "from ..training import loop"),
        ("mbx.agents.tdmpc", "from absl import flags"),
        ("mbx.envs.gymnax", "from mbx.training.state import Schedule"),
        ("mbx.training.run", "from experiments import plot"),
        ("mbx.__init__", "from mbx import mppi"),
        ("mbx.attic", ""),  # no floor
    ],
)
def test_each_wrong_import_is_found(module: str, source: str):
    assert len(faults(module, source)) == 1


# The device count can be chosen only until a backend starts. absl is left out of the names: optax
# and flax import it themselves (that ours do not is tested above).
LOAD = """
import importlib, sys
for module in sys.argv[2].split():
    importlib.import_module(module)
print(*sorted(set(sys.argv[1].split()) & sys.modules.keys()))
import jax
jax.config.update("jax_num_cpu_devices", 3)
print(jax.device_count())
"""


def load(modules: list[str]) -> subprocess.CompletedProcess[str]:
    """Import modules in a process of their own, then look at what that brought along."""
    environment = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "-c", LOAD, " ".join(ABOVE - {"absl"}), " ".join(modules)],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_kit_and_agents_load_no_simulator_and_start_no_backend():
    modules = [name for name in source_modules() if FLOOR_OF.get(room(name), -1) <= AGENTS]
    run = load([name.removesuffix(".__init__") for name in modules])
    assert run.returncode == 0, run.stderr
    loaded, devices = run.stdout.splitlines()
    assert loaded == ""
    assert devices == "3"


def test_former_names_are_todays_modules():
    """And what lies in them: never a second copy of a module."""
    for former, now in mbx._FORMER.items():
        module = importlib.import_module(f"mbx.{former}")
        assert module is importlib.import_module(now)
        assert module.__name__ == module.__spec__.name == now
    inside = importlib.import_module("mbx.envs.empo.multigrid.packed")
    assert inside is importlib.import_module("mbx.empo.multigrid.packed")
    curriculum = importlib.import_module("mbx.power.curriculum")
    assert curriculum is importlib.import_module("mbx.empo.power.curriculum")
