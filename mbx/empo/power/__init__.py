"""EMPO: a robot policy that softly maximises the long-term power of the humans around it.

V_h^e is how well human h reaches goal g, X_h the ability that follows from it, U_r =
-(mean_h X_h^-xi)^eta the robot's intrinsic reward, Q_r and V_r its discounted future, and pi_r
proportional to (-Q_r)^-beta_r its policy. Source: arXiv 2508.00159, docs/sources.md#empo.

    world = TabularWorld(...)              # every transition of a small world
    solution = solve(world, PowerParams()) # exact: the oracle for whatever learns

The public names of `equations`, `solver` (exact), `assistance` (robots that know the goals),
`worlds`, `codec` (states as replay rows), `curriculum` (schedules of training) and `named` (what
environments carry to the agent).
"""

from mbx.empo.power import curriculum
from mbx.empo.power.assistance import Assistance, solve_assistance
from mbx.empo.power.codec import Codec, Record, make_codec, make_records
from mbx.empo.power.curriculum import Curriculum
from mbx.empo.power.equations import (
    ABILITY_FLOOR,
    PowerParams,
    aggregate_ability,
    attained,
    check_params,
    human_aggregate,
    intrinsic_reward,
    q_r_target,
    q_to_z,
    robot_policy,
    soft_clamp,
    v_h_e_target,
    z_to_q,
)
from mbx.empo.power.named import HumanModel, NamedWorld
from mbx.empo.power.solver import Solution, solve
from mbx.empo.power.worlds import (
    TabularWorld,
    Views,
    World,
    check_world,
    draw_actions,
    draw_goals,
    goal_distribution,
    joint_index,
    make_varied_start,
    never_achieved,
    profiles,
    tabular_world,
)

__all__ = [
    "ABILITY_FLOOR",
    "Assistance",
    "Codec",
    "Curriculum",
    "HumanModel",
    "NamedWorld",
    "PowerParams",
    "Record",
    "Solution",
    "TabularWorld",
    "Views",
    "World",
    "aggregate_ability",
    "attained",
    "check_params",
    "check_world",
    "curriculum",
    "draw_actions",
    "draw_goals",
    "goal_distribution",
    "human_aggregate",
    "intrinsic_reward",
    "joint_index",
    "make_codec",
    "make_records",
    "make_varied_start",
    "never_achieved",
    "profiles",
    "q_r_target",
    "q_to_z",
    "robot_policy",
    "soft_clamp",
    "solve",
    "solve_assistance",
    "tabular_world",
    "v_h_e_target",
    "z_to_q",
]
