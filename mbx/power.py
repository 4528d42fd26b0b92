"""Public names of EMPO's equations, exact solver and worlds: `mbx.empo.power`.

`power.solve(world, power.PowerParams())` is the exact solution of a small world.
"""

import sys

from mbx.empo.power import *  # noqa: F403
from mbx.empo.power import (
    codec,
    curriculum,
    equations,
    named,
    solver,
    worlds,
)

# `import mbx.power.curriculum` finds it, although this is a module and no package.
for _part in (codec, curriculum, equations, named, solver, worlds):
    sys.modules[_part.__name__.replace("mbx.empo.power", __name__)] = _part
