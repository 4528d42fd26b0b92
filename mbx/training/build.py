"""From a configuration to an agent and a schedule, with every mistake told before any compile.

`register` adds agents of your own (examples/own_agent.py).

Their settings are declared in the agents' packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mbx import settings
from mbx.agents import dreamer, empo, tdmpc
from mbx.agents.base import Agent
from mbx.agents.empo.settings import Settings as EmpoSettings
from mbx.envs.base import EnvSpec
from mbx.training.state import Schedule

__all__ = [
    "build_agent",
    "build_schedule",
    "register",
]

Config = Mapping[str, Any]
Builder = Callable[[Config, EnvSpec], Agent]

_BUILDERS: dict[str, Builder] = {
    "tdmpc": lambda config, spec: tdmpc.make_agent(
        settings.from_dict(tdmpc.Settings(), config), spec
    ),
    "empo": lambda config, spec: empo.make_agent(settings.from_dict(EmpoSettings(), config), spec),
    "dreamer": lambda config, spec: dreamer.make_agent(
        settings.from_dict(dreamer.Settings(), config), spec
    ),
}


def register(name: str, builder: Builder) -> None:
    """Add an agent: `config["agent"] = name` then means `builder(config, spec)`.

    Its train state needs a field `params`. Its configuration needs the sections env, train, eval,
    checkpoint and replay as in `configs/tdmpc.py`, and reanalyze where it refreshes targets.
    """
    _BUILDERS[name] = builder


def build_agent(config: Config, spec: EnvSpec) -> Agent:
    """The agent that `config["agent"]` names, for an environment.

    Raises ValueError, naming the field, the value and what would do, for impossible settings.
    """
    if config["agent"] not in _BUILDERS:
        raise ValueError(
            f"config.agent={config['agent']!r}: choose one of {tuple(_BUILDERS)}, or register your "
            "own before"
        )
    return _BUILDERS[config["agent"]](config, spec)


def build_schedule(config: Config, spec: EnvSpec, num_envs: int) -> Schedule:
    """Step counts of the configuration (environment steps) as agent steps.

    Raises ValueError when the seed phase is too short to sample from or the ratio is negative.
    """
    train, seed_steps = config["train"], config["train"]["seed_steps"] // spec.action_repeat
    if config["agent"] == "dreamer":
        own = settings.from_dict(dreamer.Settings(), config)
        needed, length = own.rows_before_learning(), own.loss.batch_length
        if seed_steps < needed:
            raise ValueError(
                f"train.seed_steps={train['seed_steps']} gives {seed_steps} agent steps, but "
                f"sequences of {length} rows in {num_envs} environments need {needed}: raise it"
            )
        return Schedule(
            seed_steps=seed_steps,
            pretrain_updates=train["pretrain_updates"],
            utd_ratio=own.updates_per_step(),
            reanalyze_interval=0,
            reanalyze_min_step=0,
        )
    reanalyze = config.get("reanalyze", {"enabled": False, "min_step": 0})
    needed = 2 * num_envs
    if seed_steps < needed:
        raise ValueError(
            f"train.seed_steps={train['seed_steps']} gives {seed_steps} agent steps, but "
            f"{num_envs} environments need at least {needed} before learning: raise it"
        )
    if train["utd_ratio"] < 0:
        raise ValueError(f"train.utd_ratio={train['utd_ratio']}: must not be negative")
    own_batch = reanalyze.get("current_batch", False)
    return Schedule(
        seed_steps=seed_steps,
        pretrain_updates=train["pretrain_updates"],
        utd_ratio=train["utd_ratio"],
        # A learner that renews its own batch needs no passes of the loop beside that.
        reanalyze_interval=0 if own_batch or not reanalyze["enabled"] else reanalyze["interval"],
        reanalyze_min_step=reanalyze["min_step"] // spec.action_repeat,
    )
