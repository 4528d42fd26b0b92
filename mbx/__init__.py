"""mbx: model-based reinforcement learning as pure functions over immutable pytrees.

`mbx.train` trains an agent, `mbx.train_fn` gives that as a pure function, `mbx.load_policy` lets a
trained one act. Every part works alone: `mbx.mppi` plans in any model, `mbx.returns` computes
returns, `mbx.replay` is a replay buffer on the device, `mbx.agents` holds the agents. What is named
here is imported when it is first used.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mbx import agents as agents
    from mbx import categorical as categorical
    from mbx import config as config
    from mbx import distributions as distributions
    from mbx import envs as envs
    from mbx import heads as heads
    from mbx import mppi as mppi
    from mbx import networks as networks
    from mbx import observations as observations
    from mbx import planners as planners
    from mbx import power as power
    from mbx import replay as replay
    from mbx import returns as returns
    from mbx import settings as settings
    from mbx import successors as successors
    from mbx import types as types
    from mbx import world_model as world_model
    from mbx.api import train as train
    from mbx.api import train_fn as train_fn
    from mbx.training.policy import load_policy as load_policy

__version__ = "0.2.0"

_FUNCTIONS = {"train": "mbx.api", "train_fn": "mbx.api", "load_policy": "mbx.training.policy"}
_MODULES = tuple(
    "agents categorical config distributions envs heads mppi networks observations planners "
    "power replay returns settings successors types world_model".split()
)
# Former places of modules below mbx, and where they are: `import mbx.envs.empo.multigrid` works.
_FORMER: dict[str, str] = {
    "agents.empo": "mbx.empo.agent",
    "envs.empo": "mbx.empo",
    "envs.own": "mbx.envs.custom",
    "cem": "mbx.planners.cem",
    "derivatives": "mbx.fast.gradients",
    "exchange": "mbx.fast.collectives",
    "pictures": "mbx.agents.pictures",
    "rssm": "mbx.agents.dreamer.rssm",
    "running_statistics": "mbx.observations",
    "sequences": "mbx.planners.bases",
    "training.curves": "mbx.analysis.curves",
    "training.environments": "mbx.training.build",
    "training.metrics": "mbx.training.logging",
    "extensions": "mbx.config.extensions",
    "presets": "mbx.config.presets",
}

__all__ = ["__version__", *_FUNCTIONS, *_MODULES]


def __getattr__(name: str) -> object:
    """A public function or module, imported with what it needs."""
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(_FUNCTIONS[name]), name)
    if name in _MODULES or name in _FORMER:
        return importlib.import_module(_FORMER.get(name, f"mbx.{name}"))
    raise AttributeError(f"module 'mbx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Former(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules, and what is in them, by the names in `_FORMER`."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        for former, now in _FORMER.items():
            if f"{name}.".startswith(f"mbx.{former}."):
                origin = now + name[len(f"mbx.{former}") :]
                return importlib.machinery.ModuleSpec(name, self, origin=origin)
        return None

    def create_module(self, spec: Any) -> Any:
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: Any) -> None:
        module.__spec__ = module.__spec__.loader_state  # where the import system put the alias's


sys.meta_path.insert(0, _Former())  # before paths, by which parts of a package would load twice
