"""The configuration of own_agent.py for the commands; `--import` registers the agent before."""

from ml_collections import ConfigDict

from mbx.settings import to_dict
from mbx.training.build import settings_class


def get_config() -> ConfigDict:
    """Every setting with its default."""
    return ConfigDict(to_dict(settings_class("shooting")()))
