"""DreamerV3 for few steps on one core: small batches, a larger learning rate of the model.

    python -m experiments.train --config=configs/dreamer_small.py --config.env.name=dmc:walker-walk

`configs/dreamer.py` with an update every two agent steps, of 8 x 16 rows (docs/results/dreamer.md).
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """`configs/dreamer.py` with small batches and its rates for them."""
    config = presets.load("dreamer")
    config.train.update(seed_steps=4_000, steps=100_000)
    config.eval.interval = 10_000
    config.loss.update(batch_size=8, batch_length=16)
    config.optimizer.learning_rates = (1e-3, 3e-4, 1e-3)
    return config
