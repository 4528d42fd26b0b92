"""Mutation testing by its own standards: which changes it makes, and what it says about them."""

from __future__ import annotations

import json
import pathlib
import re
import subprocess
import sys
import tomllib

from experiments import mutants, mutate, mutation_table

ROOT = pathlib.Path(__file__).resolve().parents[1]

SOURCE = '''
"""Text with 1 + 1 in it."""
LIMIT = 3

class Fields:
    default: int = 5

    def shifted(self, x: int | None = None):
        if x < 0:
            raise ValueError(f"x={x + 1}")
        return x[1:] - f(x, self.y)

def g(key, mask):
    key, _ = jax.random.split(key)
    def inner(z):
        return -jax.lax.stop_gradient(z) if mask else jnp.where(z & mask, z[0], 2.0)
    return inner
'''


def test_every_kind_of_change_is_made_where_something_is_computed():
    made = {(m.function, m.kind, m.new) for m in mutants.mutants("toy.py", SOURCE)}
    shifted = "return x[1:] - f(x, self.y)"
    split = "key, _ = jax.random.split(key)"
    inner = "return -jax.lax.stop_gradient(z) if mask else jnp.where(z & mask, z[0], 2.0)"
    lines = {shifted: "Fields.shifted", split: "g", inner: "g"}
    expected = {
        ("", "constant", "LIMIT = 4"),
        ("Fields.shifted", "comparison", "if x <= 0:"),
        ("Fields.shifted", "constant", "if x < 1:"),
    }
    for line, kind, old, new in (
        (shifted, "index", "[1:]", "[:-1]"),
        (shifted, "arithmetic", "-", "+"),
        (shifted, "drop", " - f(x, self.y)", ""),
        (shifted, "swap", "x, self.y", "self.y, x"),
        (split, "key", "(key)", "(key).at[...].set(key)"),
        (inner, "sign", "-jax", "jax"),
        (inner, "stop_gradient", "jax.lax.stop_gradient(z)", "z"),
        (inner, "stop_gradient", "jax.lax.stop_gradient(z)", "(lambda x: x)(z)"),
        (inner, "comparison", "if mask", "if (not mask)"),
        (inner, "comparison", "&", "|"),
        (inner, "drop", "z & mask", "z"),
        (inner, "drop", "z & mask", "mask"),
        (inner, "drop", "jnp.where(z & mask, z[0], 2.0)", "z[0]"),
        (inner, "drop", "jnp.where(z & mask, z[0], 2.0)", "(2.0)"),
        (inner, "index", "z[0]", "z[-1]"),
        (inner, "constant", "2.0", "4.0"),
        (inner, "swap", "z & mask, z[0]", "z[0], z & mask"),
    ):
        expected.add((lines[line], kind, line.replace(old, new)))
    assert made == expected
    assert {kind for _, kind, _ in made} == set(mutants.KINDS)


TOY = {
    "mbx/__init__.py": "",
    "mbx/toy.py": (
        "LOW = 1\nif LOW != 1:\n    raise ImportError\n\n"
        "def checked(x, y):\n    return x - y\n\n"
        "def unchecked(x, y):\n    return abs(x * y)\n\n"
        "def even(x):\n    return -x * x\n"
    ),
    "tests/__init__.py": "",
    "tests/conftest.py": "",
    "tests/test_toy.py": (
        "from mbx import toy\n\n"
        "def test_checked():\n    assert toy.checked(5, 3) == 2\n\n"
        "def test_others():\n    assert toy.unchecked(1, 1) == 1 and toy.even(0) == 0\n"
    ),
    "tests/test_other.py": "def test_nothing():\n    raise RuntimeError('must not be run')\n",
    "tests/equivalent_mutants.toml": (
        '[["mbx/toy.py"]]\nfunction = "unchecked"\n'
        'line = "return abs(x * y)"\nbecomes = "return abs(x / y)"\nwhy = "y is 1"\n'
    ),
}


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "experiments.mutate", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_toy_checkout_is_judged_by_the_tests_that_call_what_changed(tmp_path):
    toy, out = tmp_path / "toy", tmp_path / "rows.jsonl"
    for name, text in TOY.items():
        (toy / name).parent.mkdir(parents=True, exist_ok=True)
        (toy / name).write_text(text)
    subprocess.run(["git", "init", "-q", str(toy)], check=True)
    common = [f"--root={toy}", f"--cache={tmp_path / 'cache'}", f"--out={out}"]
    done = mutants.mutants("mbx/toy.py", TOY["mbx/toy.py"])[0]
    before = {"key": done.key, **done._asdict(), "status": "broken", "by": "an earlier run"}
    out.write_text(json.dumps(before) + "\n")
    run(*common, "--module=toy")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    found = {(row["function"], row["new"]): row["status"] for row in rows}
    assert len(rows) == len(found) and rows[0] == before  # what was done is not done again
    assert found == {
        ("", "LOW = 2"): "broken",
        ("", "if LOW != 2:"): "broken",
        ("checked", "return x + y"): "killed",
        ("checked", "return x"): "killed",
        ("unchecked", "return abs(x / y)"): "survived",
        ("unchecked", "return abs(x)"): "survived",
        ("unchecked", "return abs(y)"): "survived",
        ("even", "return x * x"): "survived",
        ("even", "return -x / x"): "killed",
        ("even", "return (-x)"): "survived",
        ("even", "return x"): "survived",
    }
    assert {row["by"] for row in rows if row["function"] == "checked"} == {
        "tests/test_toy.py::test_checked"
    }
    assert (toy / "mbx/toy.py").read_text() == TOY["mbx/toy.py"]
    kept = {row["key"]: row for row in rows}
    moved = {key: row | {"line": 99} for key, row in kept.items()}
    gone = {f"{path} | checked": dict(rows[0], path=path) for path in ("mbx/toy.py", "mbx/x.py")}
    assert mutate.of_today(toy, moved | gone) == kept
    shown = run(*common, "--table")
    assert "| toy | 9 | 3 | 5 | 1 | 37.5% |" in shown and "Not counted: 2" in shown

    weak = (toy / "tests/test_toy.py").read_text()
    (toy / "tests/test_toy.py").write_text(weak.replace("even(0) == 0", "even(3) == -9"))
    run(*common, "--again")
    again = {row["new"]: row["status"] for row in map(json.loads, out.read_text().splitlines())}
    assert [again[f"return {x}"] for x in ("x * x", "(-x)", "x")] == ["killed"] * 3
    assert again["return abs(x)"] == "survived"


def test_rows_that_are_kept_as_csv_say_the_same(tmp_path):
    rows = {}
    for status, new in (("killed", 'f"a, {b}"'), ("survived", "x - 1"), ("survived", "x\n- 2")):
        row = dict(path="mbx/toy.py", line=3, function="f", kind="sign", old="x", new=new)
        key = f"mbx/toy.py | f | x | {new}"
        rows[key] = row | dict(status=status, by="", seconds=0.5, key=key, tried=["t"])
    known = {"mbx/toy.py | f | x | x - 1": "why"}
    mutation_table.keep(tmp_path / "kept.csv", rows, known)
    again = mutation_table.read(tmp_path / "kept.csv")
    assert again.keys() == rows.keys() and mutation_table.table(again, {}).splitlines()[2:4] == [
        "| toy | 3 | 1 | 1 | 1 | 50.0% |",
        "| all | 3 | 1 | 1 | 1 | 50.0% |",
    ]
    assert (
        mutation_table.table(rows, known).split("\n\n")[:2]
        == (mutation_table.table(again, {}).split("\n\n")[:2])
    )


def test_the_published_table_is_that_of_the_kept_rows():
    kept = mutation_table.read(ROOT / "docs/results/mutation.csv")
    table = mutation_table.table(kept, {}).partition("\n\n")[0]
    assert table in (ROOT / "docs/results/mutation.md").read_text()
    known = mutation_table.equivalents(ROOT)
    assert {key for key, row in kept.items() if row["status"] == "equivalent"} <= known.keys()


def test_tables_of_tests_name_files_that_there_are():
    files = [str(p.relative_to(ROOT / "tests")) for p in (ROOT / "tests").rglob("test_*.py")]
    for name, tests in mutate.TESTS.items():
        assert any(re.fullmatch(f"({tests}).py", file) for file in files), (name, tests)
        for one in tests.split("|") if "(" not in tests else []:
            assert any(re.fullmatch(f"{one}.py", file) for file in files), (name, one)


def test_every_line_that_is_called_equivalent_is_there():
    known = tomllib.loads((ROOT / "tests" / "equivalent_mutants.toml").read_text())
    for path, entries in known.items():
        text = (ROOT / path).read_text()
        lines = {line.strip() for line in text.splitlines()}
        for entry in entries:
            assert entry["line"] in lines, (path, entry["line"])
            name = entry["function"].rpartition(".")[2]
            assert not name or f"def {name}(" in text, (path, entry)
