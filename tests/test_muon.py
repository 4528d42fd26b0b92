"""Muon against Newton-Schulz steps written in NumPy, beside Adam for what is no matrix."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mbx import optim

BETA, STEPS = 0.95, 3


def newton_schulz(matrix):
    """Five quintic steps, on the wide side; all singular values come to between 0.5 and 1.5."""
    x = matrix / np.linalg.norm(matrix)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x


def muon_by_loop(grads):
    """Updates of one matrix for its gradients in turn."""
    momentum, found = np.zeros_like(grads[0]), []
    for t, grad in enumerate(grads, start=1):
        momentum = BETA * momentum + (1 - BETA) * grad
        # Nesterov's: the momentum of the next step as far as it is known, both bias-corrected.
        ahead = BETA * momentum / (1 - BETA ** (t + 1)) + (1 - BETA) * grad / (1 - BETA**t)
        found.append(0.2 * np.sqrt(max(grad.shape)) * newton_schulz(ahead))
    return found


def adam_by_loop(grads, eps=1e-8):
    first = second = np.zeros_like(grads[0])
    found = []
    for t, grad in enumerate(grads, start=1):
        first, second = 0.9 * first + 0.1 * grad, 0.999 * second + 0.001 * grad**2
        found.append(first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + eps))
    return found


SHAPES = {
    "encoder": {"dense": {"kernel": (5, 3), "bias": (3,)}},
    "value": {"out": {"kernel": (2, 3, 4), "bias": (2, 4)}, "prior": {"kernel": (2, 3, 4)}},
    "pixels": {"conv_0": {"kernel": (2, 2, 3, 4)}},
    "task_embedding": (6, 2),
}


def is_shape(x):
    return isinstance(x, tuple) and not isinstance(x[0], dict)


def gradients(seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s).astype(np.float32), SHAPES, is_leaf=is_shape)


@pytest.fixture(scope="module")
def grads():
    return [gradients(seed) for seed in range(STEPS)]


def steps_of(optimizer, grads):
    params = jax.tree.map(jnp.ones_like, grads[0])
    state, found, step = optimizer.init(params), [], jax.jit(optimizer.update)
    for one in grads:
        updates, state = step(one, state, params)
        found.append(updates)
    return found


def leaf(tree, *path):
    for name in path:
        tree = tree[name]
    return np.asarray(tree)


def by_loop(grads, *path, eps=1e-8):
    """Updates before the rate, of the leaf at a path."""
    own = [leaf(one, *path) for one in grads]
    if path[-1] != "kernel":
        return adam_by_loop(own, eps)
    if own[0].ndim == 4:
        flat = muon_by_loop([x.reshape(-1, x.shape[-1]) for x in own])
        return [x.reshape(own[0].shape) for x in flat]
    if own[0].ndim == 3:
        members = [muon_by_loop([x[h] for x in own]) for h in range(len(own[0]))]
        return [np.stack(parts) for parts in zip(*members, strict=True)]
    return muon_by_loop(own)


PATHS = [
    ("encoder", "dense", "kernel"),
    ("encoder", "dense", "bias"),
    ("value", "out", "kernel"),
    ("value", "out", "bias"),
    ("pixels", "conv_0", "kernel"),
    ("task_embedding",),
]


def test_matrices_are_moved_by_muon_and_all_else_by_adam(grads):
    found = steps_of(optim.scale_by_muon(optax.scale_by_adam(eps=1e-3)), grads)
    for path in PATHS:
        for one, wanted in zip(found, by_loop(grads, *path, eps=1e-3), strict=True):
            np.testing.assert_allclose(leaf(one, *path), wanted, rtol=2e-3, atol=2e-4)


def test_a_gradient_of_zero_moves_nothing():
    params = {"kernel": jnp.zeros((3, 2))}
    optimizer = optim.scale_by_muon(optax.scale_by_adam())
    found, _ = optimizer.update(params, optimizer.init(params))
    assert not np.asarray(found["kernel"]).any()
