"""TD-MPC on planner-made targets: the recommended default, sized for a laptop CPU.

    python -m experiments.train --config=configs/tdmpc.py --config.env.name=gymnax:Pendulum-v1

All settings with their defaults and ranges are declared in `mbx/agents/tdmpc/settings.py`.
"""

from ml_collections import config_dict

from mbx.agents.tdmpc.settings import Settings
from mbx.settings import to_dict


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    return config_dict.ConfigDict(to_dict(Settings()))
