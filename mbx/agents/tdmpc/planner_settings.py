"""TD-MPC's planner settings; the conditions that `needs` names are in `settings`. Loads no JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Self

from mbx.settings import NONZERO, setting


def in_order(section: Any, prefix: str, low: str, high: str, allow_equal: bool = True) -> list[str]:
    """The sentence that refuses a setting above another one of its section, if it is."""
    small, large = getattr(section, low), getattr(section, high)
    if small < large or (allow_equal and small == large):
        return []
    words = "exceeds" if allow_equal else "must be less than"
    return [f"{low}={small} {words} {prefix}.{high}={large}: lower it or raise {high}"]


_PROPOSED = {"num_proposals": NONZERO}
_EXTRA = {"extra_iterations": NONZERO}
_HEADS = {"averages_values": True}
_ENSEMBLES = {"plans_know_std": True}
_SEVERAL = {"several_dynamics": True}


@dataclasses.dataclass(frozen=True)
class Search:
    """What both planners have; the defaults are those of the acting one."""

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
    rescore_proposals: bool = setting(
        False, "Proposals scored in every round, not once.", needs=_PROPOSED
    )
    temperature: float = setting(
        0.5, "Temperature of the elites' weights.", above=0, needs="weighs_elites"
    )
    temperature_mode: str = setting(
        "multiply",
        "Elite weights: exp(temperature v), or exp(v / temperature).",
        choices=("multiply", "divide"),
        needs="weighs_elites",
    )
    min_std: float = setting(
        0.05,
        "Lowest refitted standard deviation, in action units; its square is the lowest probability "
        "of a discrete action.",
        above=0,
    )
    max_std: float = setting(
        2.0,
        "Highest standard deviation, with which a search of continuous actions starts that does "
        "not start from the policy.",
    )
    extra_iterations: int = setting(2, "Additional rounds in large action spaces.")
    extra_iterations_action_dim: int = setting(
        20, "Action dims from which a space counts as large.", needs=_EXTRA
    )
    value_reduction: str = setting(
        "mean",
        "Reduction over the drawn value heads in scores.",
        choices=("min", "mean"),
        needs=_HEADS,
    )
    std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in scores: above 0 optimism, below 0 "
        "pessimism.",
        at_least=None,
        needs=_ENSEMBLES,
    )
    aggregate: bool = setting(
        False,
        "Score by the mean of the estimates of all horizons, not the last alone.",
        needs="plans_ahead",
    )
    disagreement: float = setting(
        0.0, "Bonus for latents that dynamics heads disagree on.", at_least=None, needs=_SEVERAL
    )
    discount: float = setting(0.0, "Discount inside plans; 0 = the agent's.", at_most=1)

    def problems(self, name: str, proposes: bool) -> Iterator[str]:
        """What is wrong with the numbers of planner `name`."""
        yield from in_order(self, name, "num_elites", "num_samples")
        yield from in_order(self, name, "min_std", "max_std")
        if proposes:
            yield from in_order(self, name, "num_proposals", "num_samples", allow_equal=False)


@dataclasses.dataclass(frozen=True)
class Planner(Search):
    """The planner that acts in the environment."""

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
    reuse: float = setting(
        0.0,
        "Distance of the latent from the one that the last plan predicts, up to which that plan is "
        "followed; 0 = plan in every step.",
        needs="can_follow",
    )
    action_noise: float = setting(
        1.0,
        "Exploration noise in training, as a factor of the refitted standard deviation; with "
        "discrete actions the share drawn from the refitted probabilities.",
    )
    evaluation_selection: str = setting(
        "mean",
        "Action in evaluations: an elite drawn by weight (as in training), the best, or their "
        "mean.",
        choices=("sample", "best", "mean"),
        needs="chooses_elites",
    )
    evaluation_std_coef: float = setting(
        0.0,
        "Weight of the ensembles' standard deviation in scores during evaluations.",
        at_least=None,
        needs=_ENSEMBLES,
    )

    def check(self) -> Iterator[str]:
        yield from self.problems("planner", proposes=True)


def _again(name: str, default: Any, needs: dict[str, Any]) -> Any:
    """A setting of `Search` with another default and other conditions."""
    metadata = Search.__dataclass_fields__[name].metadata
    return dataclasses.field(default=default, metadata={**metadata, "needs": needs})


_SAMPLED = {"reads_plans": True}
_TRAINING = {"enabled": True, "reads_plans": True}
_TRAINING_WEIGHTS = _TRAINING | {"training_weighs_elites": True}
_AS_ACTING = _TRAINING | {"search": "acting"}


@dataclasses.dataclass(frozen=True)
class TrainingPlanner(Search):
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
    name: str = _again("name", "mppi", _TRAINING)
    iterations: int = _again("iterations", 3, _TRAINING)
    num_samples: int = _again("num_samples", 32, _SAMPLED)
    num_elites: int = _again("num_elites", 8, _TRAINING)
    num_proposals: int = _again("num_proposals", 8, _AS_ACTING)
    proposal_log_std: tuple[float, ...] = setting(
        (),
        "Lowest and highest log standard deviation of a Gaussian policy's trajectories; empty = "
        "the model's.",
        at_least=None,
        needs=_AS_ACTING | _PROPOSED,
    )
    rescore_proposals: bool = _again("rescore_proposals", False, _AS_ACTING | _PROPOSED)
    extra_iterations: int = _again("extra_iterations", 0, _TRAINING)
    extra_iterations_action_dim: int = _again("extra_iterations_action_dim", 20, _TRAINING | _EXTRA)
    temperature: float = _again("temperature", 0.5, _TRAINING_WEIGHTS)
    temperature_mode: str = _again("temperature_mode", "divide", _TRAINING_WEIGHTS)
    min_std: float = _again("min_std", 0.05, _TRAINING)
    max_std: float = _again("max_std", 1.0, _TRAINING)
    horizon: int = _again("horizon", 1, _TRAINING)
    value_reduction: str = _again("value_reduction", "mean", _SAMPLED | _HEADS)
    std_coef: float = _again("std_coef", 0.0, _SAMPLED | {"training_plans_know_std": True})
    aggregate: bool = _again("aggregate", False, _TRAINING | {"trains_ahead": True})
    disagreement: float = _again("disagreement", 0.0, _SAMPLED | _SEVERAL)
    discount: float = _again("discount", 0.0, _SAMPLED)

    @property
    def as_run(self) -> Self:
        """This planner; one round of horizon 1 of policy samples where it is not enabled."""
        if self.enabled:
            return self
        return dataclasses.replace(self, search="policy", iterations=1, horizon=1)

    @property
    def policy_samples(self) -> int:
        """Samples of the policy in the search's first round."""
        return self.num_proposals if self.as_run.search == "acting" else self.num_samples

    def check(self) -> Iterator[str]:
        yield from self.problems("training_planner", proposes=self.search == "acting")
        bounds = self.proposal_log_std
        if bounds and (len(bounds) != 2 or bounds[0] > bounds[1]):
            yield f"proposal_log_std={bounds}: give a lowest and a highest value, or none"
