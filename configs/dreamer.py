"""DreamerV3 sized for a laptop CPU; its differences from the official code: docs/dreamer.md.

What it sets: mbx/config/presets/dreamer.py.
"""

from mbx.config.presets.dreamer import get_config as get_config
