"""Pairs of settings: with any option chosen, no other setting is silent.

For each agent, each value of each setting that chooses a mechanism is combined with each setting
that has an effect beside it. The second one's other value changes a program or is refused by name.
"""

from __future__ import annotations

import functools

import pytest

from mbx.settings import flatten, from_dict, inactive, to_dict
from tests.agents import test_dreamer_settings as of_dreamer
from tests.agents import test_tdmpc_settings as of_tdmpc
from tests.empo import test_settings as of_empo
from tests.helpers import other_value

# Data types and sizes change every program and leave no setting without effect.
NO_MECHANISM = {
    "model.size",
    "model.dtype",
    "model.policy_dtype",
    "replay.actions_dtype",
    "replay.values_dtype",
    "model.bins",
}


AGENTS = {
    "tdmpc": (
        of_tdmpc.NAMES,
        [of_tdmpc.settings_of(name) for name in of_tdmpc.FILES],
        of_tdmpc.trace,
        of_tdmpc.OTHER,
    ),
    **{
        f"dreamer {spec.name}": (
            of_dreamer.NAMES,
            [of_dreamer.small({}, spec)],
            functools.partial(of_dreamer.resolved_trace, spec=spec),
            of_dreamer.others(spec),
        )
        for spec in (of_dreamer.VECTOR, of_dreamer.IMAGE)
    },
    "empo": (
        of_empo.NAMES,
        [from_dict(of_empo.Settings(), base) for base in of_empo.BASES],
        of_empo.trace,
        of_empo.OTHER,
    ),
}


def option_values(declared):
    """The legal values of a setting that chooses between mechanisms; none where it is a number."""
    if declared.allowed.startswith("one of"):
        return declared.allowed.removeprefix("one of ").split(", ")
    return [True, False] if isinstance(declared.default, bool) else []


def replaced(settings, name, value):
    """Settings with one other value, read as a configuration is: refused where it has no effect."""
    values = to_dict(settings)
    section, _, key = name.partition(".")
    values[section][key] = value
    return from_dict(type(settings)(), values)


OPTIONS = [
    pytest.param(agent, declared.name, value, id=f"{agent}-{declared.name}={value}")
    for agent, (names, _, _, _) in AGENTS.items()
    for declared in names
    if declared.name not in NO_MECHANISM
    for value in option_values(declared)
]


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "name", "value"), OPTIONS)
def test_no_setting_is_silent_beside_another(agent, name, value):
    names, bases, trace, others = AGENTS[agent]
    for base in bases:  # the first in which the option may be chosen
        try:
            settings = replaced(base, name, value)
            program = trace(settings)
            break
        except ValueError as error:
            refused = str(error)
    else:
        assert name.rpartition(".")[2] in refused
        return
    idle, values, silent = inactive(settings), dict(flatten(to_dict(settings))), []
    for declared in names:
        now, own = values[declared.name], declared.name.rpartition(".")[2]
        other = others.get(declared.name, other_value(declared._replace(default=now)))
        # `model.size` sets sizes that are 0, and the small networks here have none.
        if declared.name in (*idle, name, "model.size") or other == now:
            continue
        try:
            if trace(replaced(settings, declared.name, other)) == program:
                silent.append(f"{declared.name}={other!r}")
        except ValueError as error:  # it has no use here, or another one has none beside it
            assert own in str(error) or "has no effect" in str(error), error
    assert silent == []
