"""The observation's part "action_mask": whatever it rules out is left alone."""

from __future__ import annotations

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary

import mbx
from mbx import envs, observations
from mbx.agents.dreamer import policy
from mbx.agents.dreamer.networks import ModelConfig
from mbx.training import build, evaluation
from mbx.training.loop import random_actions
from mbx.types import EnvSpec, Part

PARTS = (Part("place", (2,)), Part("action_mask", (3,)))
SPEC = EnvSpec("x", (5,), np.float32, 3, 10, 1, discrete=True, parts=PARTS)
MASKS = np.array([[1, 0, 1], [0, 1, 0], [0, 0, 0]])
OBS = np.concatenate([np.full((3, 2), 7.0), MASKS], axis=1).astype(np.float32)


class Doors(gymnasium.Env):
    """A door in three is shut for a step, and knocking at it is an error."""

    observation_space = Dict(place=Box(0, 9, (1,)), action_mask=MultiBinary(3))
    action_space = Discrete(3)

    def __init__(self, pictures: bool = False) -> None:
        if pictures:
            picture = Box(0, 255, (16, 16, 3), np.uint8)
            self.observation_space = Dict(picture=picture, action_mask=MultiBinary(3))

    def _look(self):
        mask = np.arange(3) != self.now
        if "picture" in self.observation_space.keys():
            return dict(picture=np.full((16, 16, 3), self.now, np.uint8), action_mask=mask)
        return dict(place=np.float32([self.now]), action_mask=mask.astype(np.int8))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.now, self.steps = int(self.np_random.integers(3)), 0
        return self._look(), {}

    def step(self, action):
        if action == self.now:
            raise RuntimeError(f"door {action} is shut")
        self.now, self.steps = (self.now + 1) % 3, self.steps + 1
        return self._look(), float(action == 0), False, self.steps == 10, {}


def chances(function, num=400):
    """How often each action is drawn, `[rows, A]`."""
    found = jax.vmap(function)(jax.random.split(jax.random.key(0), num))
    assert np.all(np.isin(found, (0.0, 1.0)))
    return np.mean(found, axis=0)


def test_random_actions_are_the_possible_ones_alike():
    found = chances(lambda key: random_actions(SPEC, key, 3, obs=jnp.asarray(OBS)))
    np.testing.assert_array_equal(found[:2] > 0, MASKS[:2] > 0)
    np.testing.assert_allclose(found, [[0.5, 0, 0.5], [0, 1, 0], [1 / 3] * 3], atol=0.08)


def test_a_policy_draws_and_prefers_the_possible_ones():
    """By its probabilities, of which every action has a share, among those; all, where none is."""
    net = ModelConfig(vector_dim=5, action_dim=3, factors=(3,), parts=PARTS, policy_unimix=0.3)
    logits = jnp.log(jnp.array([[0.2, 0.7, 0.1]] * 3))
    mixed = 0.7 * np.exp(logits) + 0.1
    wanted = mixed * np.where(MASKS.any(-1, keepdims=True), MASKS, 1 / mixed)
    wanted /= wanted.sum(-1, keepdims=True)
    masked = policy.possible(net, logits, observations.action_mask(net, jnp.asarray(OBS)))
    found = chances(lambda key: policy.sample(*masked, policy.draw(net, key, (3,))))
    np.testing.assert_array_equal(found[:2] > 0, MASKS[:2] > 0)
    np.testing.assert_allclose(found, wanted, atol=0.08)
    modes = np.argmax(policy.mode(*masked), axis=-1)
    np.testing.assert_array_equal(modes[:2], [0, 1])
    assert policy.possible(net, logits, None) == (net, logits)


def test_masks_are_of_discrete_actions_and_of_their_number():
    assert observations.action_mask(SPEC._replace(discrete=False), OBS) is None
    assert observations.action_mask(SPEC._replace(parts=PARTS[:1]), OBS[:, :2]) is None
    np.testing.assert_array_equal(observations.action_mask(SPEC, OBS), MASKS > 0)


class MoreDoors(Doors):
    action_space = Discrete(4)

    def step(self, action):
        return super().step((self.now + 1) % 3)


def test_a_mask_of_another_number_of_actions_is_refused_where_the_task_is_made():
    with pytest.raises(ValueError, match=r"MoreDoors.*'action_mask' is of shape \[3\].* 4 actions"):
        envs.make(f"gym:{__file__}:MoreDoors", 2)
    kept = envs.make(f"gym:{__file__}:MoreDoors", 2, observe=("place",))
    assert kept.spec.obs_shape == (1,)
    by_hand = SPEC._replace(name="by hand", action_dim=4)
    with pytest.raises(ValueError, match=r"by hand.*'action_mask' is of shape \[3\].* 4 actions"):
        build.build_agent(build.settings_class("dreamer")(), by_hand)


def test_the_yardstick_of_random_actions_leaves_shut_doors_alone():
    environment = envs.make(f"gym:{__file__}:Doors", 2)
    found = evaluation.make_random(environment)(jax.random.key(0))
    assert found.lengths.tolist() == [10, 10] and 1 <= found.returns.mean() <= 7


@pytest.mark.parametrize("pictures", [False, True])
def test_shut_doors_are_left_alone(tmp_path, pictures):
    """In random steps, in training, in its evaluations, and by the trained policy."""
    small = {"model.deter": 8, "model.hidden": 4, "model.units": 4, "model.stoch": 2}
    small |= {"model.blocks": 2, "loss.batch_size": 2, "loss.batch_length": 4}
    small |= {"imagination.horizon": 2, "imagination.rows": 2, "eval.episodes": 2}
    small |= {"train.seed_steps": 20, "train.log_interval": 20, "eval.interval": 40}
    small |= {"replay.capacity": 100, "env.num_envs": 2, "env.kwargs": dict(pictures=pictures)}
    if pictures:
        small |= {"model.depth": 1, "model.decoder_blocks": 1}
    workdir = str(tmp_path / "run")
    mbx.train(Doors, "dreamer", steps=60, workdir=workdir, **small)
    act = mbx.load_policy(workdir)
    env = Doors(pictures=pictures)
    obs, _ = env.reset(seed=3)
    act.reset()
    for _ in range(9):
        obs, *_ = env.step(act(obs))
