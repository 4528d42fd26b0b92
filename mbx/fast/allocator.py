"""Makes the C library's allocator keep the large buffers that train steps use again and again.

On a CPU, XLA allocates the temporary memory of a program at every call and frees it after. glibc
gives large blocks back to the operating system at once, which clears every page again when they are
asked for the next time, 4 kB by 4 kB: up to 40 % of the time of programs with arrays of megabytes.

Threads keep arenas of their own. One arena for all would keep everything, but threads that compile
or multiply wait for its lock: the default's train interval then compiles in 30 s instead of 20, and
a process that has compiled it runs it at two thirds of the speed. Another thread's arena is in
pieces of 64 MB. A larger block is the operating system's again, and so is an empty piece, unless
the padding at the top of an arena is as large. What a program on one device needs, the main thread
asks for (`dispatch_inline`); on several, programs run in threads of their own. Those that need more
than a piece ask for blocks that fit (`mbx.fast.compiler`), and `keep_pieces` has the padding. It is
not for all: the default took 6 % longer with it.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings

# Names and numbers of malloc.h and sys/mman.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_MADV_HUGEPAGE = 14
_NEVER = -1  # the largest size there is
_PAGE, _PIECE, _MOST = 2**21, 2**26, 2**33

_kept = False


def keep_freed_pages() -> bool:
    """Keep freed memory in the process, in large pages; True where the allocator took the setting.

    Call it before jax is imported, which allocates. The process keeps the most memory that it ever
    used. Elsewhere than on Linux with glibc it does nothing.
    """
    global _kept
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    options = {_M_MMAP_THRESHOLD: _NEVER, _M_TRIM_THRESHOLD: _NEVER}
    _kept = all([library.mallopt(*option) == 1 for option in options.items()])
    if _kept:
        _use_large_pages(library)
    return _kept


def keep_pieces() -> bool:
    """Keep empty pieces of threads' arenas, too; True where the allocator took the setting.

    For programs whose memory is in pieces, after `keep_freed_pages`. XLA cannot write these to the
    cache of compiled programs, of which jax would warn at every start.
    """
    if not _kept or ctypes.CDLL(None).mallopt(_M_TOP_PAD, _PIECE) != 1:
        return False
    unwritten = "Error writing persistent compilation cache entry.*Multiple temp buffer"
    warnings.filterwarnings("ignore", unwritten, UserWarning)
    return True


def dispatch_inline() -> None:
    """Have a CPU's programs run in the thread that calls them, where `keep_freed_pages` has been.

    jax hands a program to a thread of its own and goes on in Python until the result is asked for.
    Between two programs of a run there is nothing to go on with. Call it before jax makes its
    devices; a GPU's programs stay as they are.
    """
    if _kept:
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)


def _use_large_pages(library: ctypes.CDLL) -> None:
    """Let the heap's first gigabytes lie in pages of 2 MB: a block of them is marked, and freed
    untouched, so that it costs addresses and no memory."""
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    size = min(_MOST, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    block = library.malloc(size)
    if block is None:
        return
    first = -(-block // _PAGE) * _PAGE
    library.madvise(first, (block + size - first) // _PAGE * _PAGE, _MADV_HUGEPAGE)
    library.free(block)
