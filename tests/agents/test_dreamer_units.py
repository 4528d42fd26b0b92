"""Small parts of Dreamer's losses and diagnostics by hand, which compile nothing."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types

import jax
import numpy as np

from mbx.agents.dreamer import diagnostics, optimizers, policy, update
from tests.agents import dreamer_helpers


@functools.partial(jax.jit, static_argnums=0)
def policies(config, out, draw, action):
    """All that a policy's head says."""
    return {
        "sample": policy.sample(config, out, draw),
        "mode": policy.mode(config, out),
        "log_prob": policy.log_prob(config, out, action),
        "entropy": policy.entropy(config, out),
    }


def test_a_policy_of_two_factors_by_hand():
    config = dataclasses.replace(
        dreamer_helpers.NET, action_dim=5, factors=(2, 3), policy_unimix=0.1
    )
    rng = np.random.default_rng(1)
    out, draw = np.float32(rng.normal(size=(4, 5))), np.float32(rng.uniform(size=(4, 2)))
    action = np.eye(5, dtype=np.float32)[[0, 1, 0, 1]] + np.eye(5)[[2, 4, 3, 3]]
    parts = [np.exp(out[:, :2]), np.exp(out[:, 2:])]
    p = [0.9 * x / x.sum(-1, keepdims=True) + 0.1 / x.shape[1] for x in parts]
    found = policies(config, out, draw, action)
    chosen = [(np.cumsum(x, -1) <= draw[:, i : i + 1]).sum(-1) for i, x in enumerate(p)]
    one_hot = np.concatenate([np.eye(2)[chosen[0]], np.eye(3)[chosen[1]]], -1)
    np.testing.assert_allclose(found["sample"], one_hot, atol=1e-6)
    best = np.concatenate([np.eye(2)[p[0].argmax(-1)], np.eye(3)[p[1].argmax(-1)]], -1)
    np.testing.assert_array_equal(found["mode"], best)
    taken = (np.concatenate(p, -1) * action).reshape(4, 5)
    log_prob = np.log(taken[:, :2].sum(-1)) + np.log(taken[:, 2:].sum(-1))
    np.testing.assert_allclose(found["log_prob"], log_prob, rtol=1e-4)
    entropy = -sum((x * np.log(x)).sum(-1) for x in p)
    np.testing.assert_allclose(found["entropy"], entropy, rtol=1e-4)
    assert policy.output_dim(config) == 5


def test_what_the_optimiser_does_unless_told_otherwise_is_official():
    """The numbers of dreamerv3's `opt` section: agc 0.3, pmin 1e-3, eps 1e-20, warmup 1000."""

    def defaults(function):
        given = {n: x.default for n, x in inspect.signature(function).parameters.items()}
        return {n: x for n, x in given.items() if isinstance(x, int | float)}

    assert defaults(optimizers.scale_by_laprop) == dict(beta1=0.9, beta2=0.999, eps=1e-20)
    assert defaults(optimizers.clip_adaptively) == dict(ratio=0.3, minimum=1e-3)


def test_errors_of_predictions_by_the_steps_imagined():
    """Two rows of context; the second sequence leaves its episode with row 4."""
    truth = np.zeros((8, 2, 2))
    prediction = np.arange(8.0)[:, None, None] * np.array([[[1.0, 1.0], [2.0, 0.0]]])
    inside = np.ones((8, 2), bool)
    inside[4:, 1] = False
    # Mean squares: t^2 and 2 t^2.
    assert diagnostics._errors(truth, prediction, inside, 2) == {1: 6.0, 5: 36.0, 6: 49.0}
    inside[7] = False
    assert diagnostics._errors(truth, prediction, inside, 2)[6] == 0.0
    many = np.ones((30, 1), bool)
    assert list(diagnostics._errors(np.zeros((30, 1, 1)), np.ones((30, 1, 1)), many, 5)) == [
        1,
        5,
        15,
    ]


def test_the_context_is_half_a_sequence_at_most():
    lengths = {1: 1, 2: 1, 3: 1, 6: 3, 1000: diagnostics.CONTEXT}
    for length, wanted in lengths.items():
        settings = types.SimpleNamespace(loss=types.SimpleNamespace(batch_length=length))
        assert diagnostics._context(settings) == wanted


def test_the_sum_of_losses_by_their_coefficients():
    coefs = dict(dynamics_coef=3.0, representation_coef=0.5)
    settings = dreamer_helpers.make_settings(
        dreamer_helpers.NET, loss=coefs, critic=dict(replay_coef=0.25)
    )
    names = ("vector", "dynamics", "representation", "value", "replay_value")
    losses = {name: np.float32([1.0, 3.0]) for name in names}
    assert float(update.total_loss(settings, losses)) == 2.0 * (1.0 + 3.0 + 0.5 + 1.0 + 0.25)
