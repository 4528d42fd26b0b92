"""Tools of mbx's developers: speed, planners, published results, figures. No part of the wheel."""

import sys

if sys.argv[0] == "-m":  # a command of this package starts: what `mbx` does before JAX loads
    from mbx.training import memory

    memory.keep_freed_pages()
    from mbx.config import extensions
    from mbx.config import help as usage

    try:
        sys.argv[1:] = usage.with_found_config(extensions.load(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
