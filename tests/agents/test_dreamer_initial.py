"""Dreamer's initial parameters: every kernel's fan-in by hand, and a random stream of its own."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from mbx.agents.dreamer import agent, networks
from mbx.agents.dreamer.networks import ModelConfig

SMALL = dict(deter=8, hidden=6, stoch=3, classes=4, units=5, num_bins=7, action_dim=2)
F = 8 + 3 * 4  # features
TOKENS = 5  # the encoder's last layer
MLP = {"layer_0/kernel": F, "layer_1/kernel": 5, "out/kernel": 5}


def heads(**layers):
    return {f"{name}/{x}": n for name, own in layers.items() for x, n in own.items()}


BLOCKS = {
    "model/rssm/in_h/kernel": 8,
    "model/rssm/in_z/kernel": 12,
    "model/rssm/in_a/kernel": 2,
    # The official code counts the three inputs once for every block.
    **{f"model/rssm/hidden_{x}/kernel": 8 + 3 * 6 * 2 for x in "hxa"},
    "model/rssm/hidden_rest/layer_0/kernel": 8,
    "model/rssm/gru/kernel": 8,
    "model/rssm/prior/layer_0/kernel": 8,
    "model/rssm/prior/layer_1/kernel": 6,
    "model/rssm/prior/out/kernel": 6,
    "model/rssm/posterior/deter/kernel": 8 + TOKENS,
    "model/rssm/posterior/tokens/kernel": 8 + TOKENS,
    "model/rssm/posterior/rest/layer_0/kernel": 6,
    "model/rssm/posterior/out/kernel": 6,
    "model/encoder/vector/layer_0/kernel": 3,
    "model/encoder/vector/layer_1/kernel": 5,
    **heads(**{"model/decoder/vector": MLP, "model/reward": MLP, "model/continue": MLP}),
    **heads(actor=MLP, critic=MLP),
}
PICTURES = {
    "model/rssm/in_z/kernel": 12 + 2,
    "model/rssm/in_a/kernel": 12 + 2,
    "model/rssm/gru/kernel": 8 + 6,
    "model/rssm/prior/layer_0/kernel": 8,
    "model/rssm/prior/out/kernel": 6,
    "model/rssm/posterior/out/kernel": 6,
    "model/decoder/image/stoch_0/kernel": 12,
    "model/decoder/image/stoch_1/kernel": 10,
}


@pytest.fixture
def drawn(monkeypatch):
    """Ones in place of a truncated normal's numbers, and the keys they were asked for with."""
    keys = []

    def ones(key, low, high, shape):
        assert (low, high) == (-2.0, 2.0)
        keys.append(tuple(jax.random.key_data(key).tolist()))
        return np.ones(shape, np.float32)

    monkeypatch.setattr(networks.jax.random, "truncated_normal", ones)
    return keys


def made(config, drawn):
    """(leaf by path, fan-in that a kernel was scaled by, infinite where it is zero)."""
    params = agent.init_params(config, jax.random.key(0))
    assert len(set(drawn)) == len(drawn), "two kernels share a random stream"
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in leaves}
    assert len(drawn) == sum(name.endswith("kernel") for name in found)
    fans = {}
    for name, x in found.items():
        if name.endswith("kernel"):
            value = float(x.ravel()[0])
            assert (x == x.ravel()[0]).all()
            fans[name] = (networks._TRUNCATION / value) ** 2 if value else np.inf
        elif name.endswith("scale"):
            assert (x == 1.0).all(), name
        else:
            assert not x.any(), name
    return found, fans


def test_a_block_core_and_vectors(drawn):
    """Their shapes: `test_official_parameter_counts`."""
    parts = "core posterior prior encoder decoder reward continue policy value".split()
    layers = {f"{part}_layers": 2 for part in parts}
    config = ModelConfig(**SMALL, vector_dim=3, blocks=2, **layers)
    _, fans = made(config, drawn)
    wanted = BLOCKS | {f"{x}/out/kernel": np.inf for x in ("model/reward", "critic")}
    wanted["actor/out/kernel"] = 5 / 0.01**2
    assert fans == pytest.approx(wanted, rel=1e-4)


def test_a_dense_core_and_images(drawn):
    own = dict(image_shape=(12, 12, 3), core="dense", norm="layer", initial="learned")
    config = ModelConfig(**SMALL, **own, prior_layers=1, reward_layers=0)
    found, fans = made(config, drawn)
    wide = [
        x.shape[-1] for name, x in found.items() if name.startswith("model/encoder") and x.ndim == 4
    ]
    tokens, kernel = 3 * 3 * wide[-1], config.image_kernel  # 12 pixels are halved twice
    wanted = PICTURES | {
        "model/rssm/posterior/deter/kernel": 8 + tokens,
        "model/rssm/posterior/tokens/kernel": 8 + tokens,
        "model/encoder/image/layer_0/kernel": kernel**2 * 3,
        "model/encoder/image/layer_1/kernel": kernel**2 * wide[0],
        "model/decoder/image/deter/kernel": 8,
        "model/decoder/image/convs/layer_0/kernel": kernel**2 * wide[1],
        "model/decoder/image/out/kernel": kernel**2 * wide[0],
        "model/reward/out/kernel": np.inf,
    }
    image = {name: n for name, n in fans.items() if name in wanted}
    assert image == pytest.approx(wanted, rel=1e-4)
    shapes = {name.removeprefix("model/rssm/"): x.shape for name, x in found.items()}
    assert shapes["gru_norm/scale"] == shapes["gru_norm/shift"] == (24,)
    assert not any(name.startswith(("in_z/bias", "in_a/bias", "gru/bias")) for name in shapes)
