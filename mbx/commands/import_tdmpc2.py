r"""Make a run directory of an official TD-MPC2 checkpoint, to evaluate, plan with or fine-tune.

    mbx import_tdmpc2 model.pt --task=dmc:walker-walk --workdir=runs/official
    mbx evaluate runs/official
    mbx train --config=configs/tdmpc2.py --config.train.init_from=runs/official \
        --config.env.name=dmc:walker-walk --config.model.size=5

Needs PyTorch (`pip install 'mbx-rl[torch]'`). A multi-task model takes its tasks in its order:
--task=multi:dmc:walker-stand+dmc:walker-walk+... . Settings are those of configs/tdmpc2.py.
"""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import jax

from mbx.agents.tdmpc import official
from mbx.agents.tdmpc.settings import Settings
from mbx.commands.arguments import import_torch, make_parser
from mbx.config import presets
from mbx.settings import from_dict, to_dict
from mbx.training import build
from mbx.training.checkpoint import Checkpointer
from mbx.training.files import atomic_write


def main(arguments: list[str]) -> None:
    """Run `mbx import_tdmpc2`. Raises ValueError or OSError for bad input; `mbx.cli` prints it."""
    parser = make_parser(__name__, __doc__)
    parser.add_argument("model", help="Path of the checkpoint to read.")
    parser.add_argument("--task", required=True, help="The task it was trained on.")
    parser.add_argument("--workdir", required=True, help="Directory of the run to make.")
    options = parser.parse_args(arguments)
    workdir = os.path.abspath(options.workdir)
    settings = write_run(read(options.model), options.task, workdir)
    print(f"{options.workdir}: a model of size {settings.model.size} for {settings.env.name}")


def read(path: str) -> dict[str, Any]:
    """The arrays of a PyTorch checkpoint. Nothing in the file is executed.
    Raises ImportError without PyTorch, ValueError for a file that is not a dict of arrays.
    """
    torch = import_torch()
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: not a PyTorch file of weights alone: {reason}") from error
    found = found.get("model", found) if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise ValueError(f"{path}: holds {type(found).__name__}, not a dict of arrays")
    arrays = {k: v for k, v in found.items() if isinstance(v, torch.Tensor) and not v.is_meta}
    return {name: array.float().numpy() for name, array in arrays.items()}


def write_run(arrays: dict[str, Any], task: str, workdir: str) -> Any:
    """Write the run directory of a model; returns its settings.
    Raises ValueError where model and task do not fit, or for a directory in use.
    """
    if os.path.isdir(workdir) and os.listdir(workdir):
        raise ValueError(f"workdir={workdir} is not empty: choose another directory")
    state = official.clean(arrays)
    fields = official.world_fields(state)
    config = presets.load("tdmpc2")
    config.env.name = task
    config.model.update(size=official.size_name(state), episodic=str(fields["episodic"]))
    for name in ("num_values", "num_bins", "log_std_min", "log_std_max"):
        config.model[name] = fields[name]
    if "_task_emb.weight" in state:
        config.model.task_dim = state["_task_emb.weight"].shape[1]
        config.env.pad_to = (fields["obs_shape"][0], fields["action_dim"])
    # A model without the termination head ignores the preset's settings of it.
    settings = from_dict(Settings(), config.to_dict(), check_effects=False)
    spec = build.environment_spec(settings)
    tasks = None
    if spec.tasks:
        names, dims = zip(*((one.name, one.action_dim) for one in spec.tasks), strict=True)
        tasks = official.TaskSet(names, dims, settings.model.task_dim)
    obs_dim = spec.obs_shape[0] - len(spec.tasks)
    official.check_task(state, obs_dim, spec.action_dim, tasks)
    agent = build.build_agent(settings, spec)
    train = official.with_parameters(agent.init(jax.random.key(0)), state)
    os.makedirs(workdir, exist_ok=True)
    text = json.dumps(to_dict(settings), indent=2)
    atomic_write(os.path.join(workdir, "config.json"), text.encode())
    checkpointer = Checkpointer(workdir)
    checkpointer.save_best(0, jax.tree.map(jax.numpy.asarray, train), 0.0)
    checkpointer.close()
    return settings
