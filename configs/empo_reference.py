"""EMPO with the numbers of the reference's trainer (github.com/mensch72/empo, January 2026).

What it sets: mbx/config/presets/empo_reference.py.
"""

from mbx.config.presets.empo_reference import get_config as get_config
