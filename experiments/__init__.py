"""Command lines. Importing one first makes the allocator keep large buffers, before jax loads.

Modules that `--import` names are imported next, whichever the command.
"""

import sys

from mbx.config import extensions
from mbx.training import memory

memory.keep_freed_pages()
sys.argv[1:] = extensions.load(sys.argv[1:])
