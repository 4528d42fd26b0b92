"""TD-MPC on planner-made targets: the recommended default, sized for a laptop CPU.

    python -m experiments.train --config=configs/tdmpc.py --config.env.name=gymnax:Pendulum-v1

Step counts are environment steps (action repeat included) summed over environments.
"""

from ml_collections import config_dict

from configs import sections


def get_config() -> config_dict.ConfigDict:
    """Every setting with its default."""
    config = config_dict.ConfigDict()
    config.agent = "tdmpc"  # which agent
    config.seed = 0  # of everything: parameters, environments, exploration, sampling
    config.num_seeds = 1  # seeds trained side by side in one program, each with its own log
    config.resume = False  # continue the run in the working directory
    config.matmul_precision = "default"  # of float32 products: default, high, highest

    config.distributed = sections.distributed()  # many devices and processes: docs/pods.md

    config.env = config_dict.ConfigDict()
    config.env.name = "gymnax:Pendulum-v1"  # SUITE:TASK, or multi:SUITE:TASK+SUITE:TASK (README)
    config.env.num_envs = 4  # environments stepped together
    config.env.action_repeat = 0  # 0: the suite's default
    config.env.episode_length = 0  # agent steps; 0: the task's own limit
    config.env.pad_to = (0, 0)  # observation and action sizes that several tasks get at least

    config.train = config_dict.ConfigDict()
    config.train.steps = 30_000  # environment steps of the run
    config.train.seed_steps = 1_000  # random actions before learning
    config.train.pretrain_updates = 500  # updates made at once after them
    config.train.utd_ratio = 0.5  # updates per agent step
    config.train.log_interval = 500  # environment steps between log rows
    config.train.check_finite = True  # stop with an error when a loss is not finite
    config.train.init_from = ""  # run directory whose best parameters to start from
    config.train.dataset = ""  # dataset.npz to learn from without acting

    config.eval = config_dict.ConfigDict()
    config.eval.interval = 3_000  # environment steps between evaluations (0: only at the end)
    config.eval.episodes = 20  # episodes of an evaluation, without exploration noise
    config.eval.exploring = False  # evaluate the agent as it acts in training, too

    config.log = sections.log()  # where the log goes beside the run directory

    config.checkpoint = config_dict.ConfigDict()
    config.checkpoint.interval = 6_000  # environment steps between checkpoints (0: only at the end)
    config.checkpoint.keep = 2  # newest checkpoints kept, beside the best

    config.replay = config_dict.ConfigDict()
    config.replay.capacity = 100_000  # transitions over all environments
    config.replay.shards = 0  # blocks that batches are drawn from evenly (0: one a device)
    config.replay.save = False  # write the rows to dataset.npz when the run ends
    config.replay.keep_targets = 8  # planner actions stored a transition, best first (0: all)
    config.replay.actions_dtype = "float32"  # of stored planner actions: float32, bfloat16, int8
    config.replay.values_dtype = "float32"  # of stored planner values: float32, bfloat16

    config.model = config_dict.ConfigDict()
    config.model.size = "tiny"  # tiny, 1, 5, 19, 48, 317 (millions of parameters)
    config.model.critic = "v"  # v: V(z); q: Q(z, a)
    config.model.policy = "tanh_mean"  # squashed or tanh_mean Gaussian
    config.model.num_values = 2  # value heads (0: the size's)
    config.model.num_dynamics = 1  # dynamics heads
    config.model.num_rewards = 1  # reward heads
    config.model.prior_scale = 0.0  # frozen random networks beside all heads (0: none)
    config.model.prior_div = 16  # how much narrower than the heads those are
    config.model.num_bins = 101  # of reward and value
    config.model.bin_min = -10.0  # in symlog space
    config.model.bin_max = 10.0
    config.model.log_std_min = -3.0
    config.model.log_std_max = 1.0
    config.model.dropout = 0.01  # first hidden layer of each value head
    config.model.episodic = "auto"  # termination head: auto (by suite and task), True, False
    config.model.dtype = "float32"  # compute dtype: float32, bfloat16
    config.model.task_dim = 96  # of the embedding of each of several tasks

    config.planner = config_dict.ConfigDict()  # acts in the environment
    config.planner.horizon = 3
    config.planner.iterations = 3
    config.planner.num_samples = 128
    config.planner.num_elites = 16
    config.planner.num_proposals = 8  # policy trajectories among the samples
    config.planner.proposal_noise = 0.0  # standard deviation added to them
    config.planner.prior_start = 0  # updates until which plans start from the policy's Gaussian,
    config.planner.prior_updates = 0  # and over which that fades (0: never)
    config.planner.rescore_proposals = False  # score them every round, or once
    config.planner.temperature = 0.5
    config.planner.temperature_mode = "multiply"  # multiply (TD-MPC2) or divide
    config.planner.min_std = 0.05
    config.planner.max_std = 2.0
    config.planner.action_noise = 1.0  # of the refitted std, added while training
    config.planner.selection = "sample"  # sample, best, mean
    config.planner.evaluation_selection = "mean"
    config.planner.extra_iterations = 2  # in large action spaces
    config.planner.extra_iterations_action_dim = 20  # which have so many dims
    config.planner.std_coef = 0.0  # of the ensembles' std in scores: > 0 optimism, < 0 pessimism
    config.planner.evaluation_std_coef = 0.0  # the same when evaluating
    config.planner.aggregate = False  # mean of the estimates of all horizons, not the last
    config.planner.disagreement = 0.0  # bonus for latents that dynamics heads disagree on
    config.planner.discount = 0.0  # inside plans (0: the agent's; document 001 plans with 1)

    config.training_planner = config_dict.ConfigDict()  # makes training targets
    config.training_planner.enabled = True  # False: legacy path, raw policy samples in every loss
    config.training_planner.iterations = 3
    config.training_planner.num_samples = 32
    config.training_planner.num_elites = 8
    config.training_planner.temperature = 0.5
    config.training_planner.temperature_mode = "divide"
    config.training_planner.min_std = 0.05
    config.training_planner.max_std = 1.0
    config.training_planner.horizon = 1
    config.training_planner.std_coef = 0.0  # as the planner's, for stored targets
    config.training_planner.aggregate = False
    config.training_planner.disagreement = 0.0
    config.training_planner.discount = 0.0

    config.reanalyze = config_dict.ConfigDict()
    config.reanalyze.enabled = True
    config.reanalyze.interval = 10  # learner updates between passes
    config.reanalyze.batch_size = 128  # transitions a pass
    config.reanalyze.min_step = 1_000  # environment steps before the first pass
    config.reanalyze.stale_exponent = 1.0  # 0: uniform; larger: stale targets first
    config.reanalyze.current_batch = False  # the learner's batch (BMPC) instead of rows of its own
    config.reanalyze.slices = False  # whole windows (BMPC) instead of independent rows

    config.loss = config_dict.ConfigDict()
    config.loss.batch_size = 128
    config.loss.horizon = 3  # transitions of a training window
    config.loss.rho = 0.5  # weight rho^t of step t
    config.loss.final_rho = 0.0  # instead: what rho^horizon shall be (0: rho itself)
    config.loss.head_strategy = "split"  # heads that feed value and policy: split, single, concat
    config.loss.consistency_coef = 20.0
    config.loss.encoder_consistency_coef = 0.0  # the encoder towards the dynamics
    config.loss.encoder_consistency_warmup = 0.0  # share of the run before that starts
    config.loss.reward_coef = 0.1
    config.loss.value_coef = 0.1
    config.loss.termination_coef = 1.0
    config.loss.termination_balance = False  # rare terminations weigh as much as continuations
    config.loss.num_heads = 2  # value heads used at a time
    config.loss.value_reduction = "mean"  # over them in value targets: min, mean, local (its own)
    config.loss.value_target = "planner"  # planner, td, lambda
    config.loss.lambda_ = 0.95  # of lambda targets
    config.loss.td_rollouts = 4  # imagined actions a state for td targets of a V critic
    config.loss.td_horizon = 1  # and their length
    config.loss.td_std_coef = 0.0  # optimism of value targets
    config.loss.td_dynamics_reduction = "mean"  # over dynamics heads: mean, min, max, from_std_coef
    config.loss.td_all_dynamics = True  # or one head at random
    config.loss.td_ema_policy = False  # the EMA policy acts in targets
    config.loss.aux_gammas = ()  # discounts of auxiliary value heads
    config.loss.aux_joint = False  # one network for all of them
    config.loss.aux_coef = 0.1
    config.loss.value_weighting = "best_n"  # of planner actions: uniform, weighted, best_n
    config.loss.value_best_n = 4
    config.loss.value_scale = "running"  # running or return_ema
    config.loss.policy_loss = "awr"  # awr, svg, kl, or a mixture: svg:1+kl:0.5
    config.loss.policy_std_coef = 0.0  # optimism of svg
    config.loss.kl_forward = False  # KL(expert || policy), else KL(policy || expert)
    config.loss.expert_source = "reanalyze"  # of kl: the training planner, or acting
    config.loss.expert_mean = "chosen"  # the planner's action, or final: its mean
    config.loss.expert_std_scale = 1.0
    config.loss.expert_min_std = 0.05
    config.loss.trust_region_coef = 0.0  # KL from the EMA policy
    config.loss.awr_temperature = 0.5
    config.loss.awr_effective_samples = 0.0  # instead: solve for it, so many a state (2 to 4)
    config.loss.advantage_scale = "none"  # none, range, state
    config.loss.entropy_coef = 1e-4
    config.loss.entropy_coef_end = -1.0  # where it goes (below 0: it stays)
    config.loss.entropy_start = 0.0  # from this share of the run
    config.loss.entropy_end = 1.0  # to this
    config.loss.entropy_schedule = "linear"  # or exponential
    config.loss.entropy_scale = "none"  # none (TD-MPC2); value: divided by SVG's scale, too
    config.loss.entropy_action_dim_power = 1.0
    config.loss.jacobian = 0.0  # share of the tanh Jacobian in the entropy (TD-MPC2: none)
    config.loss.optimist = False  # a second, optimistic policy that seeds the training planner
    config.loss.optimist_std_coef = 1.0
    config.loss.optimist_entropy_scale = 100.0
    config.loss.termination = "soft"  # the model's termination in targets and plans: soft, hard
    config.loss.discount = 0.0  # 0: from the episode length

    config.optimizer = config_dict.ConfigDict()
    config.optimizer.learning_rate = 3e-4
    config.optimizer.encoder_lr_scale = 0.3
    config.optimizer.encoder_lr_step_at = 1.0  # share of the run after which it steps
    config.optimizer.encoder_lr_step_scale = 1.0  # by this factor (0: frozen)
    config.optimizer.ensemble_lr_scaling = False  # rates grow with the number of heads
    config.optimizer.policy_lr_scale = 1.0
    config.optimizer.policy_adam_eps = 1e-5
    config.optimizer.weight_decay = 0.0  # AdamW's (0: Adam)
    config.optimizer.grad_clip_norm = 20.0
    config.optimizer.value_every = 1  # model updates between two of the values
    config.optimizer.policy_every = 1  # and of the policy
    config.optimizer.tau = 0.01  # target network
    config.optimizer.policy_tau = 0.01  # EMA policy
    return config
