"""BMPC (arXiv 2503.18871): the policy imitates the planner, the value learns from its rollouts.

    python -m experiments.train --config=configs/bmpc.py

The expert is the acting planner's elite with its refitted standard deviation. Every ten updates it
is refreshed for 20 windows of the batch that is about to be learned from (lazy reanalyze), by the
same search without warm start and with a wider policy. Only what differs from configs/tdmpc2.py is
set here.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("tdmpc2")
    config.train.pretrain_policy = False
    config.model.update(
        critic="v", policy="tanh_mean", num_values=2, log_std_min=-3.0, log_std_max=1.0
    )
    config.replay.keep_targets = 1  # only the expert is read
    config.training_planner.update(
        search="acting",
        horizon=3,
        iterations=6,
        num_samples=512,
        num_elites=64,
        num_proposals=24,
        proposal_log_std=(-2.0, 1.0),
        rescore_proposals=True,
        extra_iterations=2,
        temperature_mode="multiply",
        max_std=2.0,
    )
    config.reanalyze.update(current_batch=True, batch_size=80)  # 20 windows of 4 rows
    config.loss.update(
        td_rollouts=1,
        value_reduction="mean",
        policy_loss="kl",
        entropy_scale="value",  # as declared: only SVG has the other unit
        expert_source="acting",
    )
    return config
