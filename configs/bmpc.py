"""BMPC (arXiv 2503.18871): the policy imitates the planner, the value learns from its rollouts.

What it sets: mbx/config/presets/bmpc.py.
"""

from mbx.config.presets.bmpc import get_config as get_config
