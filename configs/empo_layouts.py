"""EMPO on many maps at once, for a robot that helps on maps it has never seen.

What it sets: mbx/config/presets/empo_layouts.py.
"""

from mbx.config.presets.empo_layouts import get_config as get_config
