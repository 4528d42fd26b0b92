"""A run, or several side by side, as one HTML file that needs nothing else and asks nobody.

    text = report.page(["runs/a", "runs/b"])

It holds curves, evaluations, losses, where time went, settings that are not the defaults, machine
and versions, warnings, and pictures that the run left. A training writes one at its end.
"""

from __future__ import annotations

import base64
import glob
import html
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mbx.analysis import charts, drawing
from mbx.analysis.charts import Line, chart
from mbx.analysis.curves import plot_runs
from mbx.analysis.runs import (
    Run,
    complaints,
    defaults,
    is_number,
    read_run,
    seeds_of,
    short_names,
    starts,
    times,
)
from mbx.files import atomic_write, prepare_output
from mbx.settings import flatten
from mbx.training import glossary

_MOST_BYTES = 2_000_000  # of the pictures of a run
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:24px;max-width:1180px;
background:var(--page);color:var(--ink)}
h1{font-size:24px;margin:0}h2{font-size:18px;margin:32px 0 8px}
.quiet{color:var(--quiet)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:12px}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:13px}
th,td{text-align:left;padding:3px 12px 3px 0;border-bottom:1px solid var(--grid);
vertical-align:top;overflow-wrap:anywhere}
.swatch{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}
.warning{border-left:4px solid var(--line1);padding-left:10px}
img{max-width:100%;image-rendering:pixelated}summary{cursor:pointer;margin:12px 0}
"""


def page(paths: Sequence[str], names: Sequence[str] | None = None) -> str:
    """The report of run directories.

    Args:
        paths: run directories; of a run of several seeds, each `seed-N` in it.
        names: one a run; by default the ends of the paths in which they differ.

    Raises:
        FileNotFoundError, ValueError: a directory holds no run.
    """
    paths = [seed for path in paths for seed in seeds_of(path)]
    runs = [
        read_run(path, name) for path, name in zip(paths, names or short_names(paths), strict=True)
    ]
    title = ", ".join(dict.fromkeys(f"{r.config.get('agent')} on {_task(r)}" for r in runs))
    sections = [
        ("Summary", _summary(runs)),
        ("Warnings", _warnings(runs)),
        ("Learning", _learning(runs)),
        ("Film and pictures", _pictures(runs)),
        ("Evaluations: all that was measured", _charts(runs, "eval", _other_evaluations)),
        ("Losses and gradients", _charts(runs, "train", _is_loss)),
        ("Speed, and where time went", _speed(runs)),
        ("Settings that are not the default", _settings(runs)),
        ("Machine and versions", _machine(runs)),
        ("Everything else that was logged", _rest(runs)),
    ]
    body = "".join(f"<section><h2>{head}</h2>{text}</section>" for head, text in sections if text)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # Nothing may be fetched, whatever a name or a setting holds.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">"
        f'<link rel="icon" href="data:,"><title>{_text(title)}</title>'
        f"<style>{drawing.css(':root')}{_STYLE}{charts.STYLE}</style></head><body>"
        f"<h1>{_text(title)}</h1>{_legend(runs)}{body}<script>{charts.SCRIPT}</script>"
        "</body></html>\n"
    )


def write(paths: Sequence[str], out: str) -> None:
    """Write the report of run directories to a file; folders are made. Raises as `page`."""
    text = page(paths)
    prepare_output(out)
    atomic_write(out, text.encode())


def at_end(workdir: str) -> None:
    """Write WORKDIR/report.html and draw WORKDIR/curve.png; an error is printed and ends nothing.

    For `mbx.training.run.train`, where a training is worth more than its report.
    """
    try:
        write([workdir], os.path.join(workdir, "report.html"))
        if any(read_run(path, "").curve("eval", "return_mean")[0] for path in seeds_of(workdir)):
            plot_runs([workdir], os.path.join(workdir, "curve.png"))
    except Exception as error:
        print(f"no report.html: {type(error).__name__}: {error}", file=sys.stderr)


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)


def _task(run: Run) -> Any:
    env = run.config.get("env")
    return env.get("name", "?") if isinstance(env, dict) else "?"


def _legend(runs: Sequence[Run]) -> str:
    return '<p class="quiet">' + " &nbsp; ".join(_named(i, r) for i, r in enumerate(runs)) + "</p>"


def _named(index: int, run: Run) -> str:
    color = f"var(--line{index % 8})"
    return f'<span class="swatch" style="background:{color}"></span>{_text(run.name)}'


def _table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML already."""
    top = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{top}</tr>{body}</table></div>'


def _heads(runs: Sequence[Run]) -> list[str]:
    return ["", *(_named(i, run) for i, run in enumerate(runs))]


def _summary(runs: Sequence[Run]) -> str:
    lines: dict[str, list[str]] = {}

    def add(name: str, value: str) -> None:
        lines.setdefault(name, []).append(value)

    for run in runs:
        steps, returns = run.curve("eval", "return_mean")
        seconds = [rows[-1]["seconds"] for rows in starts(run)]
        best = max(range(len(returns)), key=returns.__getitem__, default=None)
        add("task", _text(_task(run)))
        add("agent", _text(run.config.get("agent")))
        add("seed", _text(run.config.get("seed")))
        add("environment steps", f"{max((row['step'] for row in run.rows), default=0):,.0f}")
        add("last evaluation", f"{returns[-1]:.5g} at {steps[-1]:,.0f}" if returns else "none")
        found = "none" if best is None else f"{returns[best]:.5g} at {steps[best]:,.0f}"
        add("best evaluation", found)
        add("time", _duration(sum(seconds)) if seconds else "not logged")
    return _table(_heads(runs), ([name, *values] for name, values in lines.items()))


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _warnings(runs: Sequence[Run]) -> str:
    found = []
    for i, run in enumerate(runs):
        for words in complaints(run):
            found.append(f'<p class="warning">{_named(i, run)}: {_text(words)}</p>')
    return "".join(found) or "<p>None.</p>"


def _lines(runs: Sequence[Run], kind: str, key: str) -> list[Line]:
    return [Line(run.name, i, *run.curve(kind, key)) for i, run in enumerate(runs)]


def _grid(drawn: Iterable[str]) -> str:
    text = "".join(drawn)
    return f'<div class="charts">{text}</div>' if text else ""


def _learning(runs: Sequence[Run]) -> str:
    return (
        _grid(
            [
                chart("mean return of an evaluation", _lines(runs, "eval", "return_mean")),
                chart(
                    "return while training, with exploration",
                    _lines(runs, "train", "episode/return"),
                ),
            ]
        )
        or "<p>No evaluation yet.</p>"
    )


_HOUSE = {"kind", "step", "time", "seconds", "agent_steps"}


def _keys(runs: Sequence[Run], kind: str) -> list[str]:
    """Names of a kind's numbers, as they first appear."""
    found: dict[str, None] = {}
    for run in runs:
        for row in run.rows:
            if row.get("kind") == kind:
                found.update(dict.fromkeys(key for key, value in row.items() if is_number(value)))
    return [key for key in found if key not in _HOUSE]


def _is_loss(key: str) -> bool:
    return key.startswith(("loss", "grad"))


def _other_evaluations(key: str) -> bool:
    return key != "return_mean"


def _shown_elsewhere(key: str) -> bool:
    return _is_loss(key) or key in ("episode/return", "steps_per_second")


def _charts(runs: Sequence[Run], kind: str, wanted: Any) -> str:
    return _grid(
        chart(key, _lines(runs, kind, key), meaning=_meaning(runs, key))
        for key in _keys(runs, kind)
        if wanted(key)
    )


def _meaning(runs: Sequence[Run], key: str) -> str:
    """What the log means by a name; '' where no agent that is known here logs it."""
    agents = dict.fromkeys(str(run.config.get("agent")) for run in runs)
    known = (glossary.meaning(name, key) for name in agents if name in glossary.AGENTS)
    return next(filter(None, known), "")


def _rest(runs: Sequence[Run]) -> str:
    text = _charts(runs, "train", lambda key: not _shown_elsewhere(key))
    return f"<details><summary>Show</summary>{text}</details>" if text else ""


def _speed(runs: Sequence[Run]) -> str:
    speed = chart("environment steps a second", _lines(runs, "train", "steps_per_second"))
    parts = [times(run) for run in runs]
    names = list(dict.fromkeys(name for part in parts for name in part))
    rows = []
    for name in names:
        cells = []
        for part in parts:
            share = part.get(name, 0.0) / max(sum(part.values()), 1e-9)
            cells.append(f"{_duration(part[name])} ({share:.0%})" if name in part else "")
        rows.append([name, *cells])
    return _grid([speed]) + (_table(_heads(runs), rows) if rows else "")


def _settings(runs: Sequence[Run]) -> str:
    own = [dict(flatten(run.config)) for run in runs]
    usual = [defaults(run.config) for run in runs]
    names = list(dict.fromkeys(name for flat in own for name in flat))
    rows = []
    for name in names:
        values = [_shown(flat.get(name, "")) for flat in own]
        theirs = [_shown(flat[name]) if name in flat else "" for flat in usual]
        if values != theirs:
            default = " / ".join(dict.fromkeys(theirs)) or "(none)"
            rows.append([_text(name), _text(default), *map(_text, values)])
    heads = ["setting", "default", *_heads(runs)[1:]]
    return _table(heads, rows) if rows else "<p>None.</p>"


def _shown(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _machine(runs: Sequence[Run]) -> str:
    rows, lasts = [], [run.attempts[-1] if run.attempts else {} for run in runs]
    for name in ("machine", "devices", "commit", "changed_files", "started", "ended", "versions"):
        cells = []
        for run, last in zip(runs, lasts, strict=True):
            value = (run.attempts[0] if name == "started" and run.attempts else last).get(name)
            if isinstance(value, dict):
                value = ", ".join(f"{k} {v}" for k, v in value.items())
            cells.append("" if value is None else _text(value))
        if any(cells):
            rows.append([name.replace("_", " "), *cells])
    if not rows:
        return "<p>Not recorded: there is no run.json.</p>"
    attempts = [_text(", ".join(map(_how_it_ended, run.attempts))) for run in runs]
    return _table(_heads(runs), [*rows, ["attempts", *attempts]])


def _how_it_ended(attempt: Mapping[str, Any]) -> str:
    """One start of a run: where it began and what became of it."""
    return f"from step {attempt.get('from_step')}: {attempt.get('outcome') or 'killed or running'}"


def _pictures(runs: Sequence[Run]) -> str:
    found = []
    for i, run in enumerate(runs):
        left = _MOST_BYTES
        for ending, kind in (("gif", "gif"), ("png", "png")):
            for path in sorted(glob.glob(os.path.join(glob.escape(run.path), f"*.{ending}"))):
                name = os.path.basename(path)
                if name == "curve.png" or os.path.islink(path) or not os.path.isfile(path):
                    continue
                size = os.path.getsize(path)
                if size > left:
                    found.append(f"<p>{_text(name)}: left out, {size / 1e6:.1f} MB.</p>")
                    continue
                left -= size
                with open(path, "rb") as file:
                    data = base64.b64encode(file.read()).decode()
                found.append(
                    f"<figure><figcaption>{_named(i, run)}: {_text(name)}</figcaption>"
                    f'<img alt="{_text(name)}" src="data:image/{kind};base64,{data}"></figure>'
                )
    return _grid(found)
