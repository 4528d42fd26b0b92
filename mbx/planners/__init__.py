"""Planners by name, for `planner.name` and `training_planner.name` of the TD-MPC agent.

    planners.register("mine", my_plan)          # a function with the signature of mppi.plan
    python -m experiments.train --import=my_module --config.planner.name=mine

With mbx come `mppi`, `cem`, `icem`, `predictive`, and the optimisers of evosax as `evosax:CMA_ES`,
`evosax:SNES`, … (`mbx.planners.evosax`).

A custom planner keeps what surrounds it: warm start, the policy's proposals and prior, exploration
noise, stored targets and experts, reanalyze.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from mbx import categorical, mppi
from mbx.mppi import Array, MPPIConfig, Plan, ScoreFn
from mbx.planners import bases, cem, evosax, predictive


class PlanFn(Protocol):
    """A planner: see `mppi.plan`, of which arguments and result are the same."""

    def __call__(
        self,
        key: Array,
        score_fn: ScoreFn,
        mean: Array,
        std: Array,
        /,
        *,
        proposals: Array | None = None,
        initial: Array | None = None,
        action_mask: Array | None = None,
        config: Any,
    ) -> Plan: ...


class Planner(NamedTuple):
    """A planner, and the class of its settings.

    Attributes:
        plan: the function.
        config: `MPPIConfig`, or a class derived from it whose further fields are read off the
            settings of the same names.
        discrete: the function for discrete actions; None: it has none.
        begins: whether it can begin with candidates that it is given (`initial`).
    """

    plan: PlanFn
    config: type[MPPIConfig] = MPPIConfig
    discrete: PlanFn | None = None
    begins: bool = True


_KNOWN: dict[str, Planner] = {
    "mppi": Planner(mppi.plan, discrete=categorical.plan),
    "cem": Planner(cem.cem),
    "icem": Planner(cem.icem, cem.ICEMConfig),
    "predictive": Planner(predictive.plan),
}
_OURS = tuple(_KNOWN)
_EVOSAX = "evosax:"


def register(
    name: str,
    plan: PlanFn,
    config: type[MPPIConfig] = MPPIConfig,
    discrete: PlanFn | None = None,
) -> None:
    """Register a custom planner; one of that name is replaced, but none that comes with mbx.

    Args:
        name: for `planner.name` and `training_planner.name`.
        plan, config, discrete: see `Planner`.

    Raises:
        ValueError: for a name that comes with mbx.
    """
    if name in _OURS or name.startswith(_EVOSAX):
        raise ValueError(f"planner {name!r} comes with mbx: choose another name")
    _KNOWN[name] = Planner(plan, config, discrete)


def plan(
    name: str,
    key: Array,
    score_fn: ScoreFn,
    mean: Array,
    std: Array,
    *,
    discrete: bool = False,
    basis: bases.Basis | None = None,
    **given: Any,
) -> Plan:
    """`mppi.plan` by the planner of a name, whose result is checked while it is traced.

    Args:
        name: of the planner.
        key, score_fn, mean, std, given: as `mppi.plan` takes them.
        discrete: by its function for discrete actions (`mbx.categorical`).
        basis: what plans are made of (`mbx.planners.bases`); None: of one action a step.

    Raises:
        ValueError: for an unknown name, for one that has no such function, and where it returned no
            `Plan` or one of other shapes; names planner, field, what was got and what is wanted.
    """
    found = find(name)
    search = found.discrete if discrete else found.plan
    if search is None:
        able = tuple(known for known, planner in _KNOWN.items() if planner.discrete)
        raise ValueError(
            f"planner.name={name!r} plans continuous actions alone: choose one of {able}, or "
            "register yours with discrete="
        )
    if basis is not None:
        search = bases.over(search, basis)
    made = search(key, score_fn, mean, std, **given)
    if not isinstance(made, Plan):
        raise ValueError(f"planner {name!r} returned a {type(made).__name__}, wanted an mppi.Plan")
    (batch, horizon, action_dim), num = mean.shape, given["config"].num_samples
    for fields, axes, want in (
        (("action", "chosen"), "[B, A]", (batch, action_dim)),
        (("mean", "std"), "[B, T, A]", mean.shape),
        (("actions",), "[B, N, T, A]", (batch, num, horizon, action_dim)),
        (("values",), "[B, N]", (batch, num)),
    ):
        for field in fields:
            got = getattr(getattr(made, field), "shape", None)
            if got != want:
                raise ValueError(
                    f"planner {name!r}: {field} of its Plan has the shape {list(got or ())}, "
                    f"wanted {axes} = {list(want)}"
                )
    return made


def find(name: str) -> Planner:
    """The planner of a name.

    Raises:
        ValueError: for an unknown one, naming those there are.
    """
    if name.startswith(_EVOSAX):
        own = name.removeprefix(_EVOSAX)
        return Planner(evosax.planner(own), begins=evosax.holds_population(own))
    if name not in _KNOWN:
        known = (*_KNOWN, f"{_EVOSAX}ALGORITHM")
        raise ValueError(
            f"planner.name={name!r}: choose one of {known}, or register your own before"
        )
    return _KNOWN[name]
