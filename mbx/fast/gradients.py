"""Derivatives that are written out, and the switch for forward mode.

Reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`) takes the derivatives that the layers write out
for speed. JAX cannot push tangents through those, so forward mode needs the switch:

    with gradients.forward_mode():
        jacobian = jax.jacfwd(lambda z: model.step(params, z, action))(z)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

# Part of the key of JAX's caches: a jitted function is traced again where the switch differs.
_forward = jax.make_user_context(False)


def forward_mode() -> AbstractContextManager[None]:
    """A context in which `jax.jacfwd`, `jax.jvp`, `jax.linearize` and `jax.hessian` work.

    Values are the same, and reverse mode works too, with JAX's own derivatives in place of the
    written ones: equal but for rounding, and slower. Enter it where a function is traced; a
    function jitted outside is compiled once more inside.

    Examples:
        >>> with gradients.forward_mode():
        ...     slope = jax.jacfwd(networks.mish)(jnp.float32(0.0))
        >>> round(float(slope), 3)
        0.6
    """
    return _forward(True)


class Written:
    """A function of arrays whose reverse-mode derivative is written out.

    Attributes:
        fun: the plain function, which JAX differentiates by itself.
        defvjp: sets the derivative, as that of `jax.custom_vjp`.
    """

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()) -> None:
        self.fun = fun
        self._reverse = jax.custom_vjp(fun, nondiff_argnums=nondiff_argnums)
        self.defvjp = self._reverse.defvjp
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any) -> Any:
        """The function, with the derivative that the mode asks for."""
        return (self.fun if _forward.value else self._reverse)(*args)
