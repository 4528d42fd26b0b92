"""EMPO phase 2: a robot that softly maximises the power of the humans around it.

What it sets: mbx/config/presets/empo.py.
"""

from mbx.config.presets.empo import get_config as get_config
