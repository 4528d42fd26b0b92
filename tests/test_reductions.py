"""Sums and maxima of rows: the processor's form against NumPy, and the plain one in its place."""

from __future__ import annotations

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.fast import reductions

SHAPES = ((7,), (3, 13), (2, 4, 14), (5, 101), (1, 96))


@pytest.fixture(autouse=True)
def as_runs_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One column of ones; the tests' two (conftest.py), which compile quicker, every other has."""
    monkeypatch.setattr(reductions, "ONES", 1)
    for name in ("total", "down"):  # that were perhaps traced with two
        own = getattr(reductions, name).__wrapped__
        monkeypatch.setattr(reductions, name, jax.jit(lambda x, own=own: own(x)))


def drawn(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(len(shape) + shape[-1]).normal(3.0, 2.0, shape).astype(np.float32)


@pytest.mark.parametrize("shape", SHAPES)
def test_reductions_are_those_of_numpy(shape: tuple[int, ...]) -> None:
    x = drawn(shape)
    weights = drawn((shape[-1], 2))
    lead = tuple(range(len(shape) - 1))
    exact = x.astype(np.float64)
    np.testing.assert_allclose(reductions.total(x), exact.sum(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_allclose(reductions.mean(x), exact.mean(-1, keepdims=True), rtol=1e-5)
    np.testing.assert_array_equal(reductions.largest(x), x.max(-1, keepdims=True))
    np.testing.assert_allclose(reductions.sums(x, weights), exact @ weights, rtol=1e-5)
    np.testing.assert_allclose(reductions.down(x), exact.sum(lead), rtol=1e-5)


def test_the_largest_is_found_in_every_column() -> None:
    found = np.asarray(reductions.largest(np.concatenate([np.eye(101), np.zeros((1, 101))])))
    assert found[:, 0].tolist() == [1.0] * 101 + [0.0]


def test_a_row_that_is_not_finite_stays_so() -> None:
    x = np.zeros((4, 33), np.float32)
    x[0, 20], x[1, 5], x[2] = np.nan, np.inf, -np.inf
    found = np.asarray(reductions.largest(x))[:, 0]
    assert np.isnan(found[0]) and found[1] == np.inf and found[2] == -np.inf and found[3] == 0.0
    assert np.isnan(reductions.down(x)).any() and np.isnan(reductions.total(x)[0, 0])


def test_heads_side_by_side_have_sums_of_their_own() -> None:
    x = drawn((3, 2, 4, 5))
    np.testing.assert_allclose(jax.vmap(reductions.down)(x), x.sum((1, 2)), rtol=1e-5)
    twice = jax.vmap(jax.vmap(reductions.down))(x)
    np.testing.assert_allclose(twice, x.sum(2), rtol=1e-5)


def test_sums_of_heads_need_no_transposed_rows() -> None:
    """The product of `down` keeps heads as a batch axis: no copy of the rows in between."""
    program = jax.jit(jax.vmap(reductions.down)).lower(jnp.ones((3, 64, 32))).compile().as_text()
    moved = [line for line in program.splitlines() if " transpose(" in line or " copy(" in line]
    assert not [line for line in moved if "64" in line.split("=")[1].split("]")[0]], moved


def test_what_is_traced_once_is_traced_again_for_a_mesh() -> None:
    """Where rows are divided among devices `down` leaves their axes apart."""

    def program() -> str:
        return str(jax.make_jaxpr(lambda x: reductions.down(x))(jnp.ones((2, 3, 4))))

    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    before = program()
    with jax.sharding.use_abstract_mesh(mesh):
        divided = program()
    assert "(([0], [0])" in before and "(([0], [0])" not in divided
    assert "(([0, 1], [0, 1])" in divided and program() == before


def test_runs_have_products_with_one_vector() -> None:
    """Of several, all but one are work for nothing."""
    assert runpy.run_path(str(reductions.__file__))["ONES"] == 1
    for program, of in ((reductions.total, "4x1x"), (reductions.down, "5x")):
        text = jax.jit(program).lower(jnp.ones((4, 5))).as_text()
        products = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(products) == 1 and f"-> tensor<{of}f32>" in products[0]


@pytest.mark.parametrize("name", ["total", "mean", "largest", "down"])
def test_other_platforms_take_the_plain_reductions(name: str) -> None:
    """What is lowered for an accelerator has the reduction itself, and no product."""
    lowered = (
        jax.jit(getattr(reductions, name))
        .trace(jnp.ones((8, 101)))
        .lower(lowering_platforms=("cuda",))
    )
    text = lowered.as_text()
    assert "stablehlo.reduce" in text and "dot_general" not in text
    own = jax.jit(getattr(reductions, name)).lower(jnp.ones((8, 101))).as_text()
    assert ("dot_general" in own) == (name != "largest")
