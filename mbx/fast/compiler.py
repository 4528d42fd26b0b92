"""Compiler options that trade compilation time against run time.

On a CPU, XLA passes sums and maxima, with the arithmetic before them, to a library of kernels
(YNNPACK). For a learner's most frequent ones, over the 101 bins or 96 units of many rows, XLA's own
loops are faster: the default's train interval takes two thirds of the time with them. Matrix
products stay with the library. These loops use vectors of 512 bits where available (XLA's default
is 256). With several devices on one processor, a large program asks for its temporary memory in
blocks that the C library keeps for each thread (`mbx.fast.allocator`), which excludes it from the
compilation cache.

On a GPU, XLA writes several Triton kernels for products and normalizations and times them. Compiled
quickly, products are cuBLAS's by its own rules, and nothing is timed: the default's train interval
compiles in half a minute instead of three and makes a fifth fewer steps a second
(docs/notes/performance.md, "On a GPU"). Programs that run rarely are always compiled quickly.
"""

from __future__ import annotations

import jaxlib.version

Options = dict[str, str | bool | int]

# XLA may rename options, and only compiling a program shows whether it has them.
_UNTRIED = (0, 13)  # of jaxlib, as setup.cfg allows it
_TRAINING_ON_CPU: Options = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}
# Less than the 64 MB that glibc gives a thread in one piece: a larger block returns to the
# operating system after every call.
_PIECES_ON_CPU: Options = {"xla_multiheap_size_constraint_per_heap": 64_000_000}
_QUICK_ON_GPU: Options = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_disable_hlo_passes": "triton-softmax-rewriter",
}
_ONCE: dict[str, Options] = {"gpu": _QUICK_ON_GPU}
# Environment steps after which the slower program has cost what compiling it quickly had saved:
# 150 s, and 344 against 277 steps a second, of `configs/tdmpc.py` on an H100.
QUICK_STEPS = 200_000


def is_quick(effort: str, steps: int) -> bool:
    """Whether to compile training programs quickly on a GPU.
    effort: the run's `gpu_compiler`; steps: environment steps of the run.
    """
    return effort == "quick" or (effort == "auto" and steps <= QUICK_STEPS)


def for_training(platform: str, quick: bool = False, pieces: bool = False) -> Options | None:
    """`compiler_options` of `jax.jit` for a program that trains; None: the defaults.
    platform: as `jax.Device.platform`; quick: compile quickly on GPUs; pieces: whether each device
    of a CPU asks for its memory in pieces.
    """
    if platform == "cpu":
        return _known(_TRAINING_ON_CPU | (_PIECES_ON_CPU if pieces else {}))
    return _known(_QUICK_ON_GPU) if platform == "gpu" and quick else None


def for_once(platform: str) -> Options | None:
    """`compiler_options` of `jax.jit` for a program that runs rarely (evaluation, diagnostics)."""
    return _known(_ONCE.get(platform, {}))


def _known(options: Options) -> Options | None:
    """The options if the compiler has them, else None: a later compiler uses its defaults."""
    return options or None if jaxlib.version.__version_info__ < _UNTRIED else None
