"""Write a TD-MPC2 run's best model as a checkpoint that the official PyTorch code loads.

    mbx export_tdmpc2 runs/walker model.pt

Needs PyTorch (`pip install 'mbx-rl[torch]'`) and a model that the official code supports:
`configs/tdmpc2.py` on vector observations.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from mbx.agents.tdmpc import official
from mbx.agents.tdmpc.agent import resolve, world_config
from mbx.commands.arguments import import_torch, make_parser
from mbx.training import build, run


def main(arguments: list[str]) -> None:
    """Run `mbx export_tdmpc2`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("run", help="Directory of the run.")
    parser.add_argument("out", help="Path of the file to write.")
    options = parser.parse_args(arguments)
    write(os.path.abspath(options.run), os.path.abspath(options.out))
    print(options.out)


def write(workdir: str, path: str) -> None:
    """Write the best model of a run.
    Raises ImportError without PyTorch, ValueError for a run of another agent or a model that the
    official code cannot have.
    """
    torch = import_torch()
    arrays = state_dict(workdir)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    # Modules that take their numbers from the stacked heads before each use: shapes alone.
    shapes = {name: array for name, array in state.items() if ".module." in name}
    state |= {name: torch.empty_like(array, device="meta") for name, array in shapes.items()}
    temporary = f"{path}.tmp-{os.getpid()}"
    torch.save({"model": state}, temporary)
    os.replace(temporary, path)


def state_dict(workdir: str) -> dict[str, Any]:
    """The checkpoint's arrays by their official names. Raises ValueError as `write`."""
    _, train, settings = run.load(workdir)
    if settings.agent != "tdmpc":
        raise ValueError(f"{workdir} is of agent {settings.agent!r}: only 'tdmpc' has such a model")
    spec = build.environment_spec(settings)
    config = world_config(resolve(settings, spec), spec)
    state = official.to_state(train.params, train.target_value, config)
    return {name: np.array(array, np.float32) for name, array in state.items()}
