"""Your own sequences: DreamerV3's recurrent state-space model alone, fitted and imagined ahead.

    python examples/own_sequences.py

Actions turn an angle, of which the cosine is observed: one row does not say which way it goes, so
the model has to remember.
"""

import jax
import jax.numpy as jnp
import optax

from mbx import categorical, networks, rssm

LENGTH, BATCH, AHEAD = 16, 32, 5
SIZES = dict(deter=64, hidden=64, stoch=4, classes=8, blocks=2)
CONFIG = rssm.ModelConfig(vector_dim=1, action_dim=1, **SIZES)
DECODER = networks.MLP(hidden=(64,), features=1)
OPTIMIZER = optax.adam(3e-3)


def sequences(key, length=LENGTH):
    """Observations and the actions that led to them, `[T, B, 1]` each."""
    angle_key, action_key = jax.random.split(key)
    actions = jax.random.uniform(action_key, (length, BATCH, 1), minval=-1.0)
    turns = jnp.cumsum((0.5 + 0.4 * actions).at[0].set(0.0), axis=0)
    return jnp.cos(turns + jax.random.uniform(angle_key, (BATCH, 1), maxval=6.3)), actions


def init(key):
    """Parameters of the model and of a decoder."""
    features = jnp.zeros((1, CONFIG.feature_dim))
    model = rssm.init(key, CONFIG, token_dim=1)
    return {"model": model, "decoder": DECODER.init(key, features)}


def decode(params, states):
    """Predicted observations of states."""
    return DECODER.apply(params["decoder"], rssm.features(states))


def observe(params, obs, actions, key):
    """Posterior states of sequences; the observations are the tokens."""
    start = rssm.initial(CONFIG, params["model"], (BATCH,))
    is_first = jnp.zeros(obs.shape[:2], bool).at[0].set(True)
    draws = jax.random.uniform(key, (*obs.shape[:2], CONFIG.stoch))
    return rssm.observe(CONFIG, params["model"], start, obs, actions, is_first, draws)


def loss(params, key):
    """Squared error of the observations plus DreamerV3's two KL terms."""
    data_key, draw_key = jax.random.split(key)
    obs, actions = sequences(data_key)
    seen = observe(params, obs, actions, draw_key)
    pair = (categorical.mixed_logits(x, CONFIG.unimix) for x in (seen.posterior, seen.prior))
    dynamics, representation, _ = rssm.kl_losses(*pair, free_nats=0.1)
    error = jnp.square(decode(params, seen.states) - obs).sum(-1)
    return jnp.mean(10.0 * error + dynamics + 0.1 * representation)


def imagine(params, key):
    """Errors of observations imagined after a sequence's first part, and of standing still."""
    data_key, draw_key, latent_key = jax.random.split(key, 3)
    obs, actions = sequences(data_key, LENGTH + AHEAD)
    states = observe(params, obs[:LENGTH], actions[:LENGTH], draw_key).states
    last = jax.tree.map(lambda x: x[-1], states)
    known = jnp.concatenate([actions[LENGTH:], actions[:1]])  # the last one is not used
    draws = jax.random.uniform(latent_key, (AHEAD, BATCH, CONFIG.stoch))
    future, _ = rssm.imagine(CONFIG, params["model"], last, lambda _, a: a, known, draws)
    error = jnp.abs(decode(params, future)[1:] - obs[LENGTH:]).mean((1, 2))
    return error, jnp.abs(obs[LENGTH - 1] - obs[LENGTH:]).mean((1, 2))


def main(steps=600):
    """Train the model; errors 1 to 5 steps ahead, `[5]` each: the model's and standing still's."""

    def step(carry, key):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params, key)
        change, state = OPTIMIZER.update(gradient, state)
        return (optax.apply_updates(params, change), state), value

    @jax.jit
    def run(key):
        params = init(key)
        carry = params, OPTIMIZER.init(params)
        (params, _), losses = jax.lax.scan(step, carry, jax.random.split(key, steps))
        return losses, *imagine(params, jax.random.fold_in(key, steps))

    losses, found, still = run(jax.random.key(0))
    print(f"loss {losses[0]:.2f} -> {losses[-50:].mean():.2f}")
    print("error of 1 to 5 imagined steps", found.round(2), "of standing still", still.round(2))
    return losses, found, still


if __name__ == "__main__":
    main()
