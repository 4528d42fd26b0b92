"""A multigrid world in pure JAX whose successors can be listed: `empo:multigrid/NAME`.

`parse_map(text, goals=..., horizon=...)` or `load_map("rock_gate")` give a layout, `make_grid` its
outcomes and goals as pure functions, `make_world` what EMPO's agent trains on.
"""

from mbx.empo.multigrid.dynamics import Grid as Grid
from mbx.empo.multigrid.dynamics import make_grid as make_grid
from mbx.empo.multigrid.export import enumerate_states as enumerate_states
from mbx.empo.multigrid.export import export as export
from mbx.empo.multigrid.layout import Layout as Layout
from mbx.empo.multigrid.layout import load_map as load_map
from mbx.empo.multigrid.layout import load_world as load_world
from mbx.empo.multigrid.layout import parse_map as parse_map
from mbx.empo.multigrid.render import make_render as make_render
from mbx.empo.multigrid.state import State as State
from mbx.empo.multigrid.world import make_world as make_world
