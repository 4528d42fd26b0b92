"""The TD-MPC agent's settings of its two planners.

The conditions that `needs` names are in `settings`. Nothing here loads JAX.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from mbx.settings import NONZERO, setting

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


def _check_proposals(planner: Planner | TrainingPlanner, name: str) -> Iterator[str]:
    if planner.num_proposals >= planner.num_samples:
        yield (
            f"num_proposals={planner.num_proposals} must be less than {name}.num_samples="
            f"{planner.num_samples}: lower it or raise num_samples"
        )


_WEIGHTS = {"weighs_elites": True}
_CHOICE = {"chooses_elites": True}


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner that acts in the environment."""

    name: str = setting(
        "mppi",
        "Search method: mppi, cem, icem, predictive, an optimiser of evosax (evosax:CMA_ES), or a "
        "registered planner.",
    )
    horizon: int = setting(3, "Agent steps that a plan looks ahead.", at_least=1)
    iterations: int = setting(3, "Rounds of sampling and refitting.", at_least=1)
    num_samples: int = setting(128, "Candidate plans a round, proposals included.", at_least=1)
    num_elites: int = setting(16, "Best candidates that the plan is refitted to.", at_least=1)
    num_proposals: int = setting(8, "Policy trajectories among the candidates.")
    proposal_noise: float = setting(
        0.0,
        "Standard deviation of noise added to the policy's trajectories; with discrete actions "
        "the share that is drawn uniformly.",
        needs={"num_proposals": NONZERO},
    )
    prior_start: int = setting(
        0,
        "Updates until which plans start from the policy's Gaussian.",
        needs={"prior_updates": NONZERO},
    )
    prior_updates: int = setting(
        0, "Updates over which that fades (NEWT); 0 = plans never start there."
    )
    rescore_proposals: bool = setting(
        False, "Score proposals in every round, not once.", needs={"num_proposals": NONZERO}
    )
    temperature: float = setting(
        0.5, "Temperature of the elites' weights.", above=0, needs=_WEIGHTS
    )
    temperature_mode: str = setting(
        "multiply",
        "Elite weights: exp(temperature v), or exp(v / temperature).",
        choices=TEMPERATURE_MODES,
        needs=_WEIGHTS,
    )
    min_std: float = setting(
        0.05,
        "Lowest refitted standard deviation, in action units; its square is the lowest "
        "probability of a discrete action.",
        above=0,
    )
    max_std: float = setting(
        2.0, "Highest standard deviation, with which plans of continuous actions start."
    )
    action_noise: float = setting(
        1.0,
        "Exploration noise in training, as a factor of the refitted standard deviation; with "
        "discrete actions the share drawn from the refitted probabilities.",
    )
    selection: str = setting(
        "sample",
        "Action in training: an elite drawn by weight, the best, or their mean.",
        choices=SELECTIONS,
        needs=_CHOICE,
    )
    evaluation_selection: str = setting(
        "mean", "Action in evaluations, as selection.", choices=SELECTIONS, needs=_CHOICE
    )
    extra_iterations: int = setting(2, "Additional rounds in large action spaces.")
    extra_iterations_action_dim: int = setting(
        20,
        "Action dims from which an action space counts as large.",
        needs={"extra_iterations": NONZERO},
    )
    std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in scores: above 0 optimism, below 0 "
        "pessimism.",
        at_least=None,
        needs={"has_ensembles": True},
    )
    evaluation_std_coef: float = setting(
        0.0, "std_coef in evaluations.", at_least=None, needs={"has_ensembles": True}
    )
    aggregate: bool = setting(
        False,
        "Score by the mean of the estimates of all horizons, not the last alone.",
        needs={"plans_ahead": True},
    )
    disagreement: float = setting(
        0.0,
        "Bonus for latents that dynamics heads disagree on.",
        at_least=None,
        needs={"several_dynamics": True},
    )
    discount: float = setting(0.0, "Discount inside plans; 0 = the agent's.", at_most=1)

    def check(self) -> Iterator[str]:
        yield from _check_planner(self, "planner")
        yield from _check_proposals(self, "planner")


_TRAINING = {"enabled": True, "reads_plans": True}
_TRAINING_WEIGHTS = _TRAINING | {"training_weighs_elites": True}
_SAMPLED = {"reads_plans": True}
_AS_ACTING = _TRAINING | {"search": "acting"}
_PROPOSED = _AS_ACTING | {"num_proposals": NONZERO}


@dataclasses.dataclass(frozen=True)
class TrainingPlanner:
    """The planner that makes training targets: candidate actions with their values."""

    enabled: bool = setting(
        True,
        "Store planner targets in the replay; without, one round of policy samples is scored again "
        "in every update.",
        needs=_SAMPLED,
    )
    search: str = setting(
        "policy",
        "Where the search begins: policy = rounds refit samples of the policy; acting = from mean "
        "0 and max_std, with policy trajectories (without proposal noise) in every round.",
        choices=("policy", "acting"),
        needs=_TRAINING,
    )
    name: str = setting(
        "mppi", "Search method, as planner.name, which it does not follow.", needs=_TRAINING
    )
    iterations: int = setting(3, "Rounds of sampling and refitting.", at_least=1, needs=_TRAINING)
    num_samples: int = setting(32, "Candidates a round.", at_least=1, needs=_SAMPLED)
    num_elites: int = setting(
        8, "Best candidates that the plan is refitted to.", at_least=1, needs=_TRAINING
    )
    num_proposals: int = setting(8, "Policy trajectories among the candidates.", needs=_AS_ACTING)
    proposal_log_std: tuple[float, ...] = setting(
        (),
        "Lowest and highest log standard deviation of a Gaussian policy's trajectories; empty = "
        "the model's.",
        at_least=None,
        needs=_PROPOSED,
    )
    rescore_proposals: bool = setting(
        False, "Score proposals in every round, not once.", needs=_PROPOSED
    )
    extra_iterations: int = setting(0, "Additional rounds in large action spaces.", needs=_TRAINING)
    extra_iterations_action_dim: int = setting(
        20,
        "Action dims from which an action space counts as large.",
        needs=_TRAINING | {"extra_iterations": NONZERO},
    )
    temperature: float = setting(
        0.5, "Temperature of the elites' weights.", above=0, needs=_TRAINING_WEIGHTS
    )
    temperature_mode: str = setting(
        "divide",
        "Elite weights: exp(temperature v), or exp(v / temperature).",
        choices=TEMPERATURE_MODES,
        needs=_TRAINING_WEIGHTS,
    )
    min_std: float = setting(
        0.05, "Lowest refitted standard deviation, in action units.", above=0, needs=_TRAINING
    )
    max_std: float = setting(
        1.0,
        "Highest refitted standard deviation, with which an acting search of continuous actions "
        "starts.",
        needs=_TRAINING,
    )
    horizon: int = setting(1, "Agent steps that a plan looks ahead.", at_least=1, needs=_TRAINING)
    std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in scores: above 0 optimism, below 0 "
        "pessimism.",
        at_least=None,
        needs=_SAMPLED | {"has_ensembles": True},
    )
    aggregate: bool = setting(
        False,
        "Score by the mean of the estimates of all horizons, not the last alone.",
        needs=_TRAINING | {"trains_ahead": True},
    )
    disagreement: float = setting(
        0.0,
        "Bonus for latents that dynamics heads disagree on.",
        at_least=None,
        needs=_SAMPLED | {"several_dynamics": True},
    )
    discount: float = setting(
        0.0, "Discount inside plans; 0 = the agent's.", at_most=1, needs=_SAMPLED
    )

    def check(self) -> Iterator[str]:
        yield from _check_planner(self, "training_planner")
        if self.search == "acting":
            yield from _check_proposals(self, "training_planner")
        bounds = self.proposal_log_std
        if bounds and (len(bounds) != 2 or bounds[0] > bounds[1]):
            yield f"proposal_log_std={bounds}: give a lowest and a highest value, or none"
