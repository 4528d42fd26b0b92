"""Ensembles with random priors, distillation, optimism in training and pessimism in evaluation.

What it sets: mbx/config/presets/tdmpc_ensemble.py.
"""

from mbx.config.presets.tdmpc_ensemble import get_config as get_config
