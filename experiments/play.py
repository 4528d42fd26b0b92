"""`python -m experiments.play` is `mbx play`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["play", *sys.argv[1:]])
