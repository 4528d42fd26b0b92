"""DreamerV3 as the official code has it: one joint gradient, soft continues, replay context.

What it sets: mbx/config/presets/dreamerv3.py.
"""

from mbx.config.presets.dreamerv3 import get_config as get_config
