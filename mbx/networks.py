"""Network blocks of the TD-MPC2 family (NormedLinear, SimNorm, MLP, pixel encoder).

Modules are flax.linen and hold no state besides their parameters. A module that takes several
inputs treats them as one concatenated input, but multiplies each with its own rows of the kernel:
an input shared by many candidates (a root state `[B, 1, L]` with actions `[B, N, A]`) is then
multiplied once, not once a candidate. Ensembles are the same module with parameters stacked on
axis 0: `init_ensemble`, `apply_ensemble`, `apply_heads`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mbx.fast import collectives, gradients, reductions, rng

Params = Any


def mish(x: Array) -> Array:
    """Mish, `x * tanh(softplus(x))`, with one exponential instead of three (any shape).
    With n = e^x (e^x + 2), tanh(softplus(x)) = n / (n + 2), which is 1 in float32 from x = 20 on.
    """
    e = jnp.exp(jnp.minimum(x, 20.0))
    n = e * (e + 2.0)
    return x * (n / (n + 2.0))


def sim_norm(x: Array, group_size: int = 8) -> Array:
    """Softmax over groups of `group_size` consecutive features: `[..., L] -> [..., L]`.
    Raises ValueError when L is not divisible by `group_size`. Source: TD-MPC2, section 3.1.
    """
    if x.shape[-1] % group_size:
        raise ValueError(
            f"sim_norm: {x.shape[-1]} features are not divisible by simnorm_dim={group_size}; "
            "choose a latent_dim that is a multiple of simnorm_dim"
        )
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    return jax.nn.softmax(groups, axis=-1).reshape(x.shape)


class Dense(nn.Module):
    """Linear layer over one or several inputs `[..., in_i]` -> `[..., features]`.
    Equal to a dense layer on the concatenation; inputs may broadcast against each other.
    """

    features: int
    zero_init: bool = False
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        sizes = [x.shape[-1] for x in inputs]
        # TD-MPC2 truncates at +-2 absolute, a hundred standard deviations: no truncation.
        init = nn.initializers.zeros if self.zero_init else nn.initializers.normal(0.02)
        kernel = self.param("kernel", init, (sum(sizes), self.features))
        bias = self.param("bias", nn.initializers.zeros, (self.features,))
        kernel, inputs = kernel.astype(self.dtype), tuple(x.astype(self.dtype) for x in inputs)
        if len(inputs) == 1:
            out = gradients.matmul(*inputs, kernel)
        elif len({x.shape[:-1] for x in inputs}) == 1:
            out = gradients.matmul_joined(inputs, kernel)
        else:  # inputs that broadcast: multiply each before it is repeated
            kernels = jnp.split(collectives.replicate(kernel), np.cumsum(sizes)[:-1])
            parts = [gradients.matmul(x, own) for x, own in zip(inputs, kernels, strict=True)]
            out = functools.reduce(jnp.add, parts)
        return gradients.add_bias(out, bias.astype(self.dtype))


class NormActivation(nn.Module):
    """Layer normalisation over the last axis (epsilon 1e-5, float32), then an activation."""

    activation: Callable[[Array], Array]

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        bias = self.param("bias", nn.initializers.zeros, (x.shape[-1],))
        y = x.astype(jnp.float32)
        if self.activation is mish:
            return gradients.norm_mish(y, scale, bias).astype(x.dtype)
        y = gradients.layer_norm(y)[0] * reductions.expand(scale, y.ndim)
        y = y + reductions.expand(bias, y.ndim)
        return self.activation(y).astype(x.dtype)


class NormedDense(nn.Module):
    """Dense, dropout, layer normalisation, activation (NormedLinear of TD-MPC2)."""

    features: int
    activation: Callable[[Array], Array] = mish
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        x = Dense(self.features, dtype=self.dtype, name="dense")(*inputs)
        if self.dropout > 0.0 and self.has_rng("dropout"):
            x = dropout(self.make_rng("dropout"), x, self.dropout)
        return NormActivation(self.activation, name="norm")(x)


def dropout(key: Array, x: Array, rate: float) -> Array:
    """`x` `[..., B, F]` with the share `rate` of its numbers 0, the others as much larger.
    Of a part of a batch (`mbx.fast.collectives`) those of its rows that it would be in the whole.
    """
    keep = gradients.drawn_once(functools.partial(_kept, key, 1.0 - rate, x.shape), x.shape)
    return jnp.where(keep, x / (1.0 - rate), 0.0)


def _kept(key: Array, share: float, shape: tuple[int, ...]) -> Array:
    """Which of `[..., B, F]` dropout keeps; of a part of a batch, its rows of the whole's."""
    count = shape[-2] if len(shape) > 1 else 1
    if collectives.axis_size() == 1:
        return jax.random.bernoulli(key, share, shape)
    whole = (*shape[:-2], count * collectives.axis_size(), shape[-1])
    keep = jax.random.bernoulli(rng.unrolled(key), share, whole)
    return jax.lax.dynamic_slice_in_dim(keep, collectives.row_offset(count), count, axis=-2)


class MLP(nn.Module):
    """Hidden NormedDense layers, then a plain dense layer or a NormedDense one.

    Inputs `[..., in_i]`, output `[..., features]` in float32. With `out_activation` the last layer
    is normalised before it (SimNorm heads). Dropout acts in the first hidden layer only, and only
    when a "dropout" key is given to `apply`.
    """

    hidden: Sequence[int]
    features: int
    out_activation: Callable[[Array], Array] | None = None
    zero_last: bool = False
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        for i, size in enumerate(self.hidden):
            dropout = self.dropout if i == 0 else 0.0
            layer = NormedDense(size, dropout=dropout, dtype=self.dtype, name=f"layer_{i}")
            inputs = (layer(*inputs),)
        if self.out_activation is None:
            last = Dense(self.features, self.zero_last, self.dtype, name="out")
            return last(*inputs).astype(jnp.float32)
        out = NormedDense(self.features, lambda x: x, dtype=self.dtype, name="out")(*inputs)
        return self.out_activation(out.astype(jnp.float32))


def _conv_layer(x: Array, kernel: Array, strides: Any, padding: str, **_: Any) -> Array:
    """`conv` as `nn.Conv` calls it; the rest are that layer's defaults."""
    return gradients.conv(x, collectives.replicate(kernel), strides[0], padding)


class ConvEncoder(nn.Module):
    """Pixel encoder: images `[..., 64, 64, C]` with values 0..255 -> latents `[..., 16*channels]`.

    x/255 - 0.5; four VALID convolutions (7 stride 2, 5 stride 2, 3 stride 2, 3 stride 1) with ReLU
    after the first three; flatten in channel-major order; SimNorm (of groups of `simnorm_dim`; 0:
    none). Source: TD-MPC2.
    """

    channels: int = 32
    simnorm_dim: int = 8

    @nn.compact
    def __call__(self, image: Array) -> Array:
        batch = image.shape[:-3]
        x = image.reshape(-1, *image.shape[-3:]).astype(jnp.float32) / 255.0 - 0.5
        # PyTorch's default for convolutions: uniform with bound 1/sqrt(fan_in).
        init = nn.initializers.variance_scaling(1.0 / 3.0, "fan_in", "uniform")
        for i, (kernel, stride) in enumerate(((7, 2), (5, 2), (3, 2), (3, 1))):
            own = dict(padding="VALID", kernel_init=init, conv_general_dilated=_conv_layer)
            x = nn.Conv(self.channels, (kernel, kernel), stride, name=f"conv_{i}", **own)(x)
            x = nn.relu(x) if i < 3 else x
        x = jnp.moveaxis(x, -1, -3).reshape(*batch, -1)
        return sim_norm(x, self.simnorm_dim) if self.simnorm_dim else x


class MixedEncoder(nn.Module):
    """Encoder of an image and a vector: convolutions and dense layers, joined by a last network.
    What comes out of `image` and `vector` should be of one size, so that neither drowns the other.
    """

    conv: nn.Module
    image: nn.Module
    vector: nn.Module
    both: nn.Module

    @nn.compact
    def __call__(self, image: Array, vector: Array) -> Array:
        return self.both(self.image(self.conv(image)), self.vector(vector))


class DroppingMLP(nn.Module):
    """An `MLP` with dropout behind every hidden layer, where `apply` is given a "dropout" key."""

    hidden: Sequence[int]
    features: int
    dropout: float

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        for number, size in enumerate(self.hidden):
            x = NormedDense(size, name=f"layer_{number}")(*inputs)
            if self.has_rng("dropout"):
                x = dropout(self.make_rng("dropout"), x, self.dropout)
            inputs = (x,)
        return Dense(self.features, name="out")(*inputs)


class GridEncoder(nn.Module):
    """Features `[N, D]` that begin with a picture -> `[N, hidden]`, in (-1, 1).
    A 3x3 convolution and two residual ones over the picture; then two layers over it all.
    """

    picture: tuple[int, int, int]
    width: int
    hidden: int

    @nn.compact
    def __call__(self, x: Array) -> Array:
        channels, rows, columns = self.picture
        size = channels * rows * columns
        picture = x[:, :size].reshape(-1, channels, rows, columns).transpose(0, 2, 3, 1)

        def layer(inputs: Array, name: str) -> Array:
            scale = nn.initializers.variance_scaling(2.0, "fan_in", "truncated_normal")
            kernel = self.param(name, scale, (3, 3, inputs.shape[-1], self.width))
            bias = self.param(f"{name}_bias", nn.initializers.zeros, (self.width,))
            return gradients.conv(inputs, kernel) + bias.reshape(1, 1, 1, -1)

        y = jax.nn.relu(layer(picture, "conv_0"))
        for number in (1, 2):
            y = jax.nn.relu(y + layer(y, f"conv_{number}"))
        flat = y.reshape(len(x), -1)
        return MLP([self.hidden], self.hidden, nn.tanh, name="dense")(flat, x[:, size:])


class RepeatedConv(nn.Module):
    """Pictures `[N, Y, X, C]` with numbers `[N, F]` of each -> `[N, Y, X, width]`.
    3x3 convolutions with one kernel for all `rounds`: each carries what a cell knows one further.
    """

    width: int
    rounds: int

    @nn.compact
    def __call__(self, picture: Array, numbers: Array) -> Array:
        scale = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
        read = self.param("read", scale, (3, 3, picture.shape[3], self.width))
        carry = self.param("carry", scale, (3, 3, self.width, self.width))
        rest = nn.Dense(self.width, name="rest")(numbers)
        given = gradients.conv(picture, read) + rest[:, None, None]
        y = jax.nn.relu(given)
        for _ in range(self.rounds):
            y = jax.nn.relu(given + gradients.conv(y, carry))
        return y


def random_shift(image: Array, shift: Array, pad: int = 3) -> Array:
    """Shift images by whole pixels, edges replicated: `[B, H, W, C]`, `[B, 2]` -> `[B, H, W, C]`.

    `shift[:, 0]` is dx and `shift[:, 1]` is dy, integers in 0..2*pad; pad means no shift.
    Source: DrQ-v2's augmentation as TD-MPC2 uses it.

    Examples:
        >>> image = jnp.arange(3.0).reshape(1, 1, 3, 1)
        >>> networks.random_shift(image, jnp.array([[4, 3]]))[0, 0, :, 0].tolist()
        [1.0, 2.0, 2.0]
    """
    height, width, channels = image.shape[1:]
    padded = jnp.pad(image, ((0, 0), (pad, pad), (pad, pad), (0, 0)), mode="edge")

    def crop(x: Array, offset: Array) -> Array:
        zero = jnp.zeros((), offset.dtype)
        return jax.lax.dynamic_slice(x, (offset[1], offset[0], zero), (height, width, channels))

    return jax.vmap(crop)(padded, shift.astype(jnp.int32))


class PriorMLP(nn.Module):
    """A random network that is never trained: Linear and ReLU, Xavier-normal, no normalisation.

    Inputs `[..., in_i]` (broadcasting against each other), output `[..., features]`; no gradient
    reaches its parameters. Source: Osband et al. 2018 (arXiv 1806.03335); see
    docs/sources.md#ensembles.
    """

    hidden: Sequence[int]
    features: int

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        lead = jnp.broadcast_shapes(*(x.shape[:-1] for x in inputs))
        x = jnp.concatenate([jnp.broadcast_to(x, (*lead, x.shape[-1])) for x in inputs], axis=-1)
        sizes = (*self.hidden, self.features)
        for i, size in enumerate(sizes):
            layer = nn.Dense(size, kernel_init=nn.initializers.xavier_normal(), name=f"layer_{i}")
            x = layer(x)
            x = nn.relu(x) if i + 1 < len(sizes) else x
        return jax.lax.stop_gradient(x)


class MLPWithPrior(nn.Module):
    """An `MLP` whose output a frozen random network joins: by default `main + scale * prior`.

    With `out_activation` the prior joins before it, so that latents stay normalised. The prior's
    hidden layers are `prior_div` times narrower than the main ones, at least 8 wide.
    """

    hidden: Sequence[int]
    features: int
    scale: float
    prior_div: int = 16
    prior_features: int = 0  # outputs of the prior; 0: as many as the main ones
    combine: Callable[[Array, Array], Array] = jnp.add  # (main, scaled prior) -> output
    out_activation: Callable[[Array], Array] | None = None
    zero_last: bool = False
    dropout: float = 0.0
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, *inputs: Array) -> Array:
        narrow = [max(size // self.prior_div, 8) for size in self.hidden]
        prior = PriorMLP(narrow, self.prior_features or self.features, name="prior")(*inputs)
        prior, last = self.scale * prior, self.out_activation
        own = dict(zero_last=self.zero_last, dropout=self.dropout, dtype=self.dtype, name="main")
        if last is None:
            return self.combine(MLP(self.hidden, self.features, **own)(*inputs), prior)
        joined = lambda x: last(self.combine(x, prior))  # noqa: E731
        return MLP(self.hidden, self.features, joined, **own)(*inputs)


def init_ensemble(module: nn.Module, key: Array, num: int, *inputs: Array) -> Params:
    """Parameters of `num` independently initialised copies of `module`, stacked on axis 0."""
    return jax.vmap(lambda k: module.init(k, *inputs)["params"])(jax.random.split(key, num))


def apply_ensemble(
    module: nn.Module, params: Params, *inputs: Array, dropout_key: Array | None = None
) -> Array:
    """Every head on the same inputs: params stacked `[K, ...]`, result `[K, ..., features]`."""
    num = num_heads(params)
    # Repeating the inputs keeps heads the leading axis of every product; one wide product for all
    # heads would need its results, and all their gradients, transposed.
    repeated = [jnp.broadcast_to(x, (num, *x.shape)) for x in inputs]
    return apply_heads(module, params, *repeated, dropout_key=dropout_key)


def apply_heads(
    module: nn.Module, params: Params, *inputs: Array, dropout_key: Array | None = None
) -> Array:
    """Head k on the inputs' row k: params and inputs `[K, ...]`, result `[K, ..., features]`."""
    num = num_heads(params)
    keys = None if dropout_key is None else jax.random.split(dropout_key, num)

    def one(params: Params, key: Array | None, *inputs: Array) -> Array:
        rngs = None if key is None else {"dropout": key}
        return module.apply({"params": params}, *inputs, rngs=rngs)

    if num > 1:
        return jax.vmap(one)(params, keys, *inputs)
    # One head is no ensemble: the plain program, without a batch axis in its products. Squeezed,
    # not indexed: an index's gradient is a scatter, a reshape's is free.
    return one(*jax.tree.map(lambda x: jnp.squeeze(x, 0), (params, keys, *inputs)))[None]


def num_heads(params: Params) -> int:
    """Members of an ensemble, the leading axis of its stacked parameters."""
    return jax.tree.leaves(params)[0].shape[0]


def take_heads(params: Params, heads: Array) -> Params:
    """The parameters of the ensemble members `heads` `[n]`: leaves `[K, ...] -> [n, ...]`."""
    return jax.tree.map(lambda p: p[heads], params)
