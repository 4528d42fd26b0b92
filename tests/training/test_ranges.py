"""Any configuration either trains or fails at once with an error that names a setting."""

from __future__ import annotations

import copy
import importlib
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mbx.config import presets
from mbx.training import build, job, run
from tests.helpers import register_toy, tiny_config


def tiny_dreamer():
    from configs import dreamer

    register_toy()
    config = dreamer.get_config()
    config.env.update(name="toy:point", num_envs=2)
    config.loss.update(batch_size=4, batch_length=6)
    config.imagination.update(horizon=3, rows=0)
    config.replay.capacity = 400
    config.train.update(steps=80, seed_steps=16, log_interval=20)
    config.eval.update(interval=40, episodes=2, exploring=False)
    config.checkpoint.interval = 20
    return config.to_dict()


def tiny_empo():
    from configs import empo

    config = empo.get_config()
    config.env.update(name="empo:grid_rock_1h1r", num_envs=2, episode_length=5)
    config.model.hidden, config.loss.batch_size, config.replay.capacity = 8, 4, 64
    config.train.update(steps=40, seed_steps=8, log_interval=20, utd_ratio=0.25)
    config.eval.update(interval=20, episodes=2, review_episodes=2)
    config.checkpoint.interval = 20
    return config.to_dict()


CONFIGS = {"tdmpc": tiny_config(), "dreamer": tiny_dreamer(), "empo": tiny_empo()}


def leaves(config, prefix=()):
    for name, value in config.items():
        if isinstance(value, dict):
            yield from leaves(value, (*prefix, name))
        else:
            yield (*prefix, name), value


def values_like(value):
    """Values of the same type, of which many are nonsense and some are fine."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.sampled_from([-1, 0, 1, 2, 3, 5])
    if isinstance(value, float):
        return st.sampled_from([-1.0, 0.0, 0.25, 1.0, 2.5, float("inf"), float("nan")])
    if isinstance(value, str):
        return st.sampled_from(["", "nonsense"])
    return st.lists(st.sampled_from([-1, 0, 1, 2]), max_size=4).map(tuple)


# What reaches out of the process, or is another run's.
OUTSIDE = {"agent", "distributed", "log", "resume"}


@st.composite
def changed(draw, agent):
    """The agent's tiny configuration with one to three settings replaced."""
    config = copy.deepcopy(CONFIGS[agent])
    own = [(path, value) for path, value in leaves(config) if path[0] not in OUTSIDE]
    for path, value in draw(st.lists(st.sampled_from(own), min_size=1, max_size=3)):
        section = config
        for name in path[:-1]:
            section = section[name]
        section[path[-1]] = draw(values_like(value))
    return config


def attempt(config, use):
    """Whether `use(config)` works; an error must name a setting as its section.name or name."""
    names = {path[-1] for path, _ in leaves(config)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            use(config)
    except (ValueError, FloatingPointError) as error:
        assert any(name in str(error) for name in names), str(error)
        return False
    except FileNotFoundError as error:
        assert "nonsense" in str(error)  # a path among the settings
        return False
    return True


@pytest.mark.parametrize("agent", CONFIGS)
def test_a_configuration_is_taken_or_refused_with_a_name(agent):
    taken = []

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(agent))
    def check(config):
        taken.append(attempt(config, job.prepare))

    check()
    assert 0.1 < np.mean(taken) < 0.9  # both happen, or the values above are badly chosen


@pytest.mark.slow
@pytest.mark.parametrize("agent", CONFIGS)
def test_what_is_taken_trains_or_says_why_not(agent, tmp_path_factory):
    """Three environment steps and more of learning, for every configuration that is taken."""

    @settings(
        max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(changed(agent))
    def check(config):
        config["train"]["steps"] = min(config["train"]["steps"], 40)
        attempt(config, lambda c: run.train(c, str(tmp_path_factory.mktemp("run"))))

    check()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("optimizer.learning_rate", -1e-3, "give at least 0"),
        ("optimizer.tau", 1.5, "at most 1"),
        ("planner.std_coef", float("nan"), "finite"),
        ("eval.episodes", -1, "at least 0"),
        ("loss.value_best_n", 0, "at least 1"),
        ("model.num_bins", 0, "at least 2"),
        ("planner.min_std", 3.0, "planner.max_std"),
        ("replay.values_dtype", "float8", "bfloat16"),
    ],
)
def test_a_number_out_of_range_is_named_with_what_would_do(name, value, message):
    section, key = name.split(".")
    with pytest.raises(
        ValueError, match=rf"config\.{name}={value}.*{message}|'{value}'.*{message}"
    ):
        build.read(tiny_config(**{section: {key: value}}))


def test_thousands_of_environments_are_refused_before_one_is_made(monkeypatch):
    monkeypatch.setattr(job, "make_environment", None)
    config = tiny_config(env=dict(num_envs=4000))
    with pytest.raises(ValueError, match="seed_steps=16 .*env.num_envs=4000 updates need 8000"):
        job.prepare(config)


@pytest.mark.parametrize("name", presets.names())
def test_every_configuration_of_the_project_is_taken(name):
    build.read(importlib.import_module(f"configs.{name}").get_config().to_dict())


def test_planner_targets_holds_its_designs_table():
    from configs import planner_targets

    settings = build.read(planner_targets.get_config().to_dict())
    planner, acting, loss = settings.training_planner, settings.planner, settings.loss
    assert (planner.iterations, planner.num_samples, planner.horizon) == (3, 128, 1)
    assert (planner.temperature, planner.temperature_mode, planner.min_std) == (0.5, "divide", 0.05)
    assert planner.num_elites == 128 and settings.replay.keep_targets == 0  # all of them
    assert (acting.iterations, acting.num_samples, acting.horizon) == (6, 512, 3)
    assert (acting.temperature, acting.temperature_mode) == (0.5, "multiply")
    assert planner.enabled and settings.model.critic == "v"
    assert (loss.value_target, loss.value_weighting) == ("planner", "weighted")
    assert (loss.policy_loss, loss.awr_temperature) == ("awr", 0.5)
    assert (settings.reanalyze.batch_size, settings.reanalyze.stale_exponent) == (256, 0.0)
    assert (settings.reanalyze.interval, settings.reanalyze.min_step) == (500, 1000)
