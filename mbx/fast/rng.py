"""The same random numbers as `jax.random`'s, cheaper on a CPU.

jax's default generator is Threefry-2x32 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"). On a CPU jax compiles its rounds as a loop, which prevents fusion with each other and
with the code that uses the numbers. `unrolled(key)` is the key for a generator with unrolled
rounds: all that `jax.random` draws with it is equal bit for bit, in a quarter of the time and less,
and compiles sooner. `normal` draws small arrays in one dimension, where the loops are vectorized.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_SHIFTS = {shift for four in _ROTATIONS for by in four for shift in (by, 32 - by)}
_PARITY = np.uint32(0x1BD11BDA)
# Fewer numbers than this are not worth a loop of their own.
_SMALL = 256


@jax.jit  # traced once a shape: a step draws with dozens of keys
def _hash(key: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with its 20 rounds: key `[2]`, counters of any one shape, uint32."""

    # Operations of `jax.lax`: hundreds of them, traced in less than half of the time of jnp's.
    def all_of(x: Array | np.uint32) -> Array:
        return lax.broadcast(x, low.shape)

    words = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    shifts = {by: all_of(np.uint32(by)) for by in _SHIFTS}
    x, y = lax.add(high, all_of(words[0])), lax.add(low, all_of(words[1]))
    for i in range(5):
        for by in _ROTATIONS[i % 2]:
            x = lax.add(x, y)
            left = lax.shift_left(y, shifts[by])
            right = lax.shift_right_logical(y, shifts[32 - by])
            y = lax.bitwise_xor(lax.bitwise_or(left, right), x)
        x = lax.add(x, all_of(words[(i + 1) % 3]))
        y = lax.add(y, all_of(lax.add(words[(i + 2) % 3], np.uint32(i + 1))))
    return x, y


def _counters(shape: tuple[int, ...]) -> tuple[Array, Array]:
    """High and low words of 0, 1, 2, … in `shape`."""
    size = math.prod(shape)
    if size >= 2**32:
        raise ValueError(f"shape={shape}: at most 2^32 random numbers at a time")
    low = jax.lax.iota(jnp.uint32, size).reshape(shape)
    return jnp.zeros_like(low), low


def _bits(key: Array, width: int, shape: tuple[int, ...]) -> Array:
    x, y = _hash(key, *_counters(shape))
    if width == 64:
        return (x.astype("uint64") << 32) | y.astype("uint64")
    return jax.lax.convert_element_type(x ^ y, f"uint{width}")


def _joined(words: tuple[Array, Array], axis: int) -> Array:
    """Both words of new keys, made once: XLA would repeat the rounds in each reader of a key."""
    return jax.lax.optimization_barrier(jnp.stack(words, axis))


def _split(key: Array, shape: tuple[int, ...]) -> Array:
    return _joined(_hash(key, *_counters(shape)), axis=-1)


def _fold_in(key: Array, data: Array) -> Array:
    data = jnp.asarray(data, jnp.uint32)
    return _joined(_hash(key, jnp.zeros_like(data), data), axis=0)


_IMPL = jax.extend.random.define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
    split=_split,
    random_bits=_bits,
    fold_in=_fold_in,
    name="threefry2x32_unrolled",
    tag="mbx3f",
)


def unrolled(key: Array) -> Array:
    """The key (or keys) for the generator with unrolled rounds.
    For use inside programs: store and checkpoint jax's own key. Returns keys of other generators
    unchanged, and all keys where `jax_threefry_partitionable` is off, with which jax draws other
    numbers.

    Examples:
        >>> key = jax.random.key(0)
        >>> bool(jax.random.uniform(rng.unrolled(key)) == jax.random.uniform(key))
        True
    """
    own = jax.random.key_impl(key) == "threefry2x32" and jax.config.jax_threefry_partitionable
    return jax.random.wrap_key_data(jax.random.key_data(key), impl=_IMPL) if own else key


def normal(key: Array, shape: tuple[int, ...]) -> Array:
    """`jax.random.normal(key, shape)`, float32; on a CPU drawn in one dimension.
    Where the last axis is as short as an action, XLA does not vectorize, and fuses the drawing with
    reshapes of its result. A loop over two halves prevents that fusion.
    """
    size = math.prod(shape)
    fast = unrolled(key)
    on_mesh = jax.sharding.get_abstract_mesh().auto_axes  # whose devices divide plain loops
    if size < _SMALL or on_mesh or jax.random.key_impl(fast) != _IMPL:
        return jax.random.normal(fast, shape, jnp.float32)
    half = -(-size // 2)

    def in_turn(words: Array) -> Array:
        draw = functools.partial(_normal_from, words, half)
        return jax.lax.map(draw, jnp.arange(2, dtype=jnp.uint32)).reshape(-1)[:size].reshape(shape)

    return jax.lax.platform_dependent(
        jax.random.key_data(key),
        cpu=in_turn,
        default=lambda words: jax.random.normal(
            jax.random.wrap_key_data(words, impl="threefry2x32"), shape, jnp.float32
        ),
    )


def _normal_from(words: Array, num: int, part: Array) -> Array:
    """Numbers `part * num` to `(part + 1) * num` of a key's normal numbers, equal to jax's."""
    low = jax.lax.iota(jnp.uint32, num) + part * np.uint32(num)
    x, y = _hash(words, jnp.zeros_like(low), low)
    one = np.uint32(0x3F800000)  # 23 random bits after the exponent of 1: in [1, 2)
    unit = jax.lax.bitcast_convert_type(((x ^ y) >> np.uint32(9)) | one, jnp.float32) - 1.0
    least = np.nextafter(np.float32(-1.0), np.float32(0.0))
    uniform = jnp.maximum(least, unit * (np.float32(1.0) - least) + least)
    return np.float32(np.sqrt(2.0)) * jax.lax.erf_inv(uniform)
