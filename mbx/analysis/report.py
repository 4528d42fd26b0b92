"""A report of one or several runs: a single HTML file that fetches nothing.

It holds curves, losses, evaluations, times, settings that differ from the defaults, machine and
versions, warnings, and the run's pictures.
"""

from __future__ import annotations

import base64
import glob
import html
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mbx.analysis import charts, runs
from mbx.analysis.charts import Line, chart
from mbx.analysis.curves import plot_runs
from mbx.analysis.runs import Run
from mbx.settings import flatten
from mbx.training import glossary, levels
from mbx.training.files import atomic_write, prepare_output
from mbx.training.logging import duration

_MOST_BYTES = 2_000_000  # of the pictures of a run
_OF_ROWS = {"kind", "step", "time", "seconds", "agent_steps"}  # no metrics
_ELSEWHERE = ("episode/return", "steps_per_second")  # in other sections
_RECORDED = ("command", "machine", "devices", "commit", "changed_files", "started", "ended")
_RECORDED += ("versions",)


def page(paths: Sequence[str], names: Sequence[str] | None = None) -> str:
    """The report of run directories as HTML.
    paths: directories of runs, of several seeds, or folders of runs. names: one per run; by default
    the ends of the paths in which they differ. Raises FileNotFoundError or ValueError for a
    directory without a run.
    """
    paths = runs.find_runs(paths)
    names = names or runs.short_names(paths)
    found = [runs.read_run(path, name) for path, name in zip(paths, names, strict=True)]
    returns = {
        "mean return of an evaluation": _lines(found, "eval", "return_mean"),
        "return while training, with exploration": _lines(found, "train", "episode/return"),
    }
    rest = _charts(found, "train", lambda key: not _is_loss(key) and key not in _ELSEWHERE)
    sections = {
        "Summary": _columns(found, [_summary(run) for run in found]),
        "Warnings": "".join(
            f'<p class="warning">{_named(i, run)}: {html.escape(words)}</p>'
            for i, run in enumerate(found)
            for words in runs.complaints(run)
        )
        or "<p>None.</p>",
        "Learning": _grid(chart(title, lines) for title, lines in returns.items())
        or "<p>No evaluation yet.</p>",
        "Film and pictures": _grid(text for i, run in enumerate(found) for text in _films(i, run)),
        "Losses and gradients": _charts(found, "train", _is_loss),
        "Evaluations: all that was measured": _charts(found, "eval", lambda x: x != "return_mean"),
        "Speed, and where time went": _speed(found),
        "Settings that are not the default": _settings(found) or "<p>None.</p>",
        "Machine and versions": _columns(found, [_recorded(run) for run in found])
        or "<p>Not recorded: there is no run.json.</p>",
        "Everything else that was logged": rest
        and f"<details><summary>Show</summary>{rest}</details>",
    }
    body = " &nbsp; ".join(_named(i, run) for i, run in enumerate(found))
    body = f'<p class="quiet">{body}</p>'
    body += "".join(
        f"<section><h2>{x}</h2>{text}</section>" for x, text in sections.items() if text
    )
    titles = (f"{run.config['agent']} on {run.config['env']['name']}" for run in found)
    return charts.page(", ".join(dict.fromkeys(titles)), body)


def write(paths: Sequence[str], out: str) -> None:
    """Write the report of run directories to a file; folders are made. Raises as `page`."""
    text = page(paths)
    prepare_output(out)
    atomic_write(out, text.encode())


def at_end(workdir: str) -> None:
    """Write WORKDIR/report.html and WORKDIR/curve.png; errors are printed only."""
    try:
        write([workdir], os.path.join(workdir, "report.html"))
        found = [runs.read_run(path, "") for path in runs.find_runs([workdir])]
        if any(run.curve("eval", "return_mean")[0] for run in found):
            plot_runs([workdir], os.path.join(workdir, "curve.png"))
    except Exception as error:
        print(f"no report.html: {type(error).__name__}: {error}", file=sys.stderr)


def _named(index: int, run: Run) -> str:
    color = f"var(--line{index % 8})"
    return f'<span class="swatch" style="background:{color}"></span>{html.escape(run.name)}'


def _table(found: Sequence[Run], rows: Iterable[Sequence[Any]], head: Sequence[str] = ("",)) -> str:
    """A table of texts with one column per run; '' without rows."""
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    heads = [*head, *(_named(i, run) for i, run in enumerate(found))]
    top = "".join(f"<th>{cell}</th>" for cell in heads)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>' if body else ""


def _columns(found: Sequence[Run], columns: Sequence[Mapping[str, Any]]) -> str:
    """A table of one column per run, empty where a run lacks a name."""
    names = dict.fromkeys(name for column in columns for name in column)
    return _table(found, ([name, *(one.get(name, "") for one in columns)] for name in names))


def _summary(run: Run) -> dict[str, Any]:
    points = list(zip(*run.curve("eval", "return_mean"), strict=True))
    best = max(points, key=lambda point: point[1], default=None)
    seconds = sum(runs.times(run).values())
    return {
        "task": run.config["env"]["name"],
        "agent": run.config["agent"],
        "seed": run.config.get("seed"),
        "environment steps": f"{max((row['step'] for row in run.rows), default=0):,.0f}",
        "last evaluation": _evaluation(points[-1] if points else None),
        "best evaluation": _evaluation(best),
        "to compare": str(levels.of_run(run.path)) or "nothing known",
        "time": duration(seconds) if seconds else "not logged",
    }


def _evaluation(point: tuple[float, float] | None) -> str:
    return "none" if point is None else f"{point[1]:.5g} at {point[0]:,.0f}"


def _lines(found: Sequence[Run], kind: str, key: str) -> list[Line]:
    return [Line(run.name, i, *run.curve(kind, key)) for i, run in enumerate(found)]


def _grid(drawn: Iterable[str]) -> str:
    text = "".join(drawn)
    return f'<div class="charts">{text}</div>' if text else ""


def _is_loss(key: str) -> bool:
    return key.startswith(("loss", "grad"))


def _charts(found: Sequence[Run], kind: str, wanted: Callable[[str], bool]) -> str:
    """One chart per metric of a kind, in the order of first appearance, with its description."""
    rows = (row for run in found for row in run.rows if row.get("kind") == kind)
    keys = dict.fromkeys(k for row in rows for k, value in row.items() if runs.is_number(value))
    agents = dict.fromkeys(str(run.config["agent"]) for run in found)
    drawn = []
    for key in (key for key in keys if key not in _OF_ROWS and wanted(key)):
        known = (glossary.meaning(name, key) for name in agents if name in glossary.AGENTS)
        meaning = next(filter(None, known), "")
        drawn.append(chart(key, _lines(found, kind, key), meaning=meaning))
    return _grid(drawn)


def _speed(found: Sequence[Run]) -> str:
    columns = []
    for spent in map(runs.times, found):
        total = max(sum(spent.values()), 1e-9)
        columns.append({n: f"{duration(s)} ({s / total:.0%})" for n, s in spent.items()})
    speed = chart("environment steps a second", _lines(found, "train", "steps_per_second"))
    return _grid([speed]) + _columns(found, columns)


def _settings(found: Sequence[Run]) -> str:
    own = [dict(flatten(run.config)) for run in found]
    usual = [runs.defaults(run.config) for run in found]
    rows = []
    for name in dict.fromkeys(name for flat in own for name in flat):
        values = [runs.shown(flat.get(name, "")) for flat in own]
        theirs = [runs.shown(flat.get(name, "")) for flat in usual]
        # The cores are chosen by the machine.
        if values != theirs and name != "distributed.cores":
            default = " / ".join(dict.fromkeys(theirs)) or "(none)"
            rows.append([name, default, *values])
    return _table(found, rows, ("setting", "default"))


def _recorded(run: Run) -> dict[str, str]:
    """What run.json says of the run's attempts; {} without any."""
    if not run.attempts:
        return {}
    last = run.attempts[-1] | {"started": run.attempts[0].get("started")}
    found = {}
    for name in _RECORDED:
        value = last.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        if value is not None:
            found[name.replace("_", " ")] = value
    ends = ((one.get("from_step"), one.get("outcome")) for one in run.attempts)
    words = (f"from step {step}: {how or 'killed or running'}" for step, how in ends)
    return found | {"attempts": ", ".join(words)}


def _films(index: int, run: Run) -> Iterable[str]:
    """Figures of the run's films and pictures, as far as they are small enough."""
    left = _MOST_BYTES
    base = glob.escape(run.path)
    for path in sorted(glob.glob(f"{base}/*.gif")) + sorted(glob.glob(f"{base}/*.png")):
        name, ending = html.escape(os.path.basename(path)), path[-3:]
        if name == "curve.png" or os.path.islink(path) or not os.path.isfile(path):
            continue
        size = os.path.getsize(path)
        if size > left:
            yield f"<p>{name}: left out, {size / 1e6:.1f} MB.</p>"
            continue
        left -= size
        with open(path, "rb") as file:
            data = base64.b64encode(file.read()).decode()
        yield (
            f"<figure><figcaption>{_named(index, run)}: {name}</figcaption>"
            f'<img alt="{name}" src="data:image/{ending};base64,{data}"></figure>'
        )
