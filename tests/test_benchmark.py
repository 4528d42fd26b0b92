"""The benchmark's cases: what is measured, and a suite that goes on where one of them fails."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import speed
from benchmarks.speed import Case
from mbx.config import load
from mbx.training import build
from mbx.types import EnvSpec

GEMM_RATE = speed.gemm_rate
TINY = Case(preset="default", size="tiny", batch=8, envs=2, repeats=3)


@pytest.fixture(autouse=True)
def no_measurement(monkeypatch):
    monkeypatch.setattr(speed, "gemm_rate", lambda dtype, repeats: 1e11)


PLANNING = "plan update environment targets reanalyze insert sample".split() + [speed.FUSED]
OPERATIONS = {
    "default": PLANNING,
    "tdmpc2": [name for name in PLANNING if name not in ("targets", "reanalyze")],
    "dreamer": ["act", "update"],
}


@pytest.mark.parametrize(
    "preset", ["default", "tdmpc2", pytest.param("dreamer", marks=pytest.mark.slow)]
)
def test_every_operation_of_a_preset_can_be_traced(preset, monkeypatch):
    """Nothing is compiled or timed: each is a function of the arguments that it is given."""

    def traced(name, function, *args, donate, **_):
        found = jax.eval_shape(function, *args)
        if donate:  # the result takes the first argument's place
            shapes = [jax.tree.map(jnp.shape, x) for x in (found, args[0])]
            assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1]), name
        return speed.Row(name, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)

    monkeypatch.setattr(speed, "measure", traced)
    monkeypatch.setattr(speed, "filled", lambda agent, state, spec, steps: state)
    result = speed.benchmark(TINY._replace(preset=preset, batch=None))
    assert [row["name"] for row in result["rows"]] == OPERATIONS[preset]


@pytest.mark.slow
def test_only_the_operations_that_are_asked_for():
    result = speed.benchmark(TINY._replace(only=("insert", "sample")))
    assert [row["name"] for row in result["rows"]] == ["insert", "sample"]
    assert "steps_per_second" not in result
    with pytest.raises(ValueError, match="--only=plam"):
        speed.benchmark(TINY._replace(only=("sample", "plam")))


@pytest.mark.slow
def test_a_suite_goes_on_and_ends_in_time(tmp_path, capsys):
    path = tmp_path / "found.json"
    cases = (
        TINY._replace(env="nowhere:ant"),
        TINY._replace(only=("sample",)),
        TINY._replace(only=("sample",)),
    )
    results = speed.run_suite(cases[:2], seconds=1e9, path=str(path))
    out = capsys.readouterr().out
    assert len(results) == 1 and "Failed" in out and "| sample |" in out
    assert json.loads(path.read_text())["cases"][0]["rows"][0]["memory_mb"] > 0
    assert speed.run_suite(cases[2:], seconds=-1.0) == []
    assert "Not run" in capsys.readouterr().out


def test_flops_are_those_of_the_products():
    row = speed.measure("square", lambda x: x @ x, jnp.ones((64, 64)), rate=1e9, repeats=3)
    assert row.gflop == pytest.approx(2 * 64**3 / 1e9)
    assert row.floor_ms == pytest.approx(2 * 64**3 / 1e6)


def test_the_machines_rate_is_that_of_products_as_large_as_it_needs(monkeypatch):
    sizes = {"cpu": (4, 8), "gpu": (8, 16)}
    monkeypatch.setattr(speed, "square_sizes", sizes.get)
    monkeypatch.setattr(speed, "median_time", lambda call, repeats: call().shape[0] ** 2)
    for platform, largest in (("cpu", 8), ("gpu", 16)):
        monkeypatch.setattr(jax, "default_backend", lambda platform=platform: platform)
        assert GEMM_RATE("float32") == 2 * largest  # 2 n^3 in n^2 seconds
    monkeypatch.undo()
    # 8192^3 is a millisecond of an H200, two seconds and more of two cores.
    assert max(speed.square_sizes("cpu")) == 2048
    assert max(speed.square_sizes("gpu")) == max(speed.square_sizes("tpu")) == 8192


def test_a_product_that_nothing_reads_is_no_work():
    """Inside a jitted function and outside: the compiler leaves both out."""

    @jax.jit
    def both(x):
        return x @ x, x @ x.T

    def function(x):
        x @ x
        return both(x)[1]

    row = speed.measure("product", function, jnp.ones((64, 64)), rate=1e9, repeats=1)
    assert row.gflop == pytest.approx(2 * 64**3 / 1e9)


def test_the_toy_task_asks_for_no_termination():
    """TD-MPC2 in PyTorch has no such head, and the benchmark is read beside it."""
    spec = speed.toy_environment(TINY).spec
    agent = build.build_agent(load(speed.resolved(TINY)), spec)
    assert "termination" not in jax.eval_shape(agent.init, jax.random.key(0)).params


def test_it_plans_and_learns_as_the_peer():
    """Settings that cost time are TD-MPC2's: what `benchmarks/peer_tdmpc2.py` does, too."""
    config = speed.make_config(Case(env="dmc:walker-walk"))
    names = "iterations num_samples num_elites num_proposals rescore_proposals horizon".split()
    assert [config.planner[name] for name in names] == [6, 512, 64, 24, True, 3]
    assert (config.train.utd_ratio, config.loss.horizon, config.loss.batch_size) == (1.0, 3, 256)
    assert (config.model.critic, config.loss.value_reduction) == ("q", "min")


def test_every_case_of_the_suites_has_a_configuration():
    for case in (case for cases in speed.SUITES.values() for case in cases):
        for one in (case, speed.small(case)):
            config = speed.make_config(one)
            assert config.model.size == (one.size or "tiny")
            assert config.env.workers == one.workers
            assert config.env.num_envs == one.envs and one.only[:1] == case.only[:1]
            assert config.model.get("unroll", 1) == one.unroll
            assert (one.steps > 0, one.seeds > 0) == (case.steps > 0, case.seeds > 0)


def test_a_rehearsal_tries_every_kind_of_case_once(monkeypatch, capsys):
    tried = []
    made = {"case": "tiny", "rows": [{"name": "measured"}]}
    monkeypatch.setattr(speed, "benchmark", lambda case: tried.append(case) or made)
    monkeypatch.setattr(speed, "train", lambda case: tried.append(case) or made)
    speed.run_suite(speed.rehearsal("gpu"), seconds=1e9)
    assert len(tried) == len(set(tried)) == 6
    assert {(c.preset, c.size, c.env) for c in tried} == {
        ("tdmpc2", "tiny", "gymnax:Pendulum-v1"),
        ("tdmpc2", "tiny", "dmc:walker-walk"),
        ("tdmpc2", "tiny", None),
        ("default", "tiny", "gymnax:Pendulum-v1"),
        ("dreamer", "tiny", None),
    }
    *_, last = capsys.readouterr().out.split("| case |")
    assert last.count("| tiny | measured |") == 6


def test_a_training_run_is_timed_once_it_learns(monkeypatch):
    """The first interval that learns also compiles; those before it take random actions."""
    rows = [dict(kind="train", updates=n, steps_per_second=r) for n, r in ((0, 900), (5, 1))]
    rows += [dict(kind="train", updates=5, steps_per_second=rate) for rate in (30, 50, 40)]
    asked = []

    def run(env, config, **settings):
        asked.append((env, config["env"]["num_envs"], settings["steps"]))
        return None, None, [dict(kind="setup"), *rows]

    monkeypatch.setattr(speed.mbx, "train", run)
    result = speed.train(TINY._replace(env="gymnax:Pendulum-v1", steps=2_000))
    assert asked == [("gymnax:Pendulum-v1", 2, 2_000)] and result["steps_per_second"] == 40
    assert speed.table([result]).endswith("| 40 | 416.7 |") and "gymnax" in speed.table([result])


@pytest.mark.slow
def test_a_rehearsal_runs(capsys):
    results = speed.run_suite(speed.rehearsal("gpu"), seconds=1e9)
    assert len(results) == 6 and "Failed" not in capsys.readouterr().out
    for result in results:
        (row,) = result["rows"]
        assert result["steps_per_second"] > 0 if row["name"] == "training" else row["memory_mb"] > 0


def test_two_checkouts_are_timed_in_turn_and_compared_round_by_round():
    asked, clock = [], iter([10.0, 11.0, 24.0, 20.0, 30.0, 27.0])

    def measure(where):
        asked.append(where)
        return next(clock)

    times = speed.alternate(measure, "a", "b", 3)
    assert asked == ["a", "b", "b", "a", "a", "b"]
    np.testing.assert_array_equal(times, [[10.0, 11.0], [20.0, 24.0], [30.0, 27.0]])
    found = speed.spread(times)
    assert (found["before_ms"], found["after_ms"], found["rounds"]) == (20.0, 24.0, 3)
    np.testing.assert_allclose([found["ratio"], found["least"], found["largest"]], [1.1, 0.9, 1.2])


def test_latencies_are_of_single_calls_and_the_first_one_counts_apart():
    clock = iter([0.0, 0.5, 1.0, 1.003, 2.0, 2.001, 3.0, 3.002])

    class Policy:
        observation_shape, spec, seen = (2,), EnvSpec("gone:x", (2,), np.float32, 1, 7, 1), []

        def reset(self):
            self.seen.append("reset")

        def __call__(self, observation):
            self.seen.append((observation.shape, observation.dtype))

    policy = Policy()
    found = speed.latency(speed.seconds_per_action(policy, 4, clock=lambda: next(clock)))
    assert policy.seen == ["reset"] + [((2,), np.float32)] * 4
    np.testing.assert_allclose(
        [found["first"], found["median"], found["p99"], found["worst"], found["calls"]],
        [500.0, 2.0, 2.98, 3.0, 4],
    )


def test_a_task_of_the_host_is_trained_on_alone():
    with pytest.raises(ValueError, match="--env=gym:Pendulum-v1 runs on the host, .* give --steps"):
        speed.benchmark(TINY._replace(env="gym:Pendulum-v1"))
