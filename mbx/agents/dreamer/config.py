"""Dreamer's settings and the combinations of them that cannot work.

Defaults are those of documents 002 and 003; `configs/dreamerv3.py` holds the official ones.
"""

from __future__ import annotations

import dataclasses

from mbx.agents.dreamer.networks import ModelConfig

CHOICES = {
    "continues": ("hard", "soft"),
    "first_continue": ("real", "predicted"),
    "actor_gradient": ("reinforce", "reparam"),
    "replay_loss": ("aligned", "literal", "none"),
    "updates": ("joint", "sequential"),
    "optimizer": ("laprop", "adam"),
    "evaluation": ("mode", "sample"),
}


@dataclasses.dataclass(frozen=True)
class DreamerConfig:
    """Settings of the agent; defaults are those of the documents.

    dream_rows: last rows of a sequence that dreams start from (0: all). free_nats_gradient: the
    floor of the KL keeps its gradient. continue_discount: the continue head's target holds gamma,
    which dreams then do not apply. continues: "hard" | "soft" in dreams; first_continue: of a
    dream's start, "real" (the replay row's) | "predicted". return_limit: smallest divisor of
    advantages. critic_every: updates between two moves of the slow critic. replay_loss: "aligned" |
    "literal" | "none"; replay_gradient: it shapes the representation, as does the reward loss with
    reward_gradient. updates: "sequential" dreams with the updated model, "joint" is one gradient.
    replay_context: sequences start from stored latents, which are written back. fresh: sequences of
    a batch that are an environment's newest. evaluation: "mode" | "sample" of the policy.
    Rates, clips, eps: of model, actor and critic; "laprop" clips adaptively, "adam" globally.
    """

    model: ModelConfig
    batch_size: int = 16
    batch_length: int = 64
    horizon: int = 15
    dream_rows: int = 0
    gamma: float = 1.0 - 1.0 / 333.0
    lambda_: float = 0.95
    free_nats: float = 1.0
    free_nats_gradient: bool = False
    dynamics_coef: float = 0.5
    representation_coef: float = 0.1
    continue_discount: bool = False
    continues: str = "hard"
    first_continue: str = "real"
    reward_gradient: bool = True
    actor_gradient: str = "reinforce"
    entropy_coef: float = 3e-4
    return_decay: float = 0.99
    return_percentiles: tuple[float, float] = (5.0, 95.0)
    return_limit: float = 1.0
    critic_regularizer: float = 1.0
    critic_tau: float = 0.02
    critic_every: int = 1
    replay_loss: str = "aligned"
    replay_coef: float = 0.3
    replay_gradient: bool = False
    replay_context: bool = False
    fresh: int = 0
    updates: str = "sequential"
    evaluation: str = "mode"
    optimizer: str = "adam"
    learning_rates: tuple[float, float, float] = (1e-4, 8e-5, 8e-5)
    clips: tuple[float, float, float] = (1000.0, 100.0, 100.0)
    epsilons: tuple[float, float, float] = (1e-8, 1e-5, 1e-5)
    warmup: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r}: choose one of {choices}")
        for name in ("batch_size", "batch_length", "horizon", "critic_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.replay_loss != "none" and self.batch_length < 2:
            raise ValueError("replay_loss needs batch_length of at least 2: raise it, or use none")
        if not 0 <= self.dream_rows <= self.batch_length or self.dream_rows == 1:
            raise ValueError(
                f"dream_rows (imagination.rows)={self.dream_rows}: choose 0 or a number from 2 to "
                f"batch_length={self.batch_length}"
            )
        if not 0 <= self.fresh <= self.batch_size:
            raise ValueError(
                f"fresh={self.fresh}: choose a number from 0 to batch_size={self.batch_size}"
            )
        for name in ("learning_rates", "clips", "epsilons"):
            if len(getattr(self, name)) != 3:
                raise ValueError(
                    f"{name}={getattr(self, name)}: give three numbers, of model, actor and critic"
                )
        if not 0.0 < self.gamma < 1.0:
            raise ValueError(f"gamma={self.gamma}: must lie in (0, 1)")
        if self.continue_discount and self.continues == "hard":
            raise ValueError(
                "continue_discount=True with continues='hard' would drop the discount from dreams: "
                "use continues='soft', or continue_discount=False"
            )
        if self.actor_gradient == "reparam" and self.model.discrete:
            raise ValueError("actor_gradient='reparam' needs continuous actions: use 'reinforce'")
        if self.updates == "sequential" and self.replay_gradient:
            raise ValueError(
                "replay_gradient=True needs updates='joint': in sequence the world model has "
                "moved before the replay loss is known"
            )
