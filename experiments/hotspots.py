"""`python -m experiments.hotspots` is `python -m benchmarks.hotspots`."""

import sys

from absl import app

from benchmarks import hotspots

if __name__ == "__main__":
    hotspots.define_flags()
    app.run(hotspots.main)
sys.modules[__name__] = hotspots
