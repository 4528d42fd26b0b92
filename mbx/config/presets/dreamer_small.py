"""DreamerV3 for few steps on one core: small batches, short dreams, a larger rate of the model.

    python -m experiments.train --config=configs/dreamer_small.py --config.env.name=dmc:walker-walk

`configs/dreamer.py` with an update every two agent steps, of 4 x 32 rows. With
REINFORCE and a replay loss on all rows values stayed near the returns (docs/notes/dreamer.md).
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """`configs/dreamer.py` with small batches and what they need."""
    config = presets.load("dreamer")
    config.train.update(seed_steps=4_000, steps=100_000)
    config.eval.interval = 10_000
    config.loss.update(batch_size=4, batch_length=32)
    config.loss.update(free_nats=1.0, dynamics_coef=1.0, representation_coef=0.1)
    config.imagination.update(horizon=8, rows=0)
    config.actor.gradient = "reinforce"
    config.critic.update(gamma=0.99, replay_coef=1.0)
    config.optimizer.learning_rates = (1e-3, 3e-4, 1e-3)
    return config
