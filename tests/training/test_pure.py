"""A run as a pure function of its seed and numbers of its settings."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mbx
from mbx.agents.base import Agent, Mean
from mbx.config import agents
from mbx.settings import section, setting, to_dict
from mbx.training import build, run, seeds
from tests.faults import small
from tests.helpers import tiny_config

SEEDS, RATES = np.arange(4), np.array([1e-2, 1e-3], np.float32)


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Of the small agent."""

    rate: float = setting(0.01, "of steps", at_most=1.0)
    sign: float = setting(1.0, "up or down, a constant of the program", at_least=None)
    decay: float = setting(0.0, "of nothing", needs={"sign": 2.0})
    count: int = setting(3, "of nothing")
    rates: tuple[float, ...] = setting((1.0, 2.0), "of nothing")


@dataclasses.dataclass(frozen=True)
class Settings(small.Settings):
    """Those of the small agent, with a learning rate."""

    agent: str = setting("small-rate", "which agent")
    optimizer: Optimizer = section(Optimizer())


def make_agent(config: Settings, spec: Any) -> Agent:
    """The small agent with a learning rate: its step, made longer."""
    agent = small.make_agent(config, spec)
    if config.optimizer.sign < 0.0:
        raise ValueError("down")

    def update(train, buffer, key):
        new, buffer, metrics = agent.update(train, buffer, key)
        moved = 100.0 * config.optimizer.rate * (new.params - train.params)
        return new.replace(params=train.params + moved), buffer, metrics

    return agent._replace(update=update)


@pytest.fixture(scope="module")
def config():
    given = small.small_config()
    build.register("small-rate", Settings, make_agent)
    yield {**given, **to_dict(Settings())}
    del agents._REGISTERED["small-rate"]


@pytest.fixture(scope="module")
def one(config):
    return mbx.train_fn("toy:point", config, steps=80)


@pytest.fixture(scope="module")
def single(one):
    return jax.jit(one)


def grid(function):
    """Over seeds and, within each, over the settings."""
    return jax.vmap(jax.vmap(function, in_axes=(None, 0)), in_axes=(0, None))


@pytest.mark.parametrize("batched", [None, True])
def test_four_seeds_and_two_rates_at_once_are_eight_runs(config, single, batched):
    run = mbx.train_fn("toy:point", config, steps=80, batched=batched)
    many = jax.jit(grid(run))(SEEDS, {"optimizer.rate": RATES})
    assert many.returns.shape == (4, 2, 2) and many.metrics["loss"].shape == (4, 2, 4)
    for i, j in np.ndindex(4, 2):
        alone = single(SEEDS[i], {"optimizer.rate": RATES[j]})
        here = jax.tree.map(lambda x, i=i, j=j: x[i, j], many)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        jax.tree.map(close, here, alone)
    params = np.asarray(many.state.params).reshape(8, -1)
    assert np.abs(params[:, None] - params[None]).max(-1)[~np.eye(8, dtype=bool)].min() > 1e-3


@pytest.mark.parametrize(
    ("given", "backend", "together"),
    [
        ({}, "cpu", False),
        ({}, "gpu", True),
        (dict(batched=True), "cpu", True),
        (dict(batched=False), "gpu", False),
        (dict(axis_name="runs"), "cpu", True),
    ],
)
def test_runs_are_made_together_or_in_turn(config, monkeypatch, given, backend, together):
    """In turn there is one matrix of parameters at a time, never one with an axis more."""
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    run = mbx.train_fn("toy:point", config, steps=20, **given)
    many = jax.vmap(run, axis_name=given.get("axis_name"))
    program = str(jax.make_jaxpr(many)(jnp.arange(5)))
    products = re.findall(r":f32\[([\d,]*)\] = dot_general", program)
    assert products and any(one.startswith("5,") for one in products) == together


def test_runs_in_turn_make_nothing_in_step(config):
    with pytest.raises(ValueError, match="batched=False with axis_name='runs': runs made one"):
        mbx.train_fn("toy:point", config, axis_name="runs", batched=False)


def test_it_is_the_run_that_the_driver_makes(single, config, tmp_path):
    given = {**config, "seed": 2, "train": {**config["train"], "steps": 80}}
    run.train(given, str(tmp_path))
    _, state, _ = run.load(str(tmp_path), which="latest")
    pure_run = single(SEEDS[2], {"optimizer.rate": RATES[0]})
    np.testing.assert_allclose(pure_run.state.params, state.params, rtol=1e-6)
    rows = run.read_rows(str(tmp_path / "metrics.jsonl"))
    train = [row for row in rows if row["kind"] == "train"]
    for name in ("loss", "episode/return", "updates"):
        logged = [row.get(name, np.nan) for row in train]
        np.testing.assert_allclose(pure_run.metrics[name], logged, rtol=1e-5)
    assert float(pure_run.returns.mean()) == pytest.approx(rows[-1]["return_mean"], rel=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"optimizer.rat": 0.1}, "optimizer.rat is not a setting: did you mean .*rate"),
        ({"train.steps": 9}, "train.steps is fixed where the function is made"),
        ({"optimizer.count": 9}, "optimizer.count is fixed where the function is made"),
        ({"optimizer.decay": 0.5}, r"decay has no effect here: it needs optimizer.sign=2.0"),
        ({"optimizer.rate": 3.0}, "config.optimizer.rate=3.0: give at least 0 and at most 1"),
    ],
)
def test_settings_that_cannot_follow_are_refused(one, given, message):
    with pytest.raises(ValueError, match=message):
        one(0, given)


def test_several_numbers_follow_as_one_array(config):
    base = build.read(config)
    given = {"optimizer.rates": jnp.array([3.0, 4.0]), "optimizer.rate": 0.25}
    found = seeds.with_numbers(base, given).optimizer
    assert isinstance(found.rates, tuple) and [float(x) for x in found.rates] == [3.0, 4.0]
    assert found.rate == 0.25
    assert seeds.with_numbers(base, {"optimizer.rates": (5, 6)}).optimizer.rates == (5, 6)


def test_a_traced_number_that_decides_the_program_is_named(one):
    with pytest.raises(ValueError, match=r"^optimizer.sign is traced, but its value decides"):
        jax.eval_shape(one, 0, {"optimizer.rate": 0.1, "optimizer.sign": jnp.float32(1.0)})


def test_runs_that_are_no_pure_function_are_refused(config):
    with pytest.raises(ValueError, match="'gym:Pendulum-v1' is stepped in Python"):
        mbx.train_fn("gym:Pendulum-v1", config)
    with pytest.raises(ValueError, match="num_seeds, distributed, .* with a directory"):
        mbx.train_fn("toy:point", config, num_seeds=2)
    with pytest.raises(
        ValueError, match="num_seeds, distributed, .* are for runs with a directory"
    ):
        mbx.train_fn("toy:point", config, distributed=dict(cores=2))
    with pytest.raises(ValueError, match="gpu_compiler='full' .* your own jax.jit"):
        mbx.train_fn("toy:point", config, gpu_compiler="full")


def test_means_over_nothing_are_no_numbers():
    sums = {"updates": 4, "update/loss": 8.0, "passes": 0, "pass/gain": 0.0, "episodes": 2}
    sums |= {"episode/return": 5.0, "update/rare": Mean(6.0, 3.0), "faults": 1}
    found = seeds.averaged(jax.tree.map(jnp.float32, sums))
    assert np.isnan(found.pop("gain"))
    assert {name: float(x) for name, x in found.items()} == {
        **{"updates": 4, "loss": 2, "passes": 0, "episodes": 2},
        **{"episode/return": 2.5, "rare": 2, "faults": 1},
    }


@pytest.mark.slow
def test_tdmpc_at_four_seeds_and_two_rates_at_once_is_eight_runs():
    """Made in turn; together their planners' choices amplify rounding (docs/reproducibility.md)."""
    config = tiny_config(train=dict(steps=40, seed_steps=16, log_interval=20, pretrain_updates=2))
    one = mbx.train_fn("toy:point", config, batched=False)
    rates = np.array([3e-4, 1e-3], np.float32)
    many = jax.jit(grid(one))(SEEDS, {"optimizer.learning_rate": rates})
    single = jax.jit(one)
    for i, j in np.ndindex(4, 2):
        alone = single(SEEDS[i], {"optimizer.learning_rate": rates[j]})
        here = jax.tree.map(lambda x, i=i, j=j: x[i, j], many)
        for a, b in zip(jax.tree.leaves(here), jax.tree.leaves(alone), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
