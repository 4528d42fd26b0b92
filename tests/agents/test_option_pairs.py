"""Pairs of settings: with any option chosen, no other setting is silent.

For each agent, each value of each setting that chooses a mechanism is combined with each setting
that has an effect beside it. The second one's other value changes a program or is refused by name.
"""

from __future__ import annotations

import pytest

from mbx.agents.dreamer import agent as dreamer
from mbx.settings import from_dict, inactive
from tests.agents import test_dreamer_settings as of_dreamer
from tests.agents import test_tdmpc_settings as of_tdmpc
from tests.empo import test_settings as of_empo
from tests.helpers import option_values, replaced, silent_settings

# Data types and sizes change every program and leave no setting without effect.
NO_MECHANISM = {
    "model.size",
    "model.dtype",
    "model.policy_dtype",
    "replay.actions_dtype",
    "replay.values_dtype",
    "model.bins",
}


def trace_dreamer(settings):
    specs = (of_dreamer.VECTOR, of_dreamer.IMAGE)
    return [of_dreamer.trace(dreamer.resolve(settings, spec), spec) for spec in specs]


AGENTS = {
    "tdmpc": (
        of_tdmpc.NAMES,
        [of_tdmpc.settings_of(name) for name in of_tdmpc.FILES],
        of_tdmpc.trace,
        of_tdmpc.OTHER,
    ),
    "dreamer": (of_dreamer.NAMES, [of_dreamer.small({})], trace_dreamer, {}),
    "empo": (
        of_empo.NAMES,
        [from_dict(of_empo.Settings(), base) for base in of_empo.BASES],
        of_empo.trace,
        of_empo.OTHER,
    ),
}


def combinations():
    """(agent, settings) with one option changed, in the first base in which it may be."""
    for agent, (names, bases, _, _) in AGENTS.items():
        for declared in names:
            if declared.name in NO_MECHANISM:
                continue
            section, _, name = declared.name.partition(".")
            for value in option_values(declared):
                for base in bases:
                    now = getattr(getattr(base, section), name)
                    if now == value or declared.name in inactive(base):
                        continue
                    try:
                        settings = replaced(base, declared.name, value)
                    except ValueError:
                        continue
                    yield pytest.param(agent, settings, id=f"{agent}-{declared.name}={value}")
                    break


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "settings"), list(combinations()))
def test_no_setting_is_silent_beside_another(agent, settings):
    names, _, trace, others = AGENTS[agent]
    assert silent_settings(settings, names, trace, others) == []
