"""EMPO phase 2: a robot that softly maximises the power of the humans around it.

    python -m experiments.train --config=configs/empo.py
    python -m experiments.train --config=configs/empo.py --config.env.name=empo:grid_rock_1h1r \
        --config.model.kind=tables --config.loss.human_expectation=exact \
        --config.model.table_min_rate=1.0 --config.env.episode_length=0

Steps are environment steps summed over environments; curriculum durations are learner updates
(steps * utd_ratio).
"""

from ml_collections import config_dict

from mbx.empo.agent.settings import Settings
from mbx.settings import to_dict


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    return config_dict.ConfigDict(to_dict(Settings()))
