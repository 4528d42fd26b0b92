"""Makes the C library's allocator keep large buffers, which train steps reuse.

On a CPU, XLA allocates a program's temporary memory at every call and frees it after. glibc returns
large blocks to the operating system at once, which clears every page at the next use, 4 kB by 4 kB:
up to 40 % of the time of programs with arrays of megabytes.

Threads have their own arenas. A single arena would keep everything, but threads that compile or
multiply then wait for its lock: the default's train interval compiles in 30 s instead of 20, and
the same process then runs it at two thirds of the speed. Other threads' arenas are in pieces of 64
MB; larger blocks, and empty pieces without as large a padding at the arena's top, return to the
operating system. With one device, the main thread allocates a program's memory (`dispatch_inline`);
with several, programs run in their own threads. Large programs then ask for blocks that fit a piece
(`mbx.fast.compiler`), and `keep_pieces` sets the padding, with which the default takes 6 % longer.
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
    """Keep freed memory in the process, in large pages; returns whether it took effect.
    Call it before jax is imported. The process keeps its peak memory. No effect except on Linux
    with glibc.
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
    """Also keep empty pieces of threads' arenas; returns whether it took effect.
    For programs whose memory is in pieces, after `keep_freed_pages`. XLA cannot write these to the
    compilation cache; the warning that jax gives at every start is silenced.
    """
    if not _kept or ctypes.CDLL(None).mallopt(_M_TOP_PAD, _PIECE) != 1:
        return False
    unwritten = "Error writing persistent compilation cache entry.*Multiple temp buffer"
    warnings.filterwarnings("ignore", unwritten, UserWarning)
    return True


def dispatch_inline() -> None:
    """Run a CPU's programs in the calling thread, where `keep_freed_pages` is in force.
    A run has no Python work between two programs, so that asynchronous dispatch gains nothing. Call
    it before jax initializes its devices; GPU programs are unaffected.
    """
    if _kept:
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)


def _use_large_pages(library: ctypes.CDLL) -> None:
    """Mark the heap's first gigabytes for pages of 2 MB.
    The block is freed untouched: it costs addresses and no memory.
    """
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
