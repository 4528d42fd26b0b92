"""The loop around an agent that writes down how it was called, replayed in plain Python.

What `test_loop.py` sees of whole runs, in programs that compile in a second.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from fractions import Fraction

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.agents.base import Agent, Mean, Store
from mbx.envs.base import HostEnvironment, JaxEnvironment, Timestep
from mbx.fast import collectives
from mbx.training import devices, job, loop, seeds, state
from mbx.training.devices import ONE_DEVICE
from mbx.training.loop import random_actions
from mbx.training.state import Schedule
from mbx.types import EnvSpec

E, A, KEEP, BATCH, CAPACITY = 2, 3, 1, 4, 30
SEED_STEPS, PRETRAIN, EVERY, MIN_STEP = 6, 2, 2, 12
RATIO = 0.75  # 3/4 of an update a step: with two environments 3 updates in 2 steps
SPEC = EnvSpec("toy:units", (2,), jnp.float32, A, 5, 1)
SCHEDULE = Schedule(SEED_STEPS, PRETRAIN, RATIO, EVERY, MIN_STEP)
ENDS, FAULTS = (3, 4, 9), (4,)  # vector steps after which the first environment ends, by a fault


@flax.struct.dataclass
class Train:
    """Counts updates; `drawn` is the sum of what their keys gave, by number."""

    params: jax.Array
    drawn: jax.Array


def number(key):
    return jax.random.uniform(key, ())


def update(train, buffer, key):
    x = number(key)
    new = Train(train.params + 1.0, train.drawn + x * (train.params + 1.0))
    rare = jnp.where(new.params % 2 == 0, new.params, 0.0)
    metrics = {
        "loss": new.params,
        "rows": jnp.sum(buffer.size).astype(float),
        "even": Mean(rare, (new.params % 2 == 0).astype(float)),
    }
    return new, buffer, metrics


def act(train, actor, obs, is_first, key, evaluate):
    """The key's number, the observation, and what the actor state has counted."""
    count = jnp.where(is_first, 0.0, actor) + 1.0
    return jnp.stack([jnp.full(E, number(key)), obs[:, 0], count], axis=-1), count


def after_action(actor, action):
    return actor + action[:, 0]


def targets(train, actor, obs, key):
    return replay.Targets(
        actions=jnp.broadcast_to(actor[:, None, None], (E, KEEP, A)),
        values=jnp.full((E, KEEP), number(key)),
        step=jnp.full(E, jnp.int32(train.params)),
        valid=jnp.ones(E, bool),
    )


def reanalyze(train, buffer, key, chunk):
    """Notes the pass in the first stored value: 100 times its chunk, and its key's number."""
    new = buffer.targets.values.at[0, 0, 0].add(100.0 * chunk + number(key))
    metrics = {"chunk": chunk.astype(float), "drawn": number(key)}
    return buffer.replace(targets=buffer.targets.replace(values=new)), metrics


ROW = dict(
    obs=jax.ShapeDtypeStruct((2,), jnp.float32),
    action=jax.ShapeDtypeStruct((A,), jnp.float32),
    reward=jax.ShapeDtypeStruct((), jnp.float32),
    is_first=jax.ShapeDtypeStruct((), bool),
    is_last=jax.ShapeDtypeStruct((), bool),
    terminated=jax.ShapeDtypeStruct((), bool),
)
STORE = Store(replay.TargetSpec(KEEP, A), targets, reanalyze, BATCH)
PLAIN = Agent(
    init=lambda key: Train(jnp.float32(0.0), number(key)),
    init_actor=jnp.zeros,
    act=act,
    update=update,
    example_row=lambda: ROW,
)
FULL = PLAIN._replace(
    example_row=lambda: ROW | dict(latent=jax.ShapeDtypeStruct((), jnp.float32)),
    store=STORE,
    after_action=after_action,
    replay_extras=lambda actor: dict(latent=10.0 * actor),
)


def env_step(t, action, key):
    """Observations count; the first environment ends after steps ENDS, in a fault after FAULTS."""
    t = t + 1
    first = jnp.arange(E) == 0
    done = first & jnp.isin(t, jnp.asarray(ENDS))
    fault = first & jnp.isin(t, jnp.asarray(FAULTS))
    now = t + number(key)
    obs = jnp.stack([jnp.full(E, now), jnp.arange(E) + 1.0], axis=-1)
    return t, Timestep(
        obs=jnp.where(done[:, None], -obs, obs),
        final_obs=obs,
        reward=jnp.sum(action, axis=-1),
        terminated=done & ~fault,
        truncated=done & fault,
        episode_return=t + 0.5 * jnp.arange(1.0, E + 1),
        episode_length=jnp.full(E, 3),
        fault=fault,
        metrics={"success": jnp.where(fault, jnp.nan, 7.0)},
    )


ENVIRONMENT = JaxEnvironment(
    SPEC, E, lambda key: (jnp.int32(0), jnp.full((E, 2), number(key))), env_step
)


@functools.cache
def beginning(agent, environment=ENVIRONMENT, **options):
    return jax.jit(
        lambda key, obs: state.init_state(
            agent, environment, key=key, capacity=CAPACITY, host_obs=obs, **options
        )
    )


def begun(agent, *args, host_obs=None, **options):
    return beginning(agent, *args, **options)(jax.random.key(3), host_obs)


def run_in_python(steps, pretrain=PRETRAIN, min_step=MIN_STEP):
    """What `steps` of the loop must come to: rows by environment, train state, passes, metrics."""
    _, env_key, base = jax.random.split(jax.random.key(3), 3)
    init_key = jax.random.split(jax.random.key(3), 3)[0]
    num, t = jax.jit(number), 0
    obs = np.full((E, 2), num(env_key))
    actor, reward, first = np.zeros(E), np.zeros(E), np.ones(E, bool)
    params, drawn, debt, rows, passes = 0, float(num(init_key)), Fraction(0), [[], []], []
    sums = dict.fromkeys(("updates", "passes", "faults", "episodes", "loss", "length", "return"), 0)
    for i in range(steps):
        agent_steps = E * i
        act_key, step_key, learn_key = jax.random.split(jax.random.fold_in(base, agent_steps), 3)
        act_key, target_key = jax.random.split(act_key)
        if agent_steps < SEED_STEPS:
            random_key, _ = jax.random.split(act_key)
            actor = np.where(first, 0.0, actor) + 1.0
            action = np.asarray(jax.random.uniform(random_key, (E, A), minval=-1.0, maxval=1.0))
            actor = actor + action[:, 0]
        else:
            actor = np.where(first, 0.0, actor) + 1.0
            action = np.stack([np.full(E, num(act_key)), obs[:, 0], actor], -1)
        kept = float(num(target_key)), params
        t += 1
        done = [e == 0 and t in ENDS for e in range(E)]
        fault = [e == 0 and t in FAULTS for e in range(E)]
        now = np.stack([np.full(E, t + num(step_key)), np.arange(E) + 1.0], -1)
        for e in range(E):
            rows[e].append(
                dict(
                    obs=obs[e],
                    action=action[e],
                    reward=reward[e],
                    is_first=first[e],
                    is_last=False,
                    terminated=False,
                    latent=10 * actor[e],
                    kept=kept,
                    actor=actor[e],
                )
            )
            if done[e] and not fault[e]:
                last = dict(obs=now[e], reward=action[e].sum(), is_last=True, terminated=True)
                last |= dict(action=np.zeros(A), is_first=False)
                rows[e].append(last)
        sums["faults"] += sum(fault)
        sums["episodes"] += sum(done)
        sums["length"] += 3 * sum(done)
        sums["return"] += sum((t + 0.5 * (e + 1)) for e in range(E) if done[e])
        obs = np.where(np.asarray(done)[:, None], -now, now)
        reward = np.where(done, 0.0, action.sum(-1))
        first = np.asarray(done)
        # What is due.
        update_key, reanalyze_key = jax.random.split(learn_key)
        after, old = agent_steps + E, params
        due = 0
        if agent_steps < SEED_STEPS <= after:
            due = pretrain
        elif after > SEED_STEPS:
            debt += E * Fraction(3, 4)
            due = int(debt)
            debt -= due
        for j in range(due):
            params += 1
            drawn += float(num(jax.random.fold_in(update_key, j))) * params
            sums["loss"] += params
        sums["updates"] += due
        count, chunks = 0, []
        if agent_steps < SEED_STEPS <= after:
            count = -(-sum(map(len, rows)) // BATCH)
            chunks = list(range(count))
        elif after >= min_step:
            count = params // EVERY - old // EVERY
            chunks = [-1] * count
        for j, chunk in enumerate(chunks):
            passes.append((chunk, float(num(jax.random.fold_in(reanalyze_key, j)))))
        sums["passes"] += count
    return types.SimpleNamespace(
        rows=rows,
        params=params,
        drawn=drawn,
        debt=debt,
        passes=passes,
        sums=sums,
        obs=obs,
        reward=reward,
        first=first,
        actor=actor,
        base=base,
    )


STEPS = 11


@pytest.fixture(scope="module")
def whole():
    """(the state after a run, its summed metrics, what plain Python says)."""
    interval = loop.make_interval(FULL, ENVIRONMENT, SCHEDULE, length=STEPS, partition=ONE_DEVICE)
    end, sums = loop.advance(interval, begun(FULL), E * STEPS, SCHEDULE)
    end = jax.device_get(end.replace(key=jax.random.key_data(end.key)))
    return end, sums, run_in_python(STEPS)


def test_what_a_run_comes_to(whole):
    end, _, wanted = whole
    assert int(end.steps) == E * STEPS and int(end.updates) == wanted.params == end.train.params
    assert int(end.update_debt) == wanted.debt * 4
    np.testing.assert_allclose(end.train.drawn, wanted.drawn, rtol=1e-5)
    for name in ("obs", "reward", "actor"):
        np.testing.assert_allclose(getattr(end, name), getattr(wanted, name), rtol=1e-5)
    np.testing.assert_array_equal(end.is_first, wanted.first)
    np.testing.assert_array_equal(end.key, jax.random.key_data(wanted.base))


def test_rows_are_those_of_the_steps(whole):
    end, _, wanted = whole
    for e in range(E):
        assert end.replay.size[e] == len(wanted.rows[e])
        for i, row in enumerate(wanted.rows[e]):
            for name in end.replay.data:
                if name in row:
                    x = end.replay.data[name][e, i]
                    np.testing.assert_allclose(x, row[name], rtol=1e-5, err_msg=f"{name} {e} {i}")


def test_targets_and_passes_are_made_when_they_are_due(whole):
    end, sums, wanted = whole
    values = end.replay.targets.values
    assert [c for c, _ in wanted.passes if c >= 0] == [0, 1] and wanted.sums["passes"] > 6
    for e in range(E):
        for i, row in enumerate(wanted.rows[e]):
            if "kept" not in row:
                continue
            value = row["kept"][0]
            if (e, i) == (0, 0):
                value += sum(100 * chunk + x for chunk, x in wanted.passes)
            np.testing.assert_allclose(values[e, i, 0], value, rtol=1e-4)
            assert end.replay.targets.step[e, i] == row["kept"][1]
            np.testing.assert_allclose(end.replay.targets.actions[e, i], row["actor"], rtol=1e-5)
    np.testing.assert_allclose(sums["pass/chunk"], sum(c for c, _ in wanted.passes))
    np.testing.assert_allclose(sums["pass/drawn"], sum(x for _, x in wanted.passes), rtol=1e-5)
    assert int(sums["passes"]) == wanted.sums["passes"]


def test_metrics_are_sums_and_summaries_means(whole):
    _, sums, wanted = whole
    expected = wanted.sums
    for name in ("updates", "faults", "episodes"):
        assert float(sums[name]) == expected[name]
    assert float(sums["update/loss"]) == expected["loss"]
    assert float(sums["episode/length"]) == expected["length"]
    assert float(sums["episode/return"]) == expected["return"]
    success = sums["episode/success"]  # of those episodes that have it
    known = expected["episodes"] - expected["faults"]
    assert [float(x) for x in success] == [7.0 * known, known]
    told = loop.summarise(sums)
    assert told["loss"] == pytest.approx(expected["loss"] / expected["updates"])
    assert told["episode/length"] == 3.0 and told["episode/success"] == 7.0
    evens = [n for n in range(1, wanted.params + 1) if n % 2 == 0]
    assert told["even"] == pytest.approx(sum(evens) / len(evens))
    assert told["updates"] == expected["updates"] and "update/loss" not in told


def test_devices_sum_their_environments_at_an_intervals_end(whole):
    """Until then every environment has its own numbers, and truth values are counts."""
    metrics = jax.eval_shape(loop.make_step(FULL, ENVIRONMENT, SCHEDULE), begun(FULL))[1]
    for name in ("faults", "episodes"):
        assert (metrics[name].shape, metrics[name].dtype) == ((E,), jnp.int32)
    assert metrics["episode/return"].shape == metrics["episode/success"].total.shape == (E,)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    partition = devices.Partition(mesh)
    interval = loop.make_interval(FULL, ENVIRONMENT, SCHEDULE, length=STEPS, partition=partition)
    _, sums = loop.advance(interval, partition.place(begun(FULL)), E * STEPS, SCHEDULE)
    for name, x in whole[1].items():
        for one, other in zip(jax.tree.leaves(sums[name]), jax.tree.leaves(x), strict=True):
            assert one.shape == other.shape
            np.testing.assert_allclose(one, other, rtol=1e-6, err_msg=name)


def test_a_summary_of_nothing_leaves_means_out():
    nothing = {"updates": 0, "update/loss": 0.0, "update/even": Mean(0.0, 0.0), "faults": 0}
    assert loop.summarise(nothing) == {"updates": 0.0, "faults": 0.0}


class OnHost(HostEnvironment):
    spec, num_envs = SPEC, E

    def __init__(self, keys):
        self.t, self.keys = np.int32(0), iter(keys)
        self.program = jax.jit(env_step)

    def reset(self, seed):
        raise AssertionError

    get_state = set_state = close = reset

    def step(self, action):
        assert isinstance(action, np.ndarray)
        self.t, timestep = self.program(self.t, action, next(self.keys))
        return jax.device_get(timestep)


def on_host(steps):
    """The host environment of the run's keys, one a step and no more, and the first state."""
    now = begun(FULL)
    keys_at = jax.jit(lambda i: state.step_keys(now.replace(steps=i))[1])
    host = OnHost([keys_at(jnp.int32(E * i)) for i in range(steps)])
    return host, begun(FULL, host, host_obs=np.asarray(now.obs))


def test_a_host_environment_gives_the_same_run(whole):
    fused, sums, _ = whole
    host, start = on_host(STEPS)
    assert start.env is None
    # The same programs' parts may round otherwise.
    interval = loop.make_host_interval(FULL, host, SCHEDULE, length=STEPS, partition=ONE_DEVICE)
    end, told = loop.advance(interval, start, E * STEPS, SCHEDULE)
    for x, y in zip(jax.tree.leaves(end.replay), jax.tree.leaves(fused.replay), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    np.testing.assert_allclose(end.train.drawn, fused.train.drawn, rtol=1e-5)
    for x, y in zip(told["ended"], sums["ended"], strict=True):
        assert x.shape == (STEPS, E) and (x[np.asarray(y) == 0] == 0).all()
        np.testing.assert_allclose(x, y, rtol=1e-5)
    assert np.sum(told["ended"].length) == float(told["episode/length"])
    apart = ("update/even", "ended", "episode/success")
    assert {n: float(x) for n, x in told.items() if n not in apart} == pytest.approx(
        {n: float(x) for n, x in sums.items() if n not in apart}, rel=1e-5
    )


def test_learning_without_acting_counts_steps_of_all_environments():
    schedule = dataclasses.replace(SCHEDULE, seed_steps=0)
    interval = loop.make_interval(PLAIN, None, schedule, length=STEPS, partition=ONE_DEVICE)
    end, sums = loop.advance(interval, begun(PLAIN), E * STEPS, schedule)
    assert "passes" not in sums and "ended" not in sums
    expected = PRETRAIN + int(E * STEPS * Fraction(3, 4))
    assert int(end.steps) == E * STEPS and int(end.updates) == expected
    assert float(sums["update/rows"]) == 0.0 and int(end.update_debt) == E * STEPS * 3 % 4


def test_an_agent_without_targets_or_memory_of_actions_acts_at_random_then_itself():
    select = jax.jit(loop.make_select_action(PLAIN, SCHEDULE, E, SPEC))
    start, key = begun(PLAIN), jax.random.key(9)
    own = jax.random.split(key)[0]
    action, actor, made = select(start.replace(steps=jnp.int32(SEED_STEPS - 1)), key)
    np.testing.assert_array_equal(action, random_actions(SPEC, own, E))
    assert made is None and not np.any(actor)
    action, actor, made = select(start.replace(steps=jnp.int32(SEED_STEPS)), key)
    np.testing.assert_allclose(action[:, 0], number(own), rtol=1e-6)
    assert made is None and actor.tolist() == [1.0, 1.0]


def test_random_actions_are_held_until_the_seed_phase_is_over():
    """Blocks of three steps of both environments; a block keeps the action of its first step."""
    schedule = dataclasses.replace(SCHEDULE, seed_steps=5 * E, seed_hold=3)
    select = jax.jit(loop.make_select_action(PLAIN, schedule, E, SPEC))
    start = begun(PLAIN)
    now = [start.replace(steps=jnp.int32(E * t)) for t in range(6)]
    taken = [np.array(select(at, state.step_keys(at)[0])[0]) for at in now]
    for t, first in enumerate((0, 0, 0, 3, 3)):
        # Not with that key itself: of it the keys of acting and of the targets are made.
        stream = jax.random.split(state.step_keys(now[first])[0])[0]
        drawn = jax.random.normal(stream, (E, A))
        np.testing.assert_allclose(taken[t], np.clip(2.0 * drawn, -1.0, 1.0), rtol=1e-6)
    assert not np.array_equal(taken[0], taken[3])
    own = jax.random.split(state.step_keys(now[5])[0])[0]
    np.testing.assert_allclose(taken[5][:, 0], number(own), rtol=1e-6)


def test_divided_parameters_are_gathered_once_for_an_action_and_for_passes():
    """Before the planner's loops, in which every step would gather them again."""
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    start, select = begun(PLAIN), loop.make_select_action(PLAIN, SCHEDULE, E, SPEC)
    with jax.sharding.use_abstract_mesh(mesh), collectives.sharded_parameters(4):
        jaxpr = jax.make_jaxpr(select)(start, start.key).jaxpr
        due = loop.make_reanalyze(FULL, SCHEDULE, None)
        begins = jnp.int32(0), jnp.bool_(True)
        passes = jax.make_jaxpr(due)(begun(FULL), start.key, *begins).jaxpr
    for program in (jaxpr, passes):
        gathered = [x for x in program.eqns if x.primitive.name == "sharding_constraint"]
        assert len(gathered) == len(jax.tree.leaves(start.train)) > 0
        assert all(x.params["sharding"].spec == jax.P() for x in gathered)


def test_a_function_traced_once_is_the_same_function():
    traces = []

    def function(a, b):
        traces.append(1)
        return b["x"] * a, {"x": b["x"], "y": a}

    a, b = jnp.float32(2.0), {"x": jnp.arange(3.0)}
    run, shapes, kept = loop.traced(function, a, b)
    assert (shapes[0].shape, shapes[1]["y"].shape) == ((3,), ())
    assert not kept(0)
    product, rest = jax.jit(lambda a: jax.lax.fori_loop(0, 2, lambda i, _: run(a, b), run(a, b)))(
        jnp.float32(3.0)
    )
    np.testing.assert_array_equal(product, [0.0, 3.0, 6.0])
    np.testing.assert_array_equal(rest["x"], [0.0, 1.0, 2.0])
    assert float(rest["y"]) == 3.0 and len(traces) == 1
    assert loop.traced(lambda a, b: (a, {"x": b["x"]}), a, b)[2](1)
    assert not loop.traced(lambda a, b: (a, {"x": b["x"] + 0.0}), a, b)[2](1)


def test_an_update_that_writes_has_its_replay_kept():
    def writing(train, buffer, key):
        train, _, metrics = update(train, buffer, key)
        return train, buffer.replace(size=buffer.size + 1), metrics

    agent = PLAIN._replace(update=writing)
    start = begun(agent)
    inputs = (start.train, start.replay, start.key)
    assert not loop.traced(agent.update, *inputs)[2](1)
    assert loop.traced(PLAIN.update, *inputs)[2](1)
    end, sums = jax.jit(loop.make_update_loop(agent))(start, start.key, 3, 0)
    np.testing.assert_array_equal(end.replay.size, [3, 3])
    assert float(sums["rows"]) == 0 + E + 2 * E
    assert int(end.updates) == 3


def test_seeds_side_by_side_make_the_passes_of_the_fullest():
    """Batched, a sweep's passes are made together."""
    reanalyze_due = loop.make_reanalyze(FULL, SCHEDULE, "seeds")
    start = begun(FULL)
    sizes = jnp.asarray([[3, 3], [9, 2]], jnp.int32)

    def one(size):
        buffer = start.replay.replace(size=size)
        begins = jnp.int32(0), jnp.bool_(True)
        return reanalyze_due(start.replace(replay=buffer), start.key, *begins)[1]

    passes = jax.jit(jax.vmap(one, axis_name="seeds"))(sizes)["passes"]
    np.testing.assert_array_equal(passes, [3, 3])  # 11 rows, 4 a pass


# -------------------------------------------------------------------------------------------------
# Pretraining in shares

SHARED = dataclasses.replace(SCHEDULE, pretrain_updates=25, reanalyze_min_step=0)
in_python = functools.partial(run_in_python, pretrain=25, min_step=0)
EACH = 3  # steps of an interval: the seed phase ends with the first one's last
LEFT = (25, 15, 5, 0, 0, 0)  # updates of the pretraining after each of six calls
WHEN = (3, 3, 3, 3, 6, 9)  # vector steps then


def called(interval, start, pick=lambda tree: tree):
    """The state after six calls, and their metrics."""
    end, found = start, []
    for left, steps in zip(LEFT, WHEN, strict=True):
        end, sums = interval(end, np.int32(E * steps))
        found.append(jax.device_get(pick(sums)))
        now = pick(end)
        assert SHARED.updates_left(int(now.steps), int(now.updates), E) == left
        assert int(now.steps) == E * steps
    return pick(end), found


def assert_is_the_run(end, found):
    """It is what plain Python makes with all updates at once."""
    wanted = in_python(WHEN[-1])
    assert int(end.updates) == wanted.params == end.train.params
    np.testing.assert_allclose(end.train.drawn, wanted.drawn, rtol=1e-5)
    assert int(end.update_debt) == wanted.debt * 4
    np.testing.assert_allclose(end.obs, wanted.obs, rtol=1e-5)
    for e in range(E):
        assert end.replay.size[e] == len(wanted.rows[e])
    assert [int(sums["updates"]) for sums in found[:4]] == [0, 10, 10, 5]
    # Targets are all made again when the last of the updates is made, and not before.
    swept = sum(chunk >= 0 for chunk, _ in wanted.passes)
    assert [int(sums["passes"]) for sums in found[:4]] == [0, 0, 0, swept] and swept > 1
    total = {}
    for sums in found:
        total |= {n: loop.add(total[n], x) if n in total else x for n, x in sums.items()}
    for name in ("updates", "passes", "faults", "episodes"):
        assert float(total[name]) == wanted.sums[name]
    assert float(total["update/loss"]) == wanted.sums["loss"]
    assert float(total["episode/length"]) == wanted.sums["length"]
    np.testing.assert_allclose(total["pass/drawn"], sum(x for _, x in wanted.passes), rtol=1e-5)
    np.testing.assert_allclose(total["pass/chunk"], sum(c for c, _ in wanted.passes))


@functools.cache
def shared(on=ONE_DEVICE):
    return loop.make_interval(FULL, ENVIRONMENT, SHARED, length=EACH, partition=on)


@pytest.mark.parametrize("meshed", [0, 1], ids=["one device", "a mesh"])
def test_a_pretraining_in_shares_is_the_same_run(meshed):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on = devices.Partition(mesh) if meshed else ONE_DEVICE
    interval = shared(on)
    end, found = called(interval, on.place(begun(FULL)))
    assert_is_the_run(end, found)
    assert found[0]["ended"].length.any() and not found[1]["ended"].length.any()


def test_a_program_makes_the_calls_of_an_interval_itself():
    """The pretraining lies within the first of two intervals."""
    steps = EACH + 1
    interval = loop.repeated(loop.make_step(FULL, ENVIRONMENT, SHARED), steps, SHARED)
    whole = jax.jit(
        lambda state, until: jax.lax.scan(seeds.whole_interval(interval, SHARED), state, until)
    )
    end, sums = whole(begun(FULL), E * steps * jnp.array([1, 2]))
    wanted, first = in_python(2 * steps), in_python(steps)
    assert int(end.updates) == wanted.params and int(end.steps) == 2 * E * steps
    np.testing.assert_allclose(end.train.drawn, wanted.drawn, rtol=1e-5)
    assert sums["updates"].tolist() == [first.params, wanted.params - first.params]


@pytest.mark.parametrize("batched", [True, False])
def test_seeds_share_their_pretraining_alike(batched):
    interval = seeds.make_seeds_interval(FULL, ENVIRONMENT, SHARED, length=EACH, batched=batched)
    both = jax.tree.map(lambda x: jnp.stack([x, x]), begun(FULL))
    assert_is_the_run(*called(interval, both, lambda tree: seeds.pick(tree, 1)))


@pytest.mark.parametrize("fused", [True, False])
def test_an_interval_is_the_sum_of_its_calls_wherever_the_pretraining_lies(fused):
    """Here it lies within: steps that follow it act with a model that has learned."""
    steps, asked, start = EACH + 1, [], begun(FULL)
    make, environment = loop.make_interval, ENVIRONMENT
    if not fused:
        make, (environment, start) = loop.make_host_interval, on_host(steps)
    interval = make(FULL, environment, SHARED, length=steps, partition=ONE_DEVICE)
    go_on = lambda found, left: asked.append((int(found.get("updates", 0)), left)) or True  # noqa: E731
    end, sums = loop.advance(interval, start, E * steps, SHARED, go_on)
    wanted = in_python(steps)
    assert asked == [(0, 25), (10, 15), (10, 5)]  # not after the last
    assert int(end.updates) == int(sums["updates"]) == wanted.params and int(end.steps) == E * steps
    np.testing.assert_allclose(end.train.drawn, wanted.drawn, rtol=1e-5)
    assert float(sums["update/loss"]) == wanted.sums["loss"]
    assert float(sums["episodes"]) == wanted.sums["episodes"] > 0
    ended = np.flatnonzero(sums["ended"].length[:, 0]) + 1
    assert sums["ended"].length.shape == (steps, E) and ended.tolist() == [3, 4]


def test_a_pretraining_that_is_stopped_goes_on_where_it_was():
    interval, end, left = shared(), begun(FULL), []
    for answers in ([True, False], [False], [True]):
        go_on = lambda found, n: left.append(n) or answers.pop(0)  # noqa: B023, E731
        end, _ = loop.advance(interval, end, E * EACH, SHARED, go_on)
        assert int(end.steps) == E * EACH  # it has not acted
    assert left == [25, 15, 5] and int(end.updates) == 25
    end, _ = loop.advance(interval, end, 2 * E * EACH, SHARED)
    assert int(end.updates) == in_python(2 * EACH).params


def without_targets(train, buffer, key):
    """An update that counts the stored transitions that have no planner targets."""
    train, buffer, _ = update(train, buffer, key)
    stored = jnp.arange(CAPACITY)[None] < buffer.size[:, None]
    missing = stored & ~buffer.targets.valid & ~buffer.data["is_last"]
    return train, buffer, {"missing": jnp.sum(missing.astype(float)), "rows": jnp.sum(stored)}


def renewed(train, buffer, key, chunk):
    """A pass over as many rows as there are."""
    valid = jnp.ones_like(buffer.targets.valid)
    return buffer.replace(targets=buffer.targets.replace(valid=valid)), {}


READS = FULL._replace(update=without_targets, store=STORE._replace(reanalyze=renewed))


@pytest.mark.parametrize(
    ("mode", "pretrain"),
    [("fused", 0), ("fused", 25), ("host", 25), ("seeds", 25), ("dataset", 0), ("dataset", 25)],
)
def test_targets_exist_before_the_first_update_that_reads_them(mode, pretrain):
    schedule = dataclasses.replace(SCHEDULE, pretrain_updates=pretrain)
    sizes, start = dict(length=STEPS, partition=ONE_DEVICE), begun(FULL)
    if mode == "host":
        host, start = on_host(STEPS)
        interval = loop.make_host_interval(READS, host, schedule, **sizes)
    elif mode == "seeds":
        interval = seeds.make_seeds_interval(READS, ENVIRONMENT, schedule, length=STEPS)
        start = jax.tree.map(lambda x: jnp.stack([x, x]), start)
    elif mode == "dataset":
        schedule = dataclasses.replace(schedule, seed_steps=0)
        interval = loop.make_interval(READS, None, schedule, **sizes)
        rows = start.replay.replace(size=jnp.full(E, 20, jnp.int32))
        parts = types.SimpleNamespace(agent=READS, schedule=schedule, partition=ONE_DEVICE)
        start = job.with_targets(parts, start.replace(replay=rows))
    else:
        interval = loop.make_interval(READS, ENVIRONMENT, schedule, **sizes)
    _, sums = loop.advance(interval, start, E * STEPS, schedule)
    assert np.min(sums["updates"]) > pretrain and np.min(sums["update/rows"]) > 0
    assert not np.any(sums["update/missing"])


@pytest.mark.parametrize(("updates", "share"), [(500, 50), (501, 51), (25, 10), (0, 10)])
def test_ten_shares_of_ten_updates_or_more(updates, share):
    assert Schedule(0, updates, 1.0, 0, 0).pretrain_share == share


# -------------------------------------------------------------------------------------------------
# States and schedules


@pytest.mark.parametrize(
    ("given", "ratio"),
    [
        (0.75, Fraction(3, 4)),
        (3.0, Fraction(3)),
        (1 / 3, Fraction(1, 3)),
        (1e-3, Fraction(1, 1000)),
        (0.0, Fraction(0)),
        (3e-4, Fraction(3, 10_000)),
        (1.2e-6, Fraction(1, 833_333)),  # to 1e-4 of itself
        (3e-10, Fraction(0)),  # denominators are counted in int32
    ],
)
def test_ratios_are_the_simplest_fraction_that_is_near(given, ratio):
    assert Schedule(0, 0, given, 0, 0).ratio == ratio


def settings(seed_steps, needed):
    return types.SimpleNamespace(
        train=types.SimpleNamespace(seed_steps=seed_steps, pretrain_updates=11, seed_hold=3),
        env=types.SimpleNamespace(num_envs=4, action_repeat=4),
        rows_before_learning=lambda: needed,
        updates_per_step=lambda: 0.5,
        reanalyze_interval=lambda: 6,
        reanalyze_min_step=lambda: 90,
    )


def test_a_schedule_is_in_agent_steps():
    spec = SPEC._replace(action_repeat=4)
    assert state.make_schedule(settings(43, 10), spec) == Schedule(10, 11, 0.5, 6, 22, 3)
    with pytest.raises(ValueError, match=r"seed_steps=43 gives 10 agent steps.*need 11"):
        state.make_schedule(settings(43, 11), spec)


def test_a_run_begins_at_zero_with_keys_of_their_own():
    key = jax.random.key(3)
    start = begun(FULL, shards=2)
    init_key, env_key, base = jax.random.split(key, 3)
    np.testing.assert_array_equal(jax.random.key_data(start.key), jax.random.key_data(base))
    np.testing.assert_allclose(start.train.drawn, number(init_key))
    np.testing.assert_allclose(start.obs, number(env_key))
    for name in ("steps", "update_debt", "updates"):
        assert int(getattr(start, name)) == 0
    np.testing.assert_array_equal(start.reward, np.zeros(E))
    np.testing.assert_array_equal(start.is_first, np.ones(E, bool))
    np.testing.assert_array_equal(start.actor, np.zeros(E))
    assert start.replay.data["obs"].shape == (E, CAPACITY, 2)
    assert start.replay.targets.values.shape == (E, CAPACITY, KEEP)
    assert begun(PLAIN).replay.targets is None
