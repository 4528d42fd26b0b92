"""DreamerV3: a recurrent world model learned from replay, behaviour learned from its dreams.

Read one train step top to bottom: `agent` (act, update) -> `losses` (world model, dreams, actor,
critic) -> `rssm`, `encoders`, `policy`; `sequences` draws runs of replay rows.
"""

from mbx.agents.dreamer.agent import TrainState, make_agent
from mbx.agents.dreamer.config import DreamerConfig

__all__ = ["DreamerConfig", "TrainState", "make_agent"]
