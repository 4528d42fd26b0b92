"""mbx: model-based reinforcement learning as pure functions over immutable pytrees.

Import the part you need: `mbx.mppi` plans in any model, `mbx.returns` computes returns,
`mbx.replay` is a replay buffer on the device, `mbx.agents` holds the agents. `mbx.train` trains
one, `mbx.train_fn` gives that as a pure function, `mbx.load_policy` lets it act.
"""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """`train`, `train_fn` and `load_policy`, loaded with what they need when they are asked for."""
    import importlib

    where = {
        "train": "mbx.api",
        "train_fn": "mbx.api",
        "load_policy": "mbx.training.policy",
    }
    if name in where:
        return getattr(importlib.import_module(where[name]), name)
    raise AttributeError(f"module 'mbx' has no attribute {name!r}")
