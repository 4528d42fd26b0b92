"""`python -m experiments.export_tdmpc2` is `mbx export_tdmpc2`."""

import sys

from mbx.cli import main

if __name__ == "__main__":
    main(["export_tdmpc2", *sys.argv[1:]])
