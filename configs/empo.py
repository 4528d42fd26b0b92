"""EMPO phase 2: a robot that softly maximises the power of the humans around it.

    python -m experiments.train --config=configs/empo.py
    python -m experiments.train --config=configs/empo.py --config.env.name=empo:grid_rock_1h1r \
        --config.model.kind=tables --config.loss.human_expectation=exact \
        --config.model.table_min_rate=1.0 --config.env.episode_length=0

Steps are environment steps summed over environments; curriculum durations are learner updates
(steps * utd_ratio).
"""

from ml_collections import config_dict

from configs import sections


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = config_dict.ConfigDict()
    config.agent = "empo"  # which agent
    config.seed = 0  # of everything: parameters, environments, exploration, sampling
    config.num_seeds = 1  # seeds trained side by side in one program, each with its own log
    config.resume = False  # continue the run in the working directory
    config.matmul_precision = "default"  # of float32 products: default, high, highest

    config.distributed = sections.distributed()  # many devices and processes: docs/pods.md

    config.env = config_dict.ConfigDict()
    config.env.name = "empo:multigrid/gates_2h2r"  # empo:WORLD, see mbx/envs/empo/__init__.py
    config.env.num_envs = 32  # worlds stepped together
    config.env.action_repeat = 0  # 0: the suite's default, the only one
    config.env.episode_length = 30  # agent steps; 0: 50, or until the world ends

    config.train = config_dict.ConfigDict()
    config.train.steps = 160_000  # environment steps of the run
    config.train.seed_steps = 640  # random actions before learning
    config.train.pretrain_updates = 0  # updates made at once after them
    config.train.utd_ratio = 0.0625  # updates per agent step: two a step of 32 worlds
    config.train.log_interval = 3_200  # environment steps between log rows
    config.train.check_finite = True  # stop with an error when a loss is not finite

    config.eval = config_dict.ConfigDict()
    config.eval.interval = 32_000  # environment steps between evaluations (0: only at the end)
    config.eval.episodes = 64  # episodes of an evaluation, without exploration
    config.eval.exploring = False  # evaluate the agent as it acts in training, too
    config.eval.review_episodes = 256  # of learned, random and frozen robots each; 0: no review

    config.log = sections.log()  # where the log goes beside the run directory

    config.checkpoint = config_dict.ConfigDict()
    config.checkpoint.interval = 32_000  # environment steps between checkpoints (0: at the end)
    config.checkpoint.keep = 2  # newest checkpoints kept, beside the best

    config.replay = config_dict.ConfigDict()
    config.replay.capacity = 65_536  # rows over all environments, each a state and the goals
    config.replay.shards = 0  # blocks that batches are drawn from evenly (0: one a device)

    config.reanalyze = config_dict.ConfigDict()
    config.reanalyze.enabled = False  # targets are made anew in every update: nothing to refresh
    config.reanalyze.interval = 0
    config.reanalyze.min_step = 0

    config.power = config_dict.ConfigDict()
    config.power.source = "world"  # world: the parameters it comes with; config: those below
    config.power.beta_h = 10.0  # inverse temperature of the human prior
    config.power.gamma_h = 0.95
    config.power.beta_r = 40.0  # exponent of the robot's power-law policy
    config.power.gamma_r = 0.95
    config.power.zeta = 1.0  # >= 1: humans' risk aversion over goals
    config.power.xi = 1.0  # >= 1: inequality aversion over humans
    config.power.eta = 1.1  # >= 1: inequality aversion over time
    config.power.terminal_v_r = -1e-10
    config.power.reduce = "mean"  # over humans: mean or sum

    config.model = config_dict.ConfigDict()
    config.model.kind = "networks"  # networks, or tables (worlds that number their states)
    config.model.hidden = 128
    config.model.encoder = "mlp"  # mlp, or identity: heads see the features only
    config.model.q_head = "exp"  # exp, softplus (the original's), z (only without termination)
    config.model.x_h = "sum"  # X_h as the sum over goals, or a network
    config.model.table_rate_power = 1.0  # a table entry moves by n^-power ...
    config.model.table_min_rate = 0.02  # ... but at least this; 1.0 for exact human actions

    config.loss = config_dict.ConfigDict()
    config.loss.batch_size = 32  # states an update
    config.loss.q_loss = "gamma"  # gamma (relative errors) or mse (the original's)
    config.loss.human_expectation = "fresh"  # exact, fresh, rollout (biased)
    config.loss.human_samples = 1  # of human actions a state, for fresh
    config.loss.room = 1.5  # successors a joint action for which there is room (0: every slot)
    config.loss.unique = 0  # room for distinct successors (0: no de-duplication)
    config.loss.ability_floor = 1e-3  # least X_h in targets; metric zero_ability counts
    config.loss.target_interval = 0  # updates between hard copies; 0: 1 for tables, else 20

    config.optimizer = config_dict.ConfigDict()  # of networks
    config.optimizer.learning_rate_v = 1e-3
    config.optimizer.learning_rate_q = 1e-3
    config.optimizer.weight_decay = 1e-4
    config.optimizer.grad_clip_norm = 10.0

    config.curriculum = config_dict.ConfigDict()  # in learner updates
    config.curriculum.steps = 10_000  # of the run
    config.curriculum.v_h_e_steps = 1_000  # V_h^e alone
    config.curriculum.x_h_steps = 300  # then X_h, if a network
    config.curriculum.q_r_steps = 1_000  # then Q_r
    config.curriculum.ramp_steps = 2_000  # then beta_r rises from 0
    config.curriculum.epsilon_start = 1.0  # uniformly random robot actions
    config.curriculum.epsilon_end = 0.1
    config.curriculum.epsilon_steps = 5_000
    config.curriculum.gamma_h_ramp = 0  # 0: none
    config.curriculum.gamma_h_start = 0.0
    config.curriculum.gamma_r_ramp = 0
    config.curriculum.gamma_r_start = 0.0
    config.curriculum.constant_fraction = 0.7  # of the run, then rates fall
    config.curriculum.decay = "1/t"  # or 1/sqrt_t
    return config
