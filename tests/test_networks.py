"""Network blocks against the reference implementation, and their initialisation."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import speed
from mbx import networks
from mbx.fast import gradients as written
from mbx.fast import rng
from mbx.networks import dropout as drop
from mbx.world_model import config_for_size, count_parameters, make_world_model
from tests.helpers import in_programs, load_fixture

networks = in_programs(networks)

EXACT = dict(rtol=1e-5, atol=1e-6)
FORWARD = dict(rtol=2e-4, atol=2e-5)


def layer(a, prefix, norm=True):
    dense = dict(kernel=a[f"{prefix}_weight"].T, bias=a[f"{prefix}_bias"])
    if not norm:
        return dense
    return dict(dense=dense, norm=dict(scale=a[f"{prefix}_ln_scale"], bias=a[f"{prefix}_ln_bias"]))


@pytest.mark.parametrize("name", ["layers_0", "layers_1"])
def test_layers_golden(name):
    a, c = load_fixture("tdmpc", name)
    sim_norm = functools.partial(networks.sim_norm, group_size=c["simnorm_dim"])
    np.testing.assert_allclose(sim_norm(a["simnorm_in"]), a["simnorm_out"], **EXACT)
    found = networks.NormedDense(a["nl_out"].shape[-1]).apply(
        {"params": layer(a, "nl")}, a["nl_in"]
    )
    np.testing.assert_allclose(found, a["nl_out"], **FORWARD)
    hidden = (a["mlp_sim_0_weight"].shape[0], a["mlp_sim_1_weight"].shape[0])
    for kind, last in (("sim", sim_norm), ("lin", None)):
        wanted = a[f"mlp_{kind}_out"]
        mlp = networks.MLP(hidden, wanted.shape[-1], out_activation=last)
        params = {f"layer_{i}": layer(a, f"mlp_{kind}_{i}") for i in range(2)}
        params["out"] = layer(a, f"mlp_{kind}_2", norm=last is not None)
        np.testing.assert_allclose(mlp.apply({"params": params}, a["nl_in"]), wanted, **FORWARD)


def test_conv_encoder_golden():
    a, c = load_fixture("tdmpc", "conv_encoder_0")
    params = {
        f"conv_{i}": dict(
            kernel=a[f"conv{i}_weight"].transpose(2, 3, 1, 0), bias=a[f"conv{i}_bias"]
        )
        for i in range(4)
    }
    image = np.moveaxis(a["x"], 1, -1)
    z = networks.ConvEncoder(c["channels"]).apply({"params": params}, image)
    np.testing.assert_allclose(z, a["z"], **FORWARD)


def test_random_shift_golden():
    a, c = load_fixture("tdmpc", "shift_aug_0")
    image = jnp.moveaxis(jnp.asarray(a["x"]), 1, -1)
    y = networks.random_shift(image, jnp.asarray(a["shift_xy"]), c["pad"])
    np.testing.assert_allclose(jnp.moveaxis(y, -1, 1), a["y"], atol=1e-3)


def test_mish_is_mish_even_far_out():
    x = jnp.concatenate([jnp.linspace(-50, 50, 501), jnp.array([-1e4, 1e4])])
    np.testing.assert_allclose(
        networks.mish(x), x * jnp.tanh(jax.nn.softplus(x)), rtol=2e-5, atol=1e-6
    )


def test_written_out_gradients_are_the_automatic_ones():
    keys = jax.random.split(jax.random.key(0), 4)
    x, w = jax.random.normal(keys[0], (2, 5, 7)), jax.random.normal(keys[1], (7, 6))
    scale, bias = jax.random.normal(keys[2], (6,)) + 1.0, jax.random.normal(keys[3], (6,))
    mix = jnp.cos(jnp.arange(60.0)).reshape(2, 5, 6)

    def ours(x, w, scale, bias):
        return jnp.sum(written.norm_mish(written.matmul(x, w), scale, bias) * mix)

    def plain(x, w, scale, bias):
        y = x @ w
        y = (y - y.mean(-1, keepdims=True)) / jnp.sqrt(y.var(-1, keepdims=True) + 1e-5)
        y = y * scale[None, None] + bias[None, None]
        return jnp.sum(y * jnp.tanh(jax.nn.softplus(y)) * mix)

    args = (x, w, scale, bias)
    np.testing.assert_allclose(ours(*args), plain(*args), rtol=1e-5)
    a = jax.grad(ours, argnums=(0, 1, 2, 3))(*args)
    b = jax.grad(plain, argnums=(0, 1, 2, 3))(*args)
    jax.tree.map(lambda p, q: np.testing.assert_allclose(p, q, rtol=2e-4, atol=2e-5), a, b)


def test_inputs_that_broadcast_equal_the_concatenation():
    layer = networks.Dense(4)
    z, a = jnp.ones((3, 1, 5)), jax.random.normal(jax.random.key(0), (3, 6, 2))
    params = layer.init(jax.random.key(1), z, a)
    both = jnp.concatenate([jnp.broadcast_to(z, (3, 6, 5)), a], axis=-1)
    apart, joined = layer.apply(params, z, a), layer.apply(params, both)
    np.testing.assert_allclose(apart, joined, rtol=1e-5, atol=1e-6)


def test_gradients_of_joined_inputs_are_the_automatic_ones():
    """A wide input before, between and behind narrow ones: cut out, and products of their own."""
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = (2, 11, 1)
    inputs = tuple(jax.random.normal(k, (3, 4, n)) for k, n in zip(keys, sizes, strict=False))
    kernel = jax.random.normal(keys[3], (sum(sizes), 5))

    def gradients(multiply):
        return jax.grad(lambda *args: jnp.sum(jnp.sin(multiply(*args))), (0, 1))(inputs, kernel)

    ours, automatic = gradients(written.matmul_joined), gradients(written.matmul_joined.fun)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), ours, automatic
    )


def test_a_gradient_that_nothing_asks_for_costs_nothing():
    """Of a loss by the action: forwards 2 x 4 x 64 x 66, back the two columns of the action."""
    layer = networks.Dense(64)
    z, a = jnp.ones((4, 64)), jnp.ones((4, 2))
    params = layer.init(jax.random.key(0), z, a)

    def by_action(a):
        return jax.grad(lambda a: jnp.sum(jnp.sin(layer.apply(params, z, a))))(a)

    row = speed.measure("gradient", by_action, a, rate=1e9, repeats=1)
    assert row.gflop * 1e9 == pytest.approx(2 * 4 * 64 * 66 + 2 * 4 * 64 * 2)


def test_sim_norm_refuses_a_latent_that_does_not_divide():
    with pytest.raises(ValueError, match="simnorm_dim=8"):
        networks.sim_norm(jnp.zeros((2, 12)))


def test_initialisation_head_by_head():
    world = config_for_size(1, obs_shape=(24,), action_dim=6, num_values=4, episodic=True)
    params = make_world_model(world).init(jax.random.key(0))
    kernels = params["value"]["layer_1"]["dense"]["kernel"]
    assert kernels.shape[0] == 4
    for i in range(4):
        assert abs(float(kernels[i].std()) - 0.02) < 1e-3
        assert abs(float(kernels[i].mean())) < 1e-3
        for j in range(i):
            assert abs(np.corrcoef(kernels[i].ravel(), kernels[j].ravel())[0, 1]) < 0.02
    for name in ("reward", "value"):
        assert not params[name]["out"]["kernel"].any()
    for name in ("policy", "termination"):
        assert abs(float(params[name]["out"]["kernel"].std()) - 0.02) < 2e-3
    biases = [
        x for path, x in jax.tree_util.tree_leaves_with_path(params) if path[-1].key == "bias"
    ]
    assert not any(b.any() for b in biases)


def test_a_head_depends_on_its_own_parameters_only():
    world = config_for_size("tiny", obs_shape=(3,), action_dim=1, critic="v", num_values=3)
    model = make_world_model(world)
    params = model.init(jax.random.key(0))
    value = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.1), params["value"])
    z, values = np.asarray(jax.jit(model.encode)(params, np.ones((2, 3)))), jax.jit(model.value)
    gradient = jax.device_get(jax.jit(jax.grad(lambda v: model.value(v, z)[1].sum()))(value))
    reached = [x[1].any() for x in jax.tree.leaves(gradient)]
    others = [x[0].any() or x[2].any() for x in jax.tree.leaves(gradient)]
    assert all(reached) and not any(others)
    chosen = values(networks.take_heads(value, np.array([2, 0])), z)
    np.testing.assert_allclose(chosen, values(value, z)[np.array([2, 0])], rtol=1e-5)


def test_dropout_needs_a_key_and_keeps_the_mean():
    module = networks.MLP((64,), 8, dropout=0.25)
    x = jnp.ones((1, 4))
    params = networks.init_ensemble(module, jax.random.key(0), 2, x)
    still = networks.apply_ensemble(module, params, x)
    np.testing.assert_array_equal(still, networks.apply_ensemble(module, params, x))
    noisy = networks.apply_ensemble(module, params, x, dropout_key=jax.random.key(1))
    assert not np.allclose(still, noisy)
    layer = networks.NormedDense(4000, activation=lambda y: y, dropout=0.25)
    ones = dict(
        dense=dict(kernel=jnp.ones((4, 4000)), bias=jnp.zeros(4000)),
        norm=dict(scale=jnp.ones(4000), bias=jnp.zeros(4000)),
    )
    y = layer.apply({"params": ones}, x, rngs={"dropout": jax.random.key(2)})
    assert abs(float(jnp.mean(y < 0)) - 0.25) < 0.03  # dropped units lie below the mean


def test_dropout_is_drawn_once():
    def loss(kernels, x, keys):  # of several heads, as an ensemble's
        hidden = jnp.einsum("bi,hij->hbj", x, kernels)
        kept = jax.vmap(lambda key, own: drop(key, own, 0.5))(rng.unrolled(keys), hidden)
        return jnp.sum(jnp.tanh(kept @ kernels.mT))  # what is kept is read on the way back, too

    args = jnp.ones((2, 4, 8)), jnp.ones((2, 4)), jax.random.split(jax.random.key(0))
    program = jax.jit(jax.value_and_grad(loss)).lower(*args).compile().as_text()
    assert program.count(str(0x1BD11BDA)) == 1  # a constant of Threefry


def test_tiny_is_about_two_hundred_thousand_parameters():
    for shape in ((17,), (64, 64, 3)):
        world = config_for_size("tiny", obs_shape=shape, action_dim=6)
        params = jax.eval_shape(make_world_model(world).init, jax.random.key(0))
        assert 150_000 < count_parameters(params) < 260_000
    assert world.latent == 128 and config_for_size(5, obs_shape=shape, action_dim=6).latent == 512


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(latent_dim=60), "latent_dim=60"),
        (dict(critic="w"), "critic='w'"),
        (dict(policy="beta"), "policy='beta'"),
        (dict(obs_shape=(32, 32, 3)), "64x64"),
        (dict(dtype="float16"), "dtype='float16'"),
    ],
)
def test_impossible_models_are_told(fields, message):
    with pytest.raises(ValueError, match=message):
        config_for_size("tiny", **{**dict(obs_shape=(3,), action_dim=1), **fields})
    with pytest.raises(ValueError, match="model_size='2'"):
        config_for_size("2", obs_shape=(3,), action_dim=1)


def test_kernel_gradient_keeps_divided_axes_apart():
    """Merging time with a divided batch would gather the activations on every device."""
    x, kernel = jnp.linspace(-1, 1, 4 * 8 * 3).reshape(4, 8, 3), jnp.ones((3, 5))

    def gradient(x, kernel):
        return jax.grad(lambda kernel: jnp.sum(jnp.sin(written.matmul(x, kernel))))(kernel)

    alone = gradient(x, kernel)
    assert "reshape" in str(jax.make_jaxpr(gradient)(x, kernel))
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=auto)
    with jax.sharding.use_abstract_mesh(mesh):
        assert "reshape" not in str(jax.make_jaxpr(gradient)(x, kernel))
        local = jax.shard_map(gradient, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        assert "reshape" in str(jax.make_jaxpr(local)(x, kernel))  # each device its own whole batch
    one = jax.make_mesh((1,), ("data",), axis_types=auto)
    with jax.set_mesh(one):
        np.testing.assert_allclose(gradient(x, kernel), alone, **EXACT)


@pytest.mark.parametrize(
    ("side", "taps", "stride", "padding"),
    [
        ((10, 9), 5, 1, "SAME"),
        ((9, 8), 4, 1, "SAME"),
        ((11, 8), 3, 2, "SAME"),
        ((16, 15), 7, 2, "VALID"),
        ((9, 12), 5, 3, "VALID"),
    ],
)
def test_conv_derivatives_are_the_automatic_ones(side, taps, stride, padding):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (3, *side, 2))
    kernel = jax.random.normal(keys[1], (taps, taps, 2, 5))

    def gradients(conv):
        return jax.grad(lambda x, k: jnp.sum(jnp.sin(conv(x, k, stride, padding))), (0, 1))

    ours, automatic = gradients(written.conv), gradients(written.conv.fun)
    for a, b in zip(ours(x, kernel), automatic(x, kernel), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("taps", [2, 3, 4, 5, 6, 7])
def test_convolutions_of_doubled_images_are_those_of_the_small_ones(taps, zeros):
    keys = jax.random.split(jax.random.key(0), 2)
    x = jax.random.normal(keys[0], (3, 6, 5, 2))
    kernel = jax.random.normal(keys[1], (taps, taps, 2, 4))
    axes = dict(dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def plain(x, kernel):
        if zeros:
            return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", **axes)
        large = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        return jax.lax.conv_general_dilated(large, kernel, (1, 1), "SAME", **axes)

    def value_and_gradients(conv):
        def loss(x, kernel):
            return jnp.sum(jnp.sin(conv(x, kernel)))

        return conv(x, kernel), *jax.grad(loss, (0, 1))(x, kernel)

    def ours(x, kernel):
        return written.conv_doubled(x, kernel, zeros)

    for a, b in zip(value_and_gradients(ours), value_and_gradients(plain), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_conv_derivatives_need_no_permuted_axes():
    """In a loop, XLA's fast convolutions on a CPU take the plain order of axes only."""
    x, kernel = jnp.ones((2, 8, 8, 3)), jnp.ones((5, 5, 3, 4))

    def steps(kernel):
        def step(kernel, _):
            return kernel - jax.grad(lambda k: jnp.sum(written.conv(x, k) ** 2))(kernel), None

        return jax.lax.scan(step, kernel, None, length=3)[0]

    lowered = jax.jit(steps).trace(kernel).lower(lowering_platforms=("cpu",))
    text = lowered.as_text("hlo")
    labels = set(re.findall(r"dim_labels=(\S+?)[,\s]", text))
    assert labels == {"b01f_01io->b01f"}
