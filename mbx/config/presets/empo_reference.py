"""EMPO with the numbers of the reference's trainer (github.com/mensch72/empo, January 2026).

    python -m experiments.train --config=configs/empo_reference.py
    python -m experiments.train --config=configs/empo_reference.py \
        --config.env.name=empo:grid_rock_1h1r --config.env.episode_length=0

One world, one update a step, 100 000 at batches of 64; warm-up of V_h^e, X_h and Q_r, 10 000
updates each, then 20 000 in which beta_r rises; human actions as the rollout has them; squared
errors of -softplus; dropout of 0.5 behind the hidden layers of heads. Not the same: its encoders,
its rate of V_h^e, and learning rates and exploration of humans that change in the course of a run
(docs/empo.md). Only what differs from configs/empo.py is set here.
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = presets.load("empo")
    config.env.update(num_envs=1, episode_length=50)
    config.train.update(steps=100_000, seed_steps=100, utd_ratio=1.0, log_interval=2_000)
    config.eval.interval = 20_000
    config.checkpoint.interval = 20_000
    config.replay.capacity = 100_000
    config.humans.epsilon = 0.01
    config.power.update(gamma_h=0.99, gamma_r=0.99, zeta=2.0, beta_r=10.0)
    config.model.update(hidden=256, q_head="softplus", x_h="network", dropout=0.5)
    config.loss.update(
        batch_size=64, q_loss="mse", human_expectation="rollout", target_interval=100
    )
    # The original's rate of V_h^e is 1e-3. Here V_h^e is a product of 256 pairs of features, which
    # with dropout overshoots at that rate, to where its clamp leaves no gradient.
    config.optimizer.update(learning_rate_v=3e-4, learning_rate_q=1e-4)
    config.curriculum.update(
        v_h_e_steps=10_000,
        x_h_steps=10_000,
        q_r_steps=10_000,
        ramp_steps=20_000,
        epsilon_end=0.01,
        epsilon_steps=10_000,
    )
    return config
