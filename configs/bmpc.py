"""BMPC: the policy imitates the planner, the value learns from the policy's rollouts in the model.

    python -m experiments.train --config=configs/bmpc.py

The expert is the acting planner's chosen action with its refitted standard deviation, recomputed
every ten updates on slices of the replay (lazy reanalyze). Only what differs from
configs/tdmpc2.py is set here.
"""

from ml_collections import config_dict

from configs import tdmpc2


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = tdmpc2.get_config()
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
        temperature=0.5,
        temperature_mode="multiply",
        min_std=0.05,
        max_std=2.0,
    )
    config.reanalyze.update(
        enabled=True, interval=10, batch_size=60, slices=True, stale_exponent=0.0
    )
    config.loss.update(
        value_target="td",
        td_rollouts=1,
        td_horizon=1,
        value_reduction="mean",
        policy_loss="kl",
        expert_source="acting",
        expert_mean="chosen",
    )
    return config
