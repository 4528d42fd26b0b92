"""Write one HTML file about a run, or several side by side.

    mbx report runs/a --out=report.html
    mbx report runs/a runs/b runs/c

It shows curves, evaluations, losses, time, changed settings, machine and versions, warnings,
videos. The file loads nothing from the network. Every training run writes one at its end,
RUN/report.html.
"""

from __future__ import annotations

import os

from mbx.analysis import report
from mbx.commands.arguments import make_parser


def main(arguments: list[str]) -> None:
    """Run `mbx report`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("runs", nargs="+", help="Directories of the runs, or hf://USER/NAME.")
    parser.add_argument("--out", default="report.html", help="Path of the file to write.")
    options = parser.parse_args(arguments)
    report.write(options.runs, options.out)
    print(f"{options.out}: {os.path.getsize(options.out) / 1e3:.0f} kB")
