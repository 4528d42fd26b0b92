"""Options of the compiler: what a program runs for is worth seconds of compiling, or is not.

On a CPU, XLA hands sums and maxima, with the arithmetic in front of them, to a library of kernels
(YNNPACK). In those that a learner has most of, over the 101 bins or 96 units of many rows, its own
loops are faster: the default's train interval takes two thirds of the time with them. Matrix
products stay the library's. Those loops take vectors of 512 bits where the processor has them;
XLA's own choice is 256. On several devices of one processor a large program asks for its temporary
memory in blocks that the C library keeps for the thread of each (`mbx.fast.allocator`); it cannot
be written to the cache of compiled programs then.

On a GPU, XLA writes kernels for products and normalisations by Triton, several of each, and times
them. Compiled quickly, products are cuBLAS's, chosen by its rules, and nothing is timed: the
default's train interval compiles in half a minute in place of three and makes a fifth fewer steps a
second (docs/notes/performance.md, "On a GPU"). What runs once in a while is always compiled so.
"""

from __future__ import annotations

import jaxlib.version

Options = dict[str, str | bool | int]

# Names of options are no promise of XLA's, and only compiling a program tells whether it has them.
_UNTRIED = (0, 12)  # of jaxlib, as setup.cfg allows it
_TRAINING_ON_CPU: Options = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}
# Less than the 64 MB that glibc gives a thread in one piece: a larger block is the operating
# system's again after every call.
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
    """Whether a GPU's compiler is to be quick about the programs that train.

    Args:
        effort: the run's `gpu_compiler`.
        steps: environment steps of the run.
    """
    return effort == "quick" or (effort == "auto" and steps <= QUICK_STEPS)


def for_training(platform: str, quick: bool = False, pieces: bool = False) -> Options | None:
    """`compiler_options` for `jax.jit` of a program that trains on such devices; None: no others.

    Args:
        platform: of the devices, as `jax.Device.platform`.
        quick: about compiling, where the devices are GPUs.
        pieces: whether each device of a processor asks for its memory in pieces.
    """
    if platform == "cpu":
        return _known(_TRAINING_ON_CPU | (_PIECES_ON_CPU if pieces else {}))
    return _known(_QUICK_ON_GPU) if platform == "gpu" and quick else None


def for_once(platform: str) -> Options | None:
    """`compiler_options` of a program that runs once in a while: what evaluates or looks.

    Args:
        platform: as in `for_training`.
    """
    return _known(_ONCE.get(platform, {}))


def _known(options: Options) -> Options | None:
    """The options where the compiler has them, None for none: a later one is left its choices."""
    return options or None if jaxlib.version.__version_info__ < _UNTRIED else None
