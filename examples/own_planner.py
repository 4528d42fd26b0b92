r"""Your own planner: random shooting with the signature of `mppi.plan`, by name in the settings.

    python -m experiments.train --import=examples/own_planner.py --config=tdmpc \
        --config.planner.name=shooting

Warm starts, proposals of the policy, stored targets and reanalyze stay as they are; a planner that
does not refine a Gaussian hands back the one it was given.
"""

import jax
import jax.numpy as jnp

from mbx import mppi, planners


def shoot(key, score_fn, mean, std, *, proposals=None, initial=None, action_mask=None, config):
    """The best of one round of samples; states B, samples N, steps T, action dims A."""
    num = config.num_samples - (0 if proposals is None else proposals.shape[1])
    draw_key, score_key = jax.random.split(key)
    noise = jax.random.normal(draw_key, (mean.shape[0], num, *mean.shape[1:]))
    actions = jnp.clip(mean[:, None] + std[:, None] * noise, -1.0, 1.0)
    if initial is not None:
        actions = initial
    if proposals is not None:
        actions = jnp.concatenate([proposals, actions], axis=1)
    if action_mask is not None:
        actions = actions * action_mask[:, None, None]
    values = score_fn(score_key, actions)
    best = jnp.argmax(values, axis=1)[:, None, None, None]
    chosen = jnp.take_along_axis(actions, best, axis=1)[:, 0]
    return mppi.Plan(chosen[:, 0], chosen, std, actions, values, chosen[:, 0])


planners.register("shooting", shoot)
