"""Environments whose steps give what is not finite: told once, and an end."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

_ENOUGH = 10  # episodes, all of them faulty, after which nothing better is expected


class Faults:
    """Counts the episodes of one seed of a run that a fault ended.

    Args:
        task: `EnvSpec.name`.
    """

    def __init__(self, task: str) -> None:
        self._task, self._faults, self._episodes = task, 0.0, 0.0

    def see(self, metrics: Mapping[str, float], steps: int) -> None:
        """Take the metrics of an interval that ended at `steps`; warn of the first fault.

        Raises:
            FloatingPointError: where all episodes so far, at least ten, ended in a fault.
        """
        faults = metrics.get("faults", 0)
        if faults and not self._faults:
            warnings.warn(
                f"{faults:.0f} environment steps up to step {steps} were not finite: their "
                "episodes were cut off and they are not learned from (later ones are only "
                "counted, as `faults`)",
                stacklevel=3,
            )
        self._faults += faults
        self._episodes += metrics.get("episodes", 0)
        if _ENOUGH <= self._episodes <= self._faults:
            raise FloatingPointError(
                f"each of the {self._episodes:.0f} episodes up to step {steps} ended in an "
                f"observation or a reward that is not finite: mend env.name={self._task!r}, there "
                "is nothing to learn from"
            )
