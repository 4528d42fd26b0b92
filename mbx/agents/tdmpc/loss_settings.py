"""The TD-MPC agent's settings of what is minimised.

The properties that `needs` names are in `settings`. Nothing here loads JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mbx.agents.settings import HEADS_HELP, head_terms
from mbx.settings import NONZERO, setting
from mbx.traced import choose, possible

POLICY_LOSSES = ("awr", "svg", "kl", "bc")

_EXPERT = {"uses_expert": True}


@dataclasses.dataclass(frozen=True)
class Loss:
    """What is minimised."""

    batch_size: int = setting(128, "training windows", at_least=1)
    horizon: int = setting(3, "transitions of a window", at_least=1)
    rho: float = setting(0.5, "weight rho^t of step t", at_most=1, needs={"final_rho": 0.0})
    final_rho: float = setting(0.0, "rho^horizon, in place of rho; 0: rho itself counts", at_most=1)
    head_strategy: str = setting(
        "split",
        "dynamics heads that feed value and policy: a share of the batch each, head 0, or all",
        choices=("split", "single", "concat"),
        needs={"several_dynamics": True},
    )
    consistency_coef: float = setting(20.0, "of predicted latents")
    encoder_consistency_coef: float = setting(0.0, "of the encoder towards the dynamics")
    encoder_consistency_warmup: float = setting(
        0.0,
        "share of the run before that starts",
        at_most=1,
        needs={"encoder_consistency_coef": NONZERO},
    )
    reward_coef: float = setting(0.1, "of rewards")
    value_coef: float = setting(0.1, "of values")
    termination_coef: float = setting(
        1.0, "of terminations", needs={"model.episodic": ("auto", "True")}
    )
    termination_balance: bool = setting(
        False,
        "rare terminations weigh as much as continuations",
        needs={"model.episodic": ("auto", "True")},
    )
    num_heads: int = setting(2, "value heads used at a time", at_least=1)
    value_reduction: str = setting(
        "mean",
        "over them in value targets; local: every head follows its own",
        choices=("min", "mean", "local"),
        needs={"value_target": ("planner", "td")},
    )
    value_target: str = setting(
        "planner",
        "one step from the planner's actions, TD from the policy's, or a lambda return",
        choices=("planner", "td", "lambda"),
    )
    lambda_: float = setting(0.95, "of lambda returns", at_most=1, needs={"value_target": "lambda"})
    td_rollouts: int = setting(
        4, "imagined actions a state", at_least=1, needs={"value_target": "td", "model.critic": "v"}
    )
    td_horizon: int = setting(
        1,
        "steps that imagined rollouts last",
        at_least=1,
        needs={"value_target": "td", "model.critic": "v"},
    )
    td_std_coef: float = setting(
        0.0, "optimism of value targets", at_least=None, needs={"targets_know_std": True}
    )
    td_dynamics_reduction: str = setting(
        "mean",
        "of value targets over dynamics heads; from_std_coef: by the sign of td_std_coef",
        choices=("mean", "min", "max", "from_std_coef"),
        needs={"imagines_targets": True, "several_dynamics": True},
    )
    td_all_dynamics: bool = setting(
        True,
        "over all of them, or one at random",
        needs={"imagines_targets": True, "several_dynamics": True},
    )
    td_ema_policy: bool = setting(
        False, "the EMA policy acts in value targets", needs={"targets_follow_policy": True}
    )
    aux_gammas: tuple[float, ...] = setting(
        (), "discounts of auxiliary value heads", at_least=None, above=0
    )
    aux_joint: bool = setting(False, "one network for all of them", needs={"aux_gammas": NONZERO})
    aux_coef: float = setting(0.1, "of auxiliary values", needs={"aux_gammas": NONZERO})
    value_weighting: str = setting(
        "best_n",
        "of planner actions in value targets",
        choices=("uniform", "weighted", "best_n"),
        needs={"value_target": "planner"},
    )
    value_best_n: int = setting(
        4, "planner actions in use", at_least=1, needs={"value_weighting": "best_n"}
    )
    model_correction: float = setting(
        0.0,
        "share of the model's error at the action taken that planner targets are corrected by",
        at_most=1,
        needs={"value_target": "planner", "model.critic": "v"},
    )
    value_temperature: float = setting(
        0.0,
        "of the weights of planner actions in value targets; 0: those of the policy's",
        needs={"value_weighting": "weighted"},
    )
    value_last_state: bool = setting(
        False,
        "values learn in the state that a window ends in, too: T+1 states, not T",
        needs={"imagines_targets": True},
    )
    value_scale: str = setting(
        "running",
        "unit of values: running percentile range (TD-MPC2), or return EMA (DreamerV3)",
        choices=("running", "return_ema"),
        needs={"scales_values": True},
    )
    policy_loss: str = setting("svg", "awr, svg, kl, bc, or a mixture, as svg:1+kl:0.5")
    policy_coef: float = setting(1.0, "of the policy's loss")
    policy_std_coef: float = setting(
        0.0, "optimism of svg", at_least=None, needs={"uses_svg": True, "has_ensembles": True}
    )
    kl_forward: bool = setting(
        False, "KL(expert || policy) instead of KL(policy || expert)", needs=_EXPERT
    )
    expert_source: str = setting(
        "reanalyze",
        "of the expert of new rows: the training planner, or the acting one",
        choices=("reanalyze", "acting"),
        needs=_EXPERT,
    )
    expert_mean: str = setting(
        "chosen",
        "the planner's action, or its final mean",
        choices=("chosen", "final"),
        needs=_EXPERT,
    )
    expert_std_scale: float = setting(1.0, "of the expert's standard deviation", needs=_EXPERT)
    expert_min_std: float = setting(0.05, "lowest standard deviation of an expert", needs=_EXPERT)
    kl_scale_min: float = setting(
        1.0, "least range of the KL, whose running range is its unit", above=0, needs=_EXPERT
    )
    trust_region_coef: float = setting(0.0, "of the KL from the EMA policy")
    awr_temperature: float = setting(
        0.5,
        "of the weights of planner actions",
        above=0,
        needs={"weighs_plans": True, "awr_effective_samples": 0.0},
    )
    awr_effective_samples: float = setting(
        0.0,
        "the temperature is solved for so many a state, 2 to 4 say; 0: awr_temperature",
        needs={"weighs_plans": True},
    )
    advantage_scale: str = setting(
        "none",
        "unit of values in those weights: none, the values' running range, or a state's own std",
        choices=("none", "range", "state"),
        needs={"weighs_plans": True},
    )
    entropy_coef: float = setting(1e-4, "of the entropy bonus")
    entropy_coef_end: float = setting(-1.0, "where it goes; below 0: it stays", at_least=None)
    entropy_start: float = setting(
        0.0, "from this share of the run", at_most=1, needs={"changes_entropy": True}
    )
    entropy_end: float = setting(1.0, "to this", at_most=1, needs={"changes_entropy": True})
    entropy_schedule: str = setting(
        "linear",
        "in between",
        choices=("linear", "exponential"),
        needs={"changes_entropy": True},
    )
    entropy_scale: str = setting(
        "value",
        "unit of the bonus: values, divided by their scale, too; none: of SVG's loss (TD-MPC2)",
        choices=("value", "none"),
        needs={"svg_first": True},
    )
    entropy_action_dim_power: float = setting(
        1.0, "the bonus grows with this power of the action dims"
    )
    jacobian: float = setting(
        0.0,
        "share of the tanh Jacobian in the entropy; 0: TD-MPC2",
        at_most=1,
        needs={"model.policy": "squashed"},
    )
    optimist: bool = setting(
        False,
        "a second, optimistic policy whose samples join the training planner's",
        needs={"reads_plans": True},
    )
    optimist_std_coef: float = setting(
        1.0, "its optimism", at_least=None, needs={"optimist": True, "has_ensembles": True}
    )
    optimist_entropy_scale: float = setting(100.0, "of its entropy bonus", needs={"optimist": True})
    termination: str = setting(
        "soft",
        "predicted terminations in targets and plans: their probability, or cut at one half",
        choices=("soft", "hard"),
        needs={"model.episodic": ("auto", "True")},
    )
    discount: float = setting(0.0, "per agent step; 0: from the episode length", at_most=1)
    heads: str = setting("", HEADS_HELP)

    @property
    def policy_terms(self) -> dict[str, float]:
        """The policy losses in use and their weights."""
        return parse_mixture(self.policy_loss)

    @property
    def head_terms(self) -> dict[str, float | None]:
        """The auxiliary heads in use and their coefficients; None: as declared."""
        return head_terms(self.heads)

    @property
    def time_weight(self) -> Any:
        """Weight of a window's step relative to the one before it."""
        last = self.final_rho ** (1.0 / self.horizon)
        if not possible(self.final_rho <= 0.0):
            return last
        return choose(self.final_rho > 0.0, last, self.rho)

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
        if self.entropy_coef_end >= 0.0 and self.entropy_schedule == "exponential":
            for name in ("entropy_coef", "entropy_coef_end"):
                if getattr(self, name) == 0.0:
                    yield (
                        f"{name}=0 cannot be part of an exponential schedule: give a small "
                        "positive number or loss.entropy_schedule='linear'"
                    )
        if self.entropy_coef_end >= 0.0 and self.entropy_start >= self.entropy_end:
            yield (
                f"entropy_start={self.entropy_start} must be less than "
                f"loss.entropy_end={self.entropy_end}: lower it"
            )


def parse_mixture(text: str) -> dict[str, float]:
    """A mixture of policy losses, as "svg:1+kl:0.5", by name; a bare name weighs 1.

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
