"""In the direction of EfficientTDMPC (arXiv 2605.16692).

What it sets: mbx/config/presets/efficient_tdmpc.py.
"""

from mbx.config.presets.efficient_tdmpc import get_config as get_config
