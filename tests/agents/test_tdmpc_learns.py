"""TD-MPC learns a task whose optimal values and actions are known.

A point moves by its action, x' = x + a, and earns 1 - x'^2 - a^2 / 2, three times; then the episode
ends. Backwards from the end the optimal value is c - p x^2 and the optimal action -k x, with

    q = 1 + discount p',  p = q / (2 q + 1),  k = 2 q / (2 q + 1),  c = 1 + discount c'.

With a learning rate of 0, and with rewards a step late in the batch, the test fails (both were
tried): the first is the untrained model that it compares with. Late rewards fail
`test_tdmpc_oracle.py`, too (tried): no slow test, in which every parameter has to move as NumPy's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mbx import envs
from mbx.training import job
from tests.helpers import tiny_config

LENGTH, DISCOUNT = 3, 0.9
CONFIG = dict(
    env=dict(name="quadratic:point", num_envs=8),
    train=dict(steps=1200, seed_steps=320, pretrain_updates=60, utd_ratio=0.5, log_interval=80),
    model=dict(episodic="True"),
    replay=dict(capacity=4000, keep_targets=4),
    planner=dict(horizon=2, num_samples=24, num_elites=4),
    training_planner=dict(iterations=3, num_samples=12),
    loss=dict(
        batch_size=32,
        consistency_coef=2.0,
        reward_coef=1.0,
        value_coef=1.0,
        discount=DISCOUNT,
        value_best_n=2,
    ),
    reanalyze=dict(batch_size=32, interval=10),
    optimizer=dict(learning_rate=3e-3, encoder_lr_scale=1.0, policy_lr_scale=1.0, tau=0.2),
)


def observe(x, t):
    """The place, and which of the three steps comes next (none after the last)."""
    return jnp.concatenate([x[None], jax.nn.one_hot(t, LENGTH)])


def register() -> None:
    def reset(key):
        x = jax.random.uniform(key, (), minval=-0.8, maxval=0.8)
        return (x, jnp.int32(0)), observe(x, 0)

    def step(key, state, action):
        x, t = state[0] + action[0], state[1] + 1
        reward = 1.0 - jnp.square(x) - 0.5 * jnp.square(action[0])
        return (x, t), observe(x, t), reward, t == LENGTH

    def factory(task, num_envs, *, action_repeat, episode_length, seed):
        raw = envs.RawEnvironment(
            f"quadratic:{task}", (1 + LENGTH,), jnp.float32, 1, 10, reset, step
        )
        return envs.episodic(raw, num_envs)

    envs.register("quadratic", factory)


def solution(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Optimal values and actions in the places x `[n]` before each step, `[LENGTH, n]` both."""
    p = c = 0.0
    values, actions = [], []
    for _ in range(LENGTH):
        q, c = 1.0 + DISCOUNT * p, 1.0 + DISCOUNT * c
        p, k = q / (2.0 * q + 1.0), 2.0 * q / (2.0 * q + 1.0)
        values.append(c - p * x**2)
        actions.append(-k * x)
    return np.stack(values[::-1]), np.stack(actions[::-1])


def test_the_solution_is_optimal():
    """No sequence of actions on a grid earns more, and the best one earns as much."""
    grid, x = np.linspace(-1.0, 1.0, 81), 0.6
    a, b, c = np.meshgrid(grid, grid, grid, indexing="ij")
    total, place = 0.0, x
    for t, action in enumerate((a, b, c)):
        place = place + action
        total = total + DISCOUNT**t * (1.0 - place**2 - 0.5 * action**2)
    assert 0.0 <= solution(np.array([x]))[0][0, 0] - total.max() < 1e-3


@pytest.fixture(scope="module")
def run():
    config = tiny_config(**CONFIG)
    register()
    parts = job.prepare(config)
    state = job.fresh_state(parts, jax.random.key(0))
    x = np.linspace(-0.8, 0.8, 9)
    obs = jnp.stack([observe(jnp.float32(y), t) for t in range(LENGTH) for y in x])

    @jax.jit
    def look(train):
        """The best value that the training planner finds, and what the acting planner does."""
        first = jnp.ones(len(obs), bool)
        actor = parts.agent.init_actor(len(obs))
        action, actor = parts.agent.act(train, actor, obs, first, jax.random.key(1), True)
        planned = parts.agent.store.targets(train, actor, obs, jax.random.key(2))
        return jnp.max(planned.values, axis=-1).reshape(LENGTH, -1), action.reshape(LENGTH, -1)

    before = look(state.train)
    for _ in range(config["train"]["steps"] // config["train"]["log_interval"]):
        state, _ = parts.advance(state)
    return solution(x), before, look(state.train)


def errors(found, wanted):
    return [float(np.sqrt(np.mean((a - b) ** 2))) for a, b in zip(found, wanted, strict=True)]


@pytest.mark.slow
def test_planned_values_and_actions_become_the_optimal_ones(run):
    wanted, before, after = run
    values, actions = errors(after, wanted)
    assert values < 0.2 and actions < 0.15
    # What holds of a model that has learned nothing would show nothing.
    untrained = errors(before, wanted)
    assert untrained[0] > 1.0 and untrained[1] > 0.2
