"""Planner-made targets with the defaults their design was written with, on TD-MPC2's settings.

    python -m experiments.train --config=configs/planner_targets.py

The training planner draws 128 actions a state over 3 rounds and weighs all of them (no elites);
every one is stored, the policy and the values learn from all of them by the same weights, and a
pass of 256 uniformly drawn rows renews targets every 500 updates. Everything else is
configs/tdmpc2.py's, with a V critic. A transition takes 2.6 kB at 4 action dims: see
`replay.keep_targets`. configs/tdmpc.py has what learns better on a CPU (docs/planner_targets.md).
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("tdmpc2")
    config.replay.update(capacity=100_000, keep_targets=0)
    config.model.critic = "v"
    config.training_planner.update(num_samples=128, num_elites=128)
    config.reanalyze.update(interval=500, batch_size=256, stale_exponent=0.0)
    config.loss.update(value_target="planner", value_weighting="weighted", policy_loss="awr")
    config.loss.entropy_scale = "value"  # as declared: only SVG has the other unit
    return config
