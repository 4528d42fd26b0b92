"""EMPO on many maps at once, for a robot that helps on maps it has never seen.

    python -m experiments.train --config=configs/empo_layouts.py --workdir=runs/layouts
    python -m experiments.empo_layouts --workdir=runs/layouts      # what humans reach beside it

512 generated maps of 7x7 to train on, 16 others to evaluate on: a human, a robot, a rock in the
gap between two rooms, doors (`mbx.envs.empo.multigrid.generate`). Only what differs from
configs/empo.py is set here.
"""

from ml_collections import config_dict

from mbx import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("empo")
    config.env.update(name="empo:maps/doors", maps=512, held_out=16, episode_length=50)
    config.env.update(num_envs=16, varied_starts=0.7)
    config.train.update(steps=208_000, seed_steps=1_600, log_interval=8_000, utd_ratio=0.0625)
    config.eval.update(interval=104_000, episodes=64)
    config.checkpoint.interval = 40_000
    config.power.update(beta_r=50.0, gamma_r=0.92, gamma_h=0.98)
    config.model.update(hidden=128, q_encoder="own", q_head="dueling")
    config.optimizer.learning_rate_q = 5e-4
    config.loss.update(batch_size=64, advantage_coef=1.0)
    config.curriculum.update(v_h_e_steps=1_000, q_r_steps=1_000, ramp_steps=2_000)
    config.curriculum.update(epsilon_steps=6_000, epsilon_end=0.1)
    return config
