"""`python -m experiments.sweep` is `mbx sweep`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["sweep", *sys.argv[1:]])
