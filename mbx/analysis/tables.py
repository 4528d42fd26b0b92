"""Small tables as Markdown, CSV or LaTeX: `write("results.tex", Table(("a",), ((1.5,),)))`."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Callable
from typing import NamedTuple

from mbx.files import atomic_write, prepare_output

Cell = str | int | float

_LATEX = {c: f"\\{c}" for c in "&%$#_{}"} | {
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "\\": r"\textbackslash{}",
    "<": r"$<$",
    ">": r"$>$",
}


class Table(NamedTuple):
    """Names of the columns, and rows of as many cells; NaN is an empty cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


def render(table: Table, form: str) -> str:
    """The table as text. form: "md", "csv" (numbers in full) or "tex" (a tabular).

    Raises ValueError for another form.
    """
    if form not in _FORMS:
        raise ValueError(f"a table in the format {form!r}: choose one of {sorted(_FORMS)}")
    return _FORMS[form](table)


def write(path: str, table: Table) -> None:
    """Write the table in the format that the file's ending names; folders are made."""
    text = render(table, os.path.splitext(path)[1].removeprefix("."))
    prepare_output(path)
    atomic_write(path, text.encode())


def _shown(cell: Cell) -> str:
    if isinstance(cell, float):
        return "" if math.isnan(cell) else f"{cell:.4g}"
    return str(cell)


def _markdown(table: Table) -> str:
    rows = [table.columns, *table.rows]
    lines = [" | ".join(_shown(cell).replace("|", r"\|") for cell in row) for row in rows]
    lines = [f"| {line} |" for line in lines]
    return "\n".join([lines[0], "|" + "---|" * len(table.columns), *lines[1:]]) + "\n"


def _csv(table: Table) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    for row in table.rows:
        writer.writerow(["" if isinstance(x, float) and math.isnan(x) else x for x in row])
    return text.getvalue()


def _latex(table: Table) -> str:
    def line(row: tuple[Cell, ...]) -> str:
        cells = ["".join(_LATEX.get(c, c) for c in _shown(cell)) for cell in row]
        return " & ".join(cells) + r" \\"

    kinds = "".join(
        "l" if any(isinstance(row[i], str) for row in table.rows) else "r"
        for i in range(len(table.columns))
    )
    body = [line(row) for row in table.rows]
    head = [rf"\begin{{tabular}}{{{kinds}}}", r"\hline", line(table.columns), r"\hline"]
    return "\n".join([*head, *body, r"\hline", r"\end{tabular}"]) + "\n"


_FORMS: dict[str, Callable[[Table], str]] = {"md": _markdown, "csv": _csv, "tex": _latex}
