"""Draw every figure and fill every table of the documents from the data in docs/results.

    python -m benchmarks.figures                  # all of them
    python -m benchmarks.figures --check          # only say what is not as the data gives it

docs/results/figures.json says what each figure and table shows, docs/results/manifest.json what
made the data. A table stands in its page between <!-- table: NAME --> and <!-- end of table -->,
a comparison in words between <!-- claim: NAME --> and <!-- end of claim -->.
"""

from __future__ import annotations

import csv
import hashlib
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from mbx.analysis import drawing
from mbx.analysis.curves import MARKERS, Curve, draw_published, draw_seeds, value_at
from mbx.analysis.tables import interquartile_mean
from mbx.analysis.tables import mean_of_tasks as mean_of_scores
from mbx.training.files import atomic_write

from .suites import Published, load_published

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs" / "results"
Rows = list[dict[str, str]]
Spec = Mapping[str, Any]


def read(name: str) -> Rows:
    """The rows of a CSV file of docs/results."""
    with open(RESULTS / name, newline="") as file:
        return list(csv.DictReader(file))


def matching(rows: Rows, where: Mapping[str, Any]) -> Rows:
    """Rows whose columns have these values. Raises ValueError where there is none."""
    found = [row for row in rows if all(row[k] == str(v) for k, v in where.items())]
    if not found:
        raise ValueError(f"no row with {dict(where)}: fix docs/results/figures.json or the data")
    return found


def rows_of(panel: Spec, series: Spec) -> Rows:
    """A line's rows, from its own "data" or its panel's, where the conditions of both hold."""
    rows = matching(read(series.get("data", panel["data"])), panel.get("where", {}))
    return matching(rows, series["where"])


def layout() -> dict[str, dict[str, Any]]:
    """What docs/results/figures.json says: figures by path, tables by name."""
    return json.loads((RESULTS / "figures.json").read_text())


def curves_of(rows: Rows) -> list[Curve]:
    """One curve a seed, in the order of their steps."""
    curves = []
    for seed in dict.fromkeys(row["seed"] for row in rows):
        points = sorted(
            (float(row["step"]), float(row["value"])) for row in rows if row["seed"] == seed
        )
        steps, values = np.array(points).T
        curves.append(Curve(steps, values))
    return curves


def mean_of_tasks(rows: Rows, tasks: Sequence[str]) -> Curve:
    """The mean over tasks of each task's mean over seeds, at the first task's steps.

    A step that a task was not evaluated at is left out (`mbx.analysis.curves.value_at`). Raises
    ValueError where no step is left.
    """
    curves = [curves_of(matching(rows, {"task": task})) for task in tasks]
    steps = curves[0][0].steps
    values = [np.mean([[value_at(c, at) for at in steps] for c in own], 0) for own in curves]
    mean = np.mean(values, 0)
    if np.isnan(mean).all():
        raise ValueError(f"no step at which all of {list(tasks)} were evaluated")
    return Curve(steps[~np.isnan(mean)], mean[~np.isnan(mean)])


def mean_published(
    published: Published, tasks: Sequence[str], agent: str
) -> dict[int, tuple[float, float, float]]:
    """Published means over tasks by step, where all have one; no interval: mean, mean, mean."""
    known = [published[task, agent] for task in tasks]
    common = sorted(set.intersection(*(set(points) for points in known)))
    return {s: (float(np.mean([points[s][0] for points in known])),) * 3 for s in common}


def draw_panel(axes: Any, panel: Spec) -> None:
    """One task: a line a series, random and best as lines across, published values as markers.

    With "tasks" in it, the mean of these instead.
    """
    limit, tasks = 0.0, panel.get("tasks", ())
    for i, series in enumerate(panel["series"]):
        own = rows_of(panel, series)
        curves = [mean_of_tasks(own, tasks)] if tasks else curves_of(own)
        label = series["label"]
        if tasks:
            label += f" ({in_words(seeds_of_tasks(own, tasks))})"
        elif len(curves) == 1:
            label += " (1 seed)"
        draw_seeds(axes, label, curves, drawing.color(i))
        for curve in curves:
            axes.plot(curve.steps, curve.values, ".", color=drawing.color(i), markersize=3)
        limit = max(limit, *(curve.steps[-1] for curve in curves))
    limit = max(1.05 * limit, panel.get("until", 0))
    published = load_published()
    for (name, task, agent), marker in zip(panel.get("published", ()), MARKERS, strict=False):
        found = mean_published(published, tasks, agent) if tasks else published[task, agent]
        points = sorted((step, *point) for step, point in found.items())
        draw_published(axes, name, np.array(points).T, limit, marker, drawing.INK)
    lines = {"best possible": panel.get("best"), "solved": panel.get("solved")}
    if "random" in panel:
        lines["random actions"] = float(matching(read("random.csv"), panel["random"])[0]["mean"])
    for (name, value), dashes in zip(lines.items(), ("--", "-.", ":"), strict=False):
        if value is not None:
            axes.axhline(value, color=drawing.QUIET, linestyle=dashes, linewidth=1, label=name)
    axes.set_title(panel["title"])
    axes.set_xlabel("environment steps")
    axes.set_ylabel(panel.get("y", "mean return of an evaluation"))
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 1000:g}k" if x else "0")
    axes.set_xlim(0, None)
    if "minutes" in panel:  # of processor time for 100,000 steps of the lines
        hours = panel["minutes"] / 6e6
        top = axes.secondary_xaxis("top", (lambda x: x * hours, lambda x: x / hours))
        top.set_xlabel("hours of one CPU core (lines only)")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))


def _share_legend(figure: Any, panels: Sequence[Any], title: str) -> None:
    """One legend over all panels, under the figure's title; panels' titles say the seeds."""
    entries = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            if seeds := re.search(r" \(\d+ seeds?\)$", label):
                axes.set_title(axes.get_title() + seeds[0])
            entries.setdefault(re.sub(r" \(\d+ seeds?\)$", "", label), handle)
        axes.get_legend().remove()
        axes.set(xlabel="", ylabel="")
    panels[-1].set_xlabel("environment steps")
    shown = {"loc": "outside upper center", "ncols": len(entries), "title_fontsize": 11}
    figure.legend(entries.values(), entries.keys(), title=title, **shown)


def draw_relation(axes: Any, panel: Spec) -> None:
    """Columns `x` and `y` of a file, a line for every series, means over what is left."""
    for i, series in enumerate(panel["series"]):
        own = rows_of(panel, series)
        x = sorted({float(row[panel["x"]]) for row in own})
        y = [
            np.mean([float(row[panel["y"]]) for row in own if float(row[panel["x"]]) == at])
            for at in x
        ]
        y = np.maximum(y, panel.get("floor", -np.inf))
        axes.plot(x, y, "o-", markersize=3, color=drawing.color(i), label=series["label"])
    axes.set(title=panel["title"], xlabel=panel["x_label"], ylabel=panel["y_label"])
    axes.set(xscale=panel.get("x_scale", "linear"), yscale=panel.get("y_scale", "linear"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    if panel.get("y_scale", "linear") == "linear":
        axes.set_ylim(0, None)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18))


def seeds_of_tasks(rows: Rows, tasks: Sequence[str]) -> list[int]:
    """Seeds of each task."""
    return [len(curves_of(matching(rows, {"task": task}))) for task in tasks]


def in_words(seeds: Sequence[int]) -> str:
    """How many tasks have how many seeds: "11 tasks with 1 seed, 4 with 3"."""
    tasks = [(n, seeds.count(n)) for n in sorted(set(seeds))]
    (first, count), *others = tasks
    words = [f"{count} tasks with {first} seed{'s' if first > 1 else ''}"]
    return ", ".join(words + [f"{count} with {n}" for n, count in others])


def what_lines_mean(panels: Sequence[Spec]) -> str:
    """What lines, shades and dots are, for the figure's footer; the legend counts the seeds."""
    seeds: list[int] = []
    for panel in panels:
        if "x" not in panel and "tasks" not in panel:
            seeds += [len(curves_of(rows_of(panel, series))) for series in panel["series"]]
    many = sorted({n for n in seeds if n > 1})
    if not seeds:
        return ""
    if not many:
        return "One seed per line, its evaluations as dots."
    shade = {True: "range of the seeds", False: "bootstrap 95 % interval of the mean"}
    words = " and ".join(dict.fromkeys(shade[n < 5] for n in many))
    words = f"the mean of {' or '.join(map(str, many))} seeds (thin lines). Shade: {words}."
    if 1 in seeds:
        words = f"{seeds.count(1)} of {len(seeds)} lines show one seed, the others {words}"
    elif any("tasks" in panel for panel in panels):
        words = f"Mean over tasks: seeds in the legend. Other lines show {words}"
    else:
        words = f"Lines show {words}"
    return words


def draw(path: str, figure: Spec) -> str:
    """A figure of figures.json as SVG, with a digest of all that it was made from."""
    from matplotlib import pyplot as plt

    with drawing.style(path):
        panels = figure["panels"]
        columns = min(figure.get("columns", 2), len(panels))
        lines = -(-len(panels) // columns)
        width, height = figure.get("panel_size", (3.6, 3.7))
        drawn, grid = plt.subplots(
            lines,
            columns,
            figsize=(width * columns, height * lines + 0.4),
            layout="constrained",
            squeeze=False,
            sharey=figure.get("same_scale", False),
        )
        for axes in grid.flat[len(panels) :]:
            axes.set_axis_off()
        for axes, panel in zip(grid.flat, panels, strict=False):
            (draw_relation if "x" in panel else draw_panel)(axes, panel)
        title = "\n".join(textwrap.wrap(figure["title"], int(10 * width * columns)))
        if figure.get("one_legend"):
            _share_legend(drawn, list(grid.flat[: len(panels)]), title)
        else:
            drawn.suptitle(title, fontsize=11)
        words = " ".join(filter(None, [what_lines_mean(panels), figure.get("note", "")]))
        words = "\n".join(textwrap.wrap(words, int(14 * width * columns)))
        drawn.supxlabel(words, fontsize=8)
        text = drawing.to_svg(drawn, figure["title"])
    return text.rstrip() + f"\n<!-- made from {digest(figure)} -->\n"


def digest(figure: Spec) -> str:
    """Of a figure's entry and the files that it names."""
    found = hashlib.sha256(json.dumps(figure, sort_keys=True).encode())
    names = {panel["data"] for panel in figure["panels"]}
    names |= {s["data"] for panel in figure["panels"] for s in panel["series"] if "data" in s}
    if any("random" in panel for panel in figure["panels"]):
        names.add("random.csv")
    if any("published" in panel for panel in figure["panels"]):
        names.add("published.csv")
    for name in sorted(names):
        found.update((RESULTS / name).read_bytes())
    return found.hexdigest()[:16]


def table(spec: Spec) -> str:
    """A table of figures.json as Markdown.

    "cells": a file whose cells are shown as they are, with "only" these columns of it. "rows" and
    "columns": a row for what `where` finds, a column for steps (values of several seeds by commas,
    of several steps by blanks; with "mean" their mean, so many digits, with "digits" each rounded,
    with "each" a mean of every seed that has the last step, to the unit from 10 on),
    for an agent's "published" value of the row's task, or for a field of the last row.
    "mean_of_rows": the label of a last row with the means of the rows' means. "methods": see
    `methods`.
    """
    if "methods" in spec:
        return methods(spec)
    if "cells" in spec:
        head, *body = csv.reader((RESULTS / spec["cells"]).read_text().splitlines())
        kept = [i for i, name in enumerate(head) if name in spec.get("only", head)]
        return _markdown([head[i] for i in kept], [[line[i] for i in kept] for line in body])
    rows, body, columns = matching(read(spec["data"]), spec.get("where", {})), [], spec["columns"]
    groups = [matching(rows, line["where"]) for line in spec["rows"]]
    for line, own in zip(spec["rows"], groups, strict=True):
        cells = [_cell(own, column) for column in columns]
        body.append([*line["label"], *cells, *line.get("after", ())])
    if "mean_of_rows" in spec:
        means = [np.mean([_mean(own, column) for own in groups]) for column in columns]
        cells = [f"{mean:.{c['mean']}f}" for mean, c in zip(means, columns, strict=True)]
        body.append([*spec["mean_of_rows"], *cells])
    head = [*spec["head"], *(c["head"] for c in columns), *spec.get("after", ())]
    return _markdown(head, body)


def methods(spec: Spec) -> str:
    """Published methods beside the runs of "data", by "agent" rows of "published".
    Means over "tasks" of the means over seeds at each of "steps", and at the last their
    interquartile mean, and how much higher the runs are: the mean over tasks with a 95 % interval,
    tasks resampled, and in each task the seeds of either side.
    """
    rng, tasks, steps = np.random.default_rng(0), spec["tasks"], spec["steps"]
    runs = matching(read(spec["data"]), spec["where"])
    published = read(spec["published"])
    at = rng.integers(0, len(tasks), (10_000, len(tasks)))

    def scores(rows: Rows, step: int) -> list[np.ndarray]:
        found = {task: [] for task in tasks}  # type: dict[str, list[float]]
        for row in rows:
            if int(row["step"]) == step and row["task"] in found:
                found[row["task"]].append(float(row["value"]))
        return [np.array(values) for values in found.values()]

    def resampled(own: list[np.ndarray]) -> np.ndarray:
        drawn = [x[rng.integers(0, len(x), (len(at), len(x)))].mean(1) for x in own]
        return np.take_along_axis(np.stack(drawn, 1), at, 1).mean(1)

    ours, body = resampled(scores(runs, steps[-1])), []
    for line in spec["methods"]:
        rows = matching(published, {"agent": line["agent"]}) if "agent" in line else runs
        each = [scores(rows, step) for step in steps]
        cells = [f"{mean_of_scores(own):.0f}" if all(map(len, own)) else "" for own in each]
        middle = interquartile_mean([np.array([x.mean()]) for x in each[-1]])
        more = ""
        if "agent" in line:
            low, high = np.percentile(ours - resampled(each[-1]), [2.5, 97.5])
            gain = mean_of_scores(scores(runs, steps[-1])) - mean_of_scores(each[-1])
            more = f"{gain:+.0f} ({low:+.0f} to {high:+.0f})"
        body.append([*line["label"], *cells, f"{middle:.0f}", more])
    return _markdown(spec["head"], body)


def _mean(rows: Rows, column: Spec) -> float:
    """Over a column's steps and all seeds, or what is published for the rows' task there."""
    if "published" in column:
        return load_published()[rows[0]["task"], column["published"]][column["steps"][0]][0]
    return float(np.mean([float(r["value"]) for r in rows if int(r["step"]) in column["steps"]]))


def _cell(rows: Rows, column: Spec) -> str:
    if "field" in column:
        value = float(rows[-1][column["field"]])
        return "< 1e-6" if abs(value) < 1e-6 else format(value, column["format"])
    if "mean" in column:
        return f"{_mean(rows, column):.{column['mean']}f}"
    if "each" in column:
        seeds = {row["seed"] for row in rows if int(row["step"]) == column["steps"][-1]}
        means = [_mean(matching(rows, {"seed": seed}), column) for seed in sorted(seeds)]
        return ", ".join(f"{mean:.{0 if abs(mean) >= 10 else 2}f}" for mean in means)
    values = [[row["value"] for row in rows if int(row["step"]) == s] for s in column["steps"]]
    if "digits" in column:
        values = [[f"{float(v):.{column['digits']}f}" for v in each] for each in values]
    return " ".join(", ".join(each) for each in values if each)


def _markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    for line in lines:
        if len(line) != len(head):
            raise ValueError(f"{line} has {len(line)} cells under {len(head)} heads: {head}")
    text = "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in x) + " |" for x in lines
    )
    return text.replace("| --- ", "|---").replace("--- |", "---|") + "\n"


def runs_at(sides: Sequence[Spec], step: int) -> list[float]:
    """Values of runs at a step, each once, in ascending order."""
    rows = [row for side in sides for row in matching(read(side["data"]), side["where"])]
    return sorted({float(row["value"]) for row in rows if int(row["step"]) == step})


def claim(spec: Spec, tables: Mapping[str, Spec]) -> str:
    """A comparison of figures.json in words that are computed from the data.

    "one" and "other": lists of a file and `where`, whose runs are compared at "step". Or "table"
    and "published": the tasks of a table whose mean at "step" is under an agent's published mean.
    """
    if "table" in spec:
        of_table, column = tables[spec["table"]], {"steps": [spec["step"]]}
        rows = matching(read(of_table["data"]), of_table["where"])
        under = []
        for line in of_table["rows"]:
            own = matching(rows, line["where"])
            pair = _mean(own, column), _mean(own, column | {"published": spec["published"]})
            if pair[0] < pair[1]:
                under.append(f"{line['label'][0]} ({pair[0]:.0f}, {pair[1]:.0f})")
        number = len(of_table["rows"])
        below = "; below: " + ", ".join(under) if under else ""
        return f"at or above it on {number - len(under)} of {number} tasks{below}"
    one, other = (runs_at(spec[side], spec["step"]) for side in ("one", "other"))
    if one[0] > other[-1]:
        order = "every run of the first is above every run of the second"
    elif one[-1] < other[0]:
        order = "every run of the first is below every run of the second"
    else:
        order = "the ranges overlap"
    first, second = (f"{x[0]:.0f} to {x[-1]:.0f} ({len(x)} runs)" for x in (one, other))
    return f"{first} against {second}: {order}"


_CLAIMED = re.compile(r"(<!-- claim: ([\w-]+) -->).*?(<!-- end of claim -->)", re.DOTALL)
_MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def fill(text: str, known: Mapping[str, Mapping[str, Spec]]) -> str:
    """A page with tables and claims as the data gives them. ValueError for an unknown name."""
    tables, claims = known["tables"], known.get("claims", {})

    def one(found: re.Match) -> str:
        if found[2] not in tables:
            raise ValueError(f"table {found[2]!r} is not in docs/results/figures.json")
        return f"{found[1]}\n{table(tables[found[2]])}\n{found[3]}"

    def sentence(found: re.Match) -> str:
        if found[2] not in claims:
            raise ValueError(f"claim {found[2]!r} is not in docs/results/figures.json")
        return found[1] + claim(claims[found[2]], tables) + found[3]

    return _CLAIMED.sub(sentence, _MARKED.sub(one, text))


def pages() -> list[pathlib.Path]:
    """Pages that have tables to fill."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def out_of_date() -> list[str]:
    """Figures and pages that are not as the data gives them."""
    known = layout()
    wrong = []
    for path, figure in known["figures"].items():
        drawn = (ROOT / path).read_text() if (ROOT / path).exists() else ""
        if f"<!-- made from {digest(figure)} -->" not in drawn:
            wrong.append(path)
    wrong += [str(p) for p in pages() if fill(p.read_text(), known) != p.read_text()]
    return wrong


def define_flags() -> None:
    """The flags of this command; tests import the module without them."""
    flags.DEFINE_bool("check", False, "Write nothing; exit 1 where something is out of date.")


def main(_: list[str]) -> None:
    given = flags.FLAGS
    if not RESULTS.is_dir():
        sys.exit(f"error: {RESULTS} is not there: run this in a checkout")
    try:
        if given.check:
            sys.exit("\n".join(f"out of date: {name}" for name in out_of_date()) or 0)
        known = layout()
        for path, figure in known["figures"].items():
            (ROOT / path).parent.mkdir(exist_ok=True)
            atomic_write(str(ROOT / path), draw(path, figure).encode())
            print(path)
        for page in pages():
            text = page.read_text()
            if (filled := fill(text, known)) != text:
                atomic_write(str(page), filled.encode())
                print(page.relative_to(ROOT))
    except (ValueError, KeyError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    define_flags()
    app.run(main)
