"""`python -m experiments.export` is `mbx export`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["export", *sys.argv[1:]])
