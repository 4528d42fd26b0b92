"""A world with what is known of it: what environments carry to the agent."""

from __future__ import annotations

import dataclasses

from mbx.empo.power.equations import PowerParams
from mbx.empo.power.solver import Solution
from mbx.empo.power.worlds import TabularWorld, World


@dataclasses.dataclass(frozen=True, eq=False)
class NamedWorld:
    """A world with what is known of it.

    Attributes:
        world: what the agent trains on.
        params: the parameters it comes with; None: the configuration's.
        table: its transitions, where it is small enough to be listed.
        solution: their exact solution.
        held_out: the same world begun on maps that nobody trains on; None where there are none.
        prior: whose humans these are, a model of `mbx.power.HumanModel` but "auto"; "": one's own.
    """

    world: World
    params: PowerParams | None = None
    table: TabularWorld | None = None
    solution: Solution | None = None
    held_out: World | None = None
    prior: str = ""
