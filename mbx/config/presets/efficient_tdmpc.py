"""In the direction of EfficientTDMPC (arXiv 2605.16692): return estimates averaged over dynamics
heads and over rollout depths, pessimism in reanalyze, many updates a step.

    python -m experiments.train --config=configs/efficient_tdmpc.py

The settings are ours: the paper's abstract names the ingredients, not their sizes, and no priors.
On a CPU `--config.train.utd_ratio=1 --config.loss.batch_size=64` fits a run into half an hour. Only
what differs from configs/tdmpc.py is set here.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("tdmpc")
    config.env.name = "playground:CartpoleSwingup"
    config.train.update(
        steps=100_000, seed_steps=4_000, pretrain_updates=1_000, utd_ratio=2.0, log_interval=2_000
    )
    config.eval.update(interval=10_000, episodes=10)
    config.checkpoint.interval = 20_000
    config.model.update(num_dynamics=2, num_rewards=2)
    config.planner.update(num_samples=64, aggregate=True)
    config.training_planner.update(std_coef=-0.5, disagreement=-0.1)
    config.loss.update(value_best_n=1, policy_loss="awr")
    config.reanalyze.batch_size = 64
    config.optimizer.ensemble_lr_scaling = True
    return config
