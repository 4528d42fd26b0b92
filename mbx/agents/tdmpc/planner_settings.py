"""The TD-MPC agent's settings of its two planners.

The properties that `needs` names are in `settings`. Nothing here loads JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mbx.settings import NONZERO, setting

INTERPOLATIONS = ("zero", "linear", "cubic")  # mbx.planners.bases.KINDS
SELECTIONS = ("sample", "best", "mean")
TEMPERATURE_MODES = ("multiply", "divide")


def _check_planner(planner: Planner | TrainingPlanner, name: str) -> Iterator[str]:
    if planner.num_elites > planner.num_samples:
        yield (
            f"num_elites={planner.num_elites} exceeds {name}.num_samples={planner.num_samples}: "
            "lower it or raise num_samples"
        )
    if planner.min_std > planner.max_std:
        yield f"min_std={planner.min_std} is more than {name}.max_std={planner.max_std}: lower it"


_ICEM = {"name": "icem"}
_WEIGHTS = {"weighs_elites": True}
_CHOICE = {"chooses_elites": True}


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner that acts in the environment."""

    name: str = setting(
        "mppi",
        "how it searches: mppi, cem, icem, predictive, an optimiser of evosax (evosax:CMA_ES), or "
        "one of your own",
    )
    horizon: int = setting(3, "agent steps that a plan looks ahead", at_least=1)
    iterations: int = setting(3, "rounds of sampling and refitting", at_least=1)
    num_samples: int = setting(128, "candidate plans a round, proposals included", at_least=1)
    num_elites: int = setting(16, "best candidates that are refitted to", at_least=1)
    knots: int = setting(
        0,
        "control points that a plan goes through; 0: an action a step",
        needs={"plans_ahead": True},
    )
    interpolation: str = setting(
        "linear",
        "between them: zero (the last one is held), linear, or a cubic spline",
        choices=INTERPOLATIONS,
        needs={"knots": NONZERO},
    )
    smoothing: float = setting(
        0.0,
        "standard deviation, in steps, of the Gaussian that plans are smoothed by; 0: none",
        needs={"plans_ahead": True},
    )
    num_proposals: int = setting(8, "policy trajectories among the candidates")
    proposal_noise: float = setting(
        0.0,
        "standard deviation of noise added to them; of discrete actions the share that is drawn "
        "uniformly",
        needs={"num_proposals": NONZERO},
    )
    prior_start: int = setting(
        0,
        "updates until which plans start from the policy's Gaussian",
        needs={"prior_updates": NONZERO},
    )
    prior_updates: int = setting(0, "over which that fades; 0: plans never start there")
    rescore_proposals: bool = setting(
        False, "score proposals in every round, not once", needs={"num_proposals": NONZERO}
    )
    temperature: float = setting(0.5, "of the elites' weights", above=0, needs=_WEIGHTS)
    temperature_mode: str = setting(
        "multiply",
        "weights exp(temperature v), or exp(v / temperature)",
        choices=TEMPERATURE_MODES,
        needs=_WEIGHTS,
    )
    noise_beta: float = setting(
        2.0,
        "noise of power 1 / frequency^noise_beta along a plan",
        needs=_ICEM | {"plans_far": True},
    )
    keep_elites: float = setting(
        0.3,
        "share of a round's elites that compete in the next",
        at_most=1,
        needs=_ICEM | {"plans_again": True},
    )
    momentum: float = setting(
        0.1, "share of the old mean and std in the refitted", at_most=0.999, needs=_ICEM
    )
    min_std: float = setting(
        0.05,
        "lowest refitted standard deviation, in action units; its square is the lowest probability "
        "of a discrete action",
        above=0,
    )
    max_std: float = setting(
        2.0, "highest, and where plans of continuous actions start (of discrete ones uniformly)"
    )
    action_noise: float = setting(
        1.0,
        "of the refitted std, added to actions while training; of discrete actions the share that "
        "is drawn from the refitted probabilities",
    )
    selection: str = setting(
        "sample",
        "the action: an elite by weight, the best, or their mean",
        choices=SELECTIONS,
        needs=_CHOICE,
    )
    evaluation_selection: str = setting(
        "mean", "the same in evaluations", choices=SELECTIONS, needs=_CHOICE
    )
    extra_iterations: int = setting(2, "further rounds in large action spaces")
    extra_iterations_action_dim: int = setting(
        20, "which have that many dims", needs={"extra_iterations": NONZERO}
    )
    std_coef: float = setting(
        0.0,
        "of the ensembles' std in scores: above 0 optimism, below 0 pessimism",
        at_least=None,
        needs={"has_ensembles": True},
    )
    evaluation_std_coef: float = setting(
        0.0, "the same in evaluations", at_least=None, needs={"has_ensembles": True}
    )
    aggregate: bool = setting(
        False,
        "score by the mean of the estimates of all horizons, not the last alone",
        needs={"plans_ahead": True},
    )
    disagreement: float = setting(
        0.0,
        "bonus for latents that dynamics heads disagree on",
        at_least=None,
        needs={"several_dynamics": True},
    )
    discount: float = setting(0.0, "inside plans; 0: the agent's", at_most=1)

    def check(self) -> Iterator[str]:
        yield from _check_planner(self, "planner")
        if self.num_proposals >= self.num_samples:
            yield (
                f"num_proposals={self.num_proposals} must be less than planner.num_samples="
                f"{self.num_samples}: lower it or raise num_samples"
            )
        if self.knots > self.horizon:
            yield (
                f"knots={self.knots} exceeds planner.horizon={self.horizon}: lower it, or plan "
                "further ahead"
            )


_TRAINING = {"enabled": True, "reads_plans": True}
_TRAINING_WEIGHTS = _TRAINING | {"training_weighs_elites": True}
_SAMPLED = {"reads_plans": True}
_AS_ACTING = _TRAINING | {"search": "acting"}


@dataclasses.dataclass(frozen=True)
class TrainingPlanner:
    """The planner that makes training targets: candidate actions with their values."""

    enabled: bool = setting(
        True,
        "store its targets in the replay; False: policy samples, scored again in every loss",
        needs=_SAMPLED,
    )
    search: str = setting(
        "policy",
        "rounds refit samples that begin as the policy's, or search as the acting planner does: "
        "from mean 0 and max_std, with policy trajectories in every round",
        choices=("policy", "acting"),
        needs=_TRAINING,
    )
    name: str = setting("mppi", "how it searches, as planner.name", needs=_TRAINING)
    iterations: int = setting(3, "rounds of sampling and refitting", at_least=1, needs=_TRAINING)
    num_samples: int = setting(32, "candidates a round", at_least=1, needs=_SAMPLED)
    num_elites: int = setting(
        8, "best candidates that are refitted to", at_least=1, needs=_TRAINING
    )
    num_proposals: int = setting(8, "policy trajectories among the candidates", needs=_AS_ACTING)
    proposal_log_std: tuple[float, ...] = setting(
        (),
        "lowest and highest log std of a Gaussian policy in them; empty: as when acting",
        at_least=None,
        needs=_AS_ACTING | {"num_proposals": NONZERO},
    )
    rescore_proposals: bool = setting(
        False,
        "score proposals in every round, not once",
        needs=_AS_ACTING | {"num_proposals": NONZERO},
    )
    extra_iterations: int = setting(0, "further rounds in large action spaces", needs=_TRAINING)
    extra_iterations_action_dim: int = setting(
        20, "which have that many dims", needs=_TRAINING | {"extra_iterations": NONZERO}
    )
    temperature: float = setting(0.5, "of the elites' weights", above=0, needs=_TRAINING_WEIGHTS)
    temperature_mode: str = setting(
        "divide",
        "weights exp(temperature v), or exp(v / temperature)",
        choices=TEMPERATURE_MODES,
        needs=_TRAINING_WEIGHTS,
    )
    noise_beta: float = setting(
        2.0,
        "noise of power 1 / frequency^noise_beta along a plan",
        needs=_TRAINING | _ICEM | {"trains_far": True},
    )
    keep_elites: float = setting(
        0.3,
        "share of a round's elites that compete in the next",
        at_most=1,
        needs=_TRAINING | _ICEM | {"trains_again": True},
    )
    momentum: float = setting(
        0.1,
        "share of the old mean and std in the refitted",
        at_most=0.999,
        needs=_TRAINING | _ICEM,
    )
    min_std: float = setting(
        0.05, "lowest refitted standard deviation, in action units", above=0, needs=_TRAINING
    )
    max_std: float = setting(
        1.0,
        "highest refitted standard deviation, and where an acting search of continuous actions "
        "starts",
        needs=_TRAINING,
    )
    horizon: int = setting(1, "agent steps that it looks ahead", at_least=1, needs=_TRAINING)
    std_coef: float = setting(
        0.0,
        "of the ensembles' std in scores: above 0 optimism, below 0 pessimism",
        at_least=None,
        needs=_SAMPLED | {"has_ensembles": True},
    )
    aggregate: bool = setting(
        False,
        "score by the mean of the estimates of all horizons, not the last alone",
        needs=_TRAINING | {"trains_ahead": True},
    )
    disagreement: float = setting(
        0.0,
        "bonus for latents that dynamics heads disagree on",
        at_least=None,
        needs=_SAMPLED | {"several_dynamics": True},
    )
    discount: float = setting(0.0, "inside plans; 0: the agent's", at_most=1, needs=_SAMPLED)

    def check(self) -> Iterator[str]:
        yield from _check_planner(self, "training_planner")
        if self.search == "acting" and self.num_proposals >= self.num_samples:
            yield (
                f"num_proposals={self.num_proposals} must be less than training_planner.num_samples"
                f"={self.num_samples}: lower it or raise num_samples"
            )
        bounds = self.proposal_log_std
        if bounds and (len(bounds) != 2 or bounds[0] > bounds[1]):
            yield f"proposal_log_std={bounds}: give a lowest and a highest value, or none"
