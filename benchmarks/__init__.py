"""Tools of mbx's developers: speed, planners, published results, figures. No part of the wheel."""

import sys

if sys.argv[0] == "-m":  # a command of this package starts: what `mbx` does before JAX loads
    from mbx.fast import allocator

    allocator.keep_freed_pages()
    from mbx.config import extensions

    sys.argv[1:] = extensions.load(sys.argv[1:])
