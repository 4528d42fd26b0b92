"""`python -m experiments.import_tdmpc2` is `mbx import_tdmpc2`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["import_tdmpc2", *sys.argv[1:]])
