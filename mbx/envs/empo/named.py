"""A world under a name, with what is known of it: what `register_world` and `make_world` build."""

from __future__ import annotations

from typing import NamedTuple

from mbx.power.equations import PowerParams
from mbx.power.solver import Solution
from mbx.power.worlds import TabularWorld, World


class NamedWorld(NamedTuple):
    """A world with what is known of it.

    params: the parameters it comes with, None for the configuration's. table, solution: where the
    world is small enough to be listed and solved.
    """

    world: World
    params: PowerParams | None = None
    table: TabularWorld | None = None
    solution: Solution | None = None
