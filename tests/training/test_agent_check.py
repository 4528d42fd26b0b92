"""Agents of one's own that return what no run can use are told so, by agent and function."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from examples import own_agent
from mbx.agents.base import Agent, Mean, Store
from mbx.training import build
from mbx.training.agent_check import checked
from mbx.training.build import make_environment
from mbx.training.loop import make_step
from mbx.training.state import init_state, make_schedule


@dataclasses.dataclass(frozen=True)
class Settings(own_agent.Settings):
    """Those of the example's agent, under another name."""

    agent: str = "broken"


@pytest.fixture(scope="module")
def environment():
    return make_environment(Settings(), 4, seed=0)


def traced(environment, **changes):
    """One step of training of the example's agent, traced, with some of its functions changed.

    A change is a function of what the agent's own function returns.
    """

    def make_agent(settings, spec):
        agent = own_agent.make_agent(settings, spec)

        def changed(name):
            return lambda *args: changes[name](getattr(agent, name)(*args))

        return agent._replace(**{name: changed(name) for name in changes})

    build.register("broken", Settings, make_agent)
    settings = Settings()
    with jax.numpy_rank_promotion("allow"):
        agent = build.build_agent(settings, environment.spec)
        schedule = make_schedule(settings, environment.spec)
        make = functools.partial(init_state, agent, environment, capacity=100)
        state = jax.eval_shape(lambda key: make(key=key), jax.random.key(0))
        return jax.eval_shape(make_step(agent, environment, schedule), state)


def test_metrics_are_numbers_or_means(environment):
    def more(result):
        train, buffer, metrics = result
        return train, buffer, metrics | {"rare": Mean(jnp.float32(1), jnp.float32(1)), "one": 1.0}

    assert "update/rare" in traced(environment, update=more)[1]


def test_a_pass_over_stored_targets_returns_the_replay_it_was_given(environment):
    given = {"rows": jnp.zeros((2, 3))}

    def made(reanalyze):
        store = Store(None, None, reanalyze, 4)
        agent = Agent(None, None, None, None, None, store=store)
        return checked(agent, "mine", environment.spec).store.reanalyze(None, given, None, 0)

    assert made(lambda train, buffer, key, chunk: (buffer, {"n": 1}))[1] == {"n": 1}
    with pytest.raises(ValueError, match=r"agent 'mine': the replay of reanalyze\(\) is"):
        made(lambda train, buffer, key, chunk: ({"rows": jnp.zeros((2, 4))}, {}))


def metrics(value):
    return dict(update=lambda result: (*result[:2], value))


def grown(train):
    return train.replace(params=jnp.concatenate([train.params, train.params]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(init=lambda train: {"w": train.params}), r"init\(\) is a dict, .*field `params`"),
        (dict(act=lambda r: r[0]), r"result of act\(\) is a .*, wanted \(actions, actor state\)"),
        (dict(act=lambda r: (r[0][:, 0], r[1])), r"actions of act\(\) is float32\[4\], .*\[4, 1\]"),
        (dict(act=lambda r: (r[0].T, r[1])), r"float32\[1, 4\], wanted float\[4, 1\].*\[E, A\]"),
        (dict(act=lambda r: (r[0] > 0, r[1])), r"act\(\) is bool\[4, 1\], wanted float"),
        (dict(act=lambda r: ({"a": r[0]}, r[1])), r"actions of act\(\) is a dict, wanted float"),
        (dict(update=lambda r: r[:2]), r"update\(\) is a tuple of 2, wanted \(train state, rep"),
        (dict(update=lambda r: (r[0].params, *r[1:])), r"train state of update\(\) is a .*params"),
        (metrics([jnp.float32(1)]), r"metrics of update\(\) is a list, wanted a dictionary"),
        (metrics({3: jnp.float32(1)}), r"name among the metrics .* is 3, wanted a string"),
        (metrics({"loss": jnp.ones(2)}), r"metrics\['loss'\] .* is float32\[2\], wanted one numb"),
        (metrics({"loss": {"a": 1.0}}), r"metrics\['loss'\] of update\(\) is a dict"),
        (metrics({"loss": [jnp.ones(2)]}), r"metrics\['loss'\] of update\(\) is a list"),
        (metrics({"m": Mean(jnp.ones(3), 1.0)}), r"metrics\['m'\] .* is float32\[3\]"),
        (dict(example_row=lambda r: {"obs": r["obs"]}), r"without action, reward, .* terminated"),
        (
            dict(init_actor=lambda a: a[0]),
            r"init_actor\(\) is Tree leaf .* shape of length 0 .*\[E,",
        ),
        (
            dict(init_actor=lambda a: {"m": a[1:]}),
            r"leaf 'm' .* \(3,\) != \(4,\), wanted leaves \[E",
        ),
        (dict(act=lambda r: (r[0], r[1][:, None])), r"state of act\(\) is other, .*\(4, 1\) != "),
        (dict(act=lambda r: (r[0], r[1] > 0)), r"actor state of act\(\) is other, .* bool != fl"),
        (
            dict(act=lambda r: (r[0], {"m": r[1]})),
            r"actor state of act\(\) is .*with \['m'\], want",
        ),
        (dict(update=lambda r: (grown(r[0]), *r[1:])), r"train state of update\(\) is other,"),
        (dict(update=lambda r: (r[0], r[1].replace(targets=r[1].size), r[2])), r"the replay of up"),
        (
            dict(example_row=lambda r: r | {"obs": r["reward"]}),
            r"obs of example_row\(\) is float32\[\], wanted shape \[3\]",
        ),
    ],
)
def test_what_no_run_can_use_is_told(environment, changes, message):
    with pytest.raises(ValueError, match=f"agent 'broken': .*{message}"):
        traced(environment, **changes)


@pytest.mark.parametrize(
    ("name", "function", "message"),
    [
        (
            "after_action",
            lambda actor, a: actor[1:],
            r"state of after_action\(\) is other, .*\(3,\)",
        ),
        ("replay_extras", lambda actor: actor, r"replay_extras\(\) is a .*, wanted a dictionary"),
        (
            "replay_extras",
            lambda actor: {"h": actor},
            r"with \['h'\], wanted fields of example_row",
        ),
        (
            "replay_extras",
            lambda actor: {"action": actor},
            r"action of replay_extras\(\) is float32\[4\], wanted \[E, \*\[1\]\], as example_row",
        ),
    ],
)
def test_what_follows_actions_is_looked_at_too(environment, name, function, message):
    agent = own_agent.make_agent(own_agent.Settings(), environment.spec)
    agent = checked(agent._replace(**{name: function}), "broken", environment.spec)
    given = (jnp.zeros(4), jnp.zeros((4, 1))) if name == "after_action" else (jnp.zeros(4),)
    with pytest.raises(ValueError, match=message):
        getattr(agent, name)(*given)


def test_a_make_agent_that_returns_something_else_is_told(environment):
    build.register("broken", Settings, lambda settings, spec: None)
    with pytest.raises(ValueError, match="agent 'broken': .* NoneType, wanted an mbx.agents.base"):
        build.build_agent(Settings(), environment.spec)
