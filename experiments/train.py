"""`python -m experiments.train` is `mbx train`: `mbx.cli` calls `main` of `mbx.commands.train`."""

import sys

from mbx.cli import main
from mbx.commands import train as train

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
