"""`python -m experiments.figures` is `python -m benchmarks.figures`."""

import sys

from absl import app

from benchmarks import figures

if __name__ == "__main__":
    figures.define_flags()
    app.run(figures.main)
sys.modules[__name__] = figures
