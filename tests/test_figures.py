"""Results as data: pictures and tables of the documents are what the tracked files give."""

from __future__ import annotations

import csv
import json
import pathlib
import re

import numpy as np
import pytest

from benchmarks import figures
from mbx.analysis import drawing
from mbx.commands import jobs

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
# Pages whose tables all come from the data.
MEASURED = ("suites", "dreamer", "empo", "ablations", "performance", "learning", "gallery")
# `devices` counts exchanges of programs and bytes that compilers told: typed in, no data.
NOTES = sorted({x.stem for x in (ROOT / "docs/notes").glob("*.md")} - {"README", "devices"})


@pytest.fixture(scope="module")
def manifest():
    return json.loads((RESULTS / "manifest.json").read_text())


def test_every_figure_and_table_is_what_the_data_gives():
    assert figures.out_of_date() == []


def test_every_picture_has_an_entry_and_is_shown(manifest):
    pictures = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "docs").rglob("*")
        if path.suffix in {".png", ".svg", ".gif", ".jpg"}
    }
    drawn = set(figures.layout()["figures"])
    assert not list((ROOT / "docs").rglob("*.html"))  # a command writes what it shows
    assert pictures == drawn | set(manifest["pictures"])
    shown = set()
    for page in figures.pages():
        for link in re.findall(r"!\[[^]]*\]\(([^)]+)\)", page.read_text()):
            shown.add((page.parent / link).resolve().relative_to(ROOT).as_posix())
    assert shown == pictures


def test_every_file_of_data_says_what_made_it(manifest):
    files = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("*.csv")}
    assert files == set(manifest["data"])
    for name, entry in manifest["data"].items():
        made = entry.get("made_by") or (
            entry["command"] and entry["commit"] and entry["date"] and entry["machine"]
        )
        assert entry["what"] and made, name


@pytest.mark.parametrize("name", [*MEASURED, *(f"../notes/{name}" for name in NOTES)])
def test_no_table_of_numbers_stands_beside_the_data(name):
    text = (RESULTS / f"{name}.md").read_text()
    names = re.findall(r"<!-- table: ([\w-]+) -->", text)
    assert set(names) <= set(figures.layout()["tables"])
    outside = figures._MARKED.sub("", text)
    assert not re.findall(r"^\|.*\d.*\|$", outside, flags=re.MULTILINE)


def headline() -> set[str]:
    """Means of the fifteen tasks at 100k, ours and published, as the front page writes them."""
    rows, published = figures.read("default.csv"), figures.load_published()
    panel = figures.layout()["figures"]["docs/figures/overview.svg"]["panels"][0]
    own = figures.mean_of_tasks(figures.matching(rows, panel["series"][0]["where"]), panel["tasks"])
    found = [dict(zip(own.steps, own.values, strict=True))[100_000]]
    for agent in ("simbav2_utd8", "bro_utd10", "tdmpc2", "dreamerv3"):
        found.append(figures.mean_published(published, panel["tasks"], agent)[100_000][0])
    return {f"{value:.0f}" for value in found}


def times_as_fast() -> set[str]:
    """The least and the largest ratio to PyTorch."""
    ratios = []
    for name in ("tables/performance_compiled.csv",):
        with open(RESULTS / name, newline="") as file:
            head, *body = csv.reader(file)
        columns = [i for i, title in enumerate(head) if title == "times as fast"]
        ratios += [float(line[i]) for line in body for i in columns]
    return {f"{min(ratios):.1f}", f"{max(ratios):.1f}"}


def test_ratios_are_to_the_faster_of_eager_and_compiled_pytorch():
    _, *body = csv.reader((RESULTS / "tables/performance_compiled.csv").read_text().splitlines())
    assert len(body) >= 3
    for _, *cells in body:
        for theirs, own, ratio in (cells[:3], cells[3:]):
            fastest = min(float(x) for x in theirs.split(", "))
            np.testing.assert_allclose(float(ratio), fastest / float(own), rtol=0.02)


def test_every_number_of_the_front_page_comes_from_somewhere():
    """Beside code and links: what was measured, and what the package declares."""
    text, code = (ROOT / "README.md").read_text(), r"^```.*?^```|^    .*?$|`[^`\n]*`|\]\([^)]*\)"
    prose = re.sub(code, "", text, flags=re.MULTILINE | re.DOTALL)
    learning = (RESULTS / "learning.md").read_text()
    quickstart = (ROOT / "docs/quickstart.md").read_text()
    sources = {
        *headline(),
        *times_as_fast(),
        *re.search(r"at (50k) from ([0-9]+) to ([0-9]+)", learning).groups(),
        *re.search(r"([0-9]+) thousand parameters.*?has ([0-9]+) million", learning).groups(),
        *re.search(r"of (100k) steps takes ([0-9]+) to ([0-9]+) minutes", learning).groups(),
        re.search(r"take about ([0-9]+) minutes on two cores", quickstart)[1],
        *(row["environment steps"] for row in figures.read("tables/gallery.csv")),
        *re.findall(r"Python :: ([0-9.]+)\n", (ROOT / "setup.cfg").read_text()),
        str(round(len((ROOT / "examples/single_file_tdmpc.py").read_text().splitlines()), -2)),
        *re.findall(r"arxiv.org/abs/([0-9.]+)", text),
    }
    found = {x.rstrip(",.") for x in re.findall(r"(?<![\w.-])[0-9][0-9,.]*\w*", prose)}
    assert found - sources == set() and headline() | times_as_fast() < found


def test_every_table_stands_in_some_page():
    text = "".join(page.read_text() for page in figures.pages())
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == set(figures.layout()["tables"])


def test_published_values_are_joined_by_nothing():
    """The picture of a published curve is as many markers as were published up to its end."""
    path = "docs/figures/dreamer.svg"
    assert "published: DreamerV3" in (ROOT / path).read_text()
    from matplotlib import pyplot as plt

    panel = next(p for p in figures.layout()["figures"][path]["panels"] if "published" in p)
    with drawing.style("test"):
        axes = plt.figure().add_subplot()
        figures.draw_panel(axes, panel)
        (bars,) = axes.containers
        assert bars.lines[0].get_linestyle() == "None"
        np.testing.assert_array_equal(bars.lines[0].get_xdata(), [100_000, 200_000])
        np.testing.assert_allclose(bars.lines[0].get_ydata(), [676.7, 795.6])


@pytest.fixture
def data(tmp_path, monkeypatch):
    """A folder of results with two seeds of one task."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    lines = ["task,setting,seed,step,value"]
    lines += [f"t,s,{seed},{step},{seed + step / 10}" for step in (20, 10) for seed in (0, 1)]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_table_by_hand(data):
    columns = [
        {"head": "both", "steps": [10, 20]},
        {"head": "mean", "steps": [20], "mean": 1},
        {"head": "whole", "steps": [10], "digits": 0},
        {"head": "none", "steps": [30]},
        {"head": "each", "steps": [20, 10], "each": True},
        {"head": "last", "field": "value", "format": ".3f"},
    ]
    spec = {"data": "a.csv", "head": ["name"], "columns": columns, "after": ["end"]}
    rows = [{"label": ["x|y"], "where": {"setting": "s"}, "after": ["z"]}]
    assert figures.table(spec | {"rows": rows}).splitlines() == [
        "| name | both | mean | whole | none | each | last | end |",
        "|---|---|---|---|---|---|---|---|",
        "| x\\|y | 1.0, 2.0 2.0, 3.0 | 2.5 | 1, 2 |  | 1.50, 2.50 | 2.000 | z |",
    ]
    with pytest.raises(ValueError, match=r"no row with \{'setting': 'q'\}"):
        figures.table(spec | {"rows": [{"label": ["x"], "where": {"setting": "q"}}]})
    with pytest.raises(ValueError, match=r"has 7 cells under 8 heads"):
        figures.table(spec | {"rows": [{"label": ["x"], "where": {}}]})


def test_a_table_with_published_values_and_means(tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    rows = ["a,0,10,1", "a,1,10,4", "b,0,10,5", "b,0,20,8"]
    (tmp_path / "a.csv").write_text("task,seed,step,value\n" + "\n".join(rows) + "\n")
    published = {("a", "p"): {10: (1, 0, 2), 20: (9, 9, 9)}, ("b", "p"): {10: (4, 3, 5)}}
    monkeypatch.setattr(figures, "load_published", lambda: published)
    columns = [
        {"head": "10", "steps": [10], "mean": 1},
        {"head": "p at 10", "published": "p", "steps": [10], "mean": 0},
    ]
    spec = {"data": "a.csv", "head": ["task"], "columns": columns}
    spec["rows"] = [{"label": [t], "where": {"task": t}} for t in ("a", "b")]
    assert figures.table(spec | {"mean_of_rows": ["mean"]}).splitlines() == [
        "| task | 10 | p at 10 |",
        "|---|---|---|",
        "| a | 2.5 | 1 |",
        "| b | 5.0 | 4 |",
        "| mean | 3.8 | 2 |",  # (2.5 + 5) / 2, whatever a task's seeds; (1 + 4) / 2
    ]


def test_methods_beside_the_runs_by_hand(tmp_path, monkeypatch):
    """Tasks are resampled in pairs: a alone 5, b alone 9 to 29 by which of its seeds are drawn."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    ours = ["a,s,0,9,4", "a,s,0,20,10", "b,s,0,9,8", "b,s,0,20,30", "b,s,1,20,50", "b,t,0,20,0"]
    (tmp_path / "a.csv").write_text("task,setting,seed,step,value\n" + "\n".join(ours) + "\n")
    theirs = ["a,p,0,20,5", "b,p,0,20,21", "c,p,0,20,99", "b,p,0,9,7"]
    (tmp_path / "p.csv").write_text("task,agent,seed,step,value\n" + "\n".join(theirs) + "\n")
    spec = {"data": "a.csv", "where": {"setting": "s"}, "published": "p.csv"}
    spec |= {"tasks": ["a", "b"], "steps": [9, 20], "head": ["m", "9", "20", "middle", "more"]}
    spec["methods"] = [{"label": ["us"]}, {"label": ["them"], "agent": "p"}]
    assert figures.table(spec).splitlines() == [
        "| m | 9 | 20 | middle | more |",
        "|---|---|---|---|---|",
        "| us | 6 | 25 | 25 |  |",
        "| them |  | 13 | 13 | +12 (+5 to +29) |",
    ]


def test_a_mean_over_tasks_by_hand(tmp_path, monkeypatch):
    """Tasks count alike whatever their seeds; a step that one lacks is left out."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    rows = ["a,0,100,1", "a,0,200,3", "a,0,300,5", "b,0,100,10", "b,1,100,20", "b,0,201,30"]
    rows += ["b,1,200,50", "b,0,300,9", "c,0,300,7"]
    (tmp_path / "a.csv").write_text("task,seed,step,value\n" + "\n".join(rows) + "\n")
    read = figures.read("a.csv")
    steps, values = figures.mean_of_tasks(read, ["a", "b"])
    np.testing.assert_array_equal(steps, [100, 200])  # b's second seed was not evaluated at 300
    np.testing.assert_array_equal(values, [(1 + 15) / 2, (3 + 40) / 2])
    with pytest.raises(ValueError, match="no step at which all of"):
        figures.mean_of_tasks([r for r in read if r["step"] != "300"] + read[-1:], ["a", "c"])
    published = {("a", "x"): {1: (2, 1, 3), 2: (4, 0, 9)}, ("b", "x"): {2: (7, 6, 8), 3: (1, 1, 1)}}
    assert figures.mean_published(published, ["a", "b"], "x") == {2: (5.5, 5.5, 5.5)}


def test_the_mean_panel_draws_the_mean():
    """The front page's first panel: published means of 100k, the table's own row, and its seeds."""
    from matplotlib import pyplot as plt

    panel = figures.layout()["figures"]["docs/figures/overview.svg"]["panels"][0]
    assert len(panel["tasks"]) == 15
    with drawing.style("test"):
        axes = plt.figure().add_subplot()
        figures.draw_panel(axes, panel)
        found = [bars.lines[0].get_ydata()[0] for bars in axes.containers]
        lines = [x for x in axes.lines if x.get_marker() == "."]
    np.testing.assert_allclose(found, [753.4, 751.5, 680.0, 510.3, 433.3], atol=0.5)
    (label,) = [x.get_label() for x in axes.lines if "mbx" in x.get_label()]
    mean = dict(zip(lines[0].get_xdata(), lines[0].get_ydata(), strict=True))
    assert len(lines) == 1 and label.endswith("(11 tasks with 1 seed, 4 with 3)")
    at = [mean[step] for step in (10_000, 30_000, 100_000)]
    np.testing.assert_allclose(at, [454, 625, 761], atol=0.51)


def test_a_page_is_filled_between_its_marks(data):
    (data / "b.csv").write_text("a,b\n1,2\n")
    page = "x\n<!-- table: b -->\n\nold\n\n<!-- end of table -->\ny | 1 |\n"
    filled = figures.fill(page, {"tables": {"b": {"cells": "b.csv"}}})
    assert filled == page.replace("old\n", "| a | b |\n|---|---|\n| 1 | 2 |\n")
    known = {"tables": {"b": {"cells": "b.csv"}}}
    assert figures.fill(page.replace("old\n\n", ""), known) == filled
    assert figures.fill(filled, known) == filled
    with pytest.raises(ValueError, match=r"table 'b' is not in"):
        figures.fill(page, {"tables": {}})


def test_comparisons_in_words_are_computed(tmp_path, monkeypatch):
    """A run more that overlaps changes the sentence; a run in two files counts once."""
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    head = "task,setting,seed,step,value\n"
    rows = ["t,new,0,10,5", "t,new,1,10,4", "t,old,0,10,3", "t,old,1,10,1", "t,old,1,20,9"]
    (tmp_path / "a.csv").write_text(head + "\n".join(rows) + "\n")
    (tmp_path / "b.csv").write_text(head + "t,x,0,10,3\nt,y,0,10,4.4\n")
    one, other = ([{"data": "a.csv", "where": {"setting": s}}] for s in ("new", "old"))
    again = [{"data": "b.csv", "where": {"setting": s}} for s in ("x", "y")]
    spec = {"one": one, "other": [*other, again[0]], "step": 10}
    words = "4 to 5 (2 runs) against 1 to 3 (2 runs): every run of the first is {} every run of "
    assert figures.claim(spec, {}) == words.format("above") + "the second"
    below = figures.claim(spec | {"one": other, "other": one}, {})
    assert below.endswith("every run of the first is below every run of the second")
    overlap = figures.claim(spec | {"other": [*other, *again]}, {})
    assert overlap == "4 to 5 (2 runs) against 1 to 4 (3 runs): the ranges overlap"

    published = {("t", "p"): {10: (4, 0, 9)}, ("u", "p"): {10: (0.5, 0, 1)}}
    monkeypatch.setattr(figures, "load_published", lambda: published)
    (tmp_path / "a.csv").write_text(head + "t,new,0,10,3\nt,new,1,10,4\nu,new,0,10,0.5\n")
    lines = [{"label": [name], "where": {"task": name}} for name in ("t", "u")]
    tables = {"all": {"data": "a.csv", "where": {"setting": "new"}, "rows": lines}}
    spec = {"table": "all", "published": "p", "step": 10}
    assert figures.claim(spec, tables) == "at or above it on 1 of 2 tasks; below: t (4, 4)"
    page = "mbx is <!-- claim: c -->?<!-- end of claim -->."
    known = {"tables": tables, "claims": {"c": spec}}
    assert figures.fill(page, known).startswith("mbx is <!-- claim: c -->at or above it on 1")
    with pytest.raises(ValueError, match="claim 'c' is not in"):
        figures.fill(page, {"tables": {}})


def test_every_claim_stands_in_some_page_and_no_page_compares_seeds_by_hand():
    text = "".join(page.read_text() for page in figures.pages())
    assert set(re.findall(r"<!-- claim: ([\w-]+) -->", text)) == set(figures.layout()["claims"])
    assert not re.search(r"all \w+ seeds (are )?past all|all three seeds of one", text)


def test_the_headline_names_its_advantage_and_its_seeds():
    """Solved training episodes end early in the runs of dm_control: every page says so."""
    for path, figure in figures.layout()["figures"].items():
        if path.split("/")[-1] in ("overview.svg", "dmc15.svg"):
            assert "train.reset_solved" in figure["note"]
            assert "rate of 3e-4" not in str(figure)
    for page in ("README.md", "docs/results/learning.md"):
        assert "train.reset_solved" in (ROOT / page).read_text(), page
    learning = (RESULTS / "learning.md").read_text()
    assert "from 646 to 689" in learning and "One seed on eleven tasks" in learning


def test_a_figure_follows_both_themes_and_its_data(data):
    series = [{"label": "of s", "where": {"setting": "s"}}]
    panel = {"title": "A task", "data": "a.csv", "where": {"task": "t"}, "series": series}
    figure = {"title": "All <of> it", "panels": [panel | {"best": 5}]}
    first = figures.draw("figure.svg", figure)
    assert first == figures.draw("figure.svg", figure)
    for words in ("A task", "of s (2 seeds)", "best possible", "environment steps"):
        assert f"{words}</text>" in first, words
    for words in ("Lines show the mean of 2 seeds (thin", "Shade: range"):
        assert words in first, words
    assert "<title>All &lt;of&gt; it</title>" in first
    assert "prefers-color-scheme: dark" in first and "var(--ink)" in first
    assert not re.search(r"(fill|stroke): #", first.partition("</style>")[2])  # all by theme
    (data / "a.csv").write_text((data / "a.csv").read_text().replace("2.0", "2.5"))
    assert figures.digest(figure) not in first


def test_a_line_of_a_file_of_its_own(data):
    rows = "task,setting,seed,step,value\nt,s,0,10,7\nt,other,0,10,1\nu,s,0,10,2\n"
    (data / "own.csv").write_text(rows)
    own = {"label": "elsewhere", "data": "own.csv", "where": {"setting": "s"}}
    series = [{"label": "of s", "where": {"setting": "s"}}, own]
    panel = {"title": "A task", "data": "a.csv", "where": {"task": "t"}, "series": series}
    assert [row["value"] for row in figures.rows_of(panel, own)] == ["7"]
    assert {row["seed"] for row in figures.rows_of(panel, series[0])} == {"0", "1"}
    figure = {"title": "Both", "panels": [panel]}
    drawn = figures.draw("figure.svg", figure)
    for words in ("elsewhere", "of s (2 seeds)", "1 of 2 lines show one seed", "(1 seed)"):
        assert words in drawn, words
    (data / "own.csv").write_text(rows.replace("7", "8"))
    assert figures.digest(figure) not in drawn


def test_rows_as_a_file(tmp_path):
    jobs.write_rows(str(tmp_path / "new" / "a.csv"), [{"a": "x", "b": 1 / 3, "c": 2}])
    with open(tmp_path / "new" / "a.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [{"a": "x", "b": "0.333333", "c": "2"}]
