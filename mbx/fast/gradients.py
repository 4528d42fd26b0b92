"""Layers with custom derivatives, and the switch for forward mode.

Reverse mode (`jax.grad`, `jax.vjp`, `jax.jacrev`) uses the layers' custom derivatives, for speed.
JAX cannot push tangents through those, so forward mode needs the switch:

    with gradients.forward_mode():
        jacobian = jax.jacfwd(lambda z: model.step(params, z, action))(z)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx.fast import collectives, reductions
from mbx.fast.reductions import expand

LAYER_NORM_EPSILON = 1e-5

# Part of the key of JAX's caches: a jitted function is traced again where the switch differs.
_forward = jax.make_user_context(False)


def forward_mode() -> AbstractContextManager[None]:
    """A context in which `jax.jacfwd`, `jax.jvp`, `jax.linearize` and `jax.hessian` work.
    Values are the same, and reverse mode works too, with JAX's own derivatives: equal but for
    rounding, and slower. Enter it where a function is traced; a function jitted outside is compiled
    again inside.

    Examples:
        >>> with gradients.forward_mode():
        ...     slope = jax.jacfwd(networks.mish)(jnp.float32(0.0))
        >>> round(float(slope), 3)
        0.6
    """
    return _forward(True)


class Written:
    """A function of arrays with a custom reverse-mode derivative, set by `defvjp`.
    `fun` is the plain function, which JAX differentiates by itself.
    """

    def __init__(self, fun: Callable[..., Any], nondiff_argnums: tuple[int, ...] = ()) -> None:
        self.fun = fun
        self._reverse = jax.custom_vjp(fun, nondiff_argnums=nondiff_argnums)
        self.defvjp = self._reverse.defvjp
        functools.update_wrapper(self, fun)

    def __call__(self, *args: Any) -> Any:
        return (self.fun if _forward.value else self._reverse)(*args)


@Written
def matmul(x: Array, kernel: Array) -> Array:
    """`[..., in] @ [in, out]` -> `[..., out]`.
    The custom derivative makes the kernel's gradient as `[in, out]` at once; the automatic one is
    transposed, which costs a strided copy of the whole batch.
    """
    return x @ collectives.replicate(kernel)


def _matmul_backward(residuals: tuple[Array, Array], grad: Array) -> tuple[Array, Array]:
    x, kernel = residuals
    grad_rows = grad
    # Where the compiler divides rows among devices, flattening [T, B, F] would gather them on each.
    if not jax.sharding.get_abstract_mesh().auto_axes:
        x, grad_rows = (y.reshape(-1, y.shape[-1]) for y in (x, grad))
    rows = tuple(range(x.ndim - 1))
    d_kernel = jax.lax.dot_general(x, grad_rows, ((rows, rows), ((), ())))
    return grad @ collectives.replicate(kernel).T, d_kernel


# The residual is the kernel as it is stored: no gathered one lives until the backward pass.
matmul.defvjp(lambda x, kernel: (x @ collectives.replicate(kernel), (x, kernel)), _matmul_backward)


@Written
def matmul_joined(inputs: tuple[Array, ...], kernel: Array) -> Array:
    """`matmul` of inputs `[..., in_i]`, concatenated -> `[..., out]`.
    The gradient of a narrow input, under a quarter of all columns, is a separate product; that of a
    wide one is cut out of the joint product. Where only the gradient of actions is needed (the
    policy's loss), nothing else is computed.
    """
    return jnp.concatenate(inputs, axis=-1) @ collectives.replicate(kernel)


def _matmul_joined_forward(inputs: tuple[Array, ...], kernel: Array) -> tuple[Array, Any]:
    x = jnp.concatenate(inputs, axis=-1)
    return x @ collectives.replicate(kernel), (x, inputs, kernel)


def _matmul_joined_backward(residuals: Any, grad: Array) -> tuple[tuple[Array, ...], Array]:
    x, inputs, kernel = residuals
    d_x, d_kernel = _matmul_backward((x, kernel), grad)
    ends = np.cumsum([y.shape[-1] for y in inputs])

    def own(end: int, size: int) -> Array:
        part = slice(end - size, end)
        # Rows cut out of a kernel are copied, columns cut out of a result are read where they lie.
        if 4 * size < x.shape[-1]:
            return grad @ collectives.replicate(kernel)[part].T
        return d_x[..., part]

    return tuple(own(end, y.shape[-1]) for end, y in zip(ends, inputs, strict=True)), d_kernel


matmul_joined.defvjp(_matmul_joined_forward, _matmul_joined_backward)


_IMAGES = ("NHWC", "HWIO", "NHWC")


@functools.partial(Written, nondiff_argnums=(2, 3))
def conv(x: Array, kernel: Array, stride: int = 1, padding: str = "SAME") -> Array:
    """Convolution of images: `[N, H, W, C]`, `[K, K, C, O]` -> `[N, H', W', O]`.
    On a CPU its derivatives are convolutions of transposed arrays. The automatic ones permute axes
    instead, which XLA's fast kernels do not take inside a loop: they cost twenty to thirty times as
    much.
    """
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=_IMAGES
    )


def _conv_forward(x: Array, kernel: Array, stride: int, padding: str) -> tuple[Array, Any]:
    return conv(x, kernel, stride, padding), (x, kernel)


def _conv_backward(
    stride: int, padding: str, residuals: tuple[Array, Array], grad: Array
) -> tuple[Array, Array]:
    def automatic(x: Array, kernel: Array, grad: Array) -> tuple[Array, Array]:
        return jax.vjp(lambda *args: conv.fun(*args, stride, padding), x, kernel)[1](grad)

    def transposed(x: Array, kernel: Array, grad: Array) -> tuple[Array, Array]:
        # Per axis: the output's length when its steps are spread by the stride; padding before.
        sides, taps = x.shape[1:3], kernel.shape[:2]
        pads = jax.lax.padtype_to_pads(sides, taps, (stride, stride), padding)
        spread = [(n - 1) * stride + 1 for n in grad.shape[1:3]]
        axes = range(2)
        before = [taps[i] - 1 - pads[i][0] for i in axes]
        after = [sides[i] - spread[i] - before[i] + taps[i] - 1 for i in axes]
        d_x = jax.lax.conv_general_dilated(
            grad,
            jnp.swapaxes(kernel[::-1, ::-1], 2, 3),
            (1, 1),
            list(zip(before, after, strict=True)),
            lhs_dilation=(stride, stride),
            dimension_numbers=_IMAGES,
        )
        # A stride may leave last rows and columns unused; the others meet every tap.
        used = [min(sides[i], taps[i] - 1 + spread[i] - pads[i][0]) for i in axes]
        rest = [taps[i] - 1 + spread[i] - used[i] - pads[i][0] for i in axes]
        d_kernel = jax.lax.conv_general_dilated(
            jnp.swapaxes(x[:, : used[0], : used[1]], 0, 3),
            jnp.moveaxis(grad, 0, 2),
            (1, 1),
            [(pads[i][0], rest[i]) for i in axes],
            rhs_dilation=(stride, stride),
            dimension_numbers=_IMAGES,
        )
        return d_x, jnp.moveaxis(d_kernel, 0, 2)

    return jax.lax.platform_dependent(*residuals, grad, cpu=transposed, default=automatic)


conv.defvjp(_conv_forward, _conv_backward)


def conv_doubled(x: Array, kernel: Array, zeros: bool = False) -> Array:
    """`conv` of images made twice as large by repeating pixels, or by zeros as in a transposed
    convolution of stride 2: `[N, H, W, C]`, `[K, K, C, O]` -> `[N, 2 H, 2 W, O]`.
    It is one convolution of the small images, whose kernel makes the four large pixels of each: of
    5 x 5 taps it needs 3 x 3, about a third of the products.
    """
    n, height, width, _ = x.shape
    taps, first = kernel.shape[0], (kernel.shape[0] - 1) // 2
    # The small pixel that a tap of the left (0) or right (1) of two large pixels sees.
    seen = {(tap, side): divmod(side + tap - first, 2) for tap, side in np.ndindex(taps, 2)}
    reach = max(abs(place) for place, _ in seen.values())
    where = np.zeros((taps, 2 * reach + 1, 2), np.float32)
    for (tap, side), (place, odd) in seen.items():
        where[tap, place + reach, side] = 1.0 if odd or not zeros else 0.0
    small = jnp.einsum("yda,xeb,yxio->deiabo", where, where, kernel, precision="highest")
    y = conv(x, small.reshape(*small.shape[:3], -1).astype(x.dtype))
    y = y.reshape(n, height, width, 2, 2, -1).swapaxes(2, 3)
    return y.reshape(n, 2 * height, 2 * width, -1)


@Written
def add_bias(x: Array, bias: Array) -> Array:
    """`[..., F]` + `[F]`; the bias has a custom derivative (`reductions.down`)."""
    return x + expand(bias, x.ndim)


add_bias.defvjp(
    lambda x, bias: (x + expand(bias, x.ndim), None), lambda _, grad: (grad, reductions.down(grad))
)


@Written
def norm_mish(x: Array, scale: Array, bias: Array) -> Array:
    """mish(layer_norm(x) * scale + bias) over the last axis of `[..., F]`; scale, bias `[F]`.
    The custom derivative evaluates the exponentials once, the compiler's own several times.
    """
    return _norm_mish_forward(x, scale, bias)[0]


def _norm_mish_forward(x: Array, scale: Array, bias: Array) -> tuple[Array, tuple[Array, ...]]:
    normal, inverse = layer_norm(x)
    y = normal * expand(scale, x.ndim) + expand(bias, x.ndim)
    e = jnp.exp(jnp.minimum(y, 20.0))
    n = e * (e + 2.0)
    gate = n / (n + 2.0)
    slope = gate + 4.0 * y * e * (e + 1.0) / jnp.square(n + 2.0)
    return y * gate, (normal, inverse, slope, scale)


def _norm_mish_backward(residuals: tuple[Array, ...], grad: Array) -> tuple[Array, Array, Array]:
    normal, inverse, slope, scale = residuals
    dy = grad * slope
    # Sums over rows and over columns are of the same products: each is written to memory once.
    scaled, weights = dy * normal, scale[:, None] * (1.0 / scale.size)
    projection = normal * reductions.sums(scaled, weights)
    dx = inverse * (dy * expand(scale, dy.ndim) - reductions.sums(dy, weights) - projection)
    return dx, reductions.down(scaled), reductions.down(dy)


norm_mish.defvjp(_norm_mish_forward, _norm_mish_backward)


def layer_norm(x: Array) -> tuple[Array, Array]:
    """x with mean 0 and variance 1 over the last axis, and the inverse deviation `[..., 1]`."""
    centred = x - reductions.mean(x)
    variance = reductions.mean(jnp.square(centred))
    inverse = jax.lax.rsqrt(variance + LAYER_NORM_EPSILON)
    return centred * inverse, inverse


@Written
def norm_silu(x: Array, scale: Array, shift: Array | None) -> Array:
    """silu(normal x * scale + shift) over the last axis: RMSNorm without a shift, else LayerNorm.
    The custom derivative does not repeat the exponential, and sums rows and columns faster.
    """
    return _norm_silu_forward(x, scale, shift)[0]


def _norm_silu_forward(x: Array, scale: Array, shift: Array | None) -> tuple[Array, tuple]:
    normal, inverse = shifted_norm(x, shift)
    y = normal * expand(scale, x.ndim)
    y = y if shift is None else y + expand(shift, x.ndim)
    gate = jax.nn.sigmoid(y)
    return y * gate, (normal, inverse, gate, scale, shift)


def _norm_silu_backward(residuals: tuple, grad: Array) -> tuple[Array, Array, Array | None]:
    normal, inverse, gate, scale, shift = residuals
    y = normal * expand(scale, grad.ndim)
    y = y if shift is None else y + expand(shift, grad.ndim)
    dy = grad * (gate + y * gate * (1.0 - gate))
    # Sums over rows and over columns are of the same products: each is written to memory once.
    scaled, weights = dy * normal, scale[:, None] * (1.0 / scale.size)
    dx = dy * expand(scale, dy.ndim) - normal * reductions.sums(scaled, weights)
    if shift is None:
        return inverse * dx, reductions.down(scaled), None
    return (
        inverse * (dx - reductions.sums(dy, weights)),
        reductions.down(scaled),
        reductions.down(dy),
    )


norm_silu.defvjp(_norm_silu_forward, _norm_silu_backward)


def shifted_norm(x: Array, shift: Array | None) -> tuple[Array, Array]:
    """x, less its mean if there is a shift, over its root mean square; the inverse `[..., 1]`."""
    x, epsilon = (x, 1e-4) if shift is None else (x - reductions.mean(x), 1e-3)
    inverse = jax.lax.rsqrt(reductions.mean(jnp.square(x)) + epsilon)
    return x * inverse, inverse


def drawn_once(draw: Callable[[], Array], shape: tuple[int, ...]) -> Array:
    """The mask `draw()`, kept for the backward pass, where compilers would draw it again.
    On a CPU it is a branch that is always taken: barriers vanish before fusion there, and a branch
    is never fused. On an accelerator a branch may wait for the host.
    """

    def kept() -> Array:
        return jax.lax.optimization_barrier(draw())

    def taken() -> Array:
        always = jax.lax.optimization_barrier(jnp.bool_(True))  # or the branch would be none
        return jax.lax.cond(always, draw, lambda: jnp.zeros(shape, bool))

    return jax.lax.platform_dependent(cpu=taken, default=kept)
