"""A world with what is known of it, and the choice of who lives in it."""

from __future__ import annotations

import dataclasses

from mbx.empo.power.equations import PowerParams
from mbx.empo.power.solver import Solution
from mbx.empo.power.worlds import TabularWorld, World

MODELS = ("auto", "exact", "paths", "uniform", "learned")


@dataclasses.dataclass(frozen=True)
class HumanModel:
    """A choice of human prior."""

    # "exact", eqs. (1) to (3) solved, of worlds that are listed; "paths", shortest ways (grids);
    # "uniform"; "learned", by a network; "auto", exact where the world is small, else the best
    model: str = "auto"
    beta: float = 3.0  # inverse temperature of an action in "paths"
    habit: str = "uniform"  # pi^0 of eq. (2), for "exact"; or "paths"
    max_states: int = 5_000  # most states that "auto" and "exact" list
    network: str = ""  # path of the file of "learned"

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"humans.model={self.model!r}: choose one of {MODELS}")
        if self.habit not in ("uniform", "paths"):
            raise ValueError(f"humans.habit={self.habit!r}: choose uniform or paths")
        if not 0.0 <= self.beta < float("inf"):
            raise ValueError(f"humans.beta={self.beta}: give a number of at least 0")
        if self.max_states < 1:
            raise ValueError(f"humans.max_states={self.max_states}: give at least 1")


@dataclasses.dataclass(frozen=True, eq=False)
class NamedWorld:
    """A world with what is known of it: what environments carry to the agent."""

    world: World  # what the agent trains on
    params: PowerParams | None = None  # the parameters it comes with; None: the configuration's
    table: TabularWorld | None = None  # its transitions, where it is small enough to be listed
    solution: Solution | None = None  # their exact solution
    held_out: World | None = None  # the same world begun on maps that nobody trains on
    prior: str = ""  # the humans' model, of `HumanModel` but for "auto"; "": a custom one
