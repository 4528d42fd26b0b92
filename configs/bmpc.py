"""BMPC: the policy imitates the planner, the value learns from the policy's rollouts in the model.

    python -m experiments.train --config=configs/bmpc.py

The expert is the acting planner's chosen action with its refitted standard deviation, made again
every ten updates on slices of the replay (lazy reanalyze). Only what differs from
configs/tdmpc2.py is set here.
"""

from ml_collections import config_dict

from mbx import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("tdmpc2")
    config.model.update(
        critic="v", policy="tanh_mean", num_values=2, log_std_min=-3.0, log_std_max=1.0
    )
    config.replay.keep_targets = 1  # only the expert is read
    # The expert comes from a planner like the acting one, without warm start.
    config.training_planner.update(
        horizon=3,
        iterations=6,
        num_samples=512,
        num_elites=64,
        temperature_mode="multiply",
        max_std=2.0,
    )
    config.reanalyze.update(batch_size=60, slices=True)
    config.loss.update(
        td_rollouts=1, value_reduction="mean", policy_loss="kl", expert_source="acting"
    )
    return config
