"""`python -m experiments.plot` is `mbx plot`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["plot", *sys.argv[1:]])
