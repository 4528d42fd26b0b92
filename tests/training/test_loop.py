"""The loop: what is counted, what is stored, and that its two forms are one program."""

from __future__ import annotations

import re
import types
from fractions import Fraction

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.agents.base import Agent
from mbx.settings import inactive
from mbx.training import build, evaluation, job, loop, run
from mbx.training.devices import ONE_DEVICE
from mbx.training.loop import make_learn
from mbx.training.state import LoopState, Schedule, init_state, make_schedule
from tests.helpers import equations, tiny_config

CAPACITY = 60


@flax.struct.dataclass
class Steps:
    """A train state that only counts."""

    step: jax.Array


@pytest.fixture(scope="module")
def parts():
    config = tiny_config(env=dict(name="toy:ends"))
    environment = envs.make("toy:ends", 2)
    agent = build.build_agent(build.read(config), environment.spec)
    schedule = make_schedule(build.read(config).for_task(environment.spec), environment.spec)
    interval = loop.make_interval(agent, environment, schedule, length=10, partition=ONE_DEVICE)
    return config, environment, agent, schedule, interval


@pytest.fixture(scope="module")
def begin(parts):
    """Makes the first state, compiled once for all tests."""
    _, environment, agent, _, _ = parts
    program = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=CAPACITY))
    return lambda: program(jax.random.key(0))


@pytest.fixture(scope="module")
def trained(parts, begin):
    """The state after 40 vector steps, the metrics of the four intervals, and what was donated."""
    interval, state, metrics = parts[4], begin(), []
    first = state
    for i in range(4):
        state, sums = loop.advance(interval, state, 20 * (i + 1), parts[3])
        metrics.append(sums)
    return state, metrics, first


@pytest.mark.parametrize(("utd", "num_envs"), [(0.25, 3), (1.0, 4), (3.0, 2), (0.3, 7)])
def test_update_to_data_ratio_holds_for_any_number_of_environments(utd, num_envs):
    """The loop's own counting over many steps: floor(agent steps x ratio), nothing lost."""

    def update(train, buffer, key):
        return train.replace(step=train.step + 1), buffer, {}

    agent = Agent(None, None, None, update, None)
    learn = make_learn(agent, Schedule(0, 0, utd, 0, 0))
    names = ("actor", "env", "obs", "reward", "is_first", "replay")
    nothing = dict.fromkeys(names, jnp.zeros(num_envs))
    zero = jnp.int32(0)
    state = LoopState(
        train=Steps(zero),
        key=jax.random.key(0),
        steps=zero,
        update_debt=zero,
        updates=zero,
        **nothing,
    )

    def one(state, _):
        state, metrics = learn(state.replace(steps=state.steps + num_envs), True)
        return state, (state.updates, metrics["updates"])

    end, (total, made) = jax.jit(lambda s: jax.lax.scan(one, s, None, length=200))(state)
    ratio = Fraction(utd).limit_denominator(1000)
    due = [step * num_envs * ratio.numerator // ratio.denominator for step in range(1, 201)]
    np.testing.assert_array_equal(total, due)
    np.testing.assert_array_equal(np.cumsum(made), due)
    assert int(end.train.step) == due[-1]


def test_the_state_is_donated_and_nothing_recompiles(parts, trained):
    interval, first = parts[4], trained[2]
    assert first.replay.data["obs"].is_deleted()
    assert interval._cache_size() == 1


def test_the_compiled_step_never_copies_the_replay(parts, begin):
    text = parts[4].lower(begin(), np.int32(20)).compile().as_text()  # as it is called
    storage = re.findall(rf"= \(?\w+\[2,{CAPACITY}[\],][^ ]* copy\(", text)
    assert re.search(rf"\[2,{CAPACITY}", text) and not storage


def test_an_interval_moves_nothing_between_host_and_device(parts, trained, begin):
    interval, state = parts[4], begin()
    until = jnp.int32(20)
    with jax.transfer_guard("disallow"):
        state, _ = interval(state, until)
    assert int(state.steps) == 16  # where the pretraining begins


def test_matmul_precision_reaches_the_programs(parts, trained):
    """What `run.train` traces its programs in."""
    _, _, agent, _, _ = parts
    state, obs = trained[0], jnp.zeros((2, 2))

    def products(precision):
        """All of them, and those that are exact."""
        with run.matmul_precision(precision):
            first = jnp.zeros(2, bool)
            program = jax.make_jaxpr(lambda t, a: agent.act(t, a, obs, first, state.key, True))
            found = [
                equation.params["precision"]
                for equation in equations(program(state.train, state.actor).jaxpr)
                if equation.primitive.name == "dot_general"
            ]
        exact = (jax.lax.Precision.HIGHEST, jax.lax.Precision.HIGHEST)
        return len(found), found.count(exact)

    # Sums that are written as products (`mbx.fast.reductions`) are exact whatever is asked for.
    number, exact = products("default")
    assert number - exact > 50
    assert products("highest") == (number, number)


def test_one_interval_of_2n_is_two_of_n_bit_for_bit(parts, trained, begin):
    interval, state = parts[4], begin()
    copy = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    for until in (10, 30, 50, 60, 80):  # in other pieces, each at most ten steps
        state, _ = loop.advance(interval, copy(state), until, parts[3])
    same = jax.jit(lambda *states: jax.tree.map(lambda a, b: jnp.all(a == b), *states))
    assert jax.tree.all(same(state, trained[0]))


def test_evaluation_leaves_training_alone(trained):
    def act(train, actor, obs, is_first, key, evaluate):
        noise = jax.random.normal(key, obs.shape)
        return jnp.tanh(train.step * obs + 0.1 * noise), actor

    evaluate = evaluation.make_evaluate(act, jnp.zeros, envs.make("toy:ends", 3))
    state = trained[0]
    before = jax.tree.map(jnp.copy, state.train)
    a, b = (evaluate(state.train, jax.random.key(5)) for _ in range(2))
    np.testing.assert_array_equal(a.returns, b.returns)
    assert a.returns.shape == (3,) and (a.lengths <= 7).all() and (a.lengths >= 1).all()
    jax.tree.map(np.testing.assert_array_equal, before, state.train)


def test_evaluation_also_plays_as_in_training_where_that_is_asked_for(parts):
    """An agent that stays where it is, and explores by pushing outwards."""

    def act(train, actor, obs, is_first, key, evaluate):
        return (jnp.zeros_like(obs) if evaluate else jnp.ones_like(obs)), actor

    agent = parts[2]._replace(act=act, init_actor=jnp.zeros)
    run = dict(agent=agent, tests=envs.make("toy:point", 3), partition=ONE_DEVICE, seeds=(0,))
    for asked in (False, True):
        settings = build.read(tiny_config(eval=dict(exploring=asked)))
        evaluate = job.make_evaluate(types.SimpleNamespace(**run, settings=settings))
        summary = evaluate(None, [jax.random.key(0)])[0].summary()
        assert ("return_mean_exploring" in summary) == asked
    assert summary["return_mean"] > summary["return_mean_exploring"] + 1
    sampled = build.read({"agent": "dreamer", "eval": dict(action="sample")})
    assert sampled.eval.exploring  # which would play the very same episodes again
    assert "eval.exploring" in inactive(sampled)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (dict(train=dict(seed_steps=2)), "seed_steps=2"),
        (dict(loss=dict(batch_size=1000)), "batch_size=1000"),
        (dict(reanalyze=dict(batch_size=1000)), "reanalyze.batch_size=1000"),
        (dict(planner=dict(num_elites=13)), "num_elites=13"),
        (dict(planner=dict(num_proposals=12)), "num_proposals=12"),
        (dict(loss=dict(discount=1.5)), "discount=1.5"),
        (dict(loss=dict(value_target="mc")), "value_target='mc'"),
        (dict(loss=dict(policy_loss="ppo")), "policy_loss='ppo'"),
        (dict(model=dict(size="2")), "model.size='2'"),
        (dict(model=dict(episodic="maybe")), "episodic='maybe'"),
        (dict(agent="dqn"), "agent='dqn'"),
    ],
)
def test_impossible_settings_are_told_before_any_compile(sections, message):
    config = tiny_config(**sections)
    spec = envs.make("toy:point", 2).spec
    with pytest.raises(ValueError, match=message):
        build.build_agent(build.read(config), spec)
        make_schedule(build.read(config).for_task(spec), spec)
