"""Ensembles with random priors, distillation, optimism in training and pessimism in evaluation.

    python -m experiments.train --config=configs/tdmpc_ensemble.py

The defaults of the variant that docs/sources.md describes (entries ensembles and behaviour), whose
planner does not discount. Only what differs from configs/bmpc.py is set here.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("bmpc")
    config.train.update(utd_ratio=4.0, pretrain_policy=True)
    config.model.update(
        num_values=5,
        num_dynamics=2,
        num_rewards=2,
        prior_scale=1.0,
        log_std_min=-10.0,
        log_std_max=2.0,
    )
    config.planner.update(
        rescore_proposals=False,
        proposal_noise=0.05,
        max_std=1.0,
        evaluation_selection="best",
        action_noise=0.0,
        extra_iterations_action_dim=15,
        std_coef=1.0,
        evaluation_std_coef=-1.0,
        discount=1.0,
    )
    config.training_planner.update(
        max_std=1.0,
        proposal_log_std=(),
        rescore_proposals=False,
        extra_iterations_action_dim=15,
        discount=1.0,
    )
    # Every 10 agent steps: an interval counts learner updates, of which a step has four.
    config.reanalyze.update(interval=40, batch_size=64)
    config.loss.update(
        td_rollouts=4,
        value_reduction="local",
        num_heads=5,
        final_rho=0.125,
        encoder_consistency_coef=1.0,
        expert_source="reanalyze",
        kl_scale_min=0.1,
        value_last_state=True,
        termination="soft",
        optimist=True,
    )
    config.optimizer.update(
        ensemble_lr_scaling=True, tau=0.003, encoder_lr_step_at=0.5, value_every=2
    )
    return config
