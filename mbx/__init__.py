"""mbx: model-based reinforcement learning as pure functions over immutable pytrees.

Import the part you need: `mbx.mppi` plans in any model, `mbx.returns` computes returns,
`mbx.replay` is a replay buffer on the device, `mbx.agents` holds the agents.
"""

__version__ = "0.1.0"
