"""The report of made-up runs, and a training that writes one."""

from __future__ import annotations

import base64
import json
import pathlib
import re

import numpy as np
import pytest

from mbx.agents.pictures import to_gif, to_png
from mbx.agents.tdmpc.settings import Env, Settings, Train
from mbx.analysis import charts, report, runs
from tests.analysis.made import write_run
from tests.browser import look_at

ROOT = pathlib.Path(__file__).parents[2]
EVIL = "<script>alert('x')</script>&\"'"


def make_run(path: pathlib.Path, seed: int = 0, name: str = "toy:point", **also) -> str:
    """Three intervals, two evaluations, nothing else but what `also` says to write."""
    clock = iter((9.0, 11.0, 12.0, 14.0, 15.0))
    rows = []
    for step in (100, 200, 300):
        values = {"loss/value": 1 / step, "grad_norm/model": 0.5, "fill": 0.1, "faults": 0.0}
        values |= {"episode/return": step + seed, "steps_per_second": 50.0}
        rows.append({"kind": "train", "step": step, **values, "seconds": next(clock)})
        if step > 100:
            measured = {"return_mean": 7.25 * step, "return_std": 0.5, "seconds": next(clock)}
            rows.append({"kind": "eval", "step": step, **measured})
    rows[2] |= also.pop("row", {})
    write_run(path, Settings(seed=seed, env=Env(name=name), train=Train(steps=300)), rows)
    for file, text in also.items():
        (path / file.replace("_", ".")).write_text(text)
    return str(path)


@pytest.fixture
def run(tmp_path):
    attempt = {"started": "2026-11-22T20:00:00Z", "ended": None, "to_step": None}
    attempt |= {"commit": "1a2b3c4", "machine": "x86_64, 2 cores", "versions": {"jax": "0.10.2"}}
    return make_run(
        tmp_path / "a", seed=3, run_json=json.dumps({"attempts": [attempt | {"outcome": None}]})
    )


def sections(text: str) -> dict[str, str]:
    found = re.findall(r"<section><h2>(.*?)</h2>(.*?)</section>", text, flags=re.DOTALL)
    return dict(found)


def cells(text: str, name: str) -> list[str]:
    """The values beside a name in a table, without marks."""
    row = re.search(rf"<tr><td>{re.escape(name)}</td>(.*?)</tr>", text)
    return [re.sub("<.*?>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", row[1])]


def test_each_attempt_says_how_it_ended(tmp_path):
    first = {"started": "2026-11-22T20:00:00Z", "ended": None, "from_step": 0, "outcome": None}
    last = {"started": "2026-11-22T23:40:13Z", "ended": "2026-11-22T23:40:13Z", "from_step": 400}
    text = json.dumps({"attempts": [first, last | {"outcome": "complete"}]})
    found = report.page([make_run(tmp_path / "a", run_json=text)])
    assert cells(found, "started") == ["2026-11-22T20:00:00Z"]
    assert cells(found, "ended") == ["2026-11-22T23:40:13Z"]
    (attempts,) = cells(found, "attempts")
    assert attempts == "from step 0: killed or running, from step 400: complete"


def test_every_section_says_what_the_run_holds(run):
    pathlib.Path(f"{run}/episode.gif").write_bytes(to_gif(np.zeros((2, 8, 8, 3), np.uint8)))
    pathlib.Path(f"{run}/curve.png").write_bytes(to_png(np.zeros((8, 8, 3), np.uint8)))
    found = sections(report.page([run]))
    summary = found["Summary"]
    assert cells(summary, "task") == ["toy:point"]
    assert cells(summary, "environment steps") == ["300"]
    assert cells(summary, "last evaluation") == ["2175 at 300"]
    assert cells(summary, "to compare") == ["nothing known"]
    assert cells(summary, "time") == ["15 s"]
    assert found["Warnings"] == "<p>None.</p>"
    captions = {
        name: re.findall(r"<figcaption>(.*?)(?:<br>.*?)?</figcaption>", text)
        for name, text in found.items()
    }
    assert captions["Learning"] == [
        "mean return of an evaluation",
        "return while training, with exploration",
    ]
    assert captions["Losses and gradients"] == ["loss/value", "grad_norm/model"]
    assert captions["Evaluations: all that was measured"] == ["return_std"]
    assert captions["Everything else that was logged"] == ["fill", "faults"]
    measured = found["Evaluations: all that was measured"]
    assert "standard deviation of the evaluation&#x27;s returns</small>" in measured
    # 9 s, 2 s, 2 s of intervals of which 2 are usual; evaluations took 1 s each.
    speed = found["Speed, and where time went"]
    assert cells(speed, "start and compilation") == ["7 s (47%)"]
    assert cells(speed, "training (with what is saved)") == ["6 s (40%)"]
    assert cells(speed, "evaluation") == ["2 s (13%)"]
    settings = found["Settings that are not the default"]
    assert cells(settings, "seed") == ["0", "3"]
    assert cells(settings, "env.name")[1] == "toy:point"
    assert len(re.findall("<tr>", settings)) == 4  # with the head and train.steps
    assert cells(found["Machine and versions"], "commit") == ["1a2b3c4"]
    assert cells(found["Machine and versions"], "versions") == ["jax 0.10.2"]
    film = found["Film and pictures"]
    with open(f"{run}/episode.gif", "rb") as file:
        assert f"data:image/gif;base64,{base64.b64encode(file.read()).decode()}" in film
    assert "curve.png" not in film


def test_several_runs_stand_side_by_side(run, tmp_path):
    other = make_run(tmp_path / "b", name="toy:ends", row={"return_mean": None, "faults": 2.0})
    text = report.page([run, other])
    found = sections(text)
    assert cells(found["Summary"], "task") == ["toy:point", "toy:ends"]
    assert cells(found["Settings that are not the default"], "seed") == ["0", "3", "0"]
    assert cells(found["Machine and versions"], "commit") == ["1a2b3c4", ""]
    assert text.count("b</span>") == 0 and found["Warnings"].count('class="warning"') == 2
    assert "b: 2 steps of the environment were not finite" in re.sub("<.*?>", "", found["Warnings"])
    assert "not finite at least once: return_mean" in found["Warnings"]
    lines = json.loads(
        re.search(r'data-lines="(.*?)"', found["Learning"])[1].replace("&quot;", '"')
    )
    assert [line["name"] for line in lines] == ["a", "b"]
    assert lines[0]["x"] == [200, 300] and lines[0]["y"] == [1450, 2175]
    assert lines[1]["x"] == [300]


def test_what_to_know_before_believing(tmp_path):
    path = make_run(tmp_path / "a")
    (tmp_path / "a" / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"kind": "eval", "step": step, "return_mean": value}) + "\n"
            for step, value in ((50, 0.0), (100, 10.0), (150, 4.0))
        )
    )
    found = runs.complaints(runs.read_run(path, "a"))
    assert found == [
        "it stopped at 150 of 300 steps",
        "the last evaluation (4) lies far below the best (10)",
    ]
    (tmp_path / "a" / "metrics.jsonl").write_text("")
    (tmp_path / "a" / "run.json").write_text('{"attempts": [{"outcome": "OSError"}, 3]}')
    assert runs.complaints(runs.read_run(path, "a")) == [
        "metrics.jsonl holds no row",
        "an attempt from None ended: OSError",
    ]
    assert "No evaluation yet." in report.page([path])
    (tmp_path / "run.json").write_text('{"attempts": [{"outcome": "another run"}]}')
    (tmp_path / "a" / "run.json").write_text('{"attem')
    assert runs.complaints(runs.read_run(path, "a")) == ["metrics.jsonl holds no row"]
    (tmp_path / "a" / "run.json").unlink()
    assert "another run" in runs.complaints(runs.read_run(path, "a"))[1]  # a seed of that one


def test_names_and_settings_are_no_markup(tmp_path):
    attempts = json.dumps({"attempts": [{"commit": EVIL, "outcome": EVIL}]})
    path = make_run(tmp_path / "a", name=EVIL, run_json=attempts, row={EVIL: 3.0, "loss" + EVIL: 1})
    text = report.page([path], [EVIL])
    assert text.count("<script>") == 1 and "alert('x')" not in text
    assert text.count("&lt;script&gt;alert(&#x27;x&#x27;)") > 5


def test_there_is_no_address_in_it(run):
    assert not re.search(r"https?:|//\w|url\(|@import|srcset", report.page([run]))


def test_a_resumed_run_counts_its_seconds_anew():
    rows = [
        {"kind": "train", "step": 1, "seconds": 50.0},
        {"kind": "train", "step": 2, "seconds": 5.0},
        {"kind": "train", "step": 3, "seconds": 7.0},
    ]
    config = dict(agent="tdmpc", env=dict(name="x:y"))
    run = runs.Run("a", "a", config, rows, [])
    parts = runs.times(run)
    assert parts["start and compilation"] == 50 + 3 and parts["evaluation"] == 0
    assert parts["training (with what is saved)"] == 4
    assert sum(parts.values()) == 57
    assert runs.times(runs.Run("a", "a", {}, [], [])) == {}


def test_thinned_lines_keep_ends_and_extremes():
    x = np.arange(10_000.0)
    y = np.sin(x / 50)
    y[1234], y[4321] = 9.0, np.nan
    steps, values = charts.thin(x, y)
    assert 250 < steps.size <= 300 and steps[0] == 0 and steps[-1] == 9999
    assert values.max() == 9 and np.isfinite(values).all()
    np.testing.assert_array_equal(values, y[steps.astype(int)])


def test_points_lie_where_they_belong():
    text = charts.chart("a", [charts.Line("l", 0, [0, 10], [0.0, 1.0])])
    path = re.search(r'class="line" style="stroke:var\(--line0\)" d="M([\d. L]+)"', text)[1]
    (x0, y0), (x1, y1) = [map(float, point.split()) for point in path.split("L")]
    assert (x0, x1) == (58, 350) and y0 > y1  # the plot's left and right edge; up is less
    assert y0 + y1 == 12 + 184  # the same margin below as above
    assert charts.chart("a", [charts.Line("l", 0, [1], [float("nan")])]) == ""


def test_names_tell_paths_apart():
    assert runs.short_names(["x/a/seed-0", "x/b/seed-0"]) == ["a/seed-0", "b/seed-0"]
    assert runs.short_names(["x/a"]) == ["a"]
    assert len(set(runs.short_names(["x/a", "x/a"]))) == 2


def test_seeds_of_one_run_are_its_runs(tmp_path):
    seeds = [make_run(tmp_path / "a" / f"seed-{i}", seed=i) for i in range(2)]
    assert runs.find_runs([str(tmp_path / "a")]) == seeds
    assert runs.find_runs(seeds[:1]) == seeds[:1]
    report.write([str(tmp_path / "a")], str(tmp_path / "new" / "r.html"))
    assert "seed-1</span>" not in (text := (tmp_path / "new" / "r.html").read_text())
    assert cells(sections(text)["Summary"], "seed") == ["0", "1"]
    (tmp_path / "a" / "run.json").write_text('{"attempts": [{"commit": "1a2b3c4"}]}')
    text = report.page([str(tmp_path / "a")])
    assert cells(sections(text)["Machine and versions"], "commit") == ["1a2b3c4", "1a2b3c4"]


def test_what_goes_wrong_with_a_report_ends_nothing(tmp_path, capsys):
    report.at_end(str(tmp_path / "absent"))
    assert "no report.html: FileNotFoundError" in capsys.readouterr().err
    path = make_run(tmp_path / "a")
    report.at_end(path)
    assert "<h2>Learning</h2>" in (tmp_path / "a" / "report.html").read_text()


@pytest.mark.slow
def test_a_browser_shows_it_without_a_word_and_without_the_network(run, tmp_path):
    pathlib.Path(f"{run}/episode.gif").write_bytes(to_gif(np.zeros((2, 8, 8, 3), np.uint8)))
    page = tmp_path / "report.html"
    report.write([run, make_run(tmp_path / "b", name=EVIL)], str(page))
    seen = look_at(page, tmp_path)
    assert seen.console == [] and seen.requests == set()
    assert '<div id="tip"' in seen.document  # the script ran to its end
    loud = tmp_path / "loud.html"  # what such a page would be caught at
    loud.write_text("<script>console.error('x')</script><img src='http://example.com/a.png'>")
    seen = look_at(loud, tmp_path)
    assert len(seen.console) >= 1 and "GET http://example.com/a.png" in seen.requests
