"""Learning rates, the discount and loss coefficients may be traced: they give what constants do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx.agents.tdmpc import update
from mbx.agents.tdmpc.agent import resolve
from mbx.world_model import make_world_model
from tests.agents.tdmpc_helpers import SPEC, make_batch, make_settings, make_world, replaced

VALUES = {
    "optimizer.learning_rate": 2e-3,
    "optimizer.final_learning_rate": 1e-4,
    "optimizer.encoder_lr_scale": 0.5,
    "optimizer.policy_lr_scale": 2.0,
    "loss.discount": 0.8,
    "loss.consistency_coef": 5.0,
    "loss.reward_coef": 0.3,
    "loss.value_coef": 0.2,
    "loss.termination_coef": 0.7,
    "loss.policy_coef": 0.5,
    "loss.entropy_coef": 1e-2,
}


def two_updates(values):
    """Parameters and metrics of two updates with numbers by dotted name."""
    sections: dict[str, dict] = {}
    for name, value in values.items():
        section, _, own = name.partition(".")
        sections.setdefault(section, {})[own] = value
    base = make_settings(model=dict(episodic="True"), loss=dict(policy_loss="svg"))
    settings = resolve(replaced(base, **sections), SPEC)
    model = make_world_model(make_world(settings))
    state, rng = update.init_state(settings, model, jax.random.key(0)), np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.3 * rng.normal(size=x.shape), state.params)
    batch = make_batch()

    def step(state, key):
        noise = update.draw(settings, model, key)
        return update.update_from_batch(settings, model, state, batch, noise)

    state, metrics = jax.lax.scan(
        step, state.replace(params=params), jax.random.split(jax.random.key(1), 2)
    )
    return state.params, metrics


def test_traced_numbers_give_what_constants_give():
    traced = jax.jit(two_updates)
    found, wanted = traced(VALUES), jax.jit(lambda: two_updates(VALUES))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, wanted)
    other = traced({name: 0.5 * value for name, value in VALUES.items()})
    assert not all(jax.tree.leaves(jax.tree.map(np.allclose, other, found)))


@pytest.mark.parametrize("name", ["loss.trust_region_coef", "optimizer.weight_decay"])
def test_a_number_that_switches_something_on_is_none_of_them(name):
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jax.eval_shape(lambda x: two_updates({name: x}), jnp.float32(0.5))
