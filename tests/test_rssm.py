"""The recurrent state-space model: golden sequences, resets, latents, KL, pitfalls."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import rssm
from mbx.dreamer_networks import ModelConfig
from tests import dreamer_helpers as ref
from tests.helpers import load_fixture


@pytest.fixture(autouse=True)
def precise():
    with jax.default_matmul_precision("highest"):
        yield


def close(actual, expected, rtol=1e-4, atol=1e-5):
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=rtol, atol=atol)


# -------------------------------------------------------------------------------------------------
# Golden sequences


@pytest.mark.parametrize("name", ["official_rssm_0", "official_rssm_dense"])
def test_official_sequence(name):
    x, numbers = load_fixture("dreamer", name)
    config = ModelConfig(
        vector_dim=1, action_dim=2, units=4, prior_layers=numbers["imglayers"],
        **{k: numbers[k] for k in ("deter", "hidden", "stoch", "classes", "blocks", "unimix")},
    )  # fmt: skip
    params = ref.official_rssm(ref.Official(x, "w/"), config)
    carry = rssm.State(jnp.asarray(x["carry_h"]), jnp.asarray(x["carry_z"]))
    first = ref.batch_major(x["is_first"]).astype(bool)
    result = rssm.observe(
        config, params, carry, ref.batch_major(x["tokens"]), ref.batch_major(x["prev_action"]),
        first, ref.batch_major(x["z"]), ref.put_one_hot,
    )  # fmt: skip
    close(result.states.deter.swapaxes(0, 1), x["h"])
    close(result.posterior.swapaxes(0, 1), x["posterior_logits"])
    post = rssm.mixed_logits(result.posterior, config.unimix)
    prior = rssm.mixed_logits(result.prior, config.unimix)
    close(post.swapaxes(0, 1), x["posterior_mixed"])
    close(prior.swapaxes(0, 1), x["prior_mixed"])
    dyn, rep, _ = rssm.kl_losses(post, prior, numbers["free_nats"])
    close(dyn.T, x["dyn"])
    close(rep.T, x["rep"])
    last = jax.tree.map(lambda leaf: leaf[-1], result.states)
    action = jnp.asarray(x["prev_action"][:, 0])
    deter = rssm.recur(config, params, last, rssm.action_input(config, params, action))
    close(deter, x["imag_h"])
    imagined = rssm.prior_logits(config, params, deter)
    close(rssm.mixed_logits(imagined, config.unimix), x["imag_prior_mixed"])


@pytest.mark.parametrize("name", ["rssm_0", "rssm_fixed_init"])
def test_sheeprl_sequence(name):
    x, n = load_fixture("dreamer", name)
    config = ModelConfig(
        vector_dim=1, action_dim=n["A"], deter=n["Hd"], hidden=n["units"], stoch=n["S"],
        classes=n["K"], blocks=1, core="dense", norm="layer", initial="learned", prior_layers=1,
        unimix=n["unimix"],
    )  # fmt: skip
    params = ref.sheeprl_rssm(ref.Sheeprl(x, "w/"), config)
    start = rssm.initial(config, params, (x["h"].shape[1],))
    close(start.deter, x["initial_h"][0])
    close(start.stoch, x["initial_z"][0])
    result = rssm.observe(
        config, params, jax.tree.map(jnp.zeros_like, start), jnp.asarray(x["embed"]),
        jnp.asarray(x["action"]), jnp.asarray(x["is_first"][..., 0]).astype(bool),
        jnp.asarray(x["z"]), ref.put_one_hot,
    )  # fmt: skip
    close(result.states.deter, x["h"])
    close(rssm.mixed_logits(result.posterior, config.unimix), x["posterior_logits"])
    close(rssm.mixed_logits(result.prior, config.unimix), x["prior_logits"])
    last = jax.tree.map(lambda leaf: leaf[-1], result.states)
    part = rssm.action_input(config, params, jnp.asarray(x["action"][0]))
    deter = rssm.recur(config, params, last, part)
    close(deter, x["imag_h"][0])
    imagined = rssm.mixed_logits(rssm.prior_logits(config, params, deter), config.unimix)
    close(imagined, x["imag_prior_logits"][0])
