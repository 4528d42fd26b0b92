"""The recurrent state-space model: golden sequences, resets, latents, KL, pitfalls."""

from __future__ import annotations

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mbx
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import encoders as observations
from mbx.agents.dreamer import rssm, types
from mbx.agents.dreamer.networks import ModelConfig
from tests.agents import dreamer_helpers as ref
from tests.helpers import FIXTURES, load_fixture


@pytest.fixture(autouse=True)
def precise():
    with jax.default_matmul_precision("highest"):
        yield


def close(actual, expected, rtol=1e-4, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


# Golden sequences


@pytest.mark.parametrize("name", ["official_rssm_0", "official_rssm_dense"])
def test_official_sequence(name):
    x, numbers = load_fixture("dreamer", name)
    config = ModelConfig(
        vector_dim=1,
        action_dim=2,
        units=4,
        prior_layers=numbers["imglayers"],
        **{k: numbers[k] for k in ("deter", "hidden", "stoch", "classes", "blocks", "unimix")},
    )

    @jax.jit
    def compute(x):
        params = ref.official_rssm(ref.Official(x, "w/"), config)
        tokens, action = ref.batch_major(x["tokens"]), ref.batch_major(x["prev_action"])
        result = rssm.observe(
            config,
            params,
            types.State(x["carry_h"], x["carry_z"]),
            tokens,
            action,
            ref.batch_major(x["is_first"]).astype(bool),
            types.Given(ref.batch_major(x["z"])),
        )
        post = rssm.mixed_logits(result.posterior, config.unimix)
        prior = rssm.mixed_logits(result.prior, config.unimix)
        dyn, rep, _ = rssm.kl_losses(post, prior, numbers["free_nats"])
        last = jax.tree.map(lambda leaf: leaf[-1], result.states)
        deter = rssm.recur(config, params, last, rssm.action_input(config, params, action[0]))
        imagined = rssm.prior_logits(config, params, deter)
        rows = {
            "h": result.states.deter,
            "posterior_logits": result.posterior,
            "posterior_mixed": post,
            "prior_mixed": prior,
            "dyn": dyn,
            "rep": rep,
        }
        return {name: ref.batch_major(row) for name, row in rows.items()} | {
            "imag_h": deter,
            "imag_prior_mixed": rssm.mixed_logits(imagined, config.unimix),
        }

    for key, value in compute(x).items():
        close(value, x[key])


@pytest.mark.parametrize("name", ["rssm_0", "rssm_fixed_init"])
def test_sheeprl_sequence(name):
    x, n = load_fixture("dreamer", name)
    config = ModelConfig(
        vector_dim=1,
        action_dim=n["A"],
        deter=n["Hd"],
        hidden=n["units"],
        stoch=n["S"],
        classes=n["K"],
        core="dense",
        norm="layer",
        initial="learned",
        prior_layers=1,
        unimix=n["unimix"],
    )

    @jax.jit
    def compute(x):
        params = ref.sheeprl_rssm(ref.Sheeprl(x, "w/"), config)
        start = rssm.initial(config, params, (x["h"].shape[1],))
        result = rssm.observe(
            config,
            params,
            jax.tree.map(jnp.zeros_like, start),
            x["embed"],
            x["action"],
            x["is_first"][..., 0].astype(bool),
            types.Given(x["z"]),
        )
        last = jax.tree.map(lambda leaf: leaf[-1], result.states)
        part = rssm.action_input(config, params, x["action"][0])
        deter = rssm.recur(config, params, last, part)
        imagined = rssm.prior_logits(config, params, deter)
        return {
            "h": result.states.deter,
            "posterior_logits": rssm.mixed_logits(result.posterior, config.unimix),
            "prior_logits": rssm.mixed_logits(result.prior, config.unimix),
        }, {
            "initial_h": start.deter,
            "initial_z": start.stoch,
            "imag_h": deter,
            "imag_prior_logits": rssm.mixed_logits(imagined, config.unimix),
        }

    rows, firsts = compute(x)
    for key, value in rows.items():
        close(value, x[key])
    for key, value in firsts.items():
        close(value, x[key][0])


# Resets, latents, KL

SMALL = ModelConfig(
    vector_dim=3, action_dim=2, deter=8, hidden=4, stoch=3, classes=4, units=4, blocks=2
)


@jax.jit
def observe(params, *args):
    return rssm.observe(SMALL, params, *args)


@functools.partial(jax.jit, static_argnums=(1, 2))
def sequence(key, length=6, batch=2):
    names = ("tokens", "action", "draw", "deter", "params")
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
    return (
        rssm.init(keys["params"], SMALL, 5),
        types.State(jax.random.normal(keys["deter"], (batch, 8)), jnp.ones((batch, 3, 4)) / 4),
        jax.random.normal(keys["tokens"], (length, batch, 5)),
        jax.random.normal(keys["action"], (length, batch, 2)),
        jax.random.uniform(keys["draw"], (length, batch, 3)),
    )


def test_a_row_that_is_first_starts_afresh():
    params, carry, tokens, actions, draws = sequence(jax.random.key(0))
    first = jnp.zeros((6, 2), bool).at[3].set(True)
    whole = observe(params, carry, tokens, actions, first, draws)
    zero = rssm.initial(SMALL, params, (2,))
    fresh = observe(
        params, zero, tokens[3:], actions[3:].at[0].set(0.0), jnp.zeros((3, 2), bool), draws[3:]
    )
    np.testing.assert_allclose(whole.states.deter[3:], fresh.states.deter, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(whole.states.stoch[3:], fresh.states.stoch)
    # Nothing before the reset reaches past it, the previous action included.
    other = observe(params, carry, tokens, actions.at[3].set(9.0).at[:3].add(1.0), first, draws)
    np.testing.assert_array_equal(whole.states.deter[3:], other.states.deter[3:])


def test_acting_steps_equal_the_scan():
    params, carry, tokens, actions, draws = sequence(jax.random.key(1))
    first = jnp.zeros((6, 2), bool).at[2, 0].set(True)
    whole = observe(params, carry, tokens, actions, first, draws)
    state, step = carry, jax.jit(lambda *args: rssm.observe_step(SMALL, params, *args))
    for t in range(6):
        state = step(state, actions[t], tokens[t], first[t], draws[t])
        np.testing.assert_allclose(state.deter, whole.states.deter[t], rtol=1e-4, atol=1e-5)


def test_actions_matter_and_come_from_the_row_before():
    params, carry, tokens, actions, draws = sequence(jax.random.key(2))
    first = jnp.zeros((6, 2), bool)
    a = observe(params, carry, tokens, actions, first, draws)
    b = observe(params, carry, tokens, actions.at[4].add(1.0), first, draws)
    np.testing.assert_array_equal(a.states.deter[:4], b.states.deter[:4])
    assert np.all(np.any(np.asarray(a.states.deter[4] != b.states.deter[4]), axis=-1))


def test_samples_are_one_hot_and_follow_the_probabilities():
    logits = jnp.log(jnp.asarray([0.1, 0.2, 0.3, 0.4]))
    draws = jnp.linspace(0.0, 1.0, 10_000, endpoint=False)
    one_hot = rssm.sample_one_hot(jnp.broadcast_to(logits, (10_000, 4)), draws)
    np.testing.assert_allclose(jnp.mean(one_hot, axis=0), [0.1, 0.2, 0.3, 0.4], atol=1e-3)
    mixed = rssm.mixed_logits(jax.random.normal(jax.random.key(0), (50, 4)), 0.01)
    sample = rssm.straight_through(mixed, rssm.sample_one_hot(mixed, draws[:50]))
    assert set(np.unique(sample)) == {0.0, 1.0} and np.all(np.sum(sample, axis=-1) == 1.0)


def test_free_nats_are_for_every_row_by_itself():
    """Half of the rows agree, half differ: the floor lifts the first and stops their gradient."""
    post = jnp.zeros((2, 1, 1, 4)).at[1].set(jnp.asarray([6.0, 0.0, 0.0, 0.0]))

    def loss(post, prior):
        dyn, rep, _ = rssm.kl_losses(jax.nn.log_softmax(post), jax.nn.log_softmax(prior), 1.0)
        return jnp.mean(dyn), jnp.mean(rep), dyn

    prior = jnp.zeros_like(post)
    _, _, rows = loss(post, prior)
    assert rows[0, 0] == 1.0 and 1.0 < rows[1, 0] < np.log(4.0)
    grad = jax.grad(lambda q: loss(post, q)[0])(prior)
    assert not np.any(np.asarray(grad[0])) and np.any(np.asarray(grad[1]))
    assert not np.any(np.asarray(jax.grad(lambda p: loss(p, prior)[0])(post)))
    assert not np.any(np.asarray(jax.grad(lambda q: loss(post, q)[1])(prior)))


def test_dream_shapes_and_dense_core():
    config = ModelConfig(
        vector_dim=3,
        action_dim=2,
        deter=6,
        hidden=4,
        stoch=2,
        classes=3,
        units=4,
        core="dense",
        norm="layer",
        initial="learned",
        prior_layers=1,
        dtype="bfloat16",
    )

    @jax.jit
    def dream(key):
        params = rssm.init(key, config, 5)
        start = rssm.initial(config, params, (7,))
        noise = jnp.ones((5, 7, 2)), jnp.full((4, 7, 2), 0.5)
        return start, rssm.imagine(config, params, start, lambda features, draw: draw, *noise)

    start, (states, actions) = dream(jax.random.key(0))
    assert states.deter.shape == (5, 7, 6) and states.stoch.shape == (5, 7, 2, 3)
    assert actions.shape == (5, 7, 2) and states.deter.dtype == jnp.float32
    np.testing.assert_array_equal(states.deter[0], start.deter)


# Sizes, images, mistakes


@pytest.mark.parametrize("size", ["1m", "12m", "25m", "50m", "100m", "200m", "400m"])
@pytest.mark.parametrize("space", ["walker", "cartpole", "image64_disc"])
def test_official_parameter_counts(size, space):
    """Counted from shapes alone; walker's three vectors have a linear output each, ours one."""
    counts = json.loads((FIXTURES / "dreamer" / "official_param_counts.json").read_text())
    spaces = {
        "walker": dict(vector_dim=24, action_dim=6),
        "cartpole": dict(vector_dim=4, action_dim=2, factors=(2,)),
        "image64_disc": dict(image_shape=(64, 64, 3), action_dim=6, factors=(6,)),
    }
    config = ModelConfig(size=size, **spaces[space])
    shapes = jax.eval_shape(lambda key: dreamer.init_params(config, key), jax.random.key(0))
    groups = {"pol": shapes["actor"], "val": shapes["critic"]} | {
        short: shapes["model"][name]
        for short, name in dict(
            enc="encoder", dyn="rssm", dec="decoder", rew="reward", con="continue"
        ).items()
    }
    expected = dict(counts["counts"][f"{space}/size{size}"])
    found = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in groups.items()}
    assert sum(found.values()) == expected.pop("total")
    assert found == expected


def images(config, key):
    """Tokens, prediction and loss of random images in [0, 1]."""
    keys = jax.random.split(key, 3)
    encoder = observations.init_encoder(keys[0], config)
    decoder = observations.init_decoder(keys[1], config)
    image = jax.random.uniform(keys[2], (2, 3, *config.image_shape))
    tokens = observations.encode(config, encoder, {"image": image})
    prediction = observations.decode(config, decoder, jnp.zeros((2, 3, config.feature_dim)))
    return (
        tokens,
        prediction,
        observations.reconstruction_loss(config, prediction, {"image": image}),
    )


@pytest.mark.parametrize("shape", [(64, 64, 3), (12, 12, 1), (10, 10, 4)])
def test_images_keep_their_shape(shape):
    config = ModelConfig(image_shape=shape, deter=16, units=8, depth=4, stoch=4, image_scale=1.0)
    found = jax.eval_shape(lambda key: images(config, key), jax.random.key(0))
    assert found[0].shape == (2, 3, observations.token_dim(config))
    assert found[1]["image"].shape == (2, 3, *shape) and found[2]["image"].shape == (2, 3)


def test_blocks_of_the_decoder_divide_what_they_are_of():
    """One's own number is refused where it does not; the default goes as far as it can."""
    config = ModelConfig(image_shape=(10, 10, 4), deter=12, units=8, depth=4, stoch=4)
    assert observations.decoder_blocks(config) == 4
    assert observations.decoder_blocks(dataclasses.replace(config, decoder_blocks=2)) == 2
    with pytest.raises(ValueError, match="decoder_blocks=3 must divide model.deter=12"):
        observations.decoder_blocks(dataclasses.replace(config, decoder_blocks=3))


def test_images_of_64_pixels_in_both_precisions():
    """Losses are sums over pixels; those of bfloat16 are near those of float32."""
    config = ModelConfig(
        image_shape=(64, 64, 1), deter=8, units=4, stoch=2, depth=1, image_scale=1.0
    )
    half = dataclasses.replace(config, dtype="bfloat16")
    (tokens, prediction, loss), rough = jax.jit(
        lambda key: [images(c, key) for c in (config, half)]
    )(jax.random.key(0))
    image = np.asarray(prediction["image"])
    assert np.all((image >= 0.0) & (image <= 1.0)) and rough[0].dtype == jnp.float32
    truth = np.asarray(jax.random.uniform(jax.random.split(jax.random.key(0), 3)[2], image.shape))
    np.testing.assert_allclose(loss["image"], ((image - truth) ** 2).sum((2, 3, 4)), rtol=1e-4)
    np.testing.assert_allclose(rough[0], tokens, atol=0.1)
    assert np.any(np.asarray(rough[0] != tokens))
    np.testing.assert_allclose(rough[2]["image"], loss["image"], rtol=1e-2)


@pytest.mark.parametrize(
    "fields, match",
    [
        (dict(vector_dim=0), "nothing is observed"),
        (dict(deter=10, blocks=4), "deter=10"),
        (dict(num_bins=254), "num_bins=254"),
        (dict(core="lstm"), "core='lstm'"),
        (dict(size="2m"), "size='2m'"),
        (dict(core="dense", blocks=2), "blocks=2 has no effect"),
        (dict(image_shape=(84, 84, 1)), "image_shape"),
        (dict(factors=(2, 3), action_dim=4), "factors"),
    ],
)
def test_mistakes_are_refused(fields, match):
    with pytest.raises(ValueError, match=match):
        ModelConfig(**(dict(vector_dim=3) | fields))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(tokens=(3, 2, 4)), r"tokens has shape \(3, 2, 4\): give \[T, B, E\] = \(3, 2, 5\)"),
        (dict(actions=(3, 2, 1)), r"actions has shape .* \[T, B, A\]"),
        (dict(tokens=(2, 3, 5)), r"tokens has shape \(2, 3, 5\).*time first"),
        (dict(draws=(3, 2, 4)), r"draws has shape .* \[T, B, S\] = \(3, 2, 2\)"),
        (dict(carry=(4,)), r"carry.deter has shape .* \[B, D\] = \(2, 6\)"),
        (dict(is_first=float), "is_first is float32: give bool"),
    ],
)
def test_sequences_of_the_wrong_shape_are_told_by_name(change, message):
    config = ModelConfig(
        vector_dim=3, action_dim=2, deter=6, hidden=4, stoch=2, classes=3, blocks=2
    )

    def observe(key):
        shapes = dict(tokens=(3, 2, 5), actions=(3, 2, 2), draws=(3, 2, 2))
        arrays = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
        params = rssm.init(key, config, 5)
        start = mbx.rssm.initial(config, params, change.get("carry", (2,)))
        first = jnp.zeros((3, 2), change.get("is_first", bool))
        order = arrays["tokens"], arrays["actions"], first, arrays["draws"]
        return mbx.rssm.observe(config, params, start, *order)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(observe, jax.random.key(0))
