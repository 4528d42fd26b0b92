"""Command lines. Importing one first makes the allocator keep large buffers, before jax loads."""

from mbx.training import memory

memory.keep_freed_pages()
