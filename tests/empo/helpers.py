"""What the tests of EMPO's agent share: worlds of fixtures, short settings, one update."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from benchmarks import empo as empo_benchmarks
from mbx import envs, replay
from mbx.empo import suite as empo_envs
from mbx.empo.agent import TrainState, make_agent, resolve
from mbx.empo.agent.settings import Settings
from mbx.power import PowerParams, TabularWorld
from mbx.settings import from_dict
from mbx.training import loop
from mbx.training.devices import ONE_DEVICE
from mbx.training.state import Schedule, init_state
from tests.helpers import FIXTURES

# No warm-up, beta_r at its nominal value from the first update.
AT_ONCE = dict(v_h_e_steps=0, q_r_steps=0, ramp_steps=0)
EXPLORE = AT_ONCE | dict(epsilon_end=1.0)
TABLES = dict(kind="tables", table_min_rate=1.0)
AVERAGING = dict(kind="tables", table_min_rate=0.02)


def golden(name):
    """A fixture's arrays, its world and its parameters."""
    d = dict(np.load(FIXTURES / "empo" / f"{name}.npz"))
    table = TabularWorld(**{field: d[field] for field in TabularWorld._fields})
    numbers = {k.removeprefix("param_"): v.item() for k, v in d.items() if k.startswith("param_")}
    return d, table, PowerParams(**numbers, reduce=str(d.get("human_reduce", "mean")))


@functools.cache
def load(name):
    """A fixture's world with its exact solution, as the agent sees it."""
    return empo_envs.solved_world(*golden(name)[1:])


def programs(closed):
    """A traced program and those inside it, each with its constants."""
    inside = (core.ClosedJaxpr, core.Jaxpr)
    yield closed
    for equation in getattr(closed, "jaxpr", closed).eqns:
        values = list(equation.params.values())
        for value in jax.tree.leaves(values, is_leaf=lambda x: isinstance(x, inside)):
            if isinstance(value, inside):
                yield from programs(value)


def digest(function, *given):
    """Of a traced program and of its constants."""
    closed = jax.make_jaxpr(function)(*given)
    found = hashlib.sha256(re.sub(r" at 0x\w+", "", str(closed)).encode())
    for array in itertools.chain(*(getattr(one, "consts", ()) for one in programs(closed))):
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            array = jax.random.key_data(array)
        found.update(np.asarray(array).tobytes())
    return found.hexdigest()


def settings_of(**sections):
    """Settings with exact human actions, every successor slot and no comparison of robots."""
    values = dict(eval=dict(review_episodes=0), loss=dict(human_expectation="exact", room=0.0))
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    return from_dict(Settings(), values)


def environment_of(found, num_envs=1, option="", **more):
    """The world as an environment of at most 20 steps an episode."""
    empo_envs.register_world("test", lambda: found)
    return envs.make(f"empo:test{option}", num_envs, **{"episode_length": 20} | more)


def problem_of(found, settings, option=""):
    """A world with the settings it is learned by."""
    power = dataclasses.asdict(settings.power)
    return resolve(settings, environment_of(found, option=option, power=power).spec)


def train(found, settings, updates, *, num_envs=16, seed=0, option="", capacity=512, **more):
    """A fused run with one update a step: (loop state, last metrics)."""
    environment = environment_of(found, num_envs, option, **more)
    agent = make_agent(settings, environment.spec)
    schedule = Schedule(
        seed_steps=num_envs * 4,
        pretrain_updates=0,
        utd_ratio=1 / num_envs,
        reanalyze_interval=0,
        reanalyze_min_step=0,
    )
    start = jax.jit(lambda key: init_state(agent, environment, key=key, capacity=capacity))
    interval = loop.make_interval(
        agent, environment, schedule, length=updates + 4, partition=ONE_DEVICE
    )
    state, metrics = interval(start(jax.random.key(seed)))
    return state, loop.summarise(metrics)


def one_update(settings, found, seed=0):
    """Train state before and after one update on random experience, its metrics, an action."""
    environment = environment_of(found, 4)
    agent = make_agent(settings, environment.spec)
    no = jnp.zeros(4, bool)

    @jax.jit
    def run(before, key):
        env_state, obs = environment.reset(key)
        buffer = replay.init(agent.example_row(), num_envs=4, capacity=16)
        action = jax.nn.one_hot(jnp.zeros(4, int), environment.spec.action_dim)

        def step(carry, key):
            env_state, obs, first, buffer = carry
            row = dict(
                obs=obs,
                action=action,
                reward=jnp.zeros(4),
                is_first=first,
                is_last=no,
                terminated=no,
            )
            env_state, now = environment.step(env_state, action, key)
            first = now.terminated | now.truncated
            return (env_state, now.obs, first, replay.insert(buffer, row)), None

        start = (env_state, obs, ~no, buffer)
        carry, _ = jax.lax.scan(step, start, jax.random.split(key, 4))
        after, _, metrics = agent.update(before, carry[3], key)
        act = agent.act(after, agent.init_actor(4), carry[1], ~no, key, True)[0]
        return after, metrics, act

    key = jax.random.key(seed)
    before = jax.jit(agent.init)(key)
    return before, *run(before, key)


def changed(before, after):
    """Whether any leaf differs."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return any(not np.array_equal(a, b) for a, b in pairs)


def train_state(params, updates=0, target=None):
    """A train state without an optimiser's."""
    return TrainState(params, target, {}, jnp.int32(updates))


def exact_tables(found):
    return {"v_h_e": jnp.moveaxis(found.solution.V_h_e, -1, 0), "q_r": found.solution.Q_r}


def errors_of(found, settings, state):
    """Errors at the states that the replay holds, and how many these are."""
    states = empo_benchmarks.visited_states(found.world, state.replay)
    problem = problem_of(found, settings)
    return empo_benchmarks.exact_errors(problem, found.solution, state.train, states), len(states)
