"""DreamerV3's recurrent state-space model for use on its own: observe and imagine.

The public name of `mbx.agents.dreamer.rssm`.
"""

from mbx.agents.dreamer.networks import ModelConfig
from mbx.agents.dreamer.rssm import (
    features,
    imagine,
    init,
    initial,
    kl_losses,
    observe,
    observe_step,
    posterior_logits,
    prior_logits,
)
from mbx.agents.dreamer.types import Given, Observed, State

__all__ = [
    "Given",
    "ModelConfig",
    "Observed",
    "State",
    "features",
    "imagine",
    "init",
    "initial",
    "kl_losses",
    "observe",
    "observe_step",
    "posterior_logits",
    "prior_logits",
]
