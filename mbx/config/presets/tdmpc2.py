"""TD-MPC2 as published (arXiv 2310.16828): Q critic, TD targets, SVG policy, one update a step.

    python -m experiments.train --config=configs/tdmpc2.py

Only what differs from configs/tdmpc.py is set here. The 5M model and the planner's 512 samples are
the published ones; for a CPU see `--config.model.size=tiny` and `--config.planner.num_samples=128`.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("tdmpc")
    config.env.update(name="playground:CartpoleSwingup", num_envs=1)
    config.train.update(
        steps=100_000,
        seed_steps=5_000,
        seed_hold=1,
        reset_solved=-1,
        pretrain_updates=2_500,
        utd_ratio=1.0,
        log_interval=1_000,
    )
    config.eval.update(interval=10_000, episodes=10)
    config.checkpoint.interval = 20_000
    config.replay.capacity = 1_000_000
    config.model.update(
        size="5", critic="q", policy="squashed", num_values=0, log_std_min=-10.0, log_std_max=2.0
    )
    config.planner.update(
        iterations=6,
        num_samples=512,
        num_elites=64,
        num_proposals=24,
        rescore_proposals=True,
        evaluation_selection="sample",
    )
    config.optimizer.learning_rate = 3e-4
    config.loss.update(
        batch_size=256,
        value_reduction="min",
        value_target="td",
        entropy_scale="none",
        termination="hard",
    )
    return config
