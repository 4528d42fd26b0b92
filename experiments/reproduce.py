"""`python -m experiments.reproduce` is `python -m benchmarks.reproduce`."""

from absl import app

from benchmarks import reproduce

if __name__ == "__main__":
    reproduce.define_flags()
    app.run(reproduce.main)
