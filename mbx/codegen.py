"""Options of the compiler for programs that train: what they run for hours is worth seconds.

On a CPU, XLA hands sums and maxima, with the arithmetic in front of them, to a library of kernels
(YNNPACK). In those that a learner has most of, over the 101 bins or 96 units of many rows, its own
loops are faster: the default's train interval takes two thirds of the time with them. Matrix
products stay the library's. Those loops take vectors of 512 bits where the processor has them;
XLA's own choice is 256.
"""

from __future__ import annotations

import functools

import jax

Options = dict[str, str | bool | int]

_FOR_TRAINING = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT",
    "xla_cpu_prefer_vector_width": 512,
}


def for_training(platform: str) -> Options | None:
    """`compiler_options` for `jax.jit` of a program that trains on such devices; None: no others.

    Args:
        platform: of the devices, as `jax.Device.platform`.
    """
    return dict(_FOR_TRAINING) if platform == "cpu" and known(**_FOR_TRAINING) else None


@functools.cache
def known(**options: str | bool | int) -> bool:
    """Whether this version's compiler has these options: their names are no promise of XLA's."""

    def nothing() -> int:
        return 0

    try:
        jax.jit(nothing, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
