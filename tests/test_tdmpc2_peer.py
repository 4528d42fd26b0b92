"""TD-MPC2 in PyTorch, which mbx's times stand beside, has the same networks as mbx and TD-MPC2."""

from __future__ import annotations

import ast
import importlib
import pathlib
import sys

import numpy as np
import pytest

from mbx.world_model import MODEL_SIZES
from tests.helpers import load_fixture

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


def test_its_sizes_are_those_of_mbx():
    tree = ast.parse((FOLDER / "peer_tdmpc2.py").read_text())
    found = next(
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SIZES"
    )
    names = ("enc_dim", "mlp_dim", "latent_dim", "num_values")
    for size, widths in ast.literal_eval(found).items():
        assert widths == tuple(MODEL_SIZES[size][name] for name in names)
        assert MODEL_SIZES[size]["num_enc_layers"] == 2


@pytest.fixture
def peer(monkeypatch):
    pytest.importorskip("torch", reason="needs PyTorch: pip install -e '.[torch]'")
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("peer_tdmpc2")
    sys.modules.pop("peer_tdmpc2", None)


def test_its_parameters_are_as_many_as_the_published_models(peer, monkeypatch):
    counts, _ = load_fixture("tdmpc", "param_counts")
    seen = set()
    for (size, obs, action, task), total in zip(counts["rows"], counts["total"], strict=True):
        if str(size) not in peer.SIZES or task:
            continue
        monkeypatch.setattr(peer, "ACTION", int(action))
        agent = peer.Agent(str(size), obs=int(obs))
        ours = sum(p.numel() for p in (*agent.parameters, *agent.policy.parameters()))
        assert ours == total
        seen.add(str(size))
    assert seen == {"1", "5"}


def test_it_learns_and_plans(peer):
    """Where the first action's size is the reward, all of it comes to choose large ones."""
    import torch

    torch.manual_seed(0)
    agent = peer.Agent("tiny")
    obs, action = torch.randn(4, 32, peer.OBS), torch.rand(3, 32, peer.ACTION) * 2.0 - 1.0
    reward = 3.0 * action[..., :1]

    def predicted(of):
        with torch.no_grad():
            z, chosen = agent.encoder(obs[0]), torch.zeros(32, peer.ACTION)
            chosen[:, 0] = of
            value = agent.value(z, chosen, "mean", agent.targets)
            return float(agent.decode(agent.reward(torch.cat([z, chosen], -1))).mean()), value

    slow = [x.clone() for x in agent.targets.stacked]
    for _ in range(600):
        agent.update(obs, action, reward)
    assert not all(torch.equal(a, b) for a, b in zip(slow, agent.targets.stacked, strict=True))
    (low, bad), (high, good) = predicted(-0.8), predicted(0.8)
    assert -3.4 < low < -1.4 and 1.4 < high < 3.4 and (bad < good).float().mean() > 0.9
    with torch.no_grad():
        mean = torch.tanh(agent.policy(agent.encoder(obs[0]))[:, : peer.ACTION]).mean(0)
    assert mean[0] > 0.5
    chosen, plan = agent.plan(obs[0, :1], torch.zeros(peer.HORIZON, peer.ACTION))
    assert chosen.shape == (peer.ACTION,) and 0.3 < float(chosen[0]) <= 1.0
    assert plan.shape == (peer.HORIZON, peer.ACTION) and float(plan[:, 0].min()) > 0.3


def test_dropout_is_for_losses_alone(peer):
    import torch

    agent = peer.Agent("tiny")
    with torch.no_grad():  # the last layer starts at random here, and shows what is before it
        z, action = agent.encoder(torch.randn(64, peer.OBS)), torch.zeros(64, peer.ACTION)
        assert torch.equal(*(agent.value(z, action, "all") for _ in range(2)))
    assert not torch.equal(*(agent.value(z, action, "all") for _ in range(2)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch itself
def test_values_of_every_size_compile(peer):
    """Needs the extra torch. Where all heads are drawn, inductor fails at `x[randperm(2)[:2]]`."""
    import torch

    agent = peer.Agent("1")
    z, action = torch.rand(4, 128), torch.zeros(4, peer.ACTION)
    with torch.no_grad():
        compiled, eager = (f(z, action, "min") for f in (torch.compile(agent.value), agent.value))
    torch.testing.assert_close(compiled, eager)


def test_its_codes_are_those_of_the_reference(peer):
    import torch

    logits, values = torch.randn(5, peer.BINS), np.array([0.0, 1.0, -3.7, 250.0, 1e6], np.float32)
    ours = peer.cross_entropy(logits, torch.from_numpy(values)[:, None]).numpy()[:, 0]
    place = (np.clip(np.sign(values) * np.log1p(np.abs(values)), -10.0, 10.0) + 10.0) / 0.2
    low, share = np.divmod(place + 1e-6, 1.0)
    low, rows = low.astype(int), np.arange(5)
    log = torch.log_softmax(logits, -1).numpy()
    wanted = -((1.0 - share) * log[rows, low] + share * log[rows, (low + 1) % peer.BINS])
    np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-4)
