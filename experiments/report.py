"""`python -m experiments.report` is `mbx report`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["report", *sys.argv[1:]])
