"""How many rows of a batch its losses are means over, of a whole batch that is divided.

Devices learn from a part of a batch each (`fast.collectives`), and losses divide by what the whole
batch has. Those numbers depend on masks alone, so that all of them can travel together before an
update's first loss, in one exchange.
"""

from __future__ import annotations

import jax.numpy as jnp

from mbx.agents.tdmpc.policy_loss import state_mask
from mbx.agents.tdmpc.settings import Settings
from mbx.agents.tdmpc.types import Batch, Counts
from mbx.agents.tdmpc.value_targets import target_mask
from mbx.fast import collectives


def counted(settings: Settings, critic: str, batch: Batch) -> Batch:
    """The batch with the counts of the whole batch that it is a part of.

    On one device the batch as it is: there a loss counts for itself.

    Args:
        critic: "q" or "v".
    """
    if collectives.axis_size() == 1:
        return batch
    mask, valid = batch.mask, batch.plan_valid
    masks = dict(
        rows=mask, ends=mask * batch.terminated, values=target_mask(settings, critic, batch)
    )
    if valid is not None:
        masks |= dict(plans=state_mask(mask) * valid, stored=mask * valid[:-1])
    counts = collectives.psum({name: jnp.sum(x, axis=1) for name, x in masks.items()})
    return batch._replace(counts=Counts(**counts))
