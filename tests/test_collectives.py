"""Parts of a batch give what the whole gives: sums, means, percentiles, dropout, losses.

Parts are lanes of a `vmap` here; on devices they are `tests/training/test_sharding.py`'s.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import heads, networks, returns
from mbx.agents.dreamer import encoders
from mbx.agents.dreamer import networks as nets
from mbx.agents.tdmpc.policies import move_value_scale
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Scales
from mbx.fast import collectives, gradients
from tests.helpers import PARTS, in_parts


def test_a_sum_over_all_parts_comes_back_in_its_place_and_type():
    def function(x):
        tree = dict(a=x, b=jnp.sum(x), c=jnp.int32(2), d=x[:, None] + jnp.ones((1, 3)))
        return collectives.psum(tree)

    x = jnp.arange(8.0)
    found = in_parts(function, (0,), x)
    parts = np.arange(8.0).reshape(PARTS, 2)
    for i in range(PARTS):  # the same in each
        np.testing.assert_array_equal(found["a"][i], parts.sum(0))
        assert found["b"][i] == 28.0
        assert found["c"][i] == 2 * PARTS and found["c"].dtype == jnp.int32
        np.testing.assert_array_equal(found["d"][i], np.repeat(parts.sum(0)[:, None], 3, 1) + PARTS)


def test_one_array_of_a_type_travels():
    tree = [jnp.ones(3), jnp.ones((2, 2)), jnp.int32(1), jnp.float32(1.0)]

    def part(x):
        with collectives._axes(("parts",)):
            return collectives.psum(jax.tree.map(lambda y: y + x.astype(y.dtype), tree))

    text = str(jax.make_jaxpr(jax.vmap(part, axis_name="parts"))(jnp.ones(PARTS)))
    assert text.count("= psum[") == 2  # of eight floats, and of an integer
    assert ":f32[8] = psum[" in text


def test_shares_of_a_mean_add_up_to_it():
    x = jnp.asarray([1.0, 5.0, 2.0, 8.0, 0.0, 4.0, 4.0, 8.0])
    assert float(jnp.sum(in_parts(collectives.mean_share, (0,), x))) == 4.0
    assert float(collectives.mean_share(x)) == 4.0


def test_rows_of_all_parts_behind_one_another():
    x = jnp.arange(16.0).reshape(2, 8)
    both = in_parts(lambda x: collectives.all_gather((x, 2.0 * x[:1]), axis=-1), (1,), x)
    for i in range(PARTS):
        np.testing.assert_array_equal(both[0][i], x)
        np.testing.assert_array_equal(both[1][i], 2.0 * x[:1])


def test_a_parts_first_row():
    found = in_parts(lambda x: x[0] - collectives.row_offset(x.shape[0]), (0,), jnp.arange(12))
    assert found.tolist() == [0] * PARTS
    assert collectives.row_offset(3) == 0


def test_without_devices_a_batch_is_whole():
    def function(x, y):
        assert collectives.axis_size() == 1
        return collectives.psum(x) + collectives.all_gather(y)

    assert collectives.num_devices() == 1
    assert collectives.shard_map(function, (0, None), jnp.ones(3), 2.0).tolist() == [3.0] * 3


def test_devices_that_a_batch_would_be_divided_among():
    mesh = jax.sharding.AbstractMesh((3,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    inside = []
    with jax.sharding.use_abstract_mesh(mesh):
        assert (
            collectives.num_devices() == 1
        )  # where parameters are divided, too, nothing is taken apart
        with collectives.data_parallel():
            assert collectives.num_devices() == 3
            jax.make_jaxpr(lambda x: collectives.shard_map(look(inside), (0,), x, out=0))(
                jnp.ones(6)
            )
    assert inside == [(1, (2,))]


def look(found):
    def part(x):
        found.append((collectives.num_devices(), x.shape))
        return x

    return part


MASK = np.array([[1, 1, 1, 1, 1, 1, 1, 1], [1, 0, 0, 1, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 0, 0.0]])
LOSS = np.arange(24.0).reshape(3, 8) ** 2


def test_a_masked_mean_of_heads():
    shares = in_parts(heads.masked_mean, (1, 1), *map(jnp.asarray, (LOSS, MASK)))
    assert np.isclose(jnp.sum(shares), (LOSS * MASK).sum() / MASK.sum(), rtol=1e-6)


def test_percentiles_are_those_of_all_rows():
    x = jnp.asarray(LOSS[0])
    scale = returns.init_running_scale()
    settings = Settings()
    scales = Scales(scale, scale, scale, returns.init_return_ema())
    found, _ = in_parts(lambda x: move_value_scale(settings, scales, x), (0,), x)
    low, high = np.percentile(LOSS[0], (5, 95))
    moved = 1 + settings.optimizer.tau * (high - low - 1)
    np.testing.assert_allclose(found, [moved] * PARTS, rtol=1e-6)


def test_the_largest_of_all_parts():
    x = jnp.asarray([-3.0, 5.0, 2.0, 4.0])
    assert in_parts(lambda x: collectives.pmax(x[0]), (0,), x).tolist() == [5.0] * PARTS
    assert float(collectives.pmax(x[0])) == -3.0


def test_dropout_keeps_the_rows_that_it_keeps_of_the_whole():
    key = jax.random.key(3)
    whole = networks._kept(key, 0.5, (2, 8, 5))
    np.testing.assert_array_equal(whole, jax.random.bernoulli(key, 0.5, (2, 8, 5)))
    found = in_parts(lambda x: networks._kept(key, 0.5, x.shape), (1,), jnp.zeros((2, 8, 5)))
    np.testing.assert_array_equal(np.concatenate(list(found), axis=1), whole)


def test_the_best_are_those_of_top_k_where_rows_are_divided():
    x = jnp.asarray([[1.0, 3.0, -jnp.inf, 3.0, 2.0], [0.0, -1.0, 5.0, 4.0, 5.0]])
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def divided(x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return collectives.top_k(x, 3)

    program = jax.jit(divided)
    assert "top_k" not in program.lower(x).as_text()
    for found, wanted in zip(program(x), jax.lax.top_k(x, 3), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for found, wanted in zip(collectives.top_k(x, 3), jax.lax.top_k(x, 3), strict=True):
        np.testing.assert_array_equal(found, wanted)


# -------------------------------------------------------------------------------------------------
# Parameters of which every device holds a part


def constraints(function, *args):
    """Of a program for four devices: where constraints take their array from, and what they say."""
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), collectives.sharded_parameters(4):
        jaxpr = jax.make_jaxpr(function)(*args).jaxpr
    found = [x for x in jaxpr.eqns if x.primitive.name == "sharding_constraint"]
    places = [jaxpr.invars.index(x.invars[0]) if x.invars[0] in jaxpr.invars else -1 for x in found]
    return [(i, x.params["sharding"].spec) for i, x in zip(places, found, strict=True)]


def test_a_layer_gathers_its_kernel_on_both_ways_and_keeps_its_part_of_the_gradient():
    kernel, x = jnp.ones((256, 1024)), jnp.ones((8, 256))

    def gradient(kernel, x):
        found = jax.grad(lambda k: jnp.sum(jnp.square(gradients.matmul(x, k))))(kernel)
        return collectives.psum((found, found[0]))

    # On both ways the argument itself is gathered: no whole kernel is kept from one to the other.
    gathered, part = (0, jax.P()), (-1, jax.P(None, ("data",)))
    assert constraints(gradient, kernel, x) == [gathered, gathered, part]
    assert constraints(gradient, kernel[:255], x[:, :255]) == [gathered, gathered]  # small: copies
    assert not constraints(lambda kernel: kernel @ kernel.T, kernel)


def test_numbers_of_python_in_a_total_stay_what_they_are():
    assert not constraints(lambda x: collectives.psum((2.0, 3, x)), jnp.ones(4))


@pytest.mark.parametrize(
    "layer",
    [
        lambda kernel: nets.block_linear({"kernel": kernel}, jnp.ones((2, 512))),
        lambda kernel: nets.block_linear_parts({"kernel": kernel}, jnp.ones((2, 512)), 2)[1],
        lambda kernel: encoders._conv({"kernel": kernel}, jnp.ones((2, 8, 8, 512)), "float32"),
        lambda kernel: encoders._conv_doubled(
            nets.ModelConfig(vector_dim=1), {"kernel": kernel}, jnp.ones((2, 8, 8, 512))
        ),
        lambda kernel: networks._conv_layer(jnp.ones((2, 8, 8, 512)), kernel, (1, 1), "SAME"),
    ],
    ids=["blocks", "parts", "dreamer's images", "doubled images", "images"],
)
def test_other_layers_gather_their_kernels(layer, request):
    images = "images" in request.node.callspec.id
    kernel = jnp.ones((3, 3, 512, 64) if images else (2, 256, 512))
    assert constraints(layer, kernel)[0] == (0, jax.P())


def test_inputs_that_broadcast_read_rows_of_a_kernel_gathered_once():
    layer, inputs = networks.Dense(1024), (jnp.ones((2, 1, 100)), jnp.ones((2, 3, 156)))
    params = layer.init(jax.random.key(0), *inputs)["params"]
    found = constraints(
        lambda kernel: layer.apply({"params": {**params, "kernel": kernel}}, *inputs),
        params["kernel"],
    )
    assert found[0] == (0, jax.P()) and {spec for _, spec in found} == {jax.P()}
