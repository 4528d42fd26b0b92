"""Learning curves of made-up runs: reading, aggregating, drawing, the command."""

from __future__ import annotations

import os
import pathlib

import numpy as np
import pytest
from matplotlib.figure import Figure

from mbx import cli
from mbx.agents.tdmpc.settings import Env, Settings
from mbx.analysis.curves import (
    Curve,
    aggregate,
    draw_published,
    draw_runs,
    draw_seeds,
    load_curve,
    load_reference,
    plot_runs,
)
from tests.analysis.made import write_run


def make_run(path: pathlib.Path, steps, values, env: str = "toy:point", seed: int = 0) -> str:
    """A run directory with evaluations and a train row, which is not one."""
    rows = [{"kind": "train", "step": 1, "return_mean": 1e9}]
    rows += [
        {"kind": "eval", "step": int(s), "return_mean": v}
        for s, v in zip(steps, values, strict=True)
    ]
    return write_run(path, Settings(seed=seed, env=Env(name=env)), rows)


@pytest.fixture
def runs(tmp_path):
    """Three seeds with grids of their own, and one run of another environment."""
    seeds = [
        make_run(tmp_path / f"s{i}", [0, 50 + i, 100], [0.0, 4.0 + i, 10.0 + i], seed=i)
        for i in range(3)
    ]
    return [*seeds, make_run(tmp_path / "other", [0, 100], [1.0, 2.0], env="toy:ends")]


def test_a_curve_holds_one_metric_of_one_kind(tmp_path):
    run = make_run(tmp_path / "run", [0, 10, 20], [1.0, None, 3.0])
    curve = load_curve(run)
    np.testing.assert_array_equal(curve.steps, [0, 20])
    np.testing.assert_array_equal(curve.values, [1, 3])
    assert load_curve(run, "train/return_mean").values.tolist() == [1e9]
    assert load_curve(run, "eval/absent").steps.shape == (0,)


def test_returns_to_compare_with_are_lines_where_there_is_one_task(tmp_path):
    first, second = (
        make_run(tmp_path / name, [0, 9], [1.0, 2.0], env=f"gymnax:{name}")
        for name in ("CartPole-v1", "Acrobot-v1")
    )
    rows = "step,environment,task,return,length\n9,0,,21,21\n"
    (tmp_path / "CartPole-v1" / "training_episodes.csv").write_text(rows)

    def drawn(*paths):
        lines = [x for x in draw_runs(paths).lines if x.get_linestyle() == ":"]
        return {line.get_label(): line.get_ydata()[0] for line in lines}

    assert drawn(first) == {"random actions": 21, "solved": 475}
    assert drawn(first, second) == {}
    name = "gymnax:CartPole-v1"
    third = make_run(tmp_path / "third", [0, 9], [1.0, 2.0], env=name)
    (tmp_path / "third" / "training_episodes.csv").write_text(rows.replace("21,21", "31,31"))
    fourth = make_run(tmp_path / "fourth", [0, 9], [1.0, 2.0], env=name)
    assert drawn(first, third, fourth) == {"random actions": 26, "solved": 475}


def test_seeds_are_interpolated_onto_the_steps_they_share():
    a = Curve(np.array([0.0, 10.0, 20.0]), np.array([0.0, 10.0, 20.0]))
    b = Curve(np.array([4.0, 24.0]), np.array([8.0, 28.0]))  # 4 above a everywhere
    steps, mean, low, high = aggregate([a, b], points=5)
    np.testing.assert_allclose(steps, [4, 8, 12, 16, 20])
    np.testing.assert_allclose(mean, steps + 2)
    np.testing.assert_allclose(low, steps)
    np.testing.assert_allclose(high, steps + 4)


def test_the_band_of_many_seeds_is_an_interval_of_the_mean():
    values = np.random.default_rng(0).normal(5.0, 1.0, 20)
    curves = [Curve(np.array([0.0, 1.0]), np.array([v, v])) for v in values]
    _, mean, low, high = aggregate(curves)
    error = values.std() / np.sqrt(len(values))
    np.testing.assert_allclose(mean, values.mean())
    # Within sampling error of the 1.96 standard errors of the normal approximation.
    np.testing.assert_allclose((high - low) / 2, 1.96 * error, rtol=0.1)


def test_curves_without_a_common_step_are_refused():
    with pytest.raises(ValueError, match=r"share no steps \(0..10, 20..30\)"):
        aggregate(
            [Curve(np.array([0.0, 10.0]), np.zeros(2)), Curve(np.array([20.0, 30.0]), np.zeros(2))]
        )


@pytest.mark.parametrize(
    ("text", "mean", "low", "high"),
    [
        ("step,mean,lcb,ucb\n0,1,0,2\n100,5,4,6\n", [1, 5], [0, 4], [2, 6]),
        ("step,reward,seed\n0,0,1\n100,4,1\n100,6,2\n0,2,2\n", [1, 5], [0, 4], [2, 6]),
    ],
)
def test_both_forms_of_reference_are_read(tmp_path, text, mean, low, high):
    path = tmp_path / "published.csv"
    path.write_text(text)
    for found, wanted in zip(load_reference(str(path)), ([0, 100], mean, low, high), strict=True):
        np.testing.assert_allclose(found, wanted)


def test_published_seeds_are_averaged_only_where_all_were_published(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text(  # seed 2 holds two runs at 100, which count as one
        "step,reward,seed\n0,0,1\n100,4,1\n300,8,1\n100,5,2\n100,7,2\n200,9,2\n300,2,2\n"
    )
    points = load_reference(str(path))
    np.testing.assert_allclose(points, [[100, 300], [5, 5], [4, 2], [6, 8]])
    path.write_text("step,reward,seed\n0,0,1\n100,4,2\n")
    with pytest.raises(ValueError, match="2 seeds share no step"):
        load_reference(str(path))


def test_a_curve_of_one_evaluation_is_a_dot():
    axes = Figure().subplots()
    draw_seeds(axes, "short", [Curve(np.array([50.0]), np.array([3.0]))], "C0")
    draw_seeds(axes, "long", [Curve(np.array([50.0, 60.0]), np.array([3.0, 4.0]))], "C1")
    shown = {line.get_label(): line.get_marker() for line in axes.get_lines()}
    assert shown["short"] == "o" and shown["long"] == ""


def test_published_points_are_markers_that_nothing_joins(tmp_path):
    import matplotlib.pyplot as plt

    path = tmp_path / "them" / "task.csv"
    path.parent.mkdir()
    path.write_text("step,mean,lcb,ucb\n0,1,0,2\n100,5,4,7\n200,6,5,7\n")
    figure, axes = plt.subplots()
    draw_published(axes, "them", load_reference(str(path)), limit=150)
    for line in axes.lines:
        assert line.get_linestyle() == "None"
        np.testing.assert_array_equal(line.get_xdata(), [0, 100])
    np.testing.assert_array_equal(axes.lines[0].get_ydata(), [1, 5])
    (bars,) = axes.collections  # the error bars; no band
    np.testing.assert_array_equal(bars.get_segments()[1], [[100, 4], [100, 7]])
    assert axes.get_legend_handles_labels()[1] == ["published: them"]
    axes.clear()
    path.write_text("step,mean,lcb,ucb\n100000,5,4,6\n")
    draw_published(axes, "them", load_reference(str(path)), limit=150)
    assert axes.get_legend_handles_labels()[1] == ["published: them (from 100,000 steps on)"]
    plt.close(figure)


@pytest.mark.parametrize("text", ["", "step,mean,lcb,ucb\n", "a,b\n1,2\n"])
def test_a_reference_of_another_form_is_refused(tmp_path, text):
    path = tmp_path / "published.csv"
    with pytest.raises(FileNotFoundError, match="published.csv does not exist: .*step,reward,seed"):
        load_reference(str(path))
    path.write_text(text)
    with pytest.raises(ValueError, match="published.csv has .*step,reward,seed"):
        load_reference(str(path))


def test_a_file_of_a_spreadsheet_is_read_and_an_empty_cell_is_named(tmp_path):
    path = tmp_path / "published.csv"
    path.write_text("step,mean,lcb,ucb\n0,1,0,2\n", encoding="utf-8-sig")
    assert [x.tolist() for x in load_reference(str(path))] == [[0], [1], [0], [2]]
    for text, cell in (
        ("step,mean,lcb,ucb\n0,1,0,2\n9,,4,6\n", "'mean' is ''"),
        ("step,reward,seed\n0,1,1\n9,x,1\n", "'reward' is 'x'"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=f"published.csv, line 3: {cell}, not a number"):
            load_reference(str(path))


@pytest.mark.parametrize(
    "labels", [["a", "b"], ["_a", "b"], ["x" * 41, "b"], ["setting=value, " * 12, "$" + "y" * 80]]
)
def test_names_of_every_length_leave_room_for_the_curves(runs, labels):
    axes = draw_runs(runs[:2], labels=labels)
    axes.figure.draw_without_rendering()
    assert axes.get_position().width > 0.7
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [text.replace("\n", " ").strip() for text in shown] == [one.strip() for one in labels]
    box, frame = (x.get_window_extent() for x in (axes.get_legend(), axes.figure))
    assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= frame.x1


@pytest.mark.parametrize(("name", "magic"), [("a.png", b"\x89PNG"), ("new/a.pdf", b"%PDF")])
def test_the_picture_has_the_format_of_its_name(runs, tmp_path, name, magic):
    (tmp_path / "published").mkdir()
    reference = tmp_path / "published" / "task.csv"
    reference.write_text("step,mean,lcb,ucb\n0,1,0,2\n100,5,4,6\n")
    out = tmp_path / name
    plot_runs(runs, str(out), references=[str(reference)], title="three seeds and one")
    assert out.read_bytes().startswith(magic)
    assert not [n for n in os.listdir(out.parent) if ".tmp" in n]


def test_what_cannot_be_drawn_is_told(runs, tmp_path):
    with pytest.raises(ValueError, match="metric 'eval/absent'"):
        plot_runs(runs, str(tmp_path / "a.png"), metric="eval/absent")
    with pytest.raises(ValueError, match="2 labels for 4 runs"):
        plot_runs(runs, str(tmp_path / "a.png"), labels=["x", "y"])
    with pytest.raises(FileNotFoundError, match="holds no run"):
        plot_runs([str(tmp_path / "absent")], str(tmp_path / "a.png"))


def test_the_command_draws_runs_and_tells_mistakes_in_a_line(runs, tmp_path):
    out = str(tmp_path / "curve.png")
    cli.run(["plot", *runs, f"--out={out}"])
    assert os.path.getsize(out) > 1000
    with pytest.raises(SystemExit, match="^error: [^\n]*absent holds no run"):
        cli.run(["plot", str(tmp_path / "absent"), f"--out={out}"])
