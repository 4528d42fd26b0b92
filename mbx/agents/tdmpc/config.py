"""Settings of the TD-MPC agent, and every mistake in them told at once.

Defaults are TD-MPC2's coefficients with document 000's planner targets. What the options do is
described where they act: scoring of plans in `scoring`, value targets in `value_targets`,
losses in `model_loss` and `policy_loss`, learning rates in `optimizers`.
"""

from __future__ import annotations

import dataclasses

from mbx import mppi
from mbx.world_model import WorldModelConfig

VALUE_TARGETS = ("planner", "td", "lambda")
VALUE_REDUCTIONS = ("min", "mean", "local")
VALUE_WEIGHTINGS = ("uniform", "weighted", "best_n")
ADVANTAGE_SCALES = ("none", "range", "state")
POLICY_LOSSES = ("awr", "svg", "kl", "bc")
HEAD_STRATEGIES = ("single", "split", "concat")
TERMINATIONS = ("hard", "soft")


@dataclasses.dataclass(frozen=True)
class Scoring:
    """How a plan is scored from ensembles (document 001, section 6).

    std_coef: weight of the ensembles' disagreement about the return: above 0 optimism, below 0
    pessimism; its sign also chooses the best, worst or mean dynamics head. aggregate: average the
    estimates of all horizons 1..T instead of taking the last. disagreement: weight of a bonus for
    latents on which the dynamics heads differ. discount: of the planner's return; 0 for the
    agent's (document 001 plans with 1).
    """

    std_coef: float = 0.0
    aggregate: bool = False
    disagreement: float = 0.0
    discount: float = 0.0


@dataclasses.dataclass(frozen=True)
class TDMPCConfig:
    """Settings of the agent.

    discount: of the task, or one a task where `world.tasks` names several.
    horizon: transitions T of a training window. planner_horizon, target_horizon: look-ahead of the
        acting and the training planner.
    num_heads: value heads used at a time in targets, planning and the policy loss.
    value_target: "planner": one step from the planner's actions; "td": TD-MPC2's target from the
        replay's reward (Q critic), or from rollouts of the policy in the model (V critic);
        "lambda": lambda return of the replay's rewards with the planner's values as annotations.
    value_reduction: over value heads in targets: "min" or "mean" of those in use, or "local": every
        head bootstraps from itself.
    td_std_coef, td_dynamics_reduction, td_all_dynamics: optimism of targets, reduction over
        dynamics heads, and whether all of them or one at random are used.
    td_rollouts, td_horizon: imagined actions a state and their length, for value_target "td" with a
        V critic. td_ema_policy: the EMA policy acts in targets.
    prior_start, prior_updates: the acting planner starts from the policy's own Gaussian until the
        first number of updates, and ever less so until the second (NEWT's constrained planning; 0:
        never).
    stored_targets: keep planner targets in the replay (document 000); False is the legacy path, raw
        policy samples evaluated afresh in every loss.
    policy_loss: "awr", "svg", "kl", "bc" (cloning the replay's actions: demonstrations), or a
        mixture, "svg:1+kl:0.5".
    kl_forward: KL(expert || policy) instead of KL(policy || expert). expert_source: "reanalyze"
        (the training planner) or "acting". expert_mean: "chosen" (its action) or "final" (its
        refitted mean). expert_std_scale, expert_min_std: of the expert's standard deviation.
    advantage_scale, awr_temperature, awr_effective_samples: see `value_targets.planner_weights`.
    value_scale: "running" (TD-MPC2's percentile range) | "return_ema" (DreamerV3's), for SVG and
        for advantage_scale="range".
    entropy_scale: "none" (TD-MPC2): the bonus is in the units of SVG's loss, values divided by
        their scale, so that it outgrows what an action changes as that scale rises; "value": it is
        divided by the scale, too, and so in the units of values.
    jacobian: share of the tanh Jacobian in the entropy bonus (TD-MPC2: 0).
    entropy_coef, entropy_coef_end: schedule between the updates entropy_start and entropy_end.
    head_strategy: which dynamics head's latents train value and policy: "single" (head 0),
        "split" (a share of the batch each), "concat" (all of them).
    optimist: a second policy that maximises optimistically and joins the training planner.
    final_rho: rho such that rho^horizon is this (0: `rho` itself).
    aux_gammas: discounts of auxiliary value heads; aux_joint: one network for all of them.
    termination_balance: weight terminations as much as continuations in the termination loss.
    stale_exponent: 0 chooses the rows to reanalyze uniformly, > 0 stale ones first.
    reanalyze_slices: reanalyze whole windows of rows instead of independent ones.
    reanalyze_current: updates between two in which the learner's own batch is planned for anew
        before it is learned from (BMPC; 0: never).
    total_updates: of the run, for schedules given as shares of it.
    """

    world: WorldModelConfig
    discount: float | tuple[float, ...]
    planner: mppi.MPPIConfig = mppi.MPPIConfig()
    training_planner: mppi.MPPIConfig = mppi.MPPIConfig()
    scoring: Scoring = Scoring()
    evaluation_scoring: Scoring = Scoring()
    target_scoring: Scoring = Scoring()
    horizon: int = 3
    planner_horizon: int = 3
    target_horizon: int = 1
    num_proposals: int = 24
    proposal_noise: float = 0.0
    prior_start: int = 0
    prior_updates: int = 0
    evaluation_selection: str = "sample"
    stored_targets: bool = True
    keep_targets: int | None = None
    target_actions_dtype: str = "float32"
    target_values_dtype: str = "float32"
    batch_size: int = 256
    rho: float = 0.5
    final_rho: float = 0.0
    consistency_coef: float = 20.0
    encoder_consistency_coef: float = 0.0
    encoder_consistency_warmup: float = 0.0
    reward_coef: float = 0.1
    value_coef: float = 0.1
    termination_coef: float = 1.0
    termination_balance: bool = False
    num_heads: int = 2
    head_strategy: str = "split"
    value_reduction: str = "min"
    value_target: str = "planner"
    value_weighting: str = "weighted"
    value_best_n: int = 16
    value_scale: str = "running"
    lambda_: float = 0.95
    td_std_coef: float = 0.0
    td_dynamics_reduction: str = "mean"
    td_all_dynamics: bool = True
    td_rollouts: int = 4
    td_horizon: int = 1
    td_ema_policy: bool = False
    aux_gammas: tuple[float, ...] = ()
    aux_joint: bool = False
    aux_coef: float = 0.1
    policy_loss: str = "awr"
    policy_std_coef: float = 0.0
    awr_temperature: float = 0.5
    advantage_scale: str = "none"
    awr_effective_samples: float = 0.0
    kl_forward: bool = False
    expert_source: str = "reanalyze"
    expert_mean: str = "chosen"
    expert_std_scale: float = 1.0
    expert_min_std: float = 0.05
    trust_region_coef: float = 0.0
    entropy_coef: float = 1e-4
    entropy_coef_end: float = -1.0
    entropy_start: float = 0.0
    entropy_end: float = 1.0
    entropy_schedule: str = "linear"
    entropy_scale: str = "none"
    entropy_action_dim_power: float = 1.0
    jacobian: float = 0.0
    optimist: bool = False
    optimist_std_coef: float = 1.0
    optimist_entropy_scale: float = 100.0
    termination: str = "hard"
    learning_rate: float = 3e-4
    encoder_lr_scale: float = 0.3
    encoder_lr_step_at: float = 1.0
    encoder_lr_step_scale: float = 1.0
    ensemble_lr_scaling: bool = False
    policy_lr_scale: float = 1.0
    policy_adam_eps: float = 1e-5
    weight_decay: float = 0.0
    grad_clip_norm: float = 20.0
    value_every: int = 1
    policy_every: int = 1
    tau: float = 0.01
    policy_tau: float = 0.01
    reanalyze_batch: int = 256
    reanalyze_slices: bool = False
    reanalyze_current: int = 0
    stale_exponent: float = 0.0
    total_updates: int = 0

    def __post_init__(self) -> None:
        _check_choices(self)
        _check_counts(self)
        _check_combinations(self)

    @property
    def policy_terms(self) -> dict[str, float]:
        """The policy losses in use and their weights."""
        return parse_mixture(self.policy_loss)

    @property
    def time_weight(self) -> float:
        """Weight of a window's step relative to the one before it."""
        return self.final_rho ** (1.0 / self.horizon) if self.final_rho else self.rho

    @property
    def uses_expert(self) -> bool:
        """Whether the policy is distilled from a Gaussian expert."""
        return "kl" in self.policy_terms

    @property
    def uses_actions(self) -> bool:
        """Whether a loss reads planner actions at all (TD-MPC2's own losses do not)."""
        planned = self.value_target in ("planner", "lambda")
        return planned or bool({"awr", "kl"} & set(self.policy_terms))

    @property
    def uses_target_policy(self) -> bool:
        """Whether an EMA copy of the policy is kept."""
        return self.td_ema_policy or self.trust_region_coef > 0.0

    @property
    def scheduled(self) -> bool:
        """Whether a loss depends on the share of the run that is done."""
        return self.entropy_coef_end >= 0.0 or self.encoder_consistency_warmup > 0.0

    @property
    def stores_targets(self) -> bool:
        """Whether the replay holds planner targets."""
        return self.stored_targets and self.uses_actions


def parse_mixture(text: str) -> dict[str, float]:
    """ "svg:1+kl:0.5" as names and weights; a bare name weighs 1.

    Raises ValueError for an unknown name, a name given twice, or a weight that is not positive.
    """
    terms: dict[str, float] = {}
    for part in text.split("+"):
        name, _, weight = part.strip().partition(":")
        try:
            value = float(weight) if weight else 1.0
        except ValueError:
            value = -1.0
        if name not in POLICY_LOSSES or name in terms or not value > 0.0:
            raise ValueError(
                f"policy_loss={text!r}: give one of {POLICY_LOSSES}, or a sum of them with "
                "positive weights, as 'svg:1+kl:0.5'"
            )
        terms[name] = value
    return terms


def _check_choices(c: TDMPCConfig) -> None:
    for field, choices in (
        ("value_reduction", VALUE_REDUCTIONS),
        ("value_target", VALUE_TARGETS),
        ("value_weighting", VALUE_WEIGHTINGS),
        ("value_scale", ("running", "return_ema")),
        ("td_dynamics_reduction", ("mean", "min", "max", "from_std_coef")),
        ("advantage_scale", ADVANTAGE_SCALES),
        ("evaluation_selection", mppi.SELECTIONS),
        ("termination", TERMINATIONS),
        ("head_strategy", HEAD_STRATEGIES),
        ("expert_source", ("reanalyze", "acting")),
        ("expert_mean", ("chosen", "final")),
        ("entropy_schedule", ("linear", "exponential")),
        ("entropy_scale", ("none", "value")),
    ):
        if getattr(c, field) not in choices:
            raise ValueError(f"{field}={getattr(c, field)!r}: choose one of {choices}")
    parse_mixture(c.policy_loss)


def _check_counts(c: TDMPCConfig) -> None:
    for field in (
        "horizon",
        "planner_horizon",
        "target_horizon",
        "batch_size",
        "reanalyze_batch",
        "num_heads",
        "td_rollouts",
        "td_horizon",
        "value_best_n",
        "value_every",
        "policy_every",
    ):
        if getattr(c, field) < 1:
            raise ValueError(f"{field}={getattr(c, field)}: must be at least 1")
    if not 0 <= c.num_proposals < c.planner.num_samples:
        raise ValueError(
            f"num_proposals={c.num_proposals} must be less than planner.num_samples="
            f"{c.planner.num_samples}: lower it or raise num_samples"
        )
    if c.world.critic == "q" and c.num_heads > c.world.num_values:
        raise ValueError(
            f"num_heads={c.num_heads} value heads are used at a time but the model has "
            f"{c.world.num_values}: lower num_heads or raise num_values"
        )
    for field in ("entropy_start", "entropy_end", "encoder_lr_step_at", "lambda_", "jacobian"):
        if not 0.0 <= getattr(c, field) <= 1.0:
            raise ValueError(f"{field}={getattr(c, field)}: must lie in [0, 1]")
    if not all(0.0 < gamma < 1.0 for gamma in c.aux_gammas):
        raise ValueError(f"aux_gammas={c.aux_gammas}: every discount must lie in (0, 1)")


def _check_combinations(c: TDMPCConfig) -> None:
    heads = c.world.num_dynamics
    if c.head_strategy == "split" and c.batch_size % heads:
        raise ValueError(
            f"head_strategy='split' needs a batch_size divisible by num_dynamics={heads}, not "
            f"{c.batch_size}: change it, or choose 'concat' or 'single'"
        )
    if (c.scheduled or c.encoder_lr_step_at < 1.0) and c.total_updates < 1:
        raise ValueError(
            f"total_updates={c.total_updates}: the schedules of entropy_coef_end, "
            "encoder_consistency_warmup and encoder_lr_step_at are shares of it, so give it"
        )
    if c.entropy_coef_end == 0.0 and c.entropy_schedule == "exponential":
        raise ValueError(
            "entropy_coef_end=0 cannot be reached exponentially: give a small positive end or "
            "entropy_schedule='linear'"
        )
    if c.entropy_coef_end >= 0.0 and c.entropy_start >= c.entropy_end:
        raise ValueError(
            f"entropy_start={c.entropy_start} must lie before entropy_end={c.entropy_end}"
        )
    if c.value_reduction == "local" and c.num_heads < c.world.num_values:
        raise ValueError(
            f"value_reduction='local' uses all {c.world.num_values} value heads, but "
            f"num_heads={c.num_heads}: set num_heads to the number of value heads"
        )
    stored = (c.keep_targets if c.stored_targets else None) or c.training_planner.num_samples
    if c.awr_effective_samples and not 1.0 < c.awr_effective_samples < stored:
        raise ValueError(
            f"awr_effective_samples={c.awr_effective_samples} of a state's {stored} planner "
            "actions: choose a number between 1 and that, or 0 for awr_temperature as it is"
        )
    if c.awr_effective_samples and c.advantage_scale == "range":
        raise ValueError(
            "advantage_scale='range' has no effect where awr_effective_samples chooses the "
            "temperature: set it to 'none' or 'state'"
        )
    if c.entropy_scale == "value" and next(iter(c.policy_terms)) != "svg":
        raise ValueError(
            f"entropy_scale='value' needs SVG's value scale, but policy_loss={c.policy_loss!r}: "
            "name svg first, or set entropy_scale='none'"
        )
    if c.world.num_aux != len(c.aux_gammas):
        raise ValueError(
            f"world.num_aux={c.world.num_aux} auxiliary values but {len(c.aux_gammas)} aux_gammas: "
            "make them equal"
        )
    if c.reanalyze_current and not c.stores_targets:
        raise ValueError(
            f"reanalyze_current={c.reanalyze_current} renews stored targets, of which there are "
            "none: set training_planner.enabled=True and a loss that reads them"
        )
    if c.uses_expert and not c.stored_targets:
        raise ValueError(
            "policy_loss='kl' distils stored experts: set training_planner.enabled=True"
        )
