"""Dreamer's settings: by default those of `configs/dreamer.py`; nothing here loads JAX.

`configs/dreamerv3.py` holds the official code's choices. What depends on the task (the shapes of
observations and actions) joins `Model` in `networks.ModelConfig`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator

from mbx.agents import settings as common
from mbx.agents.settings import RunSettings
from mbx.settings import NONZERO, section, setting

# The official sizes; "tiny", about 0.5M, is ours, for CPUs.
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(deter=256, hidden=96, classes=8, units=96, depth=4, stoch=16, blocks=4),
    "1m": dict(deter=512, hidden=64, classes=4, units=64, depth=4, stoch=32, blocks=8),
    "12m": dict(deter=2048, hidden=256, classes=16, units=256, depth=16, stoch=32, blocks=8),
    "25m": dict(deter=3072, hidden=384, classes=24, units=384, depth=24, stoch=32, blocks=8),
    "50m": dict(deter=4096, hidden=512, classes=32, units=512, depth=32, stoch=32, blocks=8),
    "100m": dict(deter=6144, hidden=768, classes=48, units=768, depth=48, stoch=32, blocks=8),
    "200m": dict(deter=8192, hidden=1024, classes=64, units=1024, depth=64, stoch=32, blocks=8),
    "400m": dict(deter=12288, hidden=1536, classes=96, units=1536, depth=96, stoch=32, blocks=8),
}
GROUPS = ("model", "actor", "critic")  # what each optimiser moves, in the order of its settings


@dataclasses.dataclass(frozen=True)
class Train(common.Train):
    """How long a run is and how often it learns."""

    train_ratio: float = setting(64.0, "Replayed rows per agent step.")


@dataclasses.dataclass(frozen=True)
class Eval(common.Eval):
    """Evaluations during training."""

    exploring: bool = setting(
        False, "Further evaluations, of the agent as it acts in training.", needs={"action": "mode"}
    )
    action: str = setting("mode", "Action in evaluations.", choices=("mode", "sample"))
    report: bool = setting(False, "Losses and norms of their gradients, at every evaluation.")


_BY_PRIORITY = {"priority_share": NONZERO}


@dataclasses.dataclass(frozen=True)
class Replay(common.Replay):
    """What is stored of the past, and what of it is drawn."""

    context: bool = setting(False, "Start sequences from stored latents, which updates write back.")
    online: bool = setting(False, "New sequences first in batches, in their order, each once.")
    priority_share: float = setting(0.0, "Share of other sequences drawn by priority.", at_most=1)
    recency_share: float = setting(0.0, "Share of other sequences drawn by recency.", at_most=1)
    priority_exponent: float = setting(0.8, "Exponent of a row's priority.", needs=_BY_PRIORITY)
    priority_maxfrac: float = setting(
        0.5,
        "Weight of the largest priority of a sequence, against the mean of all.",
        at_most=1,
        needs=_BY_PRIORITY,
    )
    priority_zero: bool = setting(
        True, "Rows drawn by priority lose it until they are learned from.", needs=_BY_PRIORITY
    )
    priority_signal: str = setting(
        "model",
        "Priority of a row: KL and reconstruction losses (model), or the critic's loss (td).",
        choices=("model", "td"),
        needs=_BY_PRIORITY,
    )
    recency_exponent: float = setting(
        1.0, "Exponent of 1 / (age + 1), a sequence's weight.", needs={"recency_share": NONZERO}
    )

    def check(self) -> Iterator[str]:
        """Rules over several settings."""
        if self.priority_share + self.recency_share > 1.0:
            yield (
                f"priority_share={self.priority_share} and replay.recency_share="
                f"{self.recency_share} are more than 1 in sum: lower one"
            )


@dataclasses.dataclass(frozen=True)
class Model:
    """Parts and sizes of the networks."""

    size: str = setting(
        "tiny", "Size of the networks; it sets every size that is 0.", choices=tuple(SIZES)
    )
    deter: int = setting(0, "Units of the recurrent state. 0 = by size.")
    hidden: int = setting(0, "Units of the recurrent model's layers. 0 = by size.")
    stoch: int = setting(0, "Categorical latents. 0 = by size.")
    classes: int = setting(0, "Classes of a latent. 0 = by size.", at_most=127)
    units: int = setting(0, "Units of all other layers. 0 = by size.")
    depth: int = setting(0, "Half the channels of an image's first stage. 0 = by size.")
    blocks: int = setting(0, "Blocks of the recurrent cell. 0 = by size.", needs={"core": "block"})
    core: str = setting("block", "Kind of the recurrent cell.", choices=("block", "dense"))
    core_layers: int = setting(
        1, "Hidden layers of the recurrent cell.", at_least=1, needs={"core": "block"}
    )
    norm: str = setting("rms", "RMSNorm or LayerNorm in every layer.", choices=("rms", "layer"))
    initial: str = setting("zeros", "State at an episode's start.", choices=("zeros", "learned"))
    encoder_layers: int = setting(3, "Hidden layers of a vector's encoder.", at_least=1)
    decoder_layers: int = setting(3, "Hidden layers of a vector's decoder.", at_least=1)
    reward_layers: int = setting(1, "Hidden layers of the reward head.")
    continue_layers: int = setting(1, "Hidden layers of the continue head.")
    policy_layers: int = setting(3, "Hidden layers of the actor.")
    value_layers: int = setting(3, "Hidden layers of the critic.")
    prior_layers: int = setting(2, "Hidden layers of the prior.", at_least=1)
    posterior_layers: int = setting(1, "Hidden layers of the posterior.", at_least=1)
    decoder_blocks: int = setting(8, "Blocks of an image decoder's first layer.", at_least=1)
    image_multipliers: tuple[int, ...] = setting(
        (2, 3, 4, 4), "Channels of each image layer, in units of depth.", at_least=1
    )
    image_kernel: int = setting(5, "Height and width of an image kernel.", at_least=2)
    image_outer: bool = setting(False, "The outermost image layer keeps the image's size.")
    image_strided: bool = setting(False, "Strides in place of max-pooling and repetition.")
    image_activation: str = setting(
        "silu", "Activation of image layers.", choices=("silu", "gelu", "relu", "elu", "mish")
    )
    unimix: float = setting(0.01, "Share of the uniform distribution in the latents.", at_most=1)
    policy_unimix: float = setting(0.01, "Uniform share in discrete policies.", at_most=1)
    init_std: float = setting(
        2.0, "Offset of a continuous policy's raw standard deviation.", at_least=None
    )
    min_std: float = setting(0.1, "Smallest standard deviation of a continuous policy.", above=0)
    max_std: float = setting(1.0, "Largest standard deviation of a continuous policy.", above=0)
    num_bins: int = setting(255, "Bins of reward and value, an odd number.", at_least=3)
    bin_max: float = setting(20.0, "Largest bin, in symlog space.", above=0, at_most=80)
    bins_space: str = setting("symlog", "Space of the two-hot bins.", choices=("symlog", "raw"))
    dtype: str = setting("float32", "Type of matrix products.", choices=("float32", "bfloat16"))
    unroll: int = setting(
        1, "Steps of the recurrent model in one pass of its loops; more compile longer.", at_least=1
    )

    def check(self) -> Iterator[str]:
        """Rules over several settings."""
        deter, blocks = (getattr(self, n) or SIZES[self.size][n] for n in ("deter", "blocks"))
        if self.core == "block" and deter % blocks:
            yield f"deter={deter}: choose a multiple of model.blocks={blocks}"
        if self.num_bins % 2 == 0:
            yield f"num_bins={self.num_bins}: use an odd number, so that one bin is 0"
        if self.min_std > self.max_std:
            yield f"min_std={self.min_std} is more than model.max_std={self.max_std}: exchange them"


@dataclasses.dataclass(frozen=True)
class Loss:
    """Batches and the world model's loss."""

    batch_size: int = setting(16, "Sequences of a batch.", at_least=1)
    batch_length: int = setting(32, "Rows of each part of a sequence.", at_least=1)
    parts: int = setting(
        1,
        "Parts of a sequence, learned from in turn; the recurrent state is carried on.",
        at_least=1,
    )
    updates: str = setting(
        "sequential",
        "Order of updates: world model, then behaviour in the updated one; or one joint gradient.",
        choices=("sequential", "joint"),
    )
    free_nats: float = setting(0.1, "KL of a row that costs nothing, in nats.")
    dynamics_coef: float = setting(0.5, "Weight of the KL moving the prior (beta_dyn).")
    representation_coef: float = setting(0.01, "Weight of the KL moving the posterior (beta_rep).")
    representation: str = setting(
        "decoder",
        "What makes latents describe observations: reconstruction (decoder); without a decoder, "
        "little redundancy with the encoder's outputs (barlow), or a contrast of rows (infonce).",
        choices=("decoder", "barlow", "infonce"),
    )
    barlow_coef: float = setting(
        0.05, "Weight of the redundancy loss.", needs={"representation": "barlow"}
    )
    redundancy: float = setting(
        5e-4, "Weight of different outputs' correlations in it.", needs={"representation": "barlow"}
    )
    reward_gradient: bool = setting(True, "Let the reward loss shape the representation.")
    continue_discount: bool = setting(
        False, "Predict gamma times continue; imagination then has no other discount."
    )
    heads: str = setting("", common.HEADS_HELP)

    @property
    def sequence(self) -> int:
        """Rows of a whole sequence."""
        return self.parts * self.batch_length

    @property
    def head_terms(self) -> dict[str, float | None]:
        """The auxiliary heads in use and their coefficients; None: as declared."""
        return common.head_terms(self.heads)

    def check(self) -> Iterator[str]:
        """Heads are named as they have to be."""
        try:
            common.head_terms(self.heads)
        except ValueError as error:
            yield str(error)


_NORM_KINDS = ("none", "meanstd", "percentiles")
_NORMS = "their moving mean and deviation (meanstd), or 5th and 95th percentile (percentiles)"


@dataclasses.dataclass(frozen=True)
class Imagination:
    """Imagined trajectories, from which behaviour is learned."""

    horizon: int = setting(15, "Length of an imagined trajectory in steps.", at_least=1)
    rows: int = setting(8, "Last rows of a sequence that imagination starts from. 0 = all.")
    continues: str = setting(
        "hard",
        "Predicted continues: 0 or 1 (hard), or the probability (soft).",
        choices=("hard", "soft"),
    )
    first_continue: str = setting(
        "real",
        "Continue of the start: the replay row's, or predicted.",
        choices=("real", "predicted"),
    )


@dataclasses.dataclass(frozen=True)
class Actor:
    """Loss of the policy."""

    gradient: str = setting(
        "auto",
        "Gradient of the policy. reparam = by the model; auto = reparam for continuous actions.",
        choices=("auto", "reinforce", "reparam"),
    )
    entropy_coef: float = setting(3e-4, "Weight of the policy's entropy.")
    action_clip: float = setting(
        1.0,
        "Largest continuous action of a policy learned through the model. 0 = any.",
        at_most=1,
        needs={"gradient": ("auto", "reparam")},
    )
    return_limit: float = setting(1.0, "Smallest divisor of advantages.", at_least=1e-8)
    return_decay: float = setting(0.99, "Decay of the moving percentiles of returns.", at_most=1)
    return_percentiles: tuple[float, float] = setting(
        (5.0, 95.0), "Percentiles of returns whose distance divides advantages.", at_most=100
    )
    advantage_norm: str = setting(
        "none", f"Advantages also normalised by {_NORMS}.", choices=_NORM_KINDS
    )

    def check(self) -> Iterator[str]:
        """Rules over several settings."""
        given = self.return_percentiles
        if len(given) != 2 or given[0] > given[1]:
            yield f"return_percentiles={given}: give the lower and the upper one"


@dataclasses.dataclass(frozen=True)
class Critic:
    """Loss of the critic."""

    gamma: float = setting(1.0 - 1.0 / 333.0, "Discount of an agent step.", above=0, at_most=1)
    lambda_: float = setting(0.95, "Trace of the lambda returns.", at_most=1)
    tau: float = setting(0.02, "Share of the critic in an update of the slow critic.", at_most=1)
    target_update_freq: int = setting(
        1, "Gradient steps between updates of the slow critic.", at_least=1
    )
    regularizer: float = setting(1.0, "Weight of the loss towards the slow critic.")
    value_norm: str = setting("none", f"Values learned in units of {_NORMS}.", choices=_NORM_KINDS)
    replay_loss: str = setting(
        "aligned",
        "Critic loss on the rows that imagination starts from: row t by the reward of row t + 1 "
        "(aligned), or none.",
        choices=("aligned", "none"),
    )
    replay_coef: float = setting(
        0.3, "Weight of the critic loss on replay rows.", needs={"replay_loss": "aligned"}
    )
    replay_gradient: bool = setting(
        False,
        "Let the critic loss on replay rows shape the representation.",
        needs={"replay_loss": "aligned", "loss.updates": "joint"},
    )

    def check(self) -> Iterator[str]:
        """Rules over several settings."""
        if self.gamma == 1.0:
            yield "gamma=1.0: choose less than 1"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Optimisers of world model, actor and critic, in this order where three numbers are given."""

    name: str = setting("adam", "Optimizer; laprop: the official one.", choices=("adam", "laprop"))
    learning_rates: tuple[float, float, float] = setting(
        (2e-4, 3e-4, 1e-3), "Learning rates of model, actor and critic."
    )
    clips: tuple[float, ...] = setting(
        (),
        "Largest norm of a gradient; laprop: of a tensor's, relative to the parameter's. 0 = any; "
        "() = automatic: 0.3 for laprop, otherwise 1.",
    )
    epsilons: tuple[float, ...] = setting(
        (),
        "Numbers added to the root mean square of gradients. () = automatic: 1e-20 for laprop, "
        "otherwise 1e-8, 1e-5 and 1e-5.",
    )
    warmup: int = setting(
        -1,
        "Updates over which the rates rise from 0. -1 = automatic: 1,000 for laprop, otherwise 0.",
        at_least=-1,
    )
    weight_decay: float = setting(0.0, "Decay of kernels in a step, times the learning rate.")
    schedule: str = setting(
        "const",
        "Learning rates after the warm-up: const, linear to a tenth, or cosine to nearly 0.",
        choices=("const", "linear", "cosine"),
    )
    anneal: int = setting(
        0, "Update at which the schedule ends.", needs={"schedule": ("linear", "cosine")}
    )

    def resolved(self) -> Optimizer:
        """The same with numbers in the place of what is automatic."""
        official = self.name == "laprop"
        return dataclasses.replace(
            self,
            clips=self.clips or ((0.3,) * 3 if official else (1.0,) * 3),
            epsilons=self.epsilons or ((1e-20,) * 3 if official else (1e-8, 1e-5, 1e-5)),
            warmup=self.warmup if self.warmup >= 0 else 1_000 * official,
        )

    def check(self) -> Iterator[str]:
        """Rules over several settings."""
        for name in ("learning_rates", "clips", "epsilons"):
            if len(getattr(self, name)) not in ((3,) if name == "learning_rates" else (0, 3)):
                yield f"{name}={getattr(self, name)}: give three numbers, one each of {GROUPS}"
        if self.schedule != "const" and self.anneal <= self.resolved().warmup:
            yield (
                f"anneal={self.anneal}: schedule={self.schedule!r} needs more updates than the "
                f"warm-up's {self.resolved().warmup}"
            )


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of a Dreamer run."""

    agent: str = setting("dreamer", "Name of the agent.")
    env: common.Env = section(common.Env(name="gymnax:CartPole-v1"), "Task and its environments.")
    train: Train = section(
        Train(steps=60_000, seed_steps=1_000, log_interval=1_000),
        "Length of a run and how often it learns.",
    )
    eval: Eval = section(Eval(interval=5_000, exploring=True), "Evaluations during training.")
    checkpoint: common.Checkpoint = section(
        common.Checkpoint(interval=20_000), "When the state is saved."
    )
    replay: Replay = section(Replay(capacity=200_000), "Contents of the replay buffer.")
    model: Model = section(Model(), "Parts and sizes of the networks.")
    loss: Loss = section(Loss(), "Batches and the world model's loss.")
    imagination: Imagination = section(Imagination(), "Imagined trajectories of the world model.")
    actor: Actor = section(Actor(), "Loss of the policy.")
    critic: Critic = section(Critic(), "Loss of the critic.")
    optimizer: Optimizer = section(Optimizer(), "Optimizers of model, actor and critic.")

    def check_start(self, other: RunSettings) -> Iterator[str]:
        """Refuses a start from a model whose outputs mean something else."""
        names = ("model.bins_space", "model.bin_max", "loss.continue_discount", "critic.value_norm")
        for name in names if isinstance(other, Settings) else ():
            given, trained = (operator.attrgetter(name)(settings) for settings in (self, other))
            if given != trained:
                yield (
                    f"{name}={given!r}: the heads of train.init_from={self.train.init_from!r} were "
                    f"trained with {trained!r}, set that"
                )

    def updates_per_step(self) -> float:
        """Learner updates of an agent step: the train ratio over the rows of a batch."""
        return self.train.train_ratio / (self.loss.batch_size * self.loss.sequence)

    def draws(self) -> tuple[int, ...]:
        """Sequences of a batch."""
        return (self.loss.batch_size,)

    def gains_by_cores(self) -> bool:
        """Measured: acting does; an update of these takes as long."""
        return self.model.size in ("tiny", "1m")

    def large_updates(self) -> bool:
        """By its dreamed rows, 14 kB each of tiny. Larger models have arrays that fit no piece."""
        starts = self.loss.batch_size * (self.imagination.rows or self.loss.batch_length)
        return self.gains_by_cores() and starts * (self.imagination.horizon + 1) > 8_000

    def rows_before_learning(self) -> int:
        """Agent steps over all environments until each holds a sequence and the row before it."""
        return (self.loss.sequence + 1) * self.env.num_envs

    def check(self) -> Iterator[str]:
        """Rules over several sections."""
        length, rows = self.loss.batch_length, self.imagination.rows
        held = self.replay.capacity // self.env.num_envs
        if self.loss.sequence + 1 > held:
            parts = f" in loss.parts={self.loss.parts} parts" if self.loss.parts > 1 else ""
            yield (
                f"loss.batch_length={length}{parts} needs one row more than that in every "
                f"environment, but replay.capacity gives {held}: raise it"
            )
        if self.loss.heads and length < 2:
            yield f"loss.batch_length={length}: loss.heads={self.loss.heads!r} needs at least 2"
        if self.critic.replay_loss != "none" and length < 2:
            yield f"loss.batch_length={length}: critic.replay_loss needs at least 2, or be 'none'"
        if rows == 1 or rows > length:
            yield f"imagination.rows={rows}: choose 0 or a number from 2 to batch_length={length}"
        if self.replay.priority_signal == "td" and rows not in (0, length):
            yield f"replay.priority_signal='td' needs imagination.rows=0, not {rows}"
        if self.loss.continue_discount and self.imagination.continues == "hard":
            yield (
                "loss.continue_discount=True with imagination.continues='hard' would drop the "
                "discount from imagination: use 'soft', or continue_discount=False"
            )
