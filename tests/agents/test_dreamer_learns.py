"""Dreamer learns what is known: values and actions of a chain, computed by hand.

Slow: whole steps are compared with two references in test_dreamer_steps.py.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import replay
from mbx.agents.dreamer import agent as dreamer
from mbx.agents.dreamer import encoders, rssm, update
from mbx.agents.dreamer import networks as nets
from mbx.agents.dreamer.networks import ModelConfig
from tests.agents.dreamer_helpers import change, make_settings

pytestmark = pytest.mark.slow

# s0 -> s1 -> end. Going on (action 1) pays 1 at the end; stopping (action 0) pays 0.3 and ends.
# The official code's choices, but without the loss on replay rows: those act at random.
GAMMA, STOP = 0.8, 0.3
VALUES = {"s0": GAMMA, "s1": 1.0}  # of going on, which is better than stopping in both states
LAYERS = ("encoder", "decoder", "policy", "value", "prior")
SETTINGS = make_settings(
    ModelConfig(
        **dict(vector_dim=3, action_dim=2, factors=(2,), policy_unimix=0.0),
        **dict(deter=16, hidden=16, stoch=4, classes=4, units=16, blocks=2),
        **dict(num_bins=41, bin_max=2.0, bins_space="raw"),
        **{f"{part}_layers": 1 for part in LAYERS},
    ),
    loss=dict(
        **dict(batch_size=8, batch_length=6, updates="joint", continue_discount=True),
        **dict(dynamics_coef=1.0, free_nats=0.1),
    ),
    imagination=dict(horizon=3, continues="soft", first_continue="predicted"),
    critic=dict(gamma=GAMMA, replay_loss="none"),
    replay=dict(context=True, online=True),
    optimizer=dict(name="laprop", clips=(0.3, 0.3, 0.3), epsilons=(1e-20,) * 3, warmup=20),
)
UPDATES = 1200


def random_episodes(rows=300, shift=0):
    """A replay of one environment that acts at random; rewards `shift` rows late."""
    generator, columns, state = np.random.default_rng(0), [], 0
    while len(columns) < rows:
        action = generator.integers(2)
        columns.append((np.eye(3)[state], np.eye(2)[action], 0.0, state == 0, False))
        if action == 1 and state == 0:
            state = 1
            continue
        columns.append((np.eye(3)[2], np.zeros(2), 1.0 if action else STOP, False, True))
        state = 0
    obs, action, reward, first, last = (np.asarray(x) for x in zip(*columns, strict=True))
    example = dreamer.example_row(SETTINGS)
    data = dict(obs=obs, action=action, reward=np.roll(reward, shift), is_first=first)
    data |= dict(is_last=last, terminated=last)
    data |= {
        name: np.zeros((len(obs), *example[name].shape), example[name].dtype)
        for name in ("deter", "stoch", "seen")
    }

    def insert(state, row):
        row = {name: x[None].astype(example[name].dtype) for name, x in row.items()}
        return replay.insert(state, row), None

    buffer = replay.init(example, num_envs=1, capacity=len(obs))
    return jax.jit(lambda b, rows: jax.lax.scan(insert, b, rows)[0])(buffer, data)


@jax.jit
def learn(buffer, rate, num):
    """Values and probabilities of going on in s0 and s1, after `num` updates."""
    settings = change(SETTINGS, optimizer=dict(learning_rates=(rate, rate, rate)))
    one = update.make_update(settings)

    def body(i, carry):
        train, buffer = carry
        train, buffer, _ = one(train, buffer, jax.random.key(i))
        return train, buffer

    train = dreamer.init_state(settings, jax.random.key(0))
    train, _ = jax.lax.fori_loop(0, num, body, (train, buffer))
    net, model, lead = settings.model, train.params["model"], (2, 16)
    obs = jnp.broadcast_to(jnp.eye(3)[:2, None], (*lead, 3))  # s0, then s1
    observed = rssm.observe(
        net,
        model["rssm"],
        rssm.initial(net, model["rssm"], lead[1:]),
        encoders.encode(net, model["encoder"], {"vector": obs}),
        jnp.broadcast_to(jnp.array([0.0, 1.0]), (*lead, 2)),
        jnp.zeros(lead, bool).at[0].set(True),
        jax.random.uniform(jax.random.key(1), (*lead, net.stoch)),
    )
    features = rssm.features(observed.states)
    values = nets.two_hot_mean(net, nets.head(train.params["critic"], features))
    chosen = jnp.exp(rssm.mixed_logits(nets.head(train.params["actor"], features), 0.0))
    return jnp.mean(values, axis=1), jnp.mean(chosen[..., 1], axis=1)


def test_values_and_actions_of_a_chain():
    values, going_on = learn(random_episodes(), 1e-3, UPDATES)
    np.testing.assert_allclose(values, list(VALUES.values()), atol=0.05)
    assert np.all(going_on > 0.95)


@pytest.mark.parametrize("what", ["no learning rate", "rewards a row late"])
def test_the_chain_is_not_learned_without(what):
    late = what == "rewards a row late"
    values, _ = learn(random_episodes(shift=int(late)), 1e-3 if late else 0.0, UPDATES // 2)
    assert np.all(np.abs(values - np.array(list(VALUES.values()))) > 0.1)
