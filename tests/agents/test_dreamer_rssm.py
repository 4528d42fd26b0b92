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


@pytest.mark.parametrize(
    ("name", "unroll"), [("official_rssm_0", 1), ("official_rssm_0", 3), ("official_rssm_dense", 1)]
)
def test_official_sequence(name, unroll):
    x, numbers = load_fixture("dreamer", name)
    config = ModelConfig(
        vector_dim=1,
        action_dim=2,
        units=4,
        prior_layers=numbers["imglayers"],
        unroll=unroll,
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
observe = jax.jit(functools.partial(rssm.observe, SMALL))


@jax.jit
def sequence(key):
    """Parameters, the state before, tokens, actions and draws of six rows of two sequences."""
    keys = jax.random.split(key, 5)
    return (
        rssm.init(keys[4], SMALL, 5),
        types.State(jax.random.normal(keys[3], (2, 8)), jnp.ones((2, 3, 4)) / 4),
        jax.random.normal(keys[0], (6, 2, 5)),
        jax.random.normal(keys[1], (6, 2, 2)),
        jax.random.uniform(keys[2], (6, 2, 3)),
    )


def test_acting_steps_equal_the_scan():
    params, carry, tokens, actions, draws = sequence(jax.random.key(1))
    first = jnp.zeros((6, 2), bool).at[2, 0].set(True)
    whole = observe(params, carry, tokens, actions, first, draws)
    state, step = carry, jax.jit(functools.partial(rssm.observe_step, SMALL, params))
    for t in range(6):
        state = step(state, actions[t], tokens[t], first[t], draws[t])
        np.testing.assert_allclose(state.deter, whole.states.deter[t], rtol=1e-4, atol=1e-5)


def test_samples_are_one_hot_and_follow_the_probabilities():
    logits = jnp.log(jnp.asarray([0.1, 0.2, 0.3, 0.4]))
    draws = jnp.linspace(0.0, 1.0, 10_000, endpoint=False)
    one_hot = rssm.sample_one_hot(jnp.broadcast_to(logits, (10_000, 4)), draws)
    np.testing.assert_allclose(jnp.mean(one_hot, axis=0), [0.1, 0.2, 0.3, 0.4], atol=1e-3)
    mixed = rssm.mixed_logits(jax.random.normal(jax.random.key(0), (50, 4)), 0.01)
    sample = rssm.straight_through(mixed, rssm.sample_one_hot(mixed, draws[:50]))
    assert set(np.unique(sample)) == {0.0, 1.0} and np.all(np.sum(sample, axis=-1) == 1.0)


def test_dream_shapes_of_a_dense_core_in_bfloat16():
    small = dict(deter=6, hidden=4, stoch=2, classes=3, prior_layers=1, dtype="bfloat16")
    config = ModelConfig(**small, vector_dim=3, core="dense", norm="layer", initial="learned")

    def dream(key):
        params = rssm.init(key, config, 5)
        start = rssm.initial(config, params, (7,))
        noise = jnp.ones((5, 7, 1)), jnp.full((4, 7, 2), 0.5)
        return rssm.imagine(config, params, start, lambda features, draw: draw, *noise)

    states, actions = jax.eval_shape(dream, jax.random.key(0))
    assert states.deter.shape == (5, 7, 6) and states.stoch.shape == (5, 7, 2, 3)
    assert actions.shape == (5, 7, 1) and states.deter.dtype == jnp.float32


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
    names = dict(enc="encoder", dyn="rssm", dec="decoder", rew="reward", con="continue")
    groups = {short: shapes["model"][name] for short, name in names.items()}
    groups |= {"pol": shapes["actor"], "val": shapes["critic"]}
    found = {name: sum(x.size for x in jax.tree.leaves(tree)) for name, tree in groups.items()}
    assert found | {"total": sum(found.values())} == counts["counts"][f"{space}/size{size}"]


def images(config, key):
    """Tokens, prediction and loss of random images in [0, 1]."""
    keys = jax.random.split(key, 3)
    encoder = observations.init_encoder(keys[0], config)
    decoder = observations.init_decoder(keys[1], config)
    obs = {"image": jax.random.uniform(keys[2], (2, 3, *config.image_shape))}
    tokens = observations.encode(config, encoder, obs)
    prediction = observations.decode(config, decoder, jnp.zeros((2, 3, config.feature_dim)))
    return tokens, prediction, observations.reconstruction_loss(config, prediction, obs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(96, 96, 3), (84, 84, 4), (64, 64, 3), (12, 12, 1), (10, 10, 4)])
def test_images_keep_their_shape(shape, dtype):
    small = dict(deter=16, units=8, depth=4, stoch=4, image_scale=1.0)
    config = ModelConfig(image_shape=shape, dtype=dtype, **small)
    tokens, prediction, loss = jax.eval_shape(lambda key: images(config, key), jax.random.key(0))
    assert tokens.shape == (2, 3, observations.token_dim(config))
    assert prediction["image"].shape == (2, 3, *shape) and loss["image"].shape == (2, 3)
    assert prediction["image"].dtype == tokens.dtype == jnp.float32


def test_blocks_of_the_decoder_divide_what_they_are_of():
    """One's own number is refused where it does not; the default goes as far as it can."""
    config = ModelConfig(image_shape=(10, 10, 4), deter=12, units=8, depth=4, stoch=4)
    assert observations.decoder_blocks(config) == 4
    assert observations.decoder_blocks(dataclasses.replace(config, decoder_blocks=2)) == 2
    with pytest.raises(ValueError, match="decoder_blocks=3 must divide model.deter=12"):
        observations.decoder_blocks(dataclasses.replace(config, decoder_blocks=3))


@pytest.mark.parametrize(
    "fields, match",
    [
        (dict(vector_dim=0), "nothing is observed"),
        (dict(deter=10, blocks=4), "deter=10"),
        (dict(num_bins=254), "num_bins=254"),
        (dict(core="lstm"), "core='lstm'"),
        (dict(size="2m"), "size='2m'"),
        (dict(core="dense", blocks=2), "blocks=2 has no effect"),
        (dict(image_shape=(100, 100, 1)), "image_shape"),
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
        (dict(draws=(3, 2, 4)), r"draws has shape .* \[T, B, S\] = \(3, 2, 3\)"),
        (dict(carry=(4,)), r"carry.deter has shape .* \[B, D\] = \(2, 8\)"),
        (dict(is_first=float), "is_first is float32: give bool"),
    ],
)
def test_sequences_of_the_wrong_shape_are_told_by_name(change, message):
    def observe(key):
        shapes = dict(tokens=(3, 2, 5), actions=(3, 2, 2), draws=(3, 2, 3))
        arrays = {name: jnp.zeros(change.get(name, shape)) for name, shape in shapes.items()}
        params = rssm.init(key, SMALL, 5)
        start = mbx.rssm.initial(SMALL, params, change.get("carry", (2,)))
        first = jnp.zeros((3, 2), change.get("is_first", bool))
        return mbx.rssm.observe(SMALL, params, start, is_first=first, **arrays)

    with pytest.raises(ValueError, match=message):
        jax.eval_shape(observe, jax.random.key(0))
