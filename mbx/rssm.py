"""DreamerV3's recurrent state-space model for use on its own: observe and imagine.

The public name of `mbx.agents.dreamer.rssm`.
"""

from mbx.agents.dreamer.networks import ModelConfig, sized
from mbx.agents.dreamer.rssm import (
    Observed,
    State,
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

__all__ = [
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
    "sized",
]
