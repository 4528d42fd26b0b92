"""DreamerV3 sized for a laptop CPU; its differences from the official code: docs/dreamer.md.

    python -m experiments.train --config=configs/dreamer.py --config.env.name=gymnax:CartPole-v1

Hard predicted continues, real first continue, reparameterised objective for continuous actions,
two-hot codes in symlog space, three Adams, critic loss on replay rows. These are the defaults of
`mbx/agents/dreamer/settings.py`.
"""

from ml_collections import config_dict

from mbx.agents.dreamer.settings import Settings
from mbx.settings import to_dict


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    return config_dict.ConfigDict(to_dict(Settings()))
