"""What mutation testing found (`experiments.mutate`): rows, kept as CSV, and their table."""

from __future__ import annotations

import collections
import csv
import io
import json
import pathlib
import tomllib
from typing import Any

from mbx.files import atomic_write

Rows = dict[str, dict[str, Any]]  # by what names the change, `experiments.mutants.Mutant.key`
COLUMNS = ("path", "line", "function", "kind", "old", "new", "status", "by", "seconds")


def read(out: pathlib.Path) -> Rows:
    """The last row of each mutant, from JSON lines or from CSV."""
    if not out.exists():
        return {}
    if out.suffix == ".csv":
        with out.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = list(map(json.loads, out.read_text().splitlines()))
    return {" | ".join(row[x] for x in ("path", "function", "old", "new")): row for row in rows}


def keep(place: pathlib.Path, rows: Rows, known: dict[str, str]) -> None:
    """Writes rows as CSV in the order of files and lines; equivalent ones are called so."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for key, row in sorted(rows.items(), key=lambda x: (x[1]["path"], int(x[1]["line"]), x[0])):
        equivalent = row["status"] == "survived" and key in known
        writer.writerow(row | ({"status": "equivalent"} if equivalent else {}))
    atomic_write(str(place), text.getvalue().encode())


def equivalents(root: pathlib.Path) -> dict[str, str]:
    """Key -> reason of the mutants known to change nothing that a caller could see."""
    file = root / "tests" / "equivalent_mutants.toml"
    listed = tomllib.loads(file.read_text()) if file.exists() else {}
    return {
        f"{path} | {x['function']} | {x['line']} | {x['becomes']}": x["why"]
        for path, entries in listed.items()
        for x in entries
    }


def table(rows: Rows, known: dict[str, str]) -> str:
    """Markdown: the share killed by area, and the survivors."""
    count, survivors = collections.defaultdict(collections.Counter), []
    for key, row in rows.items():
        parts = row["path"].removeprefix("mbx/").removesuffix(".py").split("/")
        area = "/".join(parts[:2]) if parts[0] == "agents" else "/".join(parts)
        equivalent = row["status"] == "survived" and key in known
        status = "equivalent" if equivalent else row["status"]
        count[area][status] += 1
        if status == "survived":
            survivors.append(
                f"- `{row['path']}:{row['line']}` {row['kind']}\n\n"
                f"      - {row['old']}\n      + {row['new']}\n"
            )
    lines = [
        "| area | mutants | killed | survived | equivalent | share killed |",
        "|---|" + "---:|" * 5,
    ]
    total = sum(count.values(), collections.Counter())
    for area, c in [*sorted(count.items()), ("all", total)]:
        counted = c["killed"] + c["survived"]
        share = f"{c['killed'] / counted:.1%}" if counted else "-"
        row = (counted + c["equivalent"], c["killed"], c["survived"], c["equivalent"], share)
        lines.append(f"| {area} | {' | '.join(map(str, row))} |")
    left = f"\nNot counted: {total['broken']} that do not import, {total['stuck']} stuck.\n"
    return "\n".join(lines) + "\n" + left + "\n" + "\n".join(survivors)
