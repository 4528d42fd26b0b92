"""Settings of EMPO's worlds and humans: each changes a program or its constants, or is refused.

Those of the learner (power, model, loss, optimizer, curriculum) are in test_settings.py.
"""

from __future__ import annotations

import functools
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest

from mbx.agents import settings as shared
from mbx.empo import suite as empo_envs
from mbx.empo.agent import make_agent, resolve
from mbx.empo.agent.settings import Settings
from mbx.empo.multigrid.family import Choice, make_many
from mbx.settings import describe, from_dict
from mbx.training import build
from tests.empo.helpers import digest, load
from tests.empo.test_settings import ELSEWHERE

ROOM = """map: |
  #####
  #>..#
  #..{robot}#
  #####
goals: [[1, 1, 3, 2], [3, 1, 3, 1]]
horizon: 3
"""
UNLISTED = dict(model="paths", max_states=1)  # nothing to solve


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Names of worlds: of a map, of another with parameters of its own, of a folder of three, of a
    listed world."""
    path = tmp_path_factory.mktemp("wired")
    (path / "map.yaml").write_text(ROOM.format(robot=1))
    (path / "own.yaml").write_text(ROOM.format(robot=1) + "power: {zeta: 1.5}\n")
    (path / "maps").mkdir()
    for number in (1, 2, 3):
        (path / "maps" / f"{number}.yaml").write_text(ROOM.format(robot=number))
    found = load("dag_2h2r")
    # Without parameters of its own, so that those of settings count.
    empo_envs.register_world("wired", lambda: replace(found, params=None))
    return {
        "map": f"empo:multigrid/{path}/map.yaml",
        "own": f"empo:multigrid/{path}/own.yaml",
        "maps": f"empo:maps/{path}/maps/",
        "listed": "empo:wired",
    }


@functools.cache
def programs(settings, learner):
    """What is traced of a run: its environments, to train in and to evaluate; or its agent."""
    key = jax.random.key(0)
    made = build.make_environment(settings, 2, seed=0)
    if learner:
        agent = make_agent(settings, made.spec)
        train = jax.eval_shape(agent.init, key)
        obs = jnp.zeros((2, *made.spec.obs_shape), made.spec.obs_dtype)
        act = lambda t: agent.act(t, agent.init_actor(2), obs, jnp.zeros(2, bool), key, True)  # noqa: E731
        # Without the comparison of robots there is none.
        return digest(act, train), agent.diagnostics is None
    found = []
    for environment in (made, build.evaluation_environment(settings, 2, seed=0)):
        state, _ = jax.eval_shape(environment.reset, key)
        action = jnp.zeros((2, environment.spec.action_dim))
        found += [digest(environment.reset, key), digest(environment.step, state, action, key)]
    return *found, repr(made.spec.world.params)


def both(names, name, kind, base, value):
    """A base's settings, and the same with one of them changed, `section.name`."""
    values = {"eval": {"review_episodes": 4}, "loss": {"batch_size": 2}, "env": {}} | base
    values["env"] = values["env"] | {"name": names[kind.removesuffix("+agent")]}
    section, _, last = name.partition(".")
    other = values | {section: values.get(section, {}) | {last: value}}
    yield from (from_dict(Settings(), found) for found in (values, other))


# Kind of world, base, and another value of the setting.
CHANGES = {
    "env.varied_starts": ("map", dict(humans=UNLISTED), 0.5),
    "env.maps": ("maps", dict(env=dict(held_out=0)), 2),
    "env.held_out": ("maps", dict(env=dict(held_out=1)), 2),
    "env.map_seed": ("maps", dict(env=dict(held_out=1)), 1),
    "eval.review_episodes": ("map+agent", dict(humans=UNLISTED), 0),
    "eval.lookahead": ("map+agent", dict(humans=UNLISTED), True),
    "eval.profile": ("map+agent", dict(humans=UNLISTED, eval=dict(review_episodes=0)), True),
    "humans.model": ("map", dict(humans=UNLISTED), "uniform"),
    "humans.beta": ("map", dict(humans=UNLISTED), 2.0),
    "humans.max_states": ("map", dict(humans=dict(model="auto")), 5),
    "humans.habit": (
        "map",
        dict(humans=dict(model="exact"), power=dict(source="config", nu_h=0.5)),
        "paths",
    ),
    "humans.epsilon": ("map", dict(humans=UNLISTED), 0.1),
    "humans.resample": ("map", dict(humans=UNLISTED), 0.1),
    "power.source": ("own", dict(humans=UNLISTED), "config"),
    "power.beta_h": ("listed", dict(humans=dict(model="exact")), 5.0),
    "power.nu_h": ("map", dict(humans=UNLISTED), 0.25),
    "power.optimistic": ("listed", dict(humans=dict(model="exact")), True),
}
# The same where the world leaves them without effect, and what is said of it.
IDLE = {
    "loss.room": ("listed", {}, 99.0, "at most . successors"),
    "humans.beta": ("map", dict(humans=dict(model="auto")), 2.0, "are 'exact', not 'paths'"),
    "humans.habit": ("map", dict(humans=dict(model="exact")), "paths", "share power.nu_h is 0"),
    "humans.max_states": (
        "maps",
        dict(humans=dict(model="paths"), env=dict(held_out=0)),
        7,
        "empo:multigrid/MAP",
    ),
    "power.beta_h": ("map", dict(humans=UNLISTED), 5.0, "are 'paths', and only exact"),
    "power.optimistic": (
        "maps",
        dict(humans=dict(model="uniform"), env=dict(held_out=0)),
        True,
        "are 'uniform', and only",
    ),
    "power.nu_h": (
        "listed",
        dict(humans=dict(model="uniform"), power=dict(source="config")),
        0.25,
        "are 'uniform', which are taken as they are",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_changes_a_program(names, name):
    kind, base, value = CHANGES[name]
    before, after = (programs(x, kind.endswith("agent")) for x in both(names, name, *CHANGES[name]))
    assert before != after


@pytest.mark.slow
@pytest.mark.parametrize("name", IDLE)
def test_a_setting_that_changes_none_is_refused(names, name):
    *given, why = IDLE[name]
    before, after = both(names, name, *given)
    *same, params = programs(before, False)
    assert programs(after, False)[:-1] == tuple(same)
    resolve(before, build.make_environment(before, 2, seed=0).spec)
    message = f"{name}=.* has no effect with env.name='{before.env.name}': .*{why}.*; leave it"
    with pytest.raises(ValueError, match=message):
        resolve(after, build.make_environment(after, 2, seed=0).spec)


def test_every_setting_is_asked_about():
    declared = {x.name for x in describe(Settings()) if not x.is_section}
    common = {f"{s}.{f.name}" for s in ("env", "eval") for f in fields(getattr(shared, s.title()))}
    own = {x for x in declared if x.split(".")[0] in ("env", "eval", "humans")} - common
    # Of the network of humans: tests/empo/test_learned_prior.py.
    assert own | ELSEWHERE == {*CHANGES, "humans.network"}
    assert {*IDLE} <= {*CHANGES, "loss.room"}


def test_a_seed_that_chooses_no_map_is_refused(names):
    folder = names["maps"].removeprefix("empo:maps/")
    with pytest.raises(ValueError, match="env.map_seed=1 has no effect: .* has 3 maps, all of"):
        make_many(folder, Choice(maps=3, held_out=0, seed=1))
