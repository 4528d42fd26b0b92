"""Put a run, or several side by side, into one HTML file that can be mailed.

    python -m experiments.report runs/a --out=report.html
    python -m experiments.report runs/a runs/b runs/c

Curves, evaluations, losses, where time went, settings that are not the default, machine and
versions, warnings, films. The file needs nothing else and asks nothing of the network. Each
training writes one at its end, RUN/report.html.
"""

from __future__ import annotations

import os
import sys

from absl import app, flags

from mbx.analysis import report

OUT = flags.DEFINE_string("out", "report.html", "File to write.")


def main(argv: list[str]) -> None:
    if len(argv) < 2:
        sys.exit("error: no run directory given: python -m experiments.report RUN [RUN ...]")
    try:
        report.write(argv[1:], OUT.value)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"{OUT.value}: {os.path.getsize(OUT.value) / 1e3:.0f} kB")


if __name__ == "__main__":
    app.run(main)
