"""`python -m experiments.train` is `mbx train`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
