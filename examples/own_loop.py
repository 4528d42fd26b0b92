"""Your own training loop, and hyperparameters side by side: a value learned from your own replay.

    python examples/own_loop.py

The parts of mbx stand alone: environment, replay (`insert_step`) and returns make one compiled
step here, without an agent. Several learning rates and traces (lambda) are trained at once with
`jax.vmap`: numbers of the parts may be traced.
"""

import jax
import jax.numpy as jnp
import optax

from mbx import envs, replay, returns

NUM_ENVS, LENGTH, BATCH, DISCOUNT = 4, 8, 32, 0.97
ENV = envs.make("gymnax:Pendulum-v1", NUM_ENVS, episode_length=50)


def features(obs):
    """`[..., 10]` of Pendulum's `[..., 3]`."""
    terms = jnp.concatenate([obs / jnp.array([1.0, 1.0, 8.0]), jnp.ones_like(obs[..., :1])], -1)
    pairs = terms[..., :, None] * terms[..., None, :]
    return pairs[..., *jnp.triu_indices(4)]


def loss(weights, rows, mask, lambda_):
    """Squared error of values with their lambda returns, over windows `[T+1, B]`."""
    values = features(rows["obs"]) @ weights
    discounts = DISCOUNT * (1.0 - rows["terminated"][1:])
    goals = returns.lambda_returns(rows["reward"][1:], discounts, values[1:], lambda_)
    error = jnp.square(values[:-1] - jax.lax.stop_gradient(goals))
    return jnp.sum(error * mask) / jnp.sum(mask)


def train(learning_rate, lambda_, key, steps=600):
    """Errors of a value of the random policy, one a step `[steps]`."""
    optimizer = optax.sgd(learning_rate)

    def step(carry, key):
        env, now, buffer, weights, state = carry
        act_key, step_key, sample_key = jax.random.split(key, 3)
        obs, is_first, reward = now
        action = jax.random.uniform(act_key, (NUM_ENVS, 1), minval=-1.0)
        env, out = ENV.step(env, action, step_key)
        done = out.terminated | out.truncated
        row = dict(obs=obs, reward=reward, is_first=is_first, action=action)
        last = dict(obs=out.final_obs, reward=out.reward, terminated=out.terminated)
        buffer = replay.insert_step(buffer, row, last, done)
        batch = replay.sample(buffer, sample_key, batch_size=BATCH, length=LENGTH)
        value, gradient = jax.value_and_grad(loss)(weights, batch.rows, batch.mask, lambda_)
        ready = replay.num_transitions(buffer) > NUM_ENVS * LENGTH
        change, state = optimizer.update(jnp.where(ready, gradient, 0.0), state)
        now = out.obs, done, jnp.where(done, 0.0, out.reward)
        carry = env, now, buffer, optax.apply_updates(weights, change), state
        return carry, jnp.where(ready, value, jnp.nan)

    env, obs = ENV.reset(key)
    row = replay.example_row(obs[0].shape, action_dim=1)
    buffer = replay.init(row, num_envs=NUM_ENVS, capacity=4_000)
    now, weights = (obs, jnp.ones(NUM_ENVS, bool), jnp.zeros(NUM_ENVS)), jnp.zeros(10)
    carry = env, now, buffer, weights, optimizer.init(weights)
    return jax.lax.scan(step, carry, jax.random.split(key, steps))[1]


def main(steps=600):
    """Train all settings at once: learning rates, lambdas and their curves `[6, steps]`."""
    rates = jnp.repeat(jnp.array([1e-3, 1e-2, 5e-2]), 2)
    lambdas = jnp.tile(jnp.array([0.0, 0.9]), 3)
    run = jax.jit(jax.vmap(lambda rate, trace: train(rate, trace, jax.random.key(0), steps)))
    curves = run(rates, lambdas)
    for rate, trace, curve in zip(rates, lambdas, curves, strict=True):
        print(f"rate {rate:.3f} lambda {trace:.1f}: error {curve[-100:].mean():.2f}")
    return rates, lambdas, curves


if __name__ == "__main__":
    main()
