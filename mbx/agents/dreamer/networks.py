"""Networks of Dreamer as pure functions over dicts of parameters: MLP heads, layers, shapes.

A network is a pair of functions, `init_*(key, ...) -> params` and the forward pass. Every hidden
layer is linear, norm, activation; norms are computed in float32 at every dtype.

Two families, by `ModelConfig.norm`: "rms" is the official code's (RMSNorm with a scale, linear
layers with bias), "layer" is sheeprl's (LayerNorm with scale and shift, linear layers without).
Axes: F features (deter and flat stoch, in this order), E encoder outputs, leading `...` free.
Source: DreamerV3 (arXiv 2301.04104), appendix "Networks", and its official code.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from mbx import distributions as dist
from mbx.agents.dreamer.settings import SIZES, Model
from mbx.fast import collectives, gradients, reductions
from mbx.heads import Heads
from mbx.observations import is_packed, joined
from mbx.settings import from_dict
from mbx.types import Array, Params, Part

# A normal truncated at two standard deviations has this inverse standard deviation.
_TRUNCATION = 1.1368


@dataclasses.dataclass(frozen=True)
class ModelConfig(Model):
    """Shapes of the world model, the actor and the critic: the settings, sizes filled in, and what
    the task gives. Raises ValueError for settings that cannot be, or do not fit the task.
    """

    vector_dim: int = 0  # entries of the observed vector; 0: none is observed
    vector_shape: tuple[int, ...] = ()  # the environment's own; () for `[vector_dim]`
    image_shape: tuple[int, int, int] | None = None  # (H, W, C); None: none is observed
    image_scale: float = 255.0  # divides image values to bring them to [0, 1]
    action_dim: int = 1  # A
    factors: tuple[int, ...] = ()  # sizes of one-hot blocks, A in sum; () for continuous actions
    parts: tuple[Part, ...] = ()  # of an observation that `mbx.observations` has joined
    heads: Heads | None = None  # auxiliary heads, learned with the world model

    def __post_init__(self) -> None:
        from_dict(Model(), {f.name: getattr(self, f.name) for f in dataclasses.fields(Model)})
        for name, default in SIZES[self.size].items():
            if not getattr(self, name) and (name != "blocks" or self.core == "block"):
                object.__setattr__(self, name, default)
        if not self.vector_dim and self.image_shape is None:
            raise ValueError("nothing is observed: give vector_dim or image_shape")
        if self.factors and sum(self.factors) != self.action_dim:
            raise ValueError(f"factors={self.factors} do not sum to action_dim={self.action_dim}")
        if self.image_shape is not None:
            image_stages(self)

    @property
    def feature_dim(self) -> int:
        """F, the size of what heads read."""
        return self.deter + self.stoch * self.classes

    @property
    def obs_shape(self) -> tuple[int, ...]:
        """Shape of an environment's observation."""
        if is_packed(self.parts):
            return joined(self.parts)[0]
        return tuple(self.image_shape or self.vector_shape or (self.vector_dim,))

    @property
    def discrete(self) -> bool:
        """Whether actions are one-hot."""
        return bool(self.factors)


def image_stages(config: ModelConfig) -> int:
    """How often an image is halved: by default at most four times, 64 -> 4, 12 -> 3, 10 -> 5.
    Raises ValueError where the smallest grid is not 3 to 24 wide.
    """
    height, width = config.image_shape[:2]
    stages, most = 0, len(config.image_multipliers) - config.image_outer
    while stages < most and not height % 2 and not width % 2 and min(height, width) >= 6:
        height, width, stages = height // 2, width // 2, stages + 1
    if stages == 0 or not all(3 <= side <= 24 for side in (height, width)):
        raise ValueError(
            f"image_shape={config.image_shape}: halving it up to {most} times must end at 3 to 24 "
            "pixels; crop or resize the image, for example to 64x64"
        )
    return stages


# Layers


def init_linear(
    key: Array, fan_in: int, *shape: int, scale: float = 1.0, bias: bool = True
) -> Params:
    """kernel of `shape` (its last axis the outputs), truncated normal of variance 1/fan_in."""
    kernel = jax.random.truncated_normal(key, -2.0, 2.0, shape)
    params = {"kernel": kernel * (scale * _TRUNCATION / math.sqrt(fan_in))}
    if bias:
        params["bias"] = jnp.zeros(shape[-1] if len(shape) != 3 else shape[0] * shape[2])
    return params


def linear(params: Params, x: Array, dtype: str = "float32") -> Array:
    """`[..., in] -> [..., out]`."""
    y = gradients.matmul(x.astype(dtype), params["kernel"].astype(dtype))
    return add_bias(params, y)


def add_bias(params: Params, y: Array) -> Array:
    """y plus the bias, where the layer has one."""
    return gradients.add_bias(y, params["bias"].astype(y.dtype)) if "bias" in params else y


def block_linear(params: Params, x: Array, dtype: str = "float32") -> Array:
    """`[..., in] -> [..., out]` with a block-diagonal kernel `[G, in/G, out/G]`."""
    return block_linear_parts(params, x, 1, dtype)[0]


def block_linear_parts(params: Params, x: Array, num: int, dtype: str = "float32") -> list[Array]:
    """`block_linear` whose blocks each hold `num` outputs side by side, as `num` results
    `[..., out / num]`.
    A product for each: cut from one result, whose blocks lie between them, they cost a CPU several
    times as much as the product itself.
    """
    kernels = jnp.split(collectives.replicate(params["kernel"].astype(dtype)), num, axis=-1)
    results = [_block_matmul(x.astype(dtype), kernel) for kernel in kernels]
    if "bias" not in params:
        return results
    biases = jnp.split(params["bias"].reshape(kernels[0].shape[0], -1), num, axis=-1)
    return [add_bias({"bias": b.reshape(-1)}, y) for y, b in zip(results, biases, strict=True)]


def _block_matmul(x: Array, kernel: Array) -> Array:
    """`[..., G in]`, `[G, in, out]` -> `[..., G out]`, with blocks as the leading axis of the
    product: transposed by the compiler they cost more than here."""
    blocks, fan_in, _ = kernel.shape
    if blocks == 1:
        return gradients.matmul(x, kernel[0])
    stacked = jnp.swapaxes(x.reshape(-1, blocks, fan_in), 0, 1)
    return jnp.swapaxes(stacked @ kernel, 0, 1).reshape(*x.shape[:-1], -1)


def init_norm(kind: str, size: int) -> Params:
    """Scale, and shift where the kind has one."""
    params = {"scale": jnp.ones(size)}
    return params | {"shift": jnp.zeros(size)} if kind == "layer" else params


def norm(params: Params, x: Array) -> Array:
    """RMSNorm (eps 1e-4), or LayerNorm (eps 1e-3) where the parameters hold a shift; float32."""
    shift = params.get("shift")
    y = gradients.shifted_norm(x.astype(jnp.float32), shift)[0]
    y = y * reductions.expand(params["scale"], x.ndim)
    return y if shift is None else y + reductions.expand(shift, x.ndim)


def norm_silu(params: Params, x: Array) -> Array:
    """silu(norm(x)), float32."""
    return gradients.norm_silu(x.astype(jnp.float32), params["scale"], params.get("shift"))


def init_layer(key: Array, kind: str, fan_in: int, out: int) -> Params:
    """One hidden layer: linear, norm, activation."""
    params = init_linear(key, fan_in, fan_in, out, bias=kind == "rms")
    return params | {"norm": init_norm(kind, out)}


def layer(params: Params, x: Array, dtype: str = "float32") -> Array:
    """silu(norm(linear(x)))."""
    return norm_silu(params["norm"], linear(params, x, dtype))


def init_mlp(key: Array, kind: str, fan_in: int, units: int, layers: int) -> Params:
    """`layers` hidden layers, named layer_0, layer_1, …"""
    keys, sizes = jax.random.split(key, max(layers, 1)), [fan_in] + [units] * layers
    return {f"layer_{i}": init_layer(keys[i], kind, sizes[i], units) for i in range(layers)}


def mlp(params: Params, x: Array, dtype: str = "float32") -> Array:
    """The hidden layers one after the other; an "out" layer is left to the caller."""
    for i in range(sum(name.startswith("layer_") for name in params)):
        x = layer(params[f"layer_{i}"], x, dtype)
    return x


def init_head(key: Array, config: ModelConfig, layers: int, out: int, scale: float = 1.0) -> Params:
    """An MLP on features F with a linear output; `scale` multiplies the output's kernel."""
    mlp_key, out_key = jax.random.split(key)
    params = init_mlp(mlp_key, config.norm, config.feature_dim, config.units, layers)
    width = config.units if layers else config.feature_dim
    return params | {"out": init_linear(out_key, width, width, out, scale=scale)}


def head(params: Params, features: Array, dtype: str = "float32") -> Array:
    """`[..., F] -> [..., out]`, float32."""
    return linear(params["out"], mlp(params, features, dtype), dtype).astype(jnp.float32)


# Two-hot heads


def value_bins(config: ModelConfig) -> Array:
    """Bins of reward and value: evenly spaced in symlog space, or their symexp (mirrored)."""
    if config.bins_space == "symlog":
        return dist.bins(-config.bin_max, config.bin_max, config.num_bins)
    # Not left to a compiler: the last digit of a bin's symlog is 2e-6 of the bin. The official ones
    # are indices times a reciprocal, in float32.
    num = config.num_bins // 2
    share = np.arange(num + 1, dtype=np.float32) * np.float32(1.0 / num)
    half = -np.expm1(np.float32(config.bin_max) * (1.0 - share))
    return jnp.asarray(np.concatenate([half, -half[:-1][::-1]]))


def two_hot_mean(config: ModelConfig, logits: Array) -> Array:
    """`[..., bins] -> [...]` predicted number, in real space."""
    if config.bins_space == "symlog":
        return dist.two_hot_mean(logits, value_bins(config))
    return dist.two_hot_linear_mean(logits, value_bins(config))


def two_hot_loss(config: ModelConfig, logits: Array, target: Array) -> Array:
    """Cross-entropy with the two-hot code of `target` `[...]`."""
    if config.bins_space == "symlog":
        return dist.two_hot_cross_entropy(logits, target, value_bins(config))
    return dist.two_hot_linear_cross_entropy(logits, target, value_bins(config))
