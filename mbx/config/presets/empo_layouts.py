"""EMPO on many maps at once, for a robot that helps on maps it has never seen.

    python -m experiments.train --config=configs/empo_layouts.py --workdir=runs/layouts
    python -m benchmarks.empo layouts --workdir=runs/layouts          # what humans reach with it

512 generated maps of 7x7 to train on, 16 others to evaluate on: a human, a robot, a rock in the
gap between two rooms, doors (`mbx.empo.multigrid.generate`). Only what differs from
configs/empo.py is set here.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("empo")
    config.env.update(name="empo:maps/doors", maps=512, episode_length=50)
    config.env.update(num_envs=16, varied_starts=0.7)
    config.train.update(steps=448_000, seed_steps=1_600, log_interval=16_000, utd_ratio=0.125)
    config.eval.interval = 64_000
    config.checkpoint.interval = 32_000
    config.power.update(beta_r=20.0, gamma_r=0.8, gamma_h=0.9)
    config.model.update(q_encoder="split", q_head="dueling")
    # beta_r squared: errors of log(-Q_r) count by what they do to the logits of pi_r.
    config.loss.update(batch_size=64, advantage_coef=400.0, target_rate=0.01, room=1.1)
    config.curriculum.update(epsilon_steps=6_000, constant_fraction=0.2)
    return config
