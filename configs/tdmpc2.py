"""TD-MPC2 as published (arXiv 2310.16828): Q critic, TD targets, SVG policy, one update a step.

What it sets: mbx/config/presets/tdmpc2.py.
"""

from mbx.config.presets.tdmpc2 import get_config as get_config
