"""Meaning of the metrics that TD-MPC logs in addition to those of every run."""

KEYS = {
    "loss/consistency": "distance of predicted latents from those of the next observations",
    "loss/encoder_consistency": "distance of encoded latents from predictions; moves the encoder",
    "loss/reward": "cross-entropy of predicted rewards, in nats",
    "loss/value": "cross-entropy of values against their targets, in nats",
    "loss/aux_value": "cross-entropy of auxiliary values against their targets, in nats",
    "loss/termination": "cross-entropy of predicted terminations",
    "loss/heads/*": "loss of a registered auxiliary head",
    "loss/total": "weighted sum of the model's losses, without the policy's",
    "loss/policy": "loss of the policy; its size says little, it should not be NaN",
    "loss/optimist": "loss of the second, optimistic policy",
    "heads/*": "metric of a registered auxiliary head",
    "value/target": "mean target of the value: whether values grow towards what returns imply",
    "grad_norm/model": "norm of the model's gradient before clipping",
    "grad_norm/policy": "norm of the policy's gradient before clipping",
    "policy/std": "mean standard deviation of the policy over the action dims of a task; of "
    "actions, or with model.policy=squashed before tanh",
    "policy/entropy": "entropy of the policy in nats, sum over action dims: -log pi of one sample "
    "a state; with model.policy=squashed before tanh (but for loss.jacobian)",
    "policy/effective_samples": "number of stored actions that the policy's weights spread over",
    "policy/kl": "divergence of the policy from the planner's Gaussian in nats, mean over "
    "action dims",
    "policy/scale": "unit of values in the policy's loss",
    "policy/trust": "distance of the policy from its EMA, in the unit of its trust region",
    "targets/age": "learner updates since the planner targets of a batch were made",
    "targets/valid": "share of a batch's rows that have planner targets",
    "batch/mask": "share of a batch's rows that belong to the episode they begin in",
    "reanalyze/age": "learner updates since the targets that a pass renewed were made",
    "reanalyze/value_change": "how much a pass changed the best value stored with rows, mean size, "
    "of those that have one (an acting expert's have not)",
    "reanalyze/share": "share of the replay's rows that a pass renewed",
    "model/latent_error_*": "squared error of the latent N steps after the last observation that "
    "the model saw, mean over its numbers",
    "model/still_error_*": "squared error of an unchanged latent: what a model has to beat",
    "model/reward_error_*": "mean size of the error of the reward predicted N steps ahead",
    "model/realised": "mean return, discounted, that followed states of the evaluation's episodes, "
    "with the value of the last state where a time limit cut it",
    "model/value": "mean value of states of the evaluation's episodes",
    "model/value_bias": "mean value less the realised return: above 0 it promises too much",
    "model/value_correlation": "correlation of value and realised return over states",
    "model/policy": "mean return, by the model, of the policy acting alone",
    "model/planned": "mean return, by the model, of the planner's last mean",
    "model/planned_bias": "planned return less the realised one: above 0 plans promise too much",
    "model/planned_correlation": "correlation of planned and realised return over states",
    "model/planner_gain": "what planning is worth beyond the policy, by the model",
    "model/gain_by_round_*": "share of model/planner_gain after the planner's N-th round; not "
    "logged where there is no gain",
    "model/training_gain": "what the training planner's best actions (loss.value_best_n) are worth "
    "beyond the policy's, in states of the replay, by the model",
    "model/termination_precision": "share of the predicted ends of episodes, one step ahead, that "
    "were ends",
    "model/termination_recall": "share of the ends of episodes that were predicted",
}
