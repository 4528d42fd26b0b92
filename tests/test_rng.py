"""Random numbers with the rounds written out: equal to jax's, bit for bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.fast import rng

KEY = jax.random.fold_in(jax.random.key(7), 3)


def data(keys):
    return np.asarray(jax.random.key_data(keys))


@pytest.mark.parametrize(
    "draw",
    [
        lambda k: jax.random.bits(k, (3, 5)),
        lambda k: jax.random.bits(k, (7,), jnp.uint8),
        lambda k: jax.random.bits(k, (7,), jnp.uint16),
        lambda k: jax.random.normal(k, (4, 3)),
        lambda k: jax.random.randint(k, (9,), 0, 1000),
        lambda k: jax.random.permutation(k, 5),
        lambda k: jax.random.bernoulli(k, 0.99, (1000,)),
        lambda k: jax.random.key_data(jax.random.split(k, (2, 3))),
        lambda k: jax.random.key_data(jax.random.fold_in(k, jnp.int32(2**31 - 1))),
        lambda k: jax.vmap(lambda one: jax.random.normal(one, (3,)))(jax.random.split(k, 4)),
    ],
)
def test_draws_are_jaxs(draw):
    np.testing.assert_array_equal(jax.jit(draw)(KEY), jax.jit(draw)(rng.unrolled(KEY)))


def test_keys_keep_their_words():
    keys = jax.random.split(KEY, 3)
    np.testing.assert_array_equal(data(keys), data(rng.unrolled(keys)))


def test_other_generators_are_left_alone():
    key = jax.random.key(1, impl="rbg")
    assert jax.random.key_impl(rng.unrolled(key)) == jax.random.key_impl(key)
    with jax.threefry_partitionable(False):
        assert jax.random.key_impl(rng.unrolled(KEY)) == "threefry2x32"


@pytest.mark.parametrize("shape", [(2, 3), (1, 43, 3, 2), (5, 61)])  # the last: an odd number
def test_normal_is_jaxs(shape):
    for key in (KEY, rng.unrolled(KEY)):
        np.testing.assert_array_equal(rng.normal(key, shape), jax.random.normal(KEY, shape))
    keys = jax.random.split(KEY, 2)
    np.testing.assert_array_equal(
        jax.vmap(lambda k: rng.normal(k, shape))(keys),
        jax.vmap(lambda k: jax.random.normal(k, shape))(keys),
    )


def test_rounds_of_a_key_are_compiled_once_however_many_read_it():
    def draws(key):
        key = rng.unrolled(key)
        for i in range(3):  # keys of keys of keys
            key = jax.random.split(jax.random.fold_in(key, i))[1]
        return [scale * jax.random.uniform(key, (4, scale)) for scale in (1, 2, 3)]

    text = jax.jit(draws).lower(KEY).compile().as_text()
    # A call of the rounds has 22; six keys of two words each, three draws. With the rounds of
    # every key in whatever reads it there were 794.
    assert text.count(" xor(") <= 22 * (2 * 6 + 3)
