"""What an evaluation hands back of the episodes that it played, against counting by hand."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.agents.base import Diagnostics, Episodes
from mbx.envs.base import Timestep
from mbx.training import devices, evaluation, run, seeds

LIMIT, LENGTHS = 16, np.array([3, 16, 5])  # the first and the last end by themselves
KEYS = jax.random.split(jax.random.key(0), 2)


def act(train, actor, obs, is_first, key, evaluate):
    """Ten times the parameter, so that the episode shows whose it is; no noise is wanted."""
    assert evaluate
    return jnp.full((len(obs), 1), train), actor


def counting() -> envs.RawEnvironment:
    """Observes how many steps were made and how many the episode has; pays 10 * steps + action."""

    def reset(key):
        length = jnp.float32(LIMIT)
        return jnp.array([0.0, length]), jnp.array([0.0, length])

    def step(key, state, action):
        state = state + jnp.array([1.0, 0.0])
        return state, state, 10.0 * state[0] + action[0], state[0] >= state[1]

    return envs.RawEnvironment("toy:count", (2,), jnp.float32, 1, LIMIT, reset, step)


def of_lengths(lengths: np.ndarray):
    """Its episodes of these lengths, a JAX environment; 16 is the limit and no end of their own."""
    environment = envs.episodic(counting(), len(lengths))
    ends = jnp.where(lengths < LIMIT, lengths, 99).astype(jnp.float32)

    def reset(key):
        state, obs = environment.reset(key)
        obs = obs.at[:, 1].set(ends)
        return state.replace(raw=obs), obs

    return environment._replace(reset=reset)


class OnHost(envs.base.HostEnvironment):
    """The same in NumPy."""

    def __init__(self, lengths: np.ndarray) -> None:
        self.spec, self.num_envs = of_lengths(lengths).spec, len(lengths)
        self.ends = np.where(lengths < LIMIT, lengths, 99)

    def reset(self, seed):
        self.count = np.zeros(self.num_envs)
        return self.observed()

    def observed(self):
        return np.stack([self.count, self.ends], axis=1).astype(np.float32)

    def step(self, action):
        self.count += 1
        reward = (10 * self.count + action[:, 0]).astype(np.float32)
        final, ended = self.observed(), self.count >= self.ends
        cut = (self.count >= LIMIT) & ~ended
        self.count[ended | cut] = 0
        nothing = np.zeros(self.num_envs)
        fault = nothing.astype(bool)
        obs = self.observed()
        return Timestep(obs, final, reward, ended, cut, nothing, nothing, fault)

    def get_state(self):
        return None

    def set_state(self, snapshot):
        raise NotImplementedError

    def close(self):
        pass


def expect(found: evaluation.Evaluation, action: float) -> None:
    episodes = found.episodes
    assert isinstance(episodes, Episodes)
    np.testing.assert_array_equal(episodes.steps, [0, 1, 2, 4, 8])  # of 16
    np.testing.assert_array_equal(episodes.lengths, LENGTHS)
    np.testing.assert_array_equal(episodes.terminated, [True, False, True])
    rewards = np.array([[10 * (t + 1) + action] * 3 for t in range(LIMIT)])
    rewards[np.arange(LIMIT)[:, None] >= LENGTHS] = 0.0
    np.testing.assert_allclose(episodes.rewards, rewards)
    np.testing.assert_allclose(found.returns, rewards.sum(axis=0))
    for slot, step in enumerate([0, 1, 2, 4, 8]):
        reached = step < LENGTHS
        np.testing.assert_array_equal(episodes.obs[slot, reached, 0], step)
    np.testing.assert_array_equal(episodes.last_obs[:, 0], LENGTHS)


def test_random_actions_are_uniform_draws():
    found = evaluation.make_random(OnHost(np.full(60, LIMIT)))(KEYS[0])
    sums = found.returns - 10 * sum(range(1, LIMIT + 1))  # of 16 actions each: variance 16 / 3
    assert np.all(found.lengths == LIMIT) and abs(sums.mean()) < 1.2
    assert 1.5 < sums.std() < 3.2


@pytest.mark.parametrize("make", [of_lengths, OnHost])
def test_episodes_are_handed_back_as_they_were_played(make):
    evaluate = evaluation.make_evaluate(act, jnp.zeros, make(LENGTHS))
    expect(evaluate(jnp.float32(0.5), KEYS[0]), 0.5)


def test_every_seed_has_its_own_episodes():
    evaluate = seeds.make_seeds_evaluate(act, jnp.zeros, of_lengths(LENGTHS))
    for found, action in zip(evaluate(jnp.array([0.5, -0.25]), KEYS), (0.5, -0.25), strict=True):
        expect(found, action)


def broken(now: Timestep) -> Timestep:
    """The second step of the third episode is at fault."""
    bad = (now.final_obs[:, 0] == 2) & (now.final_obs[:, 1] == 5)
    return now._replace(fault=bad, truncated=now.truncated | bad)


def broken_on_host():
    class Broken(OnHost):
        def step(self, action):
            return broken(super().step(action))

    return Broken(LENGTHS)


def broken_in_jax():
    environment = of_lengths(LENGTHS)

    def step(state, action, key):
        state, now = environment.step(state, action, key)
        return state, broken(now)

    return environment._replace(step=step)


@pytest.mark.parametrize("make", [broken_in_jax, broken_on_host])
def test_a_step_that_is_no_number_makes_its_reward_none(make):
    evaluate = evaluation.make_evaluate(act, jnp.zeros, make())
    found = evaluate(jnp.float32(0.0), KEYS[0])
    assert np.isnan(found.episodes.rewards[1, 2]) and found.episodes.lengths[2] == 2
    assert not found.episodes.terminated[2] and np.isfinite(found.episodes.rewards[:, :2]).all()


def test_seen_steps_of_short_episodes():
    assert evaluation.seen_steps(1).tolist() == [0]
    assert evaluation.seen_steps(7).tolist() == [0, 1, 3]


def test_the_driver_gives_a_review_the_episodes_and_writes_what_it_says(tmp_path):
    """Beside the agent's diagnostics, which see the replay alone."""
    seen = []

    def review(train, rows, episodes, key):
        seen.append((train, rows, episodes))
        return Diagnostics({"b": 2.0}, {"b.txt": b"two"})

    def diagnostics(train, rows, key):
        return Diagnostics({"a": 1.0}, {"a.txt": b"one"})

    logged, best = {}, []
    logger = types.SimpleNamespace(
        workdir=str(tmp_path),
        log=lambda kind, step, row: logged.update(row),
        log_episodes=lambda *args: None,
        log_picture=lambda *args: None,
    )
    result = evaluation.Evaluation(np.ones(2), np.ones(2), episodes="episodes")
    job = types.SimpleNamespace(
        seeds=(0,),
        evaluate=lambda train, keys: [result],
        share=lambda tree, i: tree,
        agent=types.SimpleNamespace(diagnostics=diagnostics, review=review),
        partition=devices.Partition(),
    )
    keep = types.SimpleNamespace(save_best=lambda *args: best.append(args))
    state = types.SimpleNamespace(train="train", replay="rows")
    run.evaluate_seeds(job, state, 0, 8, [run.SeedRun(logger, keep)], 0.0)
    assert seen == [("train", "rows", "episodes")]
    assert logged["a"] == 1.0 and logged["b"] == 2.0 and logged["return_mean"] == 1.0
    assert [(tmp_path / name).read_text() for name in ("a.txt", "b.txt")] == ["one", "two"]
