"""From names, files, flags and keywords to the settings of a run: `load`."""

from mbx.config.agents import register as register
from mbx.config.agents import settings_class as settings_class
from mbx.config.loading import load as load
