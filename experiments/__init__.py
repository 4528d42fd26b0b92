"""Command lines. Each of them first tells the allocator to keep large buffers: before jax loads."""

from mbx.training import memory

memory.keep_freed_pages()
