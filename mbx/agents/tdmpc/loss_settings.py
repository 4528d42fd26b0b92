"""TD-MPC's loss settings; the conditions that `needs` names are in `settings`. Loads no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mbx.agents.settings import HEADS_HELP, head_terms
from mbx.agents.tdmpc.planner_settings import in_order
from mbx.settings import NONZERO, setting

POLICY_LOSSES = ("awr", "svg", "kl", "bc")

_EXPERT = {"uses_expert": True}
_EPISODIC = {"model.episodic": ("auto", "True")}
_IMAGINED = {"imagines_targets": True, "several_dynamics": True}
_ROLLOUTS = {"value_target": "td", "model.critic": "v"}
_SCHEDULE = {"changes_entropy": True}


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is minimised."""

    batch_size: int = setting(128, "Training windows of a batch.", at_least=1)
    horizon: int = setting(3, "Transitions of a window.", at_least=1)
    rho: float = setting(0.5, "Weight rho^t of step t.", at_most=1, needs={"final_rho": 0.0})
    final_rho: float = setting(
        0.0, "Weight rho^horizon, which determines rho; 0 = rho itself counts.", at_most=1
    )
    consistency_coef: float = setting(20.0, "Coefficient of predicted latents.")
    encoder_consistency_coef: float = setting(
        0.0, "Coefficient of the encoder's consistency with the dynamics."
    )
    encoder_consistency_warmup: float = setting(
        0.0,
        "Share of the run before the encoder's consistency starts.",
        at_most=1,
        needs={"encoder_consistency_coef": NONZERO},
    )
    reward_coef: float = setting(0.1, "Coefficient of rewards.")
    value_coef: float = setting(0.1, "Coefficient of values.")
    termination_coef: float = setting(1.0, "Coefficient of terminations.", needs=_EPISODIC)
    num_heads: int = setting(
        2,
        "Value heads that targets, plans and SVG each draw anew; means, minima and standard "
        "deviations are those of the drawn heads.",
        at_least=1,
    )
    value_reduction: str = setting(
        "mean",
        "Reduction over the drawn value heads in value targets; local = every head follows its "
        "own.",
        choices=("min", "mean", "local"),
        needs={"value_target": ("planner", "td")},
    )
    value_target: str = setting(
        "planner",
        "Value targets: one step from the planner's actions, TD from the policy's, or a lambda "
        "return.",
        choices=("planner", "td", "lambda"),
    )
    lambda_: float = setting(
        0.95, "Lambda of lambda returns.", at_most=1, needs={"value_target": "lambda"}
    )
    td_rollouts: int = setting(4, "Imagined actions a state.", at_least=1, needs=_ROLLOUTS)
    td_horizon: int = setting(1, "Steps of imagined rollouts.", at_least=1, needs=_ROLLOUTS)
    td_std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in value targets: above 0 optimism, below 0 "
        "pessimism.",
        at_least=None,
        needs="targets_know_std",
    )
    td_dynamics_reduction: str = setting(
        "mean",
        "Reduction of value targets over dynamics heads; from_std_coef = by the sign of "
        "td_std_coef.",
        choices=("mean", "min", "max", "from_std_coef"),
        needs=_IMAGINED | {"td_all_dynamics": True},
    )
    td_all_dynamics: bool = setting(
        True, "Value targets use all dynamics heads, not one at random.", needs=_IMAGINED
    )
    td_ema_policy: bool = setting(
        False, "The EMA policy acts in value targets.", needs="targets_follow_policy"
    )
    aux_gammas: tuple[float, ...] = setting(
        (), "Discounts of auxiliary value heads.", at_least=None, above=0
    )
    aux_joint: bool = setting(
        False, "One network for all auxiliary values.", needs={"aux_gammas": NONZERO}
    )
    aux_coef: float = setting(
        0.1, "Coefficient of auxiliary values.", needs={"aux_gammas": NONZERO}
    )
    value_weighting: str = setting(
        "best_n",
        "Weights of planner actions in value targets.",
        choices=("uniform", "weighted", "best_n"),
        needs={"value_target": "planner"},
    )
    value_best_n: int = setting(
        4, "Actions averaged in value targets.", at_least=1, needs={"value_weighting": "best_n"}
    )
    value_last_state: bool = setting(
        False, "Learn values in a window's last state, too (T+1 states).", needs="imagines_targets"
    )
    value_scale: str = setting(
        "running",
        "Unit of values: running percentile range (TD-MPC2), or return EMA (DreamerV3).",
        choices=("running", "return_ema"),
        needs="scales_values",
    )
    policy_loss: str = setting("svg", "Policy loss: awr, svg, kl, bc, or a mixture, svg:1+kl:0.5.")
    policy_coef: float = setting(1.0, "Coefficient of the policy's loss.")
    policy_std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in SVG: above 0 optimism, below 0 pessimism.",
        at_least=None,
        needs={"uses_svg": True, "svg_knows_std": True},
    )
    policy_reduction: str = setting(
        "mean",
        "Reduction over the drawn value heads in SVG.",
        choices=("min", "mean"),
        needs={"uses_svg": True, "averages_values": True},
    )
    kl_forward: bool = setting(
        False, "KL(expert || policy) in place of KL(policy || expert).", needs=_EXPERT
    )
    expert_source: str = setting(
        "reanalyze",
        "Expert of new transitions: the training planner, or the acting one.",
        choices=("reanalyze", "acting"),
        needs=_EXPERT,
    )
    expert_mean: str = setting(
        "chosen",
        "Mean of the expert: the planner's action, or its final mean.",
        choices=("chosen", "final"),
        needs=_EXPERT,
    )
    kl_scale_min: float = setting(
        1.0, "Lowest value of the KL's running range, which is its unit.", above=0, needs=_EXPERT
    )
    trust_region_coef: float = setting(0.0, "Coefficient of the KL from the EMA policy.")
    awr_temperature: float = setting(
        0.5, "Temperature of planner actions' weights.", above=0, needs="weighs_plans"
    )
    entropy_coef: float = setting(1e-4, "Coefficient of the entropy bonus.")
    entropy_coef_end: float = setting(
        -1.0, "Entropy coefficient at its schedule's end; below 0 = constant.", at_least=None
    )
    entropy_start: float = setting(
        0.0, "Share of the run at which the entropy schedule begins.", at_most=1, needs=_SCHEDULE
    )
    entropy_end: float = setting(
        1.0, "Share of the run at which the entropy schedule ends.", at_most=1, needs=_SCHEDULE
    )
    entropy_schedule: str = setting(
        "linear", "Entropy schedule's shape.", choices=("linear", "exponential"), needs=_SCHEDULE
    )
    entropy_scale: str = setting(
        "value",
        "Unit of the entropy bonus: values, divided by their scale as SVG's; none = of SVG's loss "
        "(TD-MPC2).",
        choices=("value", "none"),
        needs="svg_first",
    )
    entropy_action_dim_power: float = setting(
        1.0, "Power of the number of action dims that multiplies the entropy bonus."
    )
    jacobian: float = setting(
        0.0,
        "Share of the tanh Jacobian in the entropy; 0 = TD-MPC2.",
        at_most=1,
        needs={"model.policy": "squashed"},
    )
    optimist: bool = setting(
        False,
        "Second, optimistic policy, sampled by the training planner.",
        needs="samples_optimist",
    )
    termination: str = setting(
        "soft",
        "Predicted terminations in targets and plans: their probability, or cut at one half.",
        choices=("soft", "hard"),
        needs=_EPISODIC,
    )
    discount: float = setting(
        0.0, "Discount of an agent step; 0 = from the episode length.", at_most=1
    )
    heads: str = setting("", HEADS_HELP)

    @property
    def policy_terms(self) -> dict[str, float]:
        """Weights of the policy losses in use."""
        return parse_mixture(self.policy_loss)

    @property
    def head_terms(self) -> dict[str, float | None]:
        """Coefficients of the auxiliary heads in use; None: as declared."""
        return head_terms(self.heads)

    @property
    def time_weight(self) -> float:
        """Weight of a window's step relative to the one before it."""
        return self.final_rho ** (1.0 / self.horizon) if self.final_rho else self.rho

    def check(self) -> Iterator[str]:
        for parse, text in ((parse_mixture, self.policy_loss), (head_terms, self.heads)):
            try:
                parse(text)
            except ValueError as error:
                yield str(error)
        if any(gamma >= 1.0 for gamma in self.aux_gammas):
            yield f"aux_gammas={self.aux_gammas}: every discount must be below 1"
        if self.discount == 1.0:
            yield "discount=1.0: give less than 1, or 0 to derive it from the episode length"
        if self.entropy_coef_end < 0.0:
            return
        if self.entropy_schedule == "exponential":
            for name in ("entropy_coef", "entropy_coef_end"):
                if getattr(self, name) == 0.0:
                    yield (
                        f"{name}=0 cannot be part of an exponential schedule: give a small "
                        "positive number or loss.entropy_schedule='linear'"
                    )
        yield from in_order(self, "loss", "entropy_start", "entropy_end", allow_equal=False)


def parse_mixture(text: str) -> dict[str, float]:
    """The weights in a mixture of policy losses such as "svg:1+kl:0.5"; a bare name weighs 1.

    Raises:
        ValueError: an unknown name, a name given twice, or a weight that is not positive.
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
