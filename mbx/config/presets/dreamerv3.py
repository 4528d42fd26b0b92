"""DreamerV3 as the official code has it: one joint gradient, soft continues, replay context.

    python -m experiments.train --config=configs/dreamerv3.py --config.env.name=dmc:walker-walk

The continue head holds the discount, the actor learns by REINFORCE for all actions, reward and
value use bins in real space, LaProp with adaptive clipping trains everything. The official rate is
one for all sizes; small models learn sooner with larger ones of the model and the critic,
`--config.optimizer.learning_rates='(3e-4,4e-5,3e-4)'` (docs/results/dreamer.md).
"""

from ml_collections import config_dict

from mbx.config import presets


def get_config() -> config_dict.ConfigDict:
    """`configs/dreamer.py` with the official code's choices."""
    config = presets.load("dreamer")
    config.env.num_envs = 16
    config.train.update(seed_steps=5_000, train_ratio=512.0, steps=500_000)
    config.eval.update(action="sample", interval=20_000, report=True)
    config.replay.update(capacity=1_000_000, context=True, online=True)
    config.model.update(size="1m", bins_space="raw", policy_unimix=0.0)
    config.loss.update(
        batch_length=64,
        updates="joint",
        dynamics_coef=1.0,
        representation_coef=0.1,
        continue_discount=True,
        free_nats=1.0,
    )
    config.imagination.update(rows=0, continues="soft", first_continue="predicted")
    config.actor.gradient = "reinforce"
    config.critic.replay_gradient = True
    config.optimizer.update(name="laprop", learning_rates=(4e-5, 4e-5, 4e-5))
    return config
