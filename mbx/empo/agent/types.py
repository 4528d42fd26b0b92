"""Types that the parts of EMPO's agent share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import flax.struct

from mbx.empo.agent.models import Model
from mbx.empo.agent.settings import Settings
from mbx.empo.power import curriculum
from mbx.empo.power.codec import Codec, Records
from mbx.empo.power.equations import PowerParams
from mbx.empo.power.worlds import World
from mbx.types import Array, Params, Record


@flax.struct.dataclass
class TrainState(Record):
    """All that learning changes."""

    params: Params  # "v_h_e", "q_r" and perhaps "x_h", "u_r", "v_r", networks' weights or tables
    target: Params | None  # the frozen copy that targets are made with; None: `params`
    opt_state: Any  # of the optimisers, or how often each table entry was visited
    step: Array  # int32, updates made

    @property
    def frozen(self) -> Params:
        """The parameters that targets and policies are made with."""
        return self.params if self.target is None else self.target


@dataclasses.dataclass(frozen=True)
class Problem:
    """A world with the settings it is learned by, and what follows from both."""

    settings: Settings  # the run's
    world: World  # the world
    params: PowerParams  # of the equations, the world's own or those of `settings.power`
    curriculum: curriculum.Curriculum  # `settings.curriculum` for the networks that exist
    model: Model  # networks or tables
    codec: Codec  # observations
    records: Records | None  # successors that observations end with in `empo:NAME@stored`
    capacity: int | None  # successors of a batch for which there is room; None: every slot
    target_intervals: Mapping[str, int]  # updates between hard copies, by name; "rows" never move
    held_out: World | None = None  # the world begun on maps that nobody trains on
    target_rate: float = 0.0  # share of the way that the copy goes with every update; 0: none

    @property
    def num_robot_actions(self) -> int:
        """Joint robot actions R."""
        return self.world.num_actions**self.world.num_robots

    def at(self, step: Array) -> PowerParams:
        """The parameters in force at a learner's step: discounts and beta_r may still rise."""
        plan, p = self.curriculum, self.params
        return p._replace(
            gamma_h=curriculum.gamma_h(plan, step, p.gamma_h),
            gamma_r=curriculum.gamma_r(plan, step, p.gamma_r),
            beta_r=curriculum.beta_r(plan, step, p.beta_r),
        )
