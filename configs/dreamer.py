"""DreamerV3 with the behaviour learning of documents 002 and 003, sized for a laptop CPU.

    python -m experiments.train --config=configs/dreamer.py --config.env.name=gymnax:CartPole-v1

Hard predicted continues, real first continue, reparameterised objective for continuous actions,
two-hot in symlog space, three Adams, critic replay loss in its aligned form. Step counts are
environment steps (action repeat included) summed over environments.
"""

from ml_collections import config_dict

from configs import sections


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = config_dict.ConfigDict()
    config.agent = "dreamer"  # which agent
    config.seed = 0  # of everything: parameters, environments, exploration, sampling
    config.num_seeds = 1  # seeds trained side by side in one program, each with its own log
    config.resume = False  # continue the run in the working directory
    config.matmul_precision = "default"  # of float32 products: default, high, highest

    config.distributed = sections.distributed()  # many devices and processes: docs/pods.md

    config.env = config_dict.ConfigDict()
    config.env.name = "gymnax:CartPole-v1"  # SUITE:TASK, see the README
    config.env.num_envs = 4  # environments stepped together
    config.env.action_repeat = 0  # 0: the suite's default
    config.env.episode_length = 0  # agent steps; 0: the task's own limit

    config.train = config_dict.ConfigDict()
    config.train.steps = 60_000  # environment steps of the run
    config.train.seed_steps = 1_000  # random actions before learning
    config.train.pretrain_updates = 0  # updates made at once after them
    config.train.train_ratio = 64.0  # replayed steps per agent step
    config.train.log_interval = 1_000  # environment steps between log rows
    config.train.check_finite = True  # stop with an error when a loss is not finite

    config.eval = config_dict.ConfigDict()
    config.eval.interval = 5_000  # environment steps between evaluations (0: only at the end)
    config.eval.episodes = 20  # episodes of an evaluation
    config.eval.exploring = True  # evaluate the agent as it acts in training, too
    config.eval.action = "mode"  # of the policy: mode or sample

    config.log = sections.log()  # where the log goes beside the run directory

    config.checkpoint = config_dict.ConfigDict()
    config.checkpoint.interval = 20_000  # environment steps between checkpoints (0: at the end)
    config.checkpoint.keep = 2  # newest checkpoints kept, beside the best

    config.replay = config_dict.ConfigDict()
    config.replay.capacity = 200_000  # rows over all environments
    config.replay.shards = 0  # blocks that batches are drawn from evenly (0: one a device)
    config.replay.context = False  # sequences start from stored latents, which are written back
    config.replay.fresh = 0  # sequences of a batch that are an environment's newest rows

    config.model = config_dict.ConfigDict()
    config.model.size = "tiny"  # tiny, 1m, 12m, 25m, 50m, 100m, 200m, 400m
    config.model.core = "block"  # recurrent cell: block (block-diagonal) or dense
    config.model.norm = "rms"  # rms or layer
    config.model.initial = "zeros"  # recurrent state at an episode's start: zeros or learned
    config.model.unimix = 0.01  # share of the uniform distribution in the latents
    config.model.policy_unimix = 0.01  # and in discrete policies
    config.model.num_bins = 255  # of reward and value
    config.model.bins_space = "symlog"  # where they lie evenly: symlog or raw
    config.model.dtype = "float32"  # of matrix products: float32 or bfloat16

    config.loss = config_dict.ConfigDict()
    config.loss.batch_size = 16  # sequences
    config.loss.batch_length = 32  # rows of a sequence
    config.loss.updates = "sequential"  # model, then behaviour; or joint: one gradient
    config.loss.free_nats = 0.1  # of KL a row that cost nothing (1 for images)
    config.loss.free_nats_gradient = False  # the floor changes the value only
    config.loss.dynamics_coef = 0.5
    config.loss.representation_coef = 0.01  # 0.1 blurs small observations (docs/dreamer.md)
    config.loss.reward_gradient = True  # the reward loss shapes the representation
    config.loss.continue_discount = False  # the continue head predicts gamma times continue

    config.imagination = config_dict.ConfigDict()
    config.imagination.horizon = 15  # steps of a dream
    config.imagination.rows = 8  # last rows of a sequence to dream from (0: all)
    config.imagination.continues = "hard"  # hard (0 or 1) or soft (probability)
    config.imagination.first_continue = "real"  # real (the replay row's) or predicted

    config.actor = config_dict.ConfigDict()
    config.actor.gradient = "auto"  # reinforce, reparam; auto: reparam for continuous actions
    config.actor.entropy_coef = 3e-4
    config.actor.return_limit = 1.0  # smallest divisor of advantages
    config.actor.return_decay = 0.99  # of the percentiles' averages

    config.critic = config_dict.ConfigDict()
    config.critic.gamma = 1.0 - 1.0 / 333.0
    config.critic.lambda_ = 0.95
    config.critic.tau = 0.02  # share of the critic in a move of the slow critic
    config.critic.target_update_freq = 1  # updates between moves
    config.critic.regularizer = 1.0  # weight of the loss towards the slow critic
    config.critic.replay_loss = "aligned"  # aligned, literal (document 002 as written), none
    config.critic.replay_coef = 0.3
    config.critic.replay_gradient = False  # the replay loss shapes the representation

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.name = "adam"  # adam or laprop
    config.optimizer.learning_rates = (2e-4, 3e-4, 1e-3)  # model, actor, critic
    config.optimizer.clips = (1.0, 1.0, 1.0)  # gradient norms (laprop: relative)
    config.optimizer.epsilons = (1e-8, 1e-5, 1e-5)
    config.optimizer.warmup = 0  # updates over which the rates rise from 0
    return config
