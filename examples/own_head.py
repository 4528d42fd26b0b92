r"""Your own head and loss: which action lay between two states, read off their latents.

    python -m experiments.train --import=examples/own_head.py --config=tdmpc \
        --config.loss.heads=inverse_dynamics:0.1

It is learned with the world model, whose encoder its gradient reaches; the log has
loss/heads/inverse_dynamics and heads/inverse_dynamics/error.
"""

import jax.numpy as jnp

from mbx import heads, networks

inverse_dynamics = heads.Head(
    network=lambda spec: networks.MLP(hidden=(64,), features=spec.action_dim),
    inputs=lambda window: (window.encoded[:-1], window.encoded[1:]),
    target=lambda window: window.action,
    metrics=lambda found, taken: {"error": jnp.mean(jnp.abs(found - taken), axis=-1)},
)
heads.register("inverse_dynamics", inverse_dynamics)
