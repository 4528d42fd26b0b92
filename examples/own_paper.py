r"""A paper's method on TD-MPC: pessimistic values, recent transitions and a contrastive loss.

    python -m experiments.train --import=examples/own_paper.py --config=tdmpc \
        --config.agent=pessimistic --config.model.num_values=5 --config.loss.num_heads=5 \
        --config.loss.heads=infonce --config.loss.consistency_coef=0

Targets, plans and SVG take the least of the value heads, updates draw new transitions more often,
and predicted latents tell their own successor from those of the batch (InfoNCE). Resuming,
evaluation, sweeps and devices come from the package.
"""

import jax
import jax.numpy as jnp

from mbx import heads, networks, replay
from mbx.agents import tdmpc
from mbx.training import build


def infonce(found, _, mask):
    """Cross-entropy of the successor among those unmasked: `[T, B, 2, P]` -> `[T, B]`."""
    logits = jnp.einsum("tip,tjp->tij", found[..., 0, :], found[..., 1, :])
    own = jnp.diagonal(logits, axis1=1, axis2=2)
    return jax.nn.logsumexp(logits - 1e9 * (1.0 - mask[:, None]), axis=-1) - own


def pessimistic(settings, spec):
    """TD-MPC with the paper's values and transitions."""
    least, recent = lambda values: values.min(0), replay.by_age(half_life=500.0)
    return tdmpc.make_agent(settings, spec, value=least, sample=recent)


contrast = heads.Head(
    network=lambda spec: networks.MLP(hidden=(64,), features=32),
    inputs=lambda window: (jnp.stack([window.latents[1:], window.encoded[1:]], axis=2),),
    target=lambda window: window.mask,
    batch_loss=infonce,
)
heads.register("infonce", contrast)
build.register("pessimistic", tdmpc.Settings, pessimistic)
