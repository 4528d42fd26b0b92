"""Suites with their published protocols, for DreamerV3: FILE:SUITE.

What it sets: mbx/config/presets/suites.py.
"""

from mbx.config.presets.suites import get_config as get_config
