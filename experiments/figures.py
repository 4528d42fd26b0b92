"""`python -m experiments.figures` is `python -m benchmarks.figures`."""

from absl import app

from benchmarks import figures

if __name__ == "__main__":
    figures.define_flags()
    app.run(figures.main)
