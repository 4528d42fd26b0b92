"""`python -m experiments.evaluate` is `mbx evaluate`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["evaluate", *sys.argv[1:]])
