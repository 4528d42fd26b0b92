"""What every number in the log means: `meaning("tdmpc", "loss/value")`.

What all runs log is here, what an agent adds in `KEYS` of its package's module `glossary`. A name
may hold a `*`, which stands for any text. Rows of `train` are means over the interval's updates,
passes or episodes, rows of `eval` belong to one evaluation.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
from collections.abc import Mapping

from mbx.config.agents import PACKAGES

AGENTS = tuple(PACKAGES)

COMMON = {
    "return_mean": "mean return of the evaluation's episodes, without exploration noise: the score "
    "of a run; NaN where an episode was faulty",
    "return_std": "standard deviation of the evaluation's returns",
    "return_min": "lowest return of the evaluation",
    "return_max": "highest return of the evaluation",
    "length_mean": "mean length of the evaluation's episodes, in agent steps",
    "return_mean/*": "mean return of one of several tasks",
    "return_mean_exploring": "mean return of the agent acting as in training (eval.exploring)",
    "faulty_episodes": "evaluation episodes in which the environment gave a number that is not "
    "finite",
    "episode/return": "mean return of the training episodes that ended in the interval, with "
    "exploration",
    "episode/length": "mean length of the training episodes that ended in the interval, in agent "
    "steps",
    "episode/*": "one of the environment's own metrics, mean over the steps of an episode",
    "episode/*_last": "one of the environment's own metrics at the last step of an episode",
    "episodes": "training episodes that ended in the interval",
    "faults": "steps of the interval in which the environment gave a number that is not finite",
    "updates": "gradient steps of the interval",
    "passes": "refreshes of stored planner targets (reanalyze) in the interval",
    "steps_per_second": "environment steps a second, with learning and compilation",
    "agent_steps": "agent steps so far: environment steps divided by the action repeat",
    "seconds": "seconds since this start of the run, with compilation",
    "parameters": "number of learned parameters",
    "num_envs": "environments stepped together",
    "replay/bytes_*": "bytes of a transition in the replay buffer, by what is stored",
}


def own(agent: str) -> Mapping[str, str]:
    """The names that an agent of mbx adds; {} for a custom one."""
    module = f"{PACKAGES.get(agent)}.glossary"
    if agent not in AGENTS or importlib.util.find_spec(module) is None:
        return {}
    return importlib.import_module(module).KEYS


def meaning(agent: str, name: str) -> str | None:
    """The meaning of a logged name; None without a description."""
    known = {**own(agent), **COMMON}
    if name in known:
        return known[name]
    fitting = [pattern for pattern in known if fnmatch.fnmatchcase(name, pattern)]
    return known[max(fitting, key=len)] if fitting else None
