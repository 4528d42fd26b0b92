"""Planners by name, for `planner.name` and `training_planner.name` of the TD-MPC agent.

    planners.register("mine", my_plan)          # a function with the signature of mppi.plan
    python -m experiments.train --import=my_module --config.planner.name=mine

Built in are `mppi`, `cem`, `icem`, `predictive`, and the optimizers of evosax as `evosax:CMA_ES`,
`evosax:SNES`, … (`mbx.planners.evosax`). Warm start, policy proposals and prior, exploration noise,
stored targets and experts, and reanalyze work with custom planners, too.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol

from mbx import categorical, mppi
from mbx.mppi import Array, MPPIConfig, Plan, ScoreFn


class PlanFn(Protocol):
    """A planner with the arguments and the result of `mppi.plan`."""

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
    """A planner, and the class of its settings."""

    plan: PlanFn
    # `MPPIConfig` or a subclass; settings of the same names fill its fields
    config: type[MPPIConfig] = MPPIConfig
    discrete: PlanFn | None = None  # the function for discrete actions
    begins: bool = True  # accepts given candidates (`initial`)


_KNOWN: dict[str, Planner] = {"mppi": Planner(mppi.plan, discrete=categorical.plan)}
# Module of this package by planner, imported when the planner is first named.
_MODULES = {"cem": "cem", "icem": "cem", "predictive": "predictive"}
_EVOSAX = "evosax:"


def register(
    name: str, plan: PlanFn, config: type[MPPIConfig] = MPPIConfig, discrete: PlanFn | None = None
) -> None:
    """Register a custom planner for `planner.name`; arguments as in `Planner`.
    It replaces a custom planner of that name. Raises ValueError for a built-in name.
    """
    if name == "mppi" or name in _MODULES or name.startswith(_EVOSAX):
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
    **given: Any,
) -> Plan:
    """`mppi.plan` by the planner of a name, whose result is checked during tracing.

    Args:
        discrete: plan discrete actions (`mbx.categorical`).
        given: further arguments of `mppi.plan`.

    Raises:
        ValueError: for an unknown name, a planner without discrete actions, or a result that is not
            a `Plan` of the expected shapes; names planner, field, actual and expected value.
    """
    found = find(name)
    search = found.discrete if discrete else found.plan
    if search is None:
        able = tuple(known for known, planner in _KNOWN.items() if planner.discrete)
        raise ValueError(
            f"planner.name={name!r} plans continuous actions alone: choose one of {able}, or "
            "register yours with discrete="
        )
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
    """The planner of a name. Raises ValueError for an unknown one, naming those available."""
    if name.startswith(_EVOSAX):
        evosax = importlib.import_module(f"{__name__}.evosax")
        own = name.removeprefix(_EVOSAX)
        return Planner(evosax.planner(own), begins=evosax.holds_population(own))
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{_MODULES[name]}").PLANNERS[name]
    if name not in _KNOWN:
        known = (*_KNOWN, *_MODULES, f"{_EVOSAX}ALGORITHM")
        raise ValueError(
            f"planner.name={name!r}: choose one of {known}, or register your own before"
        )
    return _KNOWN[name]
