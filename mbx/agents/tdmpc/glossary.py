"""Meaning of the metrics that TD-MPC logs in addition to those of every run."""

KEYS = {
    "loss/consistency": "how far predicted latents are from those of the next observations",
    "loss/encoder_consistency": "the same, which moves the encoder (loss.encoder_consistency_coef)",
    "loss/reward": "cross-entropy of predicted rewards, in nats",
    "loss/value": "cross-entropy of values against their targets, in nats",
    "loss/aux_value": "the same of the auxiliary values",
    "loss/termination": "cross-entropy of predicted terminations",
    "loss/heads/*": "loss of an auxiliary head of one's own",
    "loss/total": "the model's weighted sum of the losses above; its policy's is not in it",
    "loss/policy": "of the policy; its size says little, it should not be NaN",
    "loss/optimist": "of the second, optimistic policy",
    "heads/*": "what an auxiliary head of one's own measures",
    "value/target": "mean target of the value: whether values grow towards what returns imply",
    "grad_norm/model": "norm of the model's gradient before clipping",
    "grad_norm/policy": "norm of the policy's gradient before clipping",
    "policy/std": "mean standard deviation of the policy over the action dims of a task; of "
    "actions, or with model.policy=squashed before tanh",
    "policy/entropy": "entropy of the policy in nats, sum over action dims: -log pi of one sample "
    "a state; with model.policy=squashed before tanh (but for loss.jacobian)",
    "policy/effective_samples": "how many stored actions the policy's weights spread over",
    "policy/kl": "divergence of the policy from the planner's Gaussian in nats, mean over "
    "action dims",
    "policy/scale": "what values are divided by in the policy's loss",
    "policy/trust": "how far the policy moved from its target, in the units of its trust region",
    "targets/age": "learner updates since the planner targets of a batch were made",
    "targets/valid": "share of a batch's rows that have planner targets",
    "batch/mask": "share of a batch's rows that belong to the episode they begin in",
    "reanalyze/age": "learner updates since the targets that a pass renewed were made",
    "reanalyze/value_change": "how much a pass changed the best value stored with rows, mean size, "
    "of those that have one (an acting expert's have not)",
    "reanalyze/share": "share of the replay's rows that a pass renewed",
    "model/latent_error_*": "squared error of the latent N steps after the last observation that "
    "the model saw, mean over its numbers",
    "model/still_error_*": "the same if the latent stayed what it was: what a model has to beat",
    "model/reward_error_*": "mean size of the error of the reward predicted at that depth",
    "model/realised": "mean return, discounted, that followed states of the evaluation's episodes, "
    "with the value of the last state where a time limit cut it",
    "model/value": "mean value of those states",
    "model/value_bias": "that value less the realised return: above 0 it promises too much",
    "model/value_correlation": "correlation of both over states: 1 where it ranks them rightly",
    "model/policy": "mean return, by the model, of the policy acting alone",
    "model/planned": "mean return, by the model, of the planner's last mean",
    "model/planned_bias": "that return less the realised one: above 0 plans promise too much",
    "model/planned_correlation": "correlation of both over states: 1 where plans rank them rightly",
    "model/planner_gain": "what planning is worth beyond the policy, by the model",
    "model/gain_by_round_*": "share of that gain after the planner's N-th round; not logged where "
    "there is none",
    "model/training_gain": "what the training planner's best actions (loss.value_best_n) are worth "
    "beyond the policy's, in states of the replay, by the model",
    "model/termination_precision": "share of the predicted ends of episodes, one step ahead, that "
    "were ends",
    "model/termination_recall": "share of the ends of episodes that were predicted",
}
