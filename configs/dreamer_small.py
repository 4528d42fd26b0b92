"""DreamerV3 for few steps on one core: small batches, a larger learning rate of the model.

What it sets: mbx/config/presets/dreamer_small.py.
"""

from mbx.config.presets.dreamer_small import get_config as get_config
