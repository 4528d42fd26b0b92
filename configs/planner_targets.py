"""Planner-made targets with the defaults their design was written with, on TD-MPC2's settings.

What it sets: mbx/config/presets/planner_targets.py.
"""

from mbx.config.presets.planner_targets import get_config as get_config
