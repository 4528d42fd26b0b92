"""`replay.insert_step`: the rows of one step, checked by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay

FLAG, NUMBER = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((), jnp.float32)
ROW = dict(obs=NUMBER, action=NUMBER, reward=NUMBER, latent=NUMBER)
ROW |= dict(is_first=FLAG, is_last=FLAG, terminated=FLAG)


def numbers(*values):
    return jnp.array(values, jnp.float32)


def step(**changes):
    """Two environments act on observations 1 and 2: the first goes on, the second's episode ends.

    A change to None leaves the field out.
    """
    row = dict(obs=numbers(1, 2), reward=numbers(0.1, 0.2), action=numbers(5, 6))
    row |= dict(is_first=jnp.array([True, False]), latent=numbers(7, 8))
    final = dict(obs=numbers(3, 4), reward=numbers(0.3, 0.4), terminated=jnp.array([False, True]))
    for name, value in changes.items():
        where, field = name.split("_", 1)
        fields = dict(row=row, final=final)[where]
        fields[field] = value
        if value is None:
            del fields[field]
    return row, final, jnp.array([False, True])


def test_a_step_is_a_row_and_a_last_row_where_the_episode_ended():
    spec = replay.TargetSpec(num_actions=1, action_dim=1)
    state = replay.init(ROW, num_envs=2, capacity=3, target_spec=spec)
    targets = replay.Targets(
        actions=jnp.ones((2, 1, 1)),
        values=jnp.ones((2, 1)),
        step=jnp.zeros(2, jnp.int32),
        valid=jnp.ones(2, bool),
    )
    state = jax.jit(replay.insert_step)(state, *step(), targets)
    np.testing.assert_array_equal(state.size, [1, 2])
    wanted = dict(
        obs=[1, 2, 4],
        action=[5, 6, 0],
        reward=[0.1, 0.2, 0.4],
        latent=[7, 8, 0],
        is_first=[True, False, False],
        is_last=[False, False, True],
        terminated=[False, False, True],
    )
    index = replay.Index(jnp.array([0, 1, 1]), jnp.array([0, 0, 1]))
    held = replay.row_at(state, index)
    assert set(held) == set(wanted)
    for name, values in wanted.items():
        np.testing.assert_allclose(held[name], values, err_msg=name)
    np.testing.assert_array_equal(replay.targets_at(state, index).valid, [True, True, False])
    assert int(replay.num_transitions(state)) == 1


def test_fields_of_a_last_row_that_are_given_are_kept_and_terminated_need_not_be_stored():
    fields = {name: x for name, x in ROW.items() if name != "terminated"}
    state = replay.init(fields, num_envs=2, capacity=3)
    state = replay.insert_step(state, *step(final_terminated=None, final_latent=numbers(9, 9)))
    last = replay.row_at(state, replay.Index(jnp.array([1]), jnp.array([1])))
    assert float(last["latent"][0]) == 9.0 and bool(last["is_last"][0])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (dict(row_reward=None), r"rows lack \['reward'\]: give all fields"),
        (dict(row_rewards=numbers(1, 2)), r"rows have \['rewards'\], but the replay stores \["),
        (dict(row_terminated=jnp.zeros(2, bool)), "row has terminated: leave out"),
        (dict(final_obs=None, final_reward=None), "final lacks obs, reward: give obs, reward, ter"),
        (dict(final_discount=numbers(1, 2)), r"rows have \['discount'\]"),
        (dict(final_obs=numbers(1)), r"rows\['obs'\] is float32\[1\].*float32\[2\]"),
    ],
)
def test_fields_that_are_missing_or_unknown_are_named(changes, match):
    state = jax.eval_shape(lambda: replay.init(ROW, num_envs=2, capacity=3))
    with pytest.raises(ValueError, match=match):
        jax.eval_shape(lambda s: replay.insert_step(s, *step(**changes)), state)
