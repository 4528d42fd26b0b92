"""Dreamer's encoder and decoder: vectors (symlog) and images (64x64 or small grids), or both.

Observations are a dict with "vector" `[..., D]` and / or "image" `[..., H, W, C]` (values 0 to
`image_scale`). Images are halved up to four times (`model.image_*`), 10x10 grids once.
Axes: E encoder outputs, F features; leading `...` free.
Source: official DreamerV3 (simple encoder and decoder).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mbx import distributions as dist
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.settings import Model
from mbx.agents.dreamer.types import Observation
from mbx.fast import collectives, gradients
from mbx.types import Array, Params

_DEFAULT_BLOCKS = Model.decoder_blocks  # the official code's; small images cannot always have it


def _grid(config: ModelConfig) -> tuple[int, int, tuple[int, ...]]:
    """Smallest grid (height, width) of the image, and the channels of every stage."""
    halvings = nets.image_stages(config)
    height, width = (side >> halvings for side in config.image_shape[:2])
    multipliers = config.image_multipliers[: halvings + config.image_outer]
    return height, width, tuple(config.depth * m for m in multipliers)


def token_dim(config: ModelConfig) -> int:
    """E, the size of `encode`'s result."""
    size = config.units if config.vector_dim else 0
    if config.image_shape is not None:
        height, width, channels = _grid(config)
        size += height * width * channels[-1]
    return size


def init_encoder(key: Array, config: ModelConfig) -> Params:
    """Parameters of `encode`."""
    vector_key, image_key = jax.random.split(key)
    params: Params = {}
    if config.vector_dim:
        params["vector"] = nets.init_mlp(
            vector_key, config.norm, config.vector_dim, config.units, config.encoder_layers
        )
    if config.image_shape is not None:
        channels = (config.image_shape[2], *_grid(config)[2])
        params["image"] = _init_convs(image_key, config, channels)
    return params


def _init_convs(key: Array, config: ModelConfig, channels: tuple[int, ...]) -> Params:
    """A stack of normed convolutions from channels[i] to channels[i + 1]."""
    kind, params = config.norm, {}
    for i, own in enumerate(jax.random.split(key, len(channels))[:-1]):
        conv = _init_conv(own, config, *channels[i : i + 2], bias=kind == "rms")
        params[f"layer_{i}"] = conv | {"norm": nets.init_norm(kind, channels[i + 1])}
    return params


def _init_conv(key: Array, config: ModelConfig, fan_in: int, out: int, bias: bool = True) -> Params:
    kernel = config.image_kernel
    return nets.init_linear(key, kernel * kernel * fan_in, kernel, kernel, fan_in, out, bias=bias)


def _conv(params: Params, x: Array, dtype: str, stride: int = 1) -> Array:
    kernel = collectives.replicate(params["kernel"].astype(dtype))
    return nets.add_bias(params, gradients.conv(x.astype(dtype), kernel, stride))


def _norm_act(config: ModelConfig, params: Params, x: Array) -> Array:
    if config.image_activation == "silu":
        return nets.norm_silu(params, x)
    return getattr(jax.nn, config.image_activation)(nets.norm(params, x))


def encode(config: ModelConfig, params: Params, obs: Observation) -> Array:
    """Tokens `[..., E]` of observations: MLP of symlog(vector), then the flat image grid."""
    tokens = []
    if config.vector_dim:
        tokens.append(nets.mlp(params["vector"], dist.symlog(obs["vector"]), config.dtype))
    if config.image_shape is not None:
        image = obs["image"]
        x = image.reshape(-1, *image.shape[-3:]).astype(jnp.float32) / config.image_scale - 0.5
        for i, stage in enumerate(params["image"].values()):
            halves = i > 0 or not config.image_outer
            x = _conv(stage, x, config.dtype, 2 if halves and config.image_strided else 1)
            if halves and not config.image_strided:
                # Max-pooling as a maximum over a reshaped view: its gradient is cheap everywhere.
                n, height, width, channels = x.shape
                x = x.reshape(n, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
            x = _norm_act(config, stage["norm"], x)
        tokens.append(x.reshape(*image.shape[:-3], -1))
    return tokens[0] if len(tokens) == 1 else jnp.concatenate(tokens, axis=-1)


def init_decoder(key: Array, config: ModelConfig) -> Params:
    """Parameters of `decode`."""
    vector_key, image_key = jax.random.split(key)
    params: Params = {}
    if config.vector_dim:
        layers, out = config.decoder_layers, config.vector_dim
        params["vector"] = nets.init_head(vector_key, config, layers, out)
    if config.image_shape is not None:
        params["image"] = _init_image_decoder(image_key, config)
    return params


def decoder_blocks(config: ModelConfig) -> int:
    """Blocks of the linear layer from deter to the grid; the default as far as both divide by it.
    Raises ValueError for another number that does not divide deter and the grid's channels.
    """
    given, deter, channels = config.decoder_blocks, config.deter, _grid(config)[2][-1]
    found = math.gcd(given, deter, channels)
    if found != given != _DEFAULT_BLOCKS:
        raise ValueError(
            f"model.decoder_blocks={given} must divide model.deter={deter} and the {channels} "
            f"channels that an image begins as: choose a divisor of {math.gcd(deter, channels)}"
        )
    return found


def _init_image_decoder(key: Array, config: ModelConfig) -> Params:
    height, width, channels = _grid(config)
    grid, blocks = height * width * channels[-1], decoder_blocks(config)
    deter, wide, kind = config.deter, 2 * config.units, config.norm
    keys = jax.random.split(key, 5)
    up = (channels[-1], *channels[:-1][::-1])
    return {
        "deter": nets.init_linear(keys[0], deter, blocks, deter // blocks, grid // blocks),
        "stoch_0": nets.init_layer(keys[1], kind, config.stoch * config.classes, wide),
        "stoch_1": nets.init_linear(keys[2], wide, wide, grid),
        "norm": nets.init_norm(kind, channels[-1]),
        "convs": _init_convs(keys[3], config, up),
        "out": _init_conv(keys[4], config, up[-1], config.image_shape[2]),
    }


def _conv_doubled(config: ModelConfig, params: Params, x: Array) -> Array:
    kernel = collectives.replicate(params["kernel"])
    y = gradients.conv_doubled(x.astype(config.dtype), kernel, zeros=config.image_strided)
    return nets.add_bias(params, y)


def _decode_image(config: ModelConfig, params: Params, features: Array) -> Array:
    height, width, channels = _grid(config)
    lead, blocks = features.shape[:-1], decoder_blocks(config)
    x = features.reshape(-1, config.feature_dim)
    deter, stoch = x[:, : config.deter], x[:, config.deter :]
    grid = nets.block_linear(params["deter"], deter, config.dtype)
    grid = grid.reshape(-1, blocks, height, width, channels[-1] // blocks)
    grid = jnp.moveaxis(grid, 1, 3).reshape(-1, height, width, channels[-1])
    stoch = nets.linear(params["stoch_0"], stoch, config.dtype)
    stoch = _norm_act(config, params["stoch_0"]["norm"], stoch)
    stoch = nets.linear(params["stoch_1"], stoch, config.dtype).reshape(grid.shape)
    x = _norm_act(config, params["norm"], grid + stoch)
    for stage in params["convs"].values():
        x = _norm_act(config, stage["norm"], _conv_doubled(config, stage, x))
    if config.image_outer:
        x = _conv(params["out"], x, config.dtype)
    else:
        x = _conv_doubled(config, params["out"], x)
    return jax.nn.sigmoid(x.astype(jnp.float32)).reshape(*lead, *config.image_shape)


def decode(config: ModelConfig, params: Params, features: Array) -> Observation:
    """Predictions from features `[..., F]`: the vector in symlog space, the image in [0, 1]."""
    prediction = {}
    if config.vector_dim:
        prediction["vector"] = nets.head(params["vector"], features, config.dtype)
    if config.image_shape is not None:
        prediction["image"] = _decode_image(config, params["image"], features)
    return prediction


def reconstruction_loss(
    config: ModelConfig, prediction: Observation, obs: Observation
) -> dict[str, Array]:
    """Squared errors `[...]`, summed over vector entries or pixels (no 1/2)."""
    losses = {}
    if "vector" in prediction:
        error = prediction["vector"] - dist.symlog(obs["vector"])
        losses["vector"] = jnp.sum(jnp.square(error), axis=-1)
    if "image" in prediction:
        error = prediction["image"] - obs["image"].astype(jnp.float32) / config.image_scale
        losses["image"] = jnp.sum(jnp.square(error), axis=(-3, -2, -1))
    return losses
