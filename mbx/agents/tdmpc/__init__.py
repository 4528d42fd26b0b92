"""TD-MPC on planner-made targets; with other settings TD-MPC2, BMPC, or ensembles with priors.

Read one train step top to bottom: `agent` (act, targets) -> `update` (one learner step) ->
`value_targets`, `model_loss`, `policy_loss`; `planning` makes plans, `reanalyze` makes them again.
"""

from mbx.agents.tdmpc.agent import make_agent
from mbx.agents.tdmpc.config import Scoring, TDMPCConfig
from mbx.agents.tdmpc.update import TrainState, init_state, update_from_batch

__all__ = [
    "Scoring",
    "TDMPCConfig",
    "TrainState",
    "init_state",
    "make_agent",
    "update_from_batch",
]
