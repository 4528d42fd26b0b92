"""EMPO: a robot policy that softly maximises the long-term power of the humans around it.

Equations and symbols: `equations`. `solve(world, PowerParams())` is exact: the oracle for whatever
learns. These are the public names of `equations`, `solver`, `worlds`, `codec` (states as replay
rows), `curriculum` (schedules of training) and `named` (what environments carry to the agent)."""

from mbx.empo.power import curriculum as curriculum
from mbx.empo.power.codec import Codec as Codec
from mbx.empo.power.codec import Record as Record
from mbx.empo.power.codec import make_codec as make_codec
from mbx.empo.power.codec import make_records as make_records
from mbx.empo.power.curriculum import Curriculum as Curriculum
from mbx.empo.power.equations import ABILITY_FLOOR as ABILITY_FLOOR
from mbx.empo.power.equations import PowerParams as PowerParams
from mbx.empo.power.equations import aggregate_ability as aggregate_ability
from mbx.empo.power.equations import attained as attained
from mbx.empo.power.equations import check_params as check_params
from mbx.empo.power.equations import human_aggregate as human_aggregate
from mbx.empo.power.equations import intrinsic_reward as intrinsic_reward
from mbx.empo.power.equations import robot_policy as robot_policy
from mbx.empo.power.equations import soft_clamp as soft_clamp
from mbx.empo.power.named import HumanModel as HumanModel
from mbx.empo.power.named import NamedWorld as NamedWorld
from mbx.empo.power.solver import Solution as Solution
from mbx.empo.power.solver import solve as solve
from mbx.empo.power.worlds import TabularWorld as TabularWorld
from mbx.empo.power.worlds import Views as Views
from mbx.empo.power.worlds import World as World
from mbx.empo.power.worlds import check_world as check_world
from mbx.empo.power.worlds import draw_actions as draw_actions
from mbx.empo.power.worlds import draw_goals as draw_goals
from mbx.empo.power.worlds import goal_distribution as goal_distribution
from mbx.empo.power.worlds import joint_index as joint_index
from mbx.empo.power.worlds import make_varied_start as make_varied_start
from mbx.empo.power.worlds import profiles as profiles
from mbx.empo.power.worlds import tabular_world as tabular_world
