"""`python -m experiments.reproduce` is `python -m benchmarks.reproduce`."""

import sys

from absl import app

from benchmarks import reproduce

if __name__ == "__main__":
    reproduce.define_flags()
    app.run(reproduce.main)
sys.modules[__name__] = reproduce
