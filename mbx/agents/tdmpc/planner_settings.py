"""TD-MPC's planner settings; the conditions that `needs` names are in `settings`. Loads no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

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


# Help and limits of the settings that both planners have.
_SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "horizon": ("Agent steps that a plan looks ahead.", dict(at_least=1)),
    "iterations": ("Rounds of sampling and refitting.", dict(at_least=1)),
    "num_samples": ("Candidate plans a round, proposals included.", dict(at_least=1)),
    "num_elites": ("Best candidates that the plan is refitted to.", dict(at_least=1)),
    "num_proposals": ("Policy trajectories among the candidates.", {}),
    "rescore_proposals": ("Proposals scored in every round, not once.", {}),
    "extra_iterations": ("Additional rounds in large action spaces.", {}),
    "extra_iterations_action_dim": ("Action dims from which a space counts as large.", {}),
    "temperature": ("Temperature of the elites' weights.", dict(above=0)),
    "temperature_mode": (
        "Elite weights: exp(temperature v), or exp(v / temperature).",
        dict(choices=TEMPERATURE_MODES),
    ),
    "min_std": (
        "Lowest refitted standard deviation, in action units; its square is the lowest probability "
        "of a discrete action.",
        dict(above=0),
    ),
    "max_std": (
        "Highest standard deviation, with which a search of continuous actions starts that does "
        "not start from the policy.",
        {},
    ),
    "std_coef": (
        "Weight of the ensembles' standard deviation in scores: above 0 optimism, below 0 "
        "pessimism.",
        dict(at_least=None),
    ),
    "aggregate": ("Score by the mean of the estimates of all horizons, not the last alone.", {}),
    "disagreement": ("Bonus for latents that dynamics heads disagree on.", dict(at_least=None)),
    "discount": ("Discount inside plans; 0 = the agent's.", dict(at_most=1)),
}


def _shared(name: str, default: Any, needs: str | dict[str, Any] | None = None) -> Any:
    help, limits = _SHARED[name]
    return setting(default, help, needs=needs, **limits)


_PROPOSED = {"num_proposals": NONZERO}
_EXTRA = {"extra_iterations": NONZERO}
_ENSEMBLES = {"has_ensembles": True}
_SEVERAL = {"several_dynamics": True}


@dataclasses.dataclass(frozen=True)
class Planner:
    """The planner that acts in the environment."""

    name: str = setting(
        "mppi",
        "Search method: mppi, cem, icem, predictive, an optimiser of evosax (evosax:CMA_ES), or a "
        "registered planner.",
    )
    horizon: int = _shared("horizon", 3)
    iterations: int = _shared("iterations", 3)
    num_samples: int = _shared("num_samples", 128)
    num_elites: int = _shared("num_elites", 16)
    num_proposals: int = _shared("num_proposals", 8)
    proposal_noise: float = setting(
        0.0,
        "Standard deviation of noise added to the policy's trajectories; with discrete actions "
        "the share that is drawn uniformly.",
        needs=_PROPOSED,
    )
    prior_start: int = setting(
        0,
        "Updates until which plans start from the policy's Gaussian.",
        needs={"prior_updates": NONZERO},
    )
    prior_updates: int = setting(
        0, "Updates over which the start from the policy's Gaussian fades (NEWT); 0 = none."
    )
    rescore_proposals: bool = _shared("rescore_proposals", False, _PROPOSED)
    temperature: float = _shared("temperature", 0.5, "weighs_elites")
    temperature_mode: str = _shared("temperature_mode", "multiply", "weighs_elites")
    min_std: float = _shared("min_std", 0.05)
    max_std: float = _shared("max_std", 2.0)
    action_noise: float = setting(
        1.0,
        "Exploration noise in training, as a factor of the refitted standard deviation; with "
        "discrete actions the share drawn from the refitted probabilities.",
    )
    selection: str = setting(
        "sample",
        "Action in training: an elite drawn by weight, the best, or their mean.",
        choices=SELECTIONS,
        needs="chooses_elites",
    )
    evaluation_selection: str = setting(
        "mean",
        "Action in evaluations: a choice as in planner.selection.",
        choices=SELECTIONS,
        needs="chooses_elites",
    )
    extra_iterations: int = _shared("extra_iterations", 2)
    extra_iterations_action_dim: int = _shared("extra_iterations_action_dim", 20, _EXTRA)
    std_coef: float = _shared("std_coef", 0.0, _ENSEMBLES)
    evaluation_std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in scores during evaluations.",
        at_least=None,
        needs=_ENSEMBLES,
    )
    aggregate: bool = _shared("aggregate", False, "plans_ahead")
    disagreement: float = _shared("disagreement", 0.0, _SEVERAL)
    discount: float = _shared("discount", 0.0)

    def check(self) -> Iterator[str]:
        yield from _check_planner(self, "planner")
        yield from _check_proposals(self, "planner")


_SAMPLED = {"reads_plans": True}
_TRAINING = {"enabled": True, "reads_plans": True}
_TRAINING_WEIGHTS = _TRAINING | {"training_weighs_elites": True}
_AS_ACTING = _TRAINING | {"search": "acting"}


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
    iterations: int = _shared("iterations", 3, _TRAINING)
    num_samples: int = _shared("num_samples", 32, _SAMPLED)
    num_elites: int = _shared("num_elites", 8, _TRAINING)
    num_proposals: int = _shared("num_proposals", 8, _AS_ACTING)
    proposal_log_std: tuple[float, ...] = setting(
        (),
        "Lowest and highest log standard deviation of a Gaussian policy's trajectories; empty = "
        "the model's.",
        at_least=None,
        needs=_AS_ACTING | _PROPOSED,
    )
    rescore_proposals: bool = _shared("rescore_proposals", False, _AS_ACTING | _PROPOSED)
    extra_iterations: int = _shared("extra_iterations", 0, _TRAINING)
    extra_iterations_action_dim: int = _shared(
        "extra_iterations_action_dim", 20, _TRAINING | _EXTRA
    )
    temperature: float = _shared("temperature", 0.5, _TRAINING_WEIGHTS)
    temperature_mode: str = _shared("temperature_mode", "divide", _TRAINING_WEIGHTS)
    min_std: float = _shared("min_std", 0.05, _TRAINING)
    max_std: float = _shared("max_std", 1.0, _TRAINING)
    horizon: int = _shared("horizon", 1, _TRAINING)
    std_coef: float = _shared("std_coef", 0.0, _SAMPLED | _ENSEMBLES)
    aggregate: bool = _shared("aggregate", False, _TRAINING | {"trains_ahead": True})
    disagreement: float = _shared("disagreement", 0.0, _SAMPLED | _SEVERAL)
    discount: float = _shared("discount", 0.0, _SAMPLED)

    def check(self) -> Iterator[str]:
        yield from _check_planner(self, "training_planner")
        if self.search == "acting":
            yield from _check_proposals(self, "training_planner")
        bounds = self.proposal_log_std
        if bounds and (len(bounds) != 2 or bounds[0] > bounds[1]):
            yield f"proposal_log_std={bounds}: give a lowest and a highest value, or none"
