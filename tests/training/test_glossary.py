"""Every number that an agent logs has a description, and every description is of some number."""

from __future__ import annotations

import fnmatch
import functools

import jax
import pytest

from mbx.training import build, glossary, job
from tests.helpers import overridden, tiny_config

SLOW = pytest.mark.slow
SVG = dict(policy_loss="svg", value_target="td")
DREAMER = ("model.size=tiny", "env.num_envs=2", "replay.capacity=2000")
EMPO = ("env.name=empo:grid_rock_1h1r", "env.num_envs=2")


def tdmpc(**loss) -> dict:
    return tiny_config(loss=loss)


def of(name: str, *overrides: str) -> dict:
    return overridden(f"configs/{name}.py", overrides)


CASES = {
    "tdmpc": functools.partial(tdmpc),
    "svg": functools.partial(tdmpc, trust_region_coef=0.1, **SVG),
    "kl": functools.partial(tdmpc, policy_loss="kl"),
    "ends": functools.partial(tiny_config, env=dict(name="toy:ends")),
    "optimist": functools.partial(
        tdmpc,
        optimist=True,
        aux_gammas=(0.9,),
        encoder_consistency_coef=1.0,
        value_target="td",
        policy_loss="svg:1+kl:1",
    ),
    "efficient": functools.partial(
        of, "efficient_tdmpc", "env.name=gymnax:Pendulum-v1", "replay.capacity=20000"
    ),
    "empo, options": functools.partial(
        of, "empo", *EMPO, "model.x_h=network", "loss.advantage_coef=0.1", "loss.unique=64"
    ),
    "dreamer": functools.partial(of, "dreamer", *DREAMER),
    "dreamer, images": functools.partial(
        of, "dreamer", "env.name=gymnax:Breakout-MinAtar", *DREAMER
    ),
    "dreamerv3": functools.partial(of, "dreamerv3", *DREAMER),
    "empo": functools.partial(of, "empo", *EMPO),
}
QUICK = ("dreamer", "empo")  # of tdmpc: every run of the tests (`tests/conftest.py`)
LOGGED = [pytest.param(name, marks=() if name in QUICK else SLOW) for name in CASES]


def logged(config: dict) -> set[str]:
    """Names in a training row of a run, from its abstract updates and passes."""
    settings = build.read(config)
    parts, key = job.prepare(settings), jax.random.key(0)
    agent, state = parts.agent, jax.eval_shape(lambda: job.fresh_state(parts, key))
    names = set(jax.eval_shape(agent.update, state.train, state.replay, key)[2])
    if agent.store is not None:
        passed = jax.eval_shape(agent.store.reanalyze, state.train, state.replay, key, 0)
        names |= set(passed[1])
    return names


@pytest.mark.parametrize("name", LOGGED)
def test_what_is_logged_has_a_description(name):
    config = CASES[name]()
    names = logged(config)
    assert len(names) > 10
    assert [name for name in names if glossary.meaning(config["agent"], name) is None] == []


@pytest.mark.slow
def test_every_description_of_an_agent_is_of_something_that_is_logged():
    found: dict[str, set[str]] = {name: set() for name in glossary.AGENTS}
    for make in CASES.values():
        config = make()
        found[config["agent"]] |= set(logged(config))
    beside = ("open_loop_*", "reached_*", "all_reached_*", "model/*", "heads/*", "loss/heads/*")
    idle = [
        (agent, pattern)
        for agent, names in found.items()
        for pattern in glossary.own(agent)
        if not any(fnmatch.fnmatchcase(pattern, one) for one in beside)
        and not fnmatch.filter(names, pattern)
    ]
    assert idle == []


def test_the_longest_name_that_fits_describes():
    assert "last step" in glossary.meaning("tdmpc", "episode/cost_last")
    assert "environment's own" in glossary.meaning("mine", "episode/cost")
    assert "agent steps" in glossary.meaning("tdmpc", "episode/length")
    assert glossary.meaning("tdmpc", "kl") is None
    assert "nats" in glossary.meaning("dreamer", "kl")
    assert glossary.meaning("mine", "seconds") and glossary.meaning("mine", "loss/x") is None
