"""`python -m experiments.watch` is `mbx watch`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["watch", *sys.argv[1:]])
