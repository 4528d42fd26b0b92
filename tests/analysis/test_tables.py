"""Groups of made-up runs, scores and statistics by hand and by enumeration, written tables."""

from __future__ import annotations

import csv
import itertools
import json
import math
import pathlib

import numpy as np
import pytest
import scipy.stats

from mbx.agents.dreamer.settings import Settings as Dreamer
from mbx.agents.tdmpc.settings import Settings
from mbx.analysis import runs as runs_
from mbx.analysis import tables
from mbx.analysis.curves import draw_runs
from mbx.analysis.runs import Group
from tests.analysis.made import write_run


def run(path: pathlib.Path, values=(), *, settings=None, **changes) -> str:
    """A run directory with evaluations at 10, 20, …."""
    rows = [
        {"kind": "eval", "step": 10 * i + 10, "return_mean": v, "seconds": 2.0 + i}
        for i, v in enumerate(values)
    ]
    return write_run(path, settings or Settings(), rows, **changes)


def named(found) -> dict[tuple[str, str], list[str]]:
    return {(g.task, g.settings): [pathlib.Path(x).name for x in g.runs] for g in found}


TASK = "gymnax:Pendulum-v1"


def test_runs_are_grouped_by_the_settings_that_differ(tmp_path):
    runs = [
        run(tmp_path / "a", optimizer__learning_rate=1e-4, seed=1),
        run(tmp_path / "b", optimizer__learning_rate=3e-4, seed=1, checkpoint__keep=9),
        run(
            tmp_path / "c", optimizer__learning_rate=1e-4, seed=2, log__wandb="x", eval__episodes=7
        ),
    ]
    assert named(runs_.group(runs)) == {
        (TASK, "optimizer.learning_rate=0.0001"): ["a", "c"],
        (TASK, "optimizer.learning_rate=0.0003"): ["b"],
    }
    assert named(runs_.group(runs[:1] + runs[2:])) == {(TASK, ""): ["a", "c"]}


def test_agents_tasks_and_arguments_of_the_environment_make_groups(tmp_path):
    runs = [
        run(tmp_path / "a", env__kwargs={"leak": 0.1}),
        run(tmp_path / "b"),
        run(tmp_path / "c", settings=Dreamer()),
        run(tmp_path / "d", env__name="x:y"),
    ]
    assert named(runs_.group(runs)) == {
        (TASK, "tdmpc, env.kwargs.leak=0.1"): ["a"],
        (TASK, "tdmpc, env.kwargs.leak not given"): ["b"],
        ("gymnax:CartPole-v1", "dreamer"): ["c"],
        ("x:y", "tdmpc, env.kwargs.leak not given"): ["d"],
    }


def test_a_setting_that_an_older_run_lacks_makes_no_group(tmp_path):
    runs = [run(tmp_path / name) for name in "ab"]
    path = tmp_path / "a" / "config.json"
    config = json.loads(path.read_text())
    del config["loss"]["rho"]
    path.write_text(json.dumps(config))
    assert len(runs_.group(runs)) == 1


def test_runs_are_found_as_seeds_of_one_and_in_folders(tmp_path):
    for name in ("seed-10", "seed-2"):
        run(tmp_path / "many" / name)
    run(tmp_path / "all" / "x")
    run(tmp_path / "all" / "y" / "seed-0")
    run(tmp_path / "all" / "z" / "other")  # no seed of z
    (tmp_path / "all" / "curves.csv").write_text("")
    found = runs_.find_runs([str(tmp_path / "many"), str(tmp_path / "all")])
    assert [str(pathlib.Path(x).relative_to(tmp_path)) for x in found] == [
        "many/seed-2",
        "many/seed-10",
        "all/x",
        "all/y/seed-0",
    ]
    with pytest.raises(FileNotFoundError, match="absent holds no run"):
        runs_.find_runs([str(tmp_path / "absent")])


def test_labels_group_instead(tmp_path):
    runs = [run(tmp_path / name) for name in "abc"]
    assert named(runs_.group(runs, ["u", "v", "u"])) == {
        (TASK, "u"): ["a", "c"],
        (TASK, "v"): ["b"],
    }


@pytest.fixture
def two(tmp_path) -> list[Group]:
    """Two settings on two tasks, three seeds each: at step 20 the numbers below."""
    found = []
    for task, one, other in (("t:a", (1, 2, 6), (3, 2, 9)), ("t:b", (5, 5, 5), (4, 4, 6))):
        for name, values in (("x=1", one), ("x=2", other)):
            paths = [
                run(tmp_path / f"{task}{name}{i}", [0, v], env__name=task)
                for i, v in enumerate(values)
            ]
            found.append(Group(task, name, tuple(paths)))
    return found


def test_scores_are_those_by_hand(two):
    table = tables.scores(two)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    assert [(r["task"], r["settings"], r["seeds"]) for r in rows] == [
        ("t:a", "x=1", 3),
        ("t:a", "x=2", 3),
        ("t:b", "x=1", 3),
        ("t:b", "x=2", 3),
        ("all tasks", "x=2", 6),
    ]
    assert [r["mean at 20"] for r in rows[:4]] == pytest.approx([3, 14 / 3, 5, 14 / 3])
    assert [r["IQM"] for r in rows[:4]] == pytest.approx([3, 14 / 3, 5, 14 / 3])  # of three: all
    assert rows[0]["IQM low"] == 1.0 and rows[0]["IQM high"] == 6.0
    assert rows[2]["IQM low"] == rows[2]["IQM high"] == 5.0
    better = [r["P(better than x=1)"] for r in rows]
    # Pairs of (3, 2, 9) with (1, 2, 6): 3 beats two, 2 beats one and ties one, 9 beats three.
    a, b = 6.5 / 9, 3 / 9
    assert math.isnan(better[0]) and math.isnan(better[2])
    assert [better[1], better[3], better[4]] == pytest.approx([a, b, (a + b) / 2])
    assert rows[4]["P low"] < better[4] < rows[4]["P high"]
    assert rows[1]["mean of all evaluations"] == pytest.approx(14 / 6)
    assert rows[1]["s a run"] == 3.0


def test_unfinished_runs_do_not_count_and_one_seed_has_no_interval(two):
    a, b = two[:2]
    one = tables.scores([a._replace(runs=a.runs[:1]), b], step=20)
    cells = dict(zip(one.columns, one.rows[0], strict=True))
    assert "task" not in cells and cells["mean at 20"] == 1 and math.isnan(cells["IQM low"])
    few = tables.scores([a, b], step=20)  # three seeds of a kind, where resampling says nothing
    cells = dict(zip(few.columns, few.rows[1], strict=True))
    assert cells["P(better than x=1)"] == 6.5 / 9 and math.isnan(cells["P low"])
    later = tables.scores([a, b], step=100)
    assert [row[1] for row in later.rows] == [0, 0]
    with pytest.raises(ValueError, match="metric 'eval/absent'"):
        tables.scores([a], metric="eval/absent")


TABLE = tables.Table(("a_b", "n", "x"), (("p=1e-4 | q", 3, 0.123456), ("50 %", 4, math.nan)))


def test_a_table_in_three_formats(tmp_path):
    assert tables.render(TABLE, "md") == (
        "| a_b | n | x |\n|---|---|---|\n| p=1e-4 \\| q | 3 | 0.1235 |\n| 50 % | 4 |  |\n"
    )
    assert list(csv.reader(tables.render(TABLE, "csv").splitlines())) == [
        ["a_b", "n", "x"],
        ["p=1e-4 | q", "3", "0.123456"],
        ["50 %", "4", ""],
    ]
    tables.write(str(tmp_path / "new" / "t.tex"), TABLE)
    assert (tmp_path / "new" / "t.tex").read_text() == (
        "\\begin{tabular}{lrr}\n\\hline\na\\_b & n & x \\\\\n\\hline\n"
        "p=1e-4 | q & 3 & 0.1235 \\\\\n50 \\% & 4 &  \\\\\n\\hline\n\\end{tabular}\n"
    )
    with pytest.raises(ValueError, match=r"format 'doc': choose one of \['csv', 'md', 'tex'\]"):
        tables.write(str(tmp_path / "t.doc"), TABLE)


def test_curves_are_drawn_on_axes_that_are_given_back(tmp_path):
    import matplotlib.pyplot as plt

    runs = [
        run(tmp_path / f"{i}", [i, 2 * i], optimizer__learning_rate=rate, seed=i)
        for i, rate in enumerate((1e-4, 1e-4, 3e-4))
    ]
    axes = plt.subplots()[1]
    found = draw_runs([str(tmp_path)], axes, title="of all")
    assert found is axes and axes.get_title() == "of all"
    assert axes.get_xlabel().startswith("environment steps") and "eval/re" in axes.get_ylabel()
    assert axes.get_legend_handles_labels()[1] == [
        "optimizer.learning_rate=0.0001 (2 seeds)",
        "optimizer.learning_rate=0.0003",
        "solved",
    ]
    np.testing.assert_allclose(axes.lines[2].get_ydata()[[0, -1]], [0.5, 1.0])  # the mean
    plt.close(axes.figure)
    axes = draw_runs(runs[:2])
    assert axes.get_legend_handles_labels()[1] == [f"tdmpc {TASK} (2 seeds)", "solved"]
    plt.close(axes.figure)


@pytest.mark.parametrize("sizes", [(1,), (3, 1), (4, 4), (5, 3, 2), (1, 1, 1)])
def test_the_interquartile_mean_is_the_trimmed_mean_of_all_runs(sizes):
    rng = np.random.default_rng(sum(sizes))
    scores = [rng.normal(size=n) for n in sizes]
    wanted = scipy.stats.trim_mean(np.concatenate(scores), 0.25)
    assert tables.interquartile_mean(scores) == pytest.approx(wanted)


def test_every_task_weighs_the_same_in_the_mean():
    assert tables.mean_of_tasks([[1.0, 3.0, 5.0], [10.0]]) == 6.5


def test_the_bootstrap_draws_seeds_within_tasks():
    # All 2^2 * 3^3 resamples, enumerated: seeds of one task never stand in for another's.
    scores = [np.array([0.0, 1.0]), np.array([10.0, 20.0, 60.0])]
    exact = [
        np.mean([np.mean(a), np.mean(b)])
        for a in itertools.product(scores[0], repeat=2)
        for b in itertools.product(scores[1], repeat=3)
    ]
    for level in (0.5, 0.9):
        wanted = np.percentile(exact, [50 * (1 - level), 50 * (1 + level)])
        found = tables.stratified_bootstrap(scores, tables.mean_of_tasks, draws=6_000, level=level)
        np.testing.assert_allclose(found, wanted, atol=0.6)  # the grid of sums is that fine


def test_intervals_are_those_of_their_documented_defaults():
    scores = [np.random.default_rng(0).normal(size=5), np.arange(4.0)]
    told = dict(draws=2000, level=0.95, seed=0)
    wanted = tables.stratified_bootstrap(scores, tables.interquartile_mean, **told)
    assert (
        tables.stratified_bootstrap(scores) == wanted != tables.stratified_bootstrap(scores, seed=1)
    )
    others = [scores[0] + 0.3, scores[1] - 0.5]
    told["draws"] = 50
    wanted = tables.improvement_interval(scores, others, **told)
    assert tables.improvement_interval(scores, others, draws=50) == wanted
    wanted = tables.stratified_bootstrap(
        [*scores, *others], lambda x: tables.probability_of_improvement(x[:2], x[2:]), **told
    )
    assert tables.improvement_interval(scores, others, draws=50) == wanted


def test_one_seed_has_no_interval():
    assert tables.stratified_bootstrap([[1.0, 2.0], [3.0]]) is None


def test_the_probability_of_improvement_is_the_mann_whitney_statistic_over_pairs():
    rng = np.random.default_rng(0)
    ours = [rng.integers(0, 9, n).astype(float) for n in (4, 7)]
    theirs = [rng.integers(0, 9, n).astype(float) for n in (5, 3)]
    wanted = [
        scipy.stats.mannwhitneyu(x, y).statistic / (x.size * y.size)
        for x, y in zip(ours, theirs, strict=True)
    ]
    assert tables.probability_of_improvement(ours, theirs) == pytest.approx(np.mean(wanted))


def test_the_interval_of_the_improvement_draws_both_kinds_again():
    ours, theirs = [np.array([0.0, 2.0, 7.0])], [np.array([1.0, 3.0, 4.0])]
    exact = [
        tables.probability_of_improvement([a], [b])
        for a in itertools.product(ours[0], repeat=3)
        for b in itertools.product(theirs[0], repeat=3)
    ]
    for level in (0.5, 0.9):
        wanted = np.percentile(exact, [50 * (1 - level), 50 * (1 + level)])
        found = tables.improvement_interval(ours, theirs, draws=6_000, level=level)
        np.testing.assert_allclose(found, wanted, atol=0.12)  # one pair of nine
    assert tables.improvement_interval(ours, [[1.0]]) is None
