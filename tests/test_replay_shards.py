"""A replay in shards is that many replays side by side."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx import replay_sequences as sequences

ENVS, SHARDS, CAPACITY = 4, 2, 12
ROW = dict(obs=jnp.float32(0), is_first=jnp.bool_(False), is_last=jnp.bool_(False))
SPEC = replay.TargetSpec(num_actions=2, action_dim=1)


def targets(obs, step):
    """Targets that say whose they are."""
    values = jnp.stack([obs, obs + 0.5], axis=-1)
    return replay.Targets(
        actions=jnp.zeros((*values.shape, 1)),
        values=values,
        step=jnp.full(obs.shape, step),
        valid=jnp.ones(obs.shape, bool),
    )


INSERT = jax.jit(replay.insert)


def filled(num_envs, shards, first=0):
    """Rows whose observation is 100 environment + time; every environment ends at its own time."""
    state = replay.init(ROW, num_envs=num_envs, capacity=CAPACITY, target_spec=SPEC, shards=shards)
    env = first + jnp.arange(num_envs)
    for time in range(9):
        ends = (time % 4) == (env % 3) + 1
        rows = dict(obs=100.0 * env + time, is_first=jnp.full(num_envs, time == 0), is_last=ends)
        state = INSERT(state, rows, targets(rows["obs"], 1), mask=jnp.full(num_envs, True))
    return state


def halves():
    return [filled(ENVS // SHARDS, 1, first) for first in (0, ENVS // SHARDS)]


@pytest.fixture(scope="module")
def whole():
    return filled(ENVS, SHARDS)


def joined(parts, axis):
    return jax.tree.map(lambda *x: np.concatenate(x, axis=axis), *parts)


def test_storage_does_not_depend_on_shards(whole):
    same = filled(ENVS, 1)
    jax.tree.map(np.testing.assert_array_equal, whole.replace(shards=1), same)
    assert int(replay.num_transitions(whole)) == int(replay.num_transitions(same))


def test_a_batch_is_each_shards_own_draw(whole):
    key = jax.random.key(3)
    draws = {
        1: lambda s, k, n: replay.sample(s, k, batch_size=n, length=2),
        0: lambda s, k, n: replay.sample_stale(s, k, 5, batch_size=n, exponent=1.0),
    }
    for axis, draw in draws.items():
        draw = jax.jit(draw, static_argnums=2)
        ours = draw(whole, key, 6)
        keys = jax.random.split(key, SHARDS)
        parts = [draw(s, k, 3) for s, k in zip(halves(), keys, strict=True)]
        want = joined(parts, axis)
        index, expected = (x.index if axis else x[1] for x in (ours, want))
        rows, wanted_rows = (x.rows if axis else x[0] for x in (ours, want))
        jax.tree.map(np.testing.assert_array_equal, rows, wanted_rows)
        np.testing.assert_array_equal(index.slot, expected.slot)
        # Environments count through all shards.
        np.testing.assert_array_equal(index.env, rows["obs"] // 100)
        np.testing.assert_array_equal(replay.row_at(whole, index)["obs"], rows["obs"])
        np.testing.assert_array_equal(replay.target_age(whole, index, 5), 4)


def test_targets_go_back_to_the_rows_they_were_made_for(whole):
    draw = jax.jit(functools.partial(replay.sample_rows, batch_size=8))
    rows, index = draw(whole, jax.random.key(1))
    written = jax.jit(replay.update_targets)(whole, index, targets(rows["obs"] + 0.25, 7))
    found = replay.targets_at(written, index)
    np.testing.assert_array_equal(found.values[:, 0], rows["obs"] + 0.25)
    untouched = np.ones((ENVS, CAPACITY), bool)
    untouched[np.asarray(index.env), np.asarray(index.slot)] = False
    before, after = np.asarray(whole.targets.values), np.asarray(written.targets.values)
    np.testing.assert_array_equal(before[untouched], after[untouched])
    assert written.shards == SHARDS


def test_sequences_are_drawn_and_written_by_shard(whole):
    draw = functools.partial(sequences.sample, batch_size=4, length=3)
    drawn = jax.jit(draw)(whole, jax.random.key(2))
    newest = np.asarray(drawn.rows["obs"])[-1]
    assert np.all(newest[:2] < 200) and np.all(newest[2:] >= 200)
    state = jax.jit(sequences.write)(whole, drawn.index, {"obs": drawn.rows["obs"] + 0.5})
    np.testing.assert_array_equal(replay.row_at(state, drawn.index)["obs"], drawn.rows["obs"] + 0.5)


def test_fields_may_be_empty():
    state = replay.init(dict(ROW, none=jnp.zeros(0)), num_envs=4, capacity=4, shards=SHARDS)
    rows = {name: leaf[:, 0] for name, leaf in state.data.items()}
    found = replay.sample_rows(INSERT(state, rows), jax.random.key(0), batch_size=4)[0]
    assert found["none"].shape == (4, 0)


def test_what_does_not_divide_is_refused(whole):
    with pytest.raises(ValueError, match=r"a batch of 3 cannot be drawn evenly from 2"):
        replay.sample_rows(whole, jax.random.key(0), batch_size=3)
    with pytest.raises(ValueError, match=r"num_envs is 3, which 2 shards cannot share"):
        replay.init(ROW, num_envs=3, capacity=4, shards=2)


# Two devices, in a process of its own: their number is fixed once jax has started.
ON_TWO = """
import re
import jax
jax.config.update("jax_num_cpu_devices", 2)
import jax.numpy as jnp
import numpy as np
from mbx import replay
from mbx import replay_sequences as sequences
from mbx.training.devices import Partition
from tests.test_replay_shards import ENVS, ROW, SPEC, targets

CAPACITY, MADE = 1009, 1
RULES = sequences.Selection(online=True, recency_share=0.5)


def insert(state, obs, ends, step):
    marks = {name: jnp.zeros(ENVS, x.dtype) for name, x in RULES.row.items()}
    rows = dict(obs=obs, is_first=obs < 0, is_last=ends)
    return replay.insert(state, rows | marks, targets(obs, step))


def step(state, inputs):
    time, key = inputs
    obs = 100.0 * jnp.arange(ENVS) + time
    ends = time % 4 == jnp.arange(ENVS) % 3 + 1
    state = insert(state, obs, ends, MADE)
    keys = jax.random.split(key, 3)
    stale, index = replay.sample_stale(state, keys[0], time, batch_size=4, exponent=1.0)
    state = replay.update_targets(state, index, targets(-stale["obs"], MADE + 1))
    drawn = replay.sample(state, keys[1], batch_size=6, length=2)
    run, state = sequences.select(state, keys[2], RULES, batch_size=4, length=2)
    swept = replay.refresh_index(state, jnp.int32(time), 4)
    return state, (index, drawn, run, swept, replay.targets_at(state, run.index))


def steps(state, key):
    times = jnp.arange(5.0, 25.0)
    return jax.lax.scan(step, state, (times, jax.random.split(key, times.size)))


def write(state, key):
    run = sequences.sample(state, key, batch_size=4, length=2)
    return sequences.write(state, run.index, {"obs": run.rows["obs"] + 0.5})


state = replay.init(
    ROW | RULES.row, num_envs=ENVS, capacity=CAPACITY, target_spec=SPEC, shards=2
)
for time in range(5):
    obs = 100.0 * jnp.arange(ENVS) + time
    state = insert(state, obs, obs < 0, 0)
alone = jax.jit(steps)(state, jax.random.key(0))
written = jax.jit(write)(alone[0], jax.random.key(1))

mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
two = Partition(mesh, cores=True)
state = jax.device_put(state, two.of_environments(state))
program = jax.jit(two.traced(steps), donate_argnums=0)
program = program.lower(state, jax.random.key(0)).compile()
text = program.as_text()
assert re.search(rf"\\[2,{CAPACITY}", text)
# But of the marks of the queue, one bool a row.
print(re.findall(rf"[fs]32\\[[12,]*{CAPACITY}[\\],][^ ]* copy\\(", text))
print(re.findall("all-[a-z]+|collective-[a-z]+", text))
apart = program(state, jax.random.key(0))
jax.tree.map(np.testing.assert_array_equal, alone, apart)
apart = jax.jit(two.traced(write))(apart[0], jax.random.key(1))
jax.tree.map(np.testing.assert_array_equal, written, apart)
assert not np.array_equal(written.data["obs"], alone[0].data["obs"])
"""


def test_on_as_many_devices_every_one_has_its_shard():
    """The same numbers, with nothing exchanged and no copy of what is stored."""
    done = subprocess.run([sys.executable, "-c", ON_TWO], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n[]\n"
