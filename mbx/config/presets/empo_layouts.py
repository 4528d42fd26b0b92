"""EMPO on many maps at once, for a robot that helps on maps it has never seen.

    python -m experiments.train --config=configs/empo_layouts.py --workdir=runs/layouts
    python -m benchmarks.empo layouts --workdir=runs/layouts          # what humans reach with it

2,048 generated maps of 7x7 to train on, 64 others to evaluate on: a human, a robot, a rock in the
gap between two rooms, doors (`mbx.empo.multigrid.generate`). Only what differs from
configs/empo.py is set here.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("empo")
    config.env.update(name="empo:maps/doors", maps=2_048, held_out=64, episode_length=50)
    config.env.num_envs = 16
    config.train.update(steps=640_000, seed_steps=1_600, log_interval=16_000, utd_ratio=0.125)
    config.eval.interval = 64_000
    config.checkpoint.interval = 32_000
    config.power.update(beta_r=50.0, gamma_r=0.92, gamma_h=0.98)
    config.model.update(q_encoder="shared", q_head="dueling")
    # beta_r squared: errors of log(-Q_r) count by what they do to the logits of pi_r.
    config.loss.update(batch_size=64, advantage_coef=2500.0, target_rate=0.01, room=1.1)
    config.curriculum.update(epsilon_steps=6_000, constant_fraction=0.2)
    return config
