"""`python -m experiments.hotspots` is `python -m benchmarks.hotspots`."""

import sys

from benchmarks import hotspots

if __name__ == "__main__":
    hotspots.main(sys.argv[1:])
sys.modules[__name__] = hotspots
