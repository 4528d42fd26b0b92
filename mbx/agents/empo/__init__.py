"""EMPO phase 2: a robot policy that softly maximises the power of the humans around it.

`agent` acts and learns, `targets` enumerates successors, `models` are networks or tables;
`evaluation` and `diagnostics` say how well humans fare. The theory is in `mbx.power`.
"""

from mbx.agents.empo.agent import EmpoConfig, TrainState, make_agent, make_model, policy_of

__all__ = ["EmpoConfig", "TrainState", "make_agent", "make_model", "policy_of"]
