"""`python -m experiments.benchmark` is `python -m benchmarks.speed`."""

from absl import app

from benchmarks import speed

if __name__ == "__main__":
    speed.define_flags()
    app.run(speed.main)
