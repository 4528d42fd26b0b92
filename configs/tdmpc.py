"""TD-MPC on planner-made targets: the recommended default, sized for a laptop CPU.

What it sets: mbx/config/presets/tdmpc.py.
"""

from mbx.config.presets.tdmpc import get_config as get_config
