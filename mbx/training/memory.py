"""The C library's allocator, told to keep the large buffers that train steps use again and again.

On a CPU, XLA allocates the temporary memory of a program at every call and frees it after. glibc
gives large blocks back to the operating system at once, which clears every page anew when they are
asked for the next time: up to 40 % of the time of programs with arrays of megabytes.
"""

from __future__ import annotations

import ctypes
import sys

# Names and numbers of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_NEVER = 2**31 - 1


def keep_freed_pages() -> bool:
    """Keep freed memory in the process; True where the allocator took the setting.

    Call it before anything starts threads (NumPy and jax do when imported): one arena for all
    threads is part of it, which is decided when the second thread allocates. The process keeps the
    most memory that it ever used. Elsewhere than on Linux with glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    options = ((_M_ARENA_MAX, 1), (_M_MMAP_THRESHOLD, _NEVER), (_M_TRIM_THRESHOLD, _NEVER))
    return all([mallopt(name, value) == 1 for name, value in options])
