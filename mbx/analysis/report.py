"""A report of one or several runs: a single HTML file that fetches nothing.

It holds curves, losses, evaluations, times, settings that differ from the defaults, machine and
versions, warnings, and the run's pictures.
"""

from __future__ import annotations

import base64
import glob
import html
import json
import math
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

_MOST_BYTES = 2_000_000  # of the pictures of a run
_HOUSE = {"kind", "step", "time", "seconds", "agent_steps"}  # of a row, no metrics
_ELSEWHERE = ("episode/return", "steps_per_second")  # in other sections


def page(paths: Sequence[str], names: Sequence[str] | None = None) -> str:
    """The report of run directories as HTML.
    paths: directories of runs, of several seeds, or folders of runs. names: one per run; by default
    the ends of the paths in which they differ. Raises FileNotFoundError or ValueError for a
    directory without a run.
    """
    paths = runs.find_runs(paths)
    names = names or runs.short_names(paths)
    found = [runs.read_run(path, name) for path, name in zip(paths, names, strict=True)]
    title = ", ".join(dict.fromkeys(f"{r.config['agent']} on {_task(r)}" for r in found))
    sections = [
        ("Summary", _summary(found)),
        ("Warnings", _warnings(found)),
        ("Learning", _learning(found)),
        ("Film and pictures", _pictures(found)),
        ("Losses and gradients", _charts(found, "train", _is_loss)),
        (
            "Evaluations: all that was measured",
            _charts(found, "eval", lambda key: key != "return_mean"),
        ),
        ("Speed, and where time went", _speed(found)),
        ("Settings that are not the default", _settings(found)),
        ("Machine and versions", _machine(found)),
        ("Everything else that was logged", _rest(found)),
    ]
    legend = " &nbsp; ".join(_named(i, run) for i, run in enumerate(found))
    body = f'<p class="quiet">{legend}</p>'
    body += "".join(f"<section><h2>{head}</h2>{text}</section>" for head, text in sections if text)
    return charts.page(title, body)


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


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _task(run: Run) -> str:
    return run.config["env"]["name"]


def _named(index: int, run: Run) -> str:
    color = f"var(--line{index % 8})"
    return f'<span class="swatch" style="background:{color}"></span>{_text(run.name)}'


def _table(found: Sequence[Run], rows: Iterable[Sequence[str]], head: Sequence[str] = ("",)) -> str:
    """A table with one column per run; cells are HTML."""
    heads = [*head, *(_named(i, run) for i, run in enumerate(found))]
    top = "".join(f"<th>{cell}</th>" for cell in heads)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _summary(found: Sequence[Run]) -> str:
    columns = []
    for run in found:
        points = list(zip(*run.curve("eval", "return_mean"), strict=True))
        best = max(points, key=lambda point: point[1], default=None)
        seconds = [rows[-1]["seconds"] for rows in runs.starts(run)]
        columns.append(
            {
                "task": _text(_task(run)),
                "agent": _text(run.config["agent"]),
                "seed": _text(run.config.get("seed")),
                "environment steps": f"{max((row['step'] for row in run.rows), default=0):,.0f}",
                "last evaluation": _evaluation(points[-1] if points else None),
                "best evaluation": _evaluation(best),
                "to compare": _text(levels.of_run(run.path)) or "nothing known",
                "time": _duration(sum(seconds)) if seconds else "not logged",
            }
        )
    return _table(found, ([name, *(one[name] for one in columns)] for name in columns[0]))


def _evaluation(point: tuple[float, float] | None) -> str:
    return "none" if point is None else f"{point[1]:.5g} at {point[0]:,.0f}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _warnings(found: Sequence[Run]) -> str:
    words = [
        f'<p class="warning">{_named(i, run)}: {_text(words)}</p>'
        for i, run in enumerate(found)
        for words in runs.complaints(run)
    ]
    return "".join(words) or "<p>None.</p>"


def _lines(found: Sequence[Run], kind: str, key: str) -> list[Line]:
    return [Line(run.name, i, *run.curve(kind, key)) for i, run in enumerate(found)]


def _grid(drawn: Iterable[str]) -> str:
    text = "".join(drawn)
    return f'<div class="charts">{text}</div>' if text else ""


def _learning(found: Sequence[Run]) -> str:
    named = {
        "mean return of an evaluation": ("eval", "return_mean"),
        "return while training, with exploration": ("train", "episode/return"),
    }
    drawn = _grid(chart(title, _lines(found, *which)) for title, which in named.items())
    return drawn or "<p>No evaluation yet.</p>"


def _is_loss(key: str) -> bool:
    return key.startswith(("loss", "grad"))


def _charts(found: Sequence[Run], kind: str, wanted: Callable[[str], bool]) -> str:
    """One chart per metric of a kind, in the order of first appearance."""
    rows = (row for run in found for row in run.rows if row.get("kind") == kind)
    keys = dict.fromkeys(k for row in rows for k, value in row.items() if runs.is_number(value))
    return _grid(
        chart(key, _lines(found, kind, key), meaning=_meaning(found, key))
        for key in keys
        if key not in _HOUSE and wanted(key)
    )


def _meaning(found: Sequence[Run], key: str) -> str:
    """The log's description of a name; '' where it has none."""
    agents = dict.fromkeys(str(run.config["agent"]) for run in found)
    known = (glossary.meaning(name, key) for name in agents if name in glossary.AGENTS)
    return next(filter(None, known), "")


def _rest(found: Sequence[Run]) -> str:
    text = _charts(found, "train", lambda key: not _is_loss(key) and key not in _ELSEWHERE)
    return f"<details><summary>Show</summary>{text}</details>" if text else ""


def _speed(found: Sequence[Run]) -> str:
    speed = chart("environment steps a second", _lines(found, "train", "steps_per_second"))
    parts = [runs.times(run) for run in found]
    rows = []
    for name in dict.fromkeys(name for part in parts for name in part):
        cells = []
        for part in parts:
            share = part.get(name, 0.0) / max(sum(part.values()), 1e-9)
            cells.append(f"{_duration(part[name])} ({share:.0%})" if name in part else "")
        rows.append([name, *cells])
    return _grid([speed]) + (_table(found, rows) if rows else "")


def _settings(found: Sequence[Run]) -> str:
    own = [dict(flatten(run.config)) for run in found]
    usual = [runs.defaults(run.config) for run in found]
    rows = []
    for name in dict.fromkeys(name for flat in own for name in flat):
        values = [_shown(flat.get(name, "")) for flat in own]
        theirs = [_shown(flat[name]) if name in flat else "" for flat in usual]
        # The cores are chosen by the machine.
        if values != theirs and name != "distributed.cores":
            default = " / ".join(dict.fromkeys(theirs)) or "(none)"
            rows.append([_text(name), _text(default), *map(_text, values)])
    return _table(found, rows, ("setting", "default")) if rows else "<p>None.</p>"


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _machine(found: Sequence[Run]) -> str:
    rows, lasts = [], [run.attempts[-1] if run.attempts else {} for run in found]
    for name in (
        "command",
        "machine",
        "devices",
        "commit",
        "changed_files",
        "started",
        "ended",
        "versions",
    ):
        cells = []
        for run, last in zip(found, lasts, strict=True):
            value = (run.attempts[0] if name == "started" and run.attempts else last).get(name)
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            cells.append("" if value is None else _text(value))
        if any(cells):
            rows.append([name.replace("_", " "), *cells])
    if not rows:
        return "<p>Not recorded: there is no run.json.</p>"
    attempts = [_text(", ".join(map(_how_it_ended, run.attempts))) for run in found]
    return _table(found, [*rows, ["attempts", *attempts]])


def _how_it_ended(attempt: Mapping[str, Any]) -> str:
    return f"from step {attempt.get('from_step')}: {attempt.get('outcome') or 'killed or running'}"


def _pictures(found: Sequence[Run]) -> str:
    drawn = []
    for i, run in enumerate(found):
        left, base = _MOST_BYTES, glob.escape(run.path)
        for ending in ("gif", "png"):
            for path in sorted(glob.glob(os.path.join(base, f"*.{ending}"))):
                name = os.path.basename(path)
                if name == "curve.png" or os.path.islink(path) or not os.path.isfile(path):
                    continue
                size = os.path.getsize(path)
                if size > left:
                    drawn.append(f"<p>{_text(name)}: left out, {size / 1e6:.1f} MB.</p>")
                    continue
                left -= size
                with open(path, "rb") as file:
                    data = base64.b64encode(file.read()).decode()
                drawn.append(
                    f"<figure><figcaption>{_named(i, run)}: {_text(name)}</figcaption>"
                    f'<img alt="{_text(name)}" src="data:image/{ending};base64,{data}"></figure>'
                )
    return _grid(drawn)
