r"""Your own review of an agent: numbers and a file of your own with every evaluation.

    python -m experiments.train --import=examples/own_review.py --config=tdmpc \
        --config.agent=tdmpc_reviewed

An agent is a tuple of functions, so a copy with another `diagnostics` is a new one. Here it reports
how large the parts of the world model are; the log has norm/..., the run directory norms.json.
"""

import json

import jax
import optax

from mbx.agents.base import Diagnostics
from mbx.agents.tdmpc import Settings, make_agent
from mbx.training import build


@jax.jit
def norms(params):
    """Euclidean norm of every part's parameters."""
    return {f"norm/{name}": optax.tree.norm(part) for name, part in params.items()}


def diagnostics(train, replay, key):
    """Called with every evaluation, outside any compiled program."""
    found = {name: float(x) for name, x in norms(train.params).items()}
    return Diagnostics(found, {"norms.json": json.dumps(found).encode()})


def reviewed(settings, spec):
    """TD-MPC with this review."""
    return make_agent(settings, spec)._replace(diagnostics=diagnostics)


build.register("tdmpc_reviewed", Settings, reviewed)
