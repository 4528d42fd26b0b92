"""No two streams of random numbers of the TD-MPC agent are the same one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import networks, types
from mbx.agents.tdmpc import planning
from mbx.agents.tdmpc.update import draw, init_state
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import A, B, T, make_model, make_settings, make_world


@pytest.fixture
def used(monkeypatch):
    """The data of every key that random numbers are drawn from, in order."""
    seen = []

    def watch(module, name, position=0):
        original = getattr(module, name)

        def spy(*args, **kwargs):
            if isinstance(args[position], jax.core.Tracer):
                return original(*args, **kwargs)
            seen.append(tuple(np.asarray(jax.random.key_data(args[position])).tolist()))
            # Numbers do not matter here, and drawing them one by one is slow to compile.
            drawn = jax.eval_shape(lambda: original(*args, **kwargs))
            return jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), drawn)

        monkeypatch.setattr(module, name, spy)

    for name in ("normal", "uniform", "permutation", "randint", "gumbel"):
        watch(jax.random, name)
    watch(networks, "init_ensemble", 1)
    return seen


ALL = dict(
    model=dict(num_values=4, num_dynamics=3, num_rewards=2, dropout=0.1),
    loss=dict(value_target="td", td_all_dynamics=False, optimist=True, policy_loss="svg:1+kl:1"),
)


def test_no_two_draws_of_an_update_share_a_stream(used):
    settings = make_settings(**ALL)
    model = make_model(settings)
    noise = draw(settings, model, jax.random.key(1))
    assert all(x is not None for x in noise), noise  # every stream is in use
    handed_on = (noise.dropout, noise.policy_dropout, noise.optimist_dropout)
    keys = [*used, *(tuple(jax.random.key_data(key).tolist()) for key in handed_on)]
    assert len(keys) == len(noise) and len(set(keys)) == len(keys)
    # Every state has draws of its own: fewer would be broadcast.
    states, rollouts = (T + 1, B, A), (settings.loss.td_horizon, T, B, settings.loss.td_rollouts, A)
    assert noise.policy_eps.shape == noise.optimist_eps.shape == states
    assert noise.target_eps.shape == (T, B, A) and noise.rollout_eps.shape == rollouts


def test_no_two_components_of_a_model_and_its_optimist_are_initialised_alike(used):
    settings = make_settings(**ALL)
    world = make_world(
        settings, obs_shape=(3 + 2,), tasks=types.TaskSet(("a", "b"), (1, 2), embedding_dim=4)
    )
    with jax.disable_jit():
        model = make_world_model(world)
        init_state(settings, model, jax.random.key(0))
    ensembles_and_tasks = set(used)
    assert len(ensembles_and_tasks) == len(used) == 2 * 4
    singles = [jax.random.split(jax.random.split(jax.random.key(0))[i], 7)[0] for i in (0, 1)]
    assert not ensembles_and_tasks & {tuple(jax.random.key_data(k).tolist()) for k in singles}


def test_proposals_and_their_noise_are_apart(used):
    settings = make_settings(planner=dict(proposal_noise=0.1))
    model = make_model(settings)
    params, mean = model.init(jax.random.key(0)), jnp.zeros((2, 3, 2))
    used.clear()
    planning.plan_to_act(settings, model, params, jnp.ones((2, 8)), mean, jax.random.key(1))
    assert len(used) >= 3 and len(set(used)) == len(used)
