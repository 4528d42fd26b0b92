"""Numbers that switch something on by not being 0, or by their sign, where they may be traced.

A Python number decides what a program holds. A traced one (an argument of `jax.jit`, a lane of
`jax.vmap`) has no value yet: the program holds both, and the value chooses.

Nothing here loads JAX before a number is traced.
"""

from __future__ import annotations

from typing import Any


def possible(condition: Any) -> bool:
    """Whether a comparison may hold: it does, or it is an array, which only the program knows.

    Examples:
        >>> traced.possible(0.5 > 0.0), traced.possible(0.0 > 0.0)
        (True, False)
        >>> traced.possible(jnp.float32(0.0) > 0.0)
        True
    """
    return True if _is_array(condition) else bool(condition)


def choose(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` where a comparison holds, else `no`: one of them as it is, or `jnp.where` of arrays.

    Examples:
        >>> traced.choose(0.5 > 0.0, "on", "off")
        'on'
        >>> float(traced.choose(jnp.float32(0.0) > 0.0, 1.0, 2.0))
        2.0
    """
    if not _is_array(condition):
        return yes if condition else no
    import jax.numpy as jnp

    return jnp.where(condition, yes, no)


def _is_array(condition: Any) -> bool:
    """Whether a comparison came to an array of JAX's; NumPy's have their value at once."""
    return hasattr(condition, "aval")
