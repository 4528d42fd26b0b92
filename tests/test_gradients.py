"""Forward-mode derivatives through the layers and the world model."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import distributions as dist
from mbx.fast import gradients
from mbx.world_model import config_for_size, make_world_model


@pytest.fixture(scope="module")
def functions():
    """Functions of latent and action `[L + A]` that the world model offers, by name."""
    config = config_for_size(
        "tiny", obs_shape=(3,), action_dim=2, latent_dim=8, enc_dim=8, mlp_dim=16, num_dynamics=2
    )
    model = make_world_model(config)
    # Drawn by NumPy, which needs no compiling; none is zero, as the last layers are at first.
    random = np.random.default_rng(0)

    def drawn(path, x):
        middle = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(middle + 0.3 * random.normal(size=x.shape), jnp.float32)

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree_util.tree_map_with_path(drawn, shapes)

    def tiled(x):
        return model.tile_heads(x[:8]), x[8:]

    return dict(
        step=lambda x: model.step(params, *tiled(x)).ravel(),
        reward_mean=lambda x: model.reward_mean(params, *tiled(x)).ravel(),
        value_mean=lambda x: model.value_mean(params["value"], x[:8], x[8:]).ravel(),
        policy=lambda x: model.policy(params, x[:8])[0],
    )


@pytest.mark.parametrize("name", ["step", "reward_mean", "value_mean", "policy"])
def test_forward_mode_is_what_finite_differences_say(functions, name):
    f, step = jax.jit(functions[name]), 5e-3
    x = jnp.linspace(-0.8, 0.9, 10)
    reverse = jax.jit(jax.jacrev(f))(x)  # first: what JAX has cached must not serve inside
    with gradients.forward_mode():
        forward = jax.jit(jax.jacfwd(f))(x)
    shifts = step * np.eye(10, dtype=np.float32)
    differences = [(f(x + s) - f(x - s)) / (2 * step) for s in shifts]
    assert np.abs(forward).max() > 0.1
    np.testing.assert_allclose(forward, np.stack(differences, -1), atol=1e-3, rtol=0)
    np.testing.assert_allclose(forward, reverse, atol=1e-5, rtol=1e-4)


def test_forward_mode_of_images_and_moved_distributions():
    image = np.random.default_rng(0).normal(size=(1, 5, 6, 2)).astype(np.float32)
    kernel = jnp.ones((3, 3, 2, 2)) / 9
    bins, logits = jnp.linspace(-2.0, 2.0, 5), jnp.array([[0.3, -0.2, 0.9, 0.1, 0.4]])

    def filtered(k):
        return jnp.tanh(gradients.conv(image, k, 2, "VALID")).ravel()

    def moved(x):
        return dist.shift_logits(logits * x[0], bins, x[1]).ravel()

    for f, x in ((filtered, kernel), (moved, jnp.array([1.1, 0.37]))):
        reverse = jax.jit(jax.jacrev(f))(x)
        with gradients.forward_mode():
            forward = jax.jit(jax.jacfwd(f))(x)
        np.testing.assert_allclose(forward, reverse, atol=1e-5, rtol=1e-4)


def test_reverse_mode_keeps_the_written_derivatives(functions):
    def gradient(x):
        return jax.grad(lambda x: functions["step"](x)[0])(x)

    f, x = functions["step"], jnp.ones(10)
    with gradients.forward_mode():
        assert "custom_vjp" not in str(jax.make_jaxpr(f)(x))
        inside = jax.jit(gradient)(x)
    # Of three layers: products and biases; of two of them norms with Mish.
    assert str(jax.make_jaxpr(f)(x)).count("custom_vjp_call") == 3 + 3 + 2
    np.testing.assert_allclose(jax.jit(gradient)(x), inside, atol=1e-6, rtol=1e-4)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jacfwd(f)(x)
