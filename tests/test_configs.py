"""Every configuration builds its agent and schedule on tasks of all kinds and action repeats."""

from __future__ import annotations

import functools
import importlib
import pathlib

import jax
import jax.numpy as jnp
import pytest

from mbx.config import load
from mbx.config.presets.suites import SUITES
from mbx.training import build
from mbx.training.state import make_schedule
from mbx.types import EnvSpec

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "configs"
NAMES = sorted(p.stem for p in FOLDER.glob("*.py") if "def get_config" in p.read_text())

# What suites give: brax, dm_control, playground, gymnasium; classic control; grids; screens.
KINDS = {
    "continuous": EnvSpec("x:continuous", (24,), jnp.float32, 6, 500, 1),
    "discrete": EnvSpec("x:discrete", (4,), jnp.float32, 2, 500, 1, discrete=True),
    "grid": EnvSpec("x:grid", (10, 10, 4), jnp.float32, 3, 500, 1, discrete=True),
    "screen": EnvSpec("x:screen", (64, 64, 3), jnp.uint8, 5, 500, 1, discrete=True),
}
TAKES = {"dreamer": tuple(KINDS), "tdmpc": ("continuous", "grid"), "empo": ()}


@functools.cache
def config_of(name):
    return importlib.import_module(f"configs.{name}").get_config().to_dict()


def specs_of(name):
    """Tasks for a configuration: of the kinds its agent takes, or its own."""
    config = config_of(name)
    kinds = [KINDS[kind] for kind in TAKES[config["agent"]]]
    return kinds or [build.environment_spec(build.read(config))]


@pytest.mark.parametrize("repeat", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_starts_with_every_action_repeat(name, repeat):
    config = config_of(name)
    for spec in specs_of(name):
        spec = spec._replace(action_repeat=repeat)
        schedule = make_schedule(build.read(config).for_task(spec), spec)
        assert schedule.seed_steps == config["train"]["seed_steps"] // repeat
        assert schedule.ratio > 0


def test_suites_are_arguments_of_one_file():
    found = {suite: load(f"{FOLDER}/suites.py:{suite}") for suite in SUITES}
    assert [one.train.train_ratio for one in found.values()] == [32, 256, 1024, 512, 512, 256]
    assert found["atari"].env.kwargs == {"full_action_space": True} and found["atari"].env.grey
    for one in found.values():
        spec = KINDS["continuous" if one.env.pixels else "screen"]
        spec = spec._replace(action_repeat=2 if one.env.pixels else 1)
        assert make_schedule(one.for_task(spec), spec).seed_steps >= 2_000
    assert load("suites:atari100k") == found["atari100k"] != load("dreamerv3")
    with pytest.raises(ValueError, match="--config=suites:ataris is unknown: choose one of"):
        load("suites:ataris")


@pytest.mark.parametrize("name", NAMES)
def test_in_every_configuration_each_schedule_moves(name):
    """The seed phase ends, updates follow, and stored targets are made again within the run."""
    settings = build.read(config_of(name))
    for spec in specs_of(name):
        chosen = settings.for_task(spec)
        schedule = make_schedule(chosen, spec)
        steps = chosen.train.steps // spec.action_repeat
        assert schedule.seed_steps < steps // 2
        updates = schedule.pretrain_updates + (steps - schedule.seed_steps) * schedule.ratio
        assert updates > 1_000
        if every := schedule.reanalyze_interval:
            assert updates / every > 10 and schedule.reanalyze_min_step < steps // 2


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_builds_an_agent_that_acts(name):
    """Traced, not compiled: shapes and dtypes of what it acts with and does."""
    num_envs, key = config_of(name)["env"]["num_envs"], jax.random.key(0)
    for spec in specs_of(name):
        agent = build.build_agent(build.read(config_of(name)), spec)
        row = agent.example_row()
        assert row["obs"].shape == tuple(spec.obs_shape) and row["action"].shape[-1:] == (
            spec.action_dim,
        )
        train = jax.eval_shape(agent.init, key)
        actor = jax.eval_shape(lambda agent=agent: agent.init_actor(num_envs))
        obs = jax.ShapeDtypeStruct((num_envs, *row["obs"].shape), row["obs"].dtype)
        first = jax.ShapeDtypeStruct((num_envs,), jnp.bool_)
        action, after = jax.eval_shape(
            functools.partial(agent.act, evaluate=False), train, actor, obs, first, key
        )
        assert action.shape == (num_envs, spec.action_dim)
        assert jax.tree.structure(after) == jax.tree.structure(actor)
