"""Suites with their published protocols, for DreamerV3: `--config=configs/suites.py:SUITE`.

    python -m experiments.train --config=configs/suites.py:atari100k
    python -m experiments.train --config=configs/suites.py:crafter --config.model.size=12m

Environments, image sizes, steps and train ratios are the official code's, which has no MiniGrid.
The replay buffer holds 100,000 images, not five million; all other settings are those of
`configs/dreamerv3.py`.
"""

from typing import Any

from ml_collections import config_dict

from mbx.config import presets

# Task, agent steps, train ratio, and further settings of `env`.
SUITES: dict[str, tuple[str, int, float, dict[str, Any]]] = {
    "atari": (
        *("atari:Pong", 50_000_000, 32.0),
        dict(image_size=96, grey=True, kwargs=dict(full_action_space=True)),
    ),
    "atari100k": (
        *("atari:Pong", 100_000, 256.0),
        dict(image_size=64, num_envs=1, kwargs=dict(repeat_action_probability=0.0)),
    ),
    "bsuite": ("bsuite:catch/0", 100_000, 1024.0, dict(num_envs=1)),
    "crafter": ("crafter:reward", 1_000_000, 512.0, dict(num_envs=1)),
    "minigrid": ("gym:minigrid:MiniGrid-DoorKey-5x5-v0", 500_000, 512.0, {}),
    "dmc_vision": ("dmc:walker-walk", 1_000_000, 256.0, dict(pixels=True)),
}


def get_config(suite: str = "dmc_vision") -> config_dict.ConfigDict:
    """`configs/dreamerv3.py` for a suite."""
    if suite not in SUITES:
        raise ValueError(f"--config=suites:{suite} is unknown: choose one of {list(SUITES)}")
    config, (name, steps, ratio, env) = presets.load("dreamerv3"), SUITES[suite]
    config.env.update(env, name=name)
    config.train.update(steps=steps, train_ratio=ratio)
    config.eval.update(episodes=5, interval=steps // 20)  # a reset of Crafter takes a second
    config.replay.capacity = 100_000
    if config.env.num_envs == 1:
        config.train.seed_steps = 2_000
    return config
