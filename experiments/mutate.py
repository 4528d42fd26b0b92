"""Mutation testing: would the tests notice a wrong line?

    python -m experiments.mutate --module=returns,mppi --sample=100 --out=runs/mutants.jsonl
    python -m experiments.mutate --module=agents/tdmpc,training --sample=200 --seed=1 --out=...
    python -m experiments.mutate --out=runs/mutants.jsonl --again    # survivors, with today's tests
    python -m experiments.mutate --out=runs/mutants.jsonl --table    # Markdown: shares, survivors
    python -m experiments.mutate --out=runs/mutants.jsonl --keep=docs/results/mutation.csv

Every mutant (`experiments.mutants`) is one changed line in a copy of the checkout. Against it run
the tests that call the changed function, the fastest file first, and if they all pass the whole
files; the first failure ends it. Which files: those that TESTS names for the module, or where it
names none, or --tests does, all that import it. A file runs in a process forked from one that has
JAX and pytest loaded and no backend started; programs that the change leaves alone come from a
compilation cache. Files are measured once, unchanged, before their first mutant: how long they
take, what they call. Results are rows of --out, and a run that was stopped goes on.

killed: a test failed, crashed, or ran for thrice its time. broken: the module does not import, not
counted; nor is stuck: a test that waits without end.
survived: to be mended in the tests, or listed with its reason in tests/equivalent_mutants.toml.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import json
import os
import pathlib
import random
import re
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

from . import mutants as sources
from . import mutation_table as results
from .mutants import Mutant

ROOT = pathlib.Path(__file__).resolve().parents[1]
HOME = pathlib.Path(tempfile.gettempdir()) / f"mbx-mutants-{os.getuid()}"
AREAS = (
    "returns mppi replay replay_ring replay_shards replay_storage distributions successors "
    "world_model agents/tdmpc agents/dreamer agents/empo training/loop training/learning "
    "training/state training/checkpoint training/sharding"
)
# Test files that are enough for a module's mutants, and fast: patterns under tests/; the first that
# fits. A mutant that they let pass is not killed, whatever slower tests would say.
TESTS = {
    "returns": "test_returns",
    "mppi": "test_mppi",
    "categorical": "test_categorical",
    "cem": "test_cem",
    "muon": "test_muon",
    "predictive|sequences|risk|tuning|evolution": "test_planner_methods",
    "distributions": "test_distributions",
    "successors": "test_successors",
    "replay.*": "test_replay.*",
    "heads": "test_heads",
    "keys": "test_keys",
    "extensions": "test_extensions",
    "observations": "test_observations",
    "planners": "test_(cem|planner_methods)",
    "world_model": "test_world_model",
    "envs/(parallel|worker)": "envs/test_parallel",
    "envs/images": "envs/test_images",
    "envs/gymnax": "envs/test_(packages|suites|own)",
    "agents/dreamer/diagnostics": "agents/test_dreamer_(units|diagnostics)",
    "agents/dreamer/.*": "agents/test_dreamer(_(apart|initial|units|edges|rows|rssm|sequences))?",
    "agents/tdmpc/diagnostics": "agents/test_tdmpc_diagnostics",
    "agents/tdmpc/.*settings": "agents/test_tdmpc_(settings|losses)",
    "agents/tdmpc/official": "agents/test_tdmpc_official",
    "agents/tdmpc/.*": "agents/test_tdmpc(_(losses|options|plans|ensembles|golden|keys|counts))?",
    "empo/agent/(diagnostics|evaluation)": "empo/test_units",
    "empo/agent/robots|power/assistance": "empo/test_robots",
    "empo/agent/(game|playing)": "empo/test_game",
    "empo/agent/.*": "empo/test_(agent|units|stored)",
    "training/(loop|learning|state)": "training/test_loop_units",
    "training/agent_check": "training/test_agent_check",
    "training/checkpoint": "training/test_checkpoint",
    "training/evaluation": "training/test_evaluation",
    "training/inputs": "training/test_inputs",
    "training/pure": "training/test_pure",
    "training/sharding": "training/test_sharding_units",
    "training/statistics": "training/test_statistics",
    "training/trust": "training/test_trust",
    "training/policy": "training/test_policy",
}
PARTS = ("mbx", "tests", "configs", "experiments")
WARM = "flax optax chex distrax orbax.checkpoint ml_collections absl.flags"  # where in use


def imports(root: pathlib.Path) -> dict[str, set[str]]:
    """File -> files of the checkout that it loads, itself included.

    A module named in a string counts (a registry's names), and an agent's package loads all of it.
    """
    files = {str(p.relative_to(root)) for part in PARTS for p in (root / part).rglob("*.py")}
    names = {f.removesuffix(".py").removesuffix("/__init__").replace("/", "."): f for f in files}
    direct = {}
    for file in files:
        found, text = set(), (root / file).read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        direct[file] = {names[name] for name in found if name in names}
        folders = [file.removesuffix("__init__.py")] if file.startswith("mbx/agents/") else []
        folders += [
            f"{x.replace('.', '/')}/" for x in ("mbx.agents", "configs") if f'f"{x}.' in text
        ]
        direct[file] |= {f for f in files if f.startswith(tuple(folders))} if folders else set()
    reached = {}
    for file in files:
        seen, rest = {file}, [file]
        while rest:
            new = direct[rest.pop()] - seen
            seen |= new
            rest += new
        reached[file] = seen
    return reached


class Tests:
    """What is known of the test files: seconds, outcome, and what each test calls."""

    def __init__(self, tree: pathlib.Path, pattern: str, quick: bool) -> None:
        self.tree, self.quick, self.reached = tree, quick, imports(tree)
        names = (f for f in self.reached if re.search(r"^tests/(.*/)?test_", f))
        self.files, self.pattern = sorted(names), pattern
        self.store, self.clock = tree.parents[1] / "tests.json", int(time.time())
        self.known = json.loads(self.store.read_text()) if self.store.exists() else {}

    def digest(self, file: str) -> str:
        code = re.sub(r'"{3}.*?"{3}', "", (self.tree / file).read_text(), flags=re.DOTALL)
        return hashlib.sha1(code.encode()).hexdigest()

    def meant(self, path: str) -> list[str]:
        """The test files that a module's mutants run against."""
        module = path.removeprefix("mbx/").removesuffix(".py")
        found = [tests for name, tests in TESTS.items() if re.fullmatch(name, module)]
        if self.pattern or not found:
            return [f for f in self.files if path in self.reached[f] and re.search(self.pattern, f)]
        return [f for f in self.files if re.fullmatch(f"tests/({found[0]}).py", f)]

    def of(self, mutant: Mutant) -> list[tuple[float, str, list[str], bool]]:
        """(seconds, file, its tests that call the function, whether to run only those), in the
        order to try: tests that call it, the fastest file first; then whole files."""
        calling, whole = [], []
        for file in self.meant(mutant.path):
            known = self.measured(file, mutant.path)
            if known["failed"]:
                continue
            calls = f"{mutant.path}:{mutant.function}"
            tests = {t: s for t, (s, called) in known["tests"].items() if calls in called}
            if first := sorted(tests, key=tests.get):
                calling.append((sum(tests.values()), file, first, True))
            loaded = calls in known["loading"] or not mutant.function or known["processes"]
            if (tests or loaded) and len(tests) < len(known["tests"]):
                whole.append((known["seconds"], file, first, False))
        return sorted(calling) + ([] if self.quick else sorted(whole))

    def measured(self, file: str, path: str) -> dict[str, Any]:
        """Runs a test file unchanged, unless it and the module are as they were."""
        entry, now = self.known.get(file), self.digest(path)
        if entry and entry["digest"] == self.digest(file) and entry["modules"].get(path) == now:
            return entry
        print(f"measuring {file}", flush=True)
        result = forked(self, file, seconds=1800)
        if result["failed"]:
            print(f"{file} fails without any change ({result['failed']}): left out", flush=True)
        modules = {f: self.digest(f) for f in self.reached[file] if f.startswith("mbx/")}
        text = (self.tree / file).read_text()
        self.known[file] = result | {
            "digest": self.digest(file),
            "modules": modules,
            "processes": "subprocess" in text or "multiprocessing" in text,
        }
        self.store.write_text(json.dumps(self.known))
        return self.known[file]


class Plugin:
    """pytest's hooks in the forked process: order, first failure, and what is called."""

    def __init__(self, tree: pathlib.Path, first: list[str], only: bool, record: bool) -> None:
        self.tree, self.only, self.record = f"{tree}/", only, record
        self.programs = str(tree.parents[1] / "programs")
        self.order = {name: i for i, name in enumerate(first)}
        self.called: set[str] = set()
        self.result: dict[str, Any] = {"failed": "", "tests": {}, "loading": []}

    def trace(self, frame: Any, event: str, arg: Any) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if file.startswith(self.tree + "mbx/"):
            self.called.add(f"{file[len(self.tree) :]}:{name.partition('.<locals>')[0]}")

    def pytest_sessionstart(self) -> None:
        if jax := sys.modules.get("jax"):
            # Unchanged programs are kept once; what a mutant compiles is not worth keeping.
            jax.config.update("jax_compilation_cache_dir", self.programs)
            least = 0.0 if self.record else 1e9
            jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
        if self.record:
            threading.settrace(self.trace)
            sys.settrace(self.trace)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        self.result["loading"] = sorted(self.called)
        if self.only:
            items[:] = [item for item in items if item.nodeid in self.order]
        items.sort(key=lambda item: self.order.get(item.nodeid, len(self.order)))

    def pytest_runtest_logstart(self) -> None:
        self.called.clear()
        self.start = time.process_time()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        seconds = time.process_time() - self.start
        self.result["tests"][nodeid] = [round(seconds, 3), sorted(self.called)]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.result["failed"]:
            self.result["failed"] = report.nodeid

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.result["failed"] = report.nodeid or "collection"


def forked(
    tests: Tests,
    file: str,
    *,
    seconds: float,
    first: list[str] = (),
    only: bool = False,
    changed: str = "",
) -> dict[str, Any]:
    """One test file in a process of its own: {failed, tests, loading, seconds}.

    Without a changed file it is measured: all its tests, and what each calls. failed is the first
    failing test, "import", "time" (processor seconds), "crash" (ended by a signal), "stuck"
    (waiting), "".
    """
    (out := tests.tree.parent / "result.json").unlink(missing_ok=True)
    if (pid := os.fork()) == 0:
        try:
            _child(tests, file, first, only, changed, int(seconds) + 1, out)
        finally:
            traceback.print_exc()
            os._exit(1)
    end = time.monotonic() + 60 + 30 * seconds  # on a busy machine
    while (ended := os.wait4(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.killpg(pid, signal.SIGKILL)
        time.sleep(0.02)
    spent = round(ended[2].ru_utime + ended[2].ru_stime, 2)
    died = os.WIFSIGNALED(ended[1]) and time.monotonic() <= end
    failed = "time" if spent >= 0.9 * seconds else "crash" if died else "stuck"
    result = {"failed": failed, "tests": {}, "loading": []}
    return (json.loads(out.read_text()) if out.exists() else result) | {"seconds": spent}


def _child(
    tests: Tests,
    file: str,
    first: list[str],
    only: bool,
    changed: str,
    seconds: int,
    out: pathlib.Path,
) -> None:
    os.setpgid(0, 0)  # a group to be killed; another session would lose the run's priority
    tree = tests.tree
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    log = os.open(tree.parent / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.chdir(tree)
    for name in [n for n in sys.modules if n.partition(".")[0] in PARTS]:
        del sys.modules[name]
    sys.path[:] = [str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    import pytest

    plugin = Plugin(tree, first, only, record=not changed)
    if changed:
        try:
            importlib.import_module(changed.removesuffix(".py").replace("/", "."))
        except Exception:
            out.write_text(json.dumps(plugin.result | {"failed": "import"}))
            os._exit(0)
    arguments = [file, "-q", "-n", "0", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    pytest.main([*arguments, "-x"] if changed else arguments, plugins=[plugin])
    sys.settrace(None)
    if not sys.modules["mbx"].__file__.startswith(str(tree)):
        raise RuntimeError("the tests did not load the copy")
    out.write_text(json.dumps(plugin.result))
    os._exit(0)


def judged(mutant: Mutant, tests: Tests, budget: float) -> dict[str, Any]:
    """Tries the tests on a mutant: {status, by, seconds, tried}."""
    place = tests.tree / mutant.path
    original, stamp = place.read_bytes(), place.stat()
    spent, tried = 0.0, []
    candidates = tests.of(mutant)
    result = {"failed": ""}
    try:
        place.write_text(mutant.source)
        # A second of its own, so that no compiled file of another version is taken for it.
        tests.clock += 1
        os.utime(place, (tests.clock, tests.clock))
        for usual, file, first, only in candidates:
            if tried and spent + usual > budget:
                continue
            limit, path = 20 + 3 * usual, mutant.path
            result = forked(tests, file, seconds=limit, first=first, only=only, changed=path)
            spent = round(spent + result["seconds"], 2)
            tried += [file] if file not in tried else []
            if result["failed"]:
                break
    finally:
        place.write_bytes(original)
        os.utime(place, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    by = result["failed"]
    status = {"": "survived", "import": "broken", "stuck": "stuck"}.get(by, "killed")
    return {"status": status, "by": by, "seconds": spent, "tried": tried}


def copied(root: pathlib.Path, place: pathlib.Path) -> pathlib.Path:
    """A checkout's files, tracked or new, as they are now."""
    shutil.rmtree(place, ignore_errors=True)
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listing, cwd=root, text=True).split("\0"):
        if name and (root / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, place / name)
    return place


def warmed(root: pathlib.Path) -> None:
    """Loads what is slow to load and is not ours. Nothing here may start JAX's backend."""
    runpy.run_path(str(root / "tests" / "conftest.py"))
    texts = " ".join(p.read_text() for part in PARTS for p in (root / part).rglob("*.py"))
    used = [name for name in WARM.split() if name.partition(".")[0] in texts]
    for name in ["pytest", "hypothesis", "xdist", *used]:
        importlib.import_module(name)


def chosen(root: pathlib.Path, areas: list[str], sample: int, seed: int) -> list[Mutant]:
    """Mutants of the areas (files or folders of mbx): all in the order of files, or a sample in the
    order of its draw, so that the first of them are a sample as well."""
    files = []
    for area in areas:
        base = root / "mbx" / area
        found = sorted(base.glob("*.py")) if base.is_dir() else [base.with_suffix(".py")]
        files += [f for f in found if f.name not in ("__init__.py", "settings.py")]
    every = []
    for file in files:
        every += sources.mutants(str(file.relative_to(root)), file.read_text())
    picked = range(len(every))
    if 0 < sample < len(every):
        picked = random.Random(seed).sample(picked, sample)
    return [every[i] for i in picked]


def of_today(root: pathlib.Path, rows: results.Rows) -> results.Rows:
    """The rows whose change can still be made, with the lines where it is."""
    areas = sorted({row["path"][4:-3] for row in rows.values() if (root / row["path"]).exists()})
    lines = {mutant.key: mutant.line for mutant in chosen(root, areas, 0, 0)}
    return {key: row | {"line": lines[key]} for key, row in rows.items() if key in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--module", default=AREAS.replace(" ", ","), help="files, folders of mbx")
    parser.add_argument("--sample", type=int, default=0, help="mutants tried; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--tests", default="", help="regular expression: files in TESTS' place")
    parser.add_argument("--quick", action="store_true", help="no whole files")
    parser.add_argument("--budget", type=float, default=120.0, help="processor seconds a mutant")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="rows, one a mutant")
    parser.add_argument("--again", action="store_true", help="survivors in --out once more")
    parser.add_argument("--table", action="store_true", help="print what --out holds, and end")
    parser.add_argument("--keep", type=pathlib.Path, help="write --out, of today's lines, as CSV")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="the checkout")
    parser.add_argument("--cache", type=pathlib.Path, default=HOME, help="copy, programs, times")
    args = parser.parse_args()
    rows, known = results.read(args.out), results.equivalents(args.root)
    if args.keep:
        results.keep(args.keep, of_today(args.root, rows), known)
    if args.table:
        print(results.table(rows, known))
    if args.table or args.keep:
        return
    if args.again:
        left = {key for key, row in rows.items() if row["status"] in ("survived", "stuck")}
        areas = sorted({rows[key]["path"][4:-3] for key in left})
        todo = [m for m in chosen(args.root, areas, 0, 0) if m.key in left - known.keys()]
    else:
        todo = chosen(args.root, args.module.split(","), args.sample, args.seed)
        todo = [m for m in todo if m.key not in rows]
    warmed(args.root)
    work = args.cache / str(os.getpid())
    tests = Tests(copied(args.root, work / "tree"), args.tests, args.quick)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        for i, mutant in enumerate(todo):
            row = {"key": mutant.key, **mutant._asdict(), **judged(mutant, tests, args.budget)}
            del row["source"]
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            place = f"{mutant.path}:{mutant.line}"
            print(i + 1, len(todo), row["status"], row["seconds"], place, row["by"], flush=True)
            if row["status"] == "survived":
                print(f"    - {mutant.old}\n    + {mutant.new}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
