"""Settings of the TD-MPC agent; the defaults are what `configs/tdmpc.py` trains.

What a section does is described where it acts: the planners in `planning`, value targets in
`value_targets`, losses in `model_loss` and `policy_loss`, optimisers in `update`. Steps are
environment steps (action repeat included) summed over environments; "share of the run" is of its
learner updates. Nothing here loads JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Self

from mbx.agents import settings as common
from mbx.agents.settings import RunSettings
from mbx.agents.tdmpc.loss_settings import Loss
from mbx.agents.tdmpc.planner_settings import Planner, TrainingPlanner
from mbx.settings import NONZERO, section, setting
from mbx.traced import choose, possible

if TYPE_CHECKING:
    from mbx.types import EnvSpec

__all__ = ["Loss", "Model", "Planner", "Settings", "TrainingPlanner"]

PUBLISHED_RATE = 3e-4  # of everything but the encoder, in TD-MPC2's config.yaml
MODEL_SIZES = ("tiny", "1", "5", "19", "48", "317")

_STORED = {"stores_plans": True}
_REANALYZE = {"enabled": True, "stores_plans": True}


@dataclasses.dataclass(frozen=True)
class Env(common.Env):
    """The task and how many copies of it are stepped together."""

    name: str = setting(
        "gymnax:Pendulum-v1", "SUITE:TASK, or multi:SUITE:TASK+SUITE:TASK for several at once"
    )


@dataclasses.dataclass(frozen=True)
class Train(common.Train):
    """How long a run is, and how often it learns."""

    steps: int = setting(10_000, "environment steps of the run", at_least=1)
    log_interval: int = setting(200, "environment steps between log rows", at_least=1)
    seed_hold: int = setting(
        0,
        "agent steps that each random action is held; 0: the task's, 4, or 1 with discrete actions",
    )
    reset_solved: int = setting(
        0,
        "agent steps in a row with nearly the highest reward after which three environments in "
        "four begin another episode in training, where the suite says what its rewards can be "
        "(dmc: does); 0: the task's, 50 there; -1: never",
        at_least=-1,
    )
    pretrain_updates: int = setting(500, "updates made at once after the random actions")
    pretrain_policy: bool = setting(
        True, "the policy learns in those, too", needs={"pretrain_updates": NONZERO}
    )
    utd_ratio: float = setting(
        0.0, "learner updates per agent step; 0: the task's, 2, or 0.5 with discrete actions"
    )


@dataclasses.dataclass(frozen=True)
class Replay(common.Replay):
    """What is stored of the past."""

    keep_targets: int = setting(
        8, "planner actions stored with a transition, best first; 0: all", needs=_STORED
    )
    actions_dtype: str = setting(
        "float32",
        "of stored planner actions",
        choices=("float32", "bfloat16", "int8"),
        needs=_STORED,
    )
    values_dtype: str = setting(
        "float32", "of stored planner values", choices=("float32", "bfloat16"), needs=_STORED
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of the world model."""

    size: str = setting(
        "tiny",
        "millions of parameters, as TD-MPC2 published them; tiny: about 0.2",
        choices=MODEL_SIZES,
    )
    critic: str = setting("v", "v: V(z); q: Q(z, a)", choices=("q", "v"))
    policy: str = setting(
        "tanh_mean",
        "of continuous actions: Gaussian squashed by tanh, or Gaussian around tanh(mean) with "
        "clipped samples (discrete ones have a categorical policy)",
        choices=("squashed", "tanh_mean"),
    )
    normalize_observations: bool = setting(
        False,
        "vectors enter the encoder in standard deviations of what was learned from; images and "
        "boards cannot",
    )
    num_values: int = setting(2, "value heads; 0: the size's")
    num_dynamics: int = setting(1, "dynamics heads", at_least=1)
    num_rewards: int = setting(1, "reward heads", at_least=1)
    prior_scale: float = setting(0.0, "of frozen random networks beside all heads; 0: none")
    prior_div: int = setting(
        16, "how much narrower those are", at_least=1, needs={"prior_scale": NONZERO}
    )
    num_bins: int = setting(101, "of predicted rewards and values; 1: regression", at_least=1)
    bins: str = setting(
        "fixed",
        "fixed: from bin_min to bin_max; auto: over what an episode can return, where the suite "
        "says what its rewards can be (dmc: does)",
        choices=("fixed", "auto"),
        needs={"has_bins": True},
    )
    bin_min: float = setting(
        -10.0, "lowest bin, in symlog space", at_least=None, needs={"has_bins": True}
    )
    bin_max: float = setting(10.0, "highest bin", at_least=None, needs={"has_bins": True})
    log_std_min: float = setting(-3.0, "of a Gaussian policy", at_least=None)
    log_std_max: float = setting(1.0, "of a Gaussian policy", at_least=None)
    dropout: float = setting(0.01, "in the first hidden layer of each value head", at_most=1)
    episodic: str = setting(
        "auto",
        "termination head: where the task can end by itself",
        choices=("auto", "True", "False"),
    )
    dtype: str = setting("float32", "of computations", choices=("float32", "bfloat16"))
    task_dim: int = setting(
        96, "numbers in the embedding of each of several tasks", needs={"several_tasks": True}
    )

    def check(self) -> Iterator[str]:
        for low, high in (("bin_min", "bin_max"), ("log_std_min", "log_std_max")):
            if getattr(self, low) > getattr(self, high):
                yield (
                    f"{low}={getattr(self, low)} is more than model.{high}={getattr(self, high)}: "
                    "exchange them"
                )


@dataclasses.dataclass(frozen=True)
class Reanalyze:
    """How stored planner targets are made again with newer parameters."""

    enabled: bool = setting(
        True,
        "make stored targets again; without, agents learned little on dm_control "
        "(docs/planner_targets.md)",
        needs=_STORED,
    )
    interval: int = setting(10, "learner updates between passes", at_least=1, needs=_REANALYZE)
    batch_size: int = setting(128, "transitions a pass", at_least=1, needs=_REANALYZE)
    min_step: int = setting(
        1_000,
        "environment steps before the first pass",
        needs=_REANALYZE | {"current_batch": False},
    )
    stale_exponent: float = setting(
        1.0,
        "0: rows are drawn uniformly; larger: stale targets first",
        needs=_REANALYZE | {"current_batch": False, "slices": False},
    )
    current_batch: bool = setting(
        False,
        "the windows that the learner is about to learn from instead of rows of their own",
        needs=_REANALYZE,
    )
    slices: bool = setting(
        False, "whole windows instead of single rows", needs=_REANALYZE | {"current_batch": False}
    )


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam or Muon with one clip of the global norm; rates of the model's components."""

    name: str = setting(
        "adam",
        "adam, or muon: the matrices by it, all else by adam, at the same rates",
        choices=("adam", "muon"),
    )
    learning_rate: float = setting(
        0.0,
        "of everything that has no factor below; 0: 1e-3 of the tiny model with continuous "
        "actions, 3e-4 of others",
    )
    final_learning_rate: float = setting(
        0.0, "what it falls to; 0: 3e-4 where learning_rate is 0 as well, else it stays"
    )
    lr_decay_start: int = setting(
        10_000, "updates before it begins to; the policy's stays", needs={"rate_falls": True}
    )
    lr_decay_updates: int = setting(
        30_000,
        "updates over which it then falls there, linearly",
        at_least=1,
        needs={"rate_falls": True},
    )
    encoder_lr_scale: float = setting(0.3, "factor of the encoder's rate")
    encoder_lr_step_at: float = setting(
        1.0, "share of the run after which that rate steps; 1: never", at_most=1
    )
    encoder_lr_step_scale: float = setting(
        1.0, "by this factor; 0: frozen", needs={"steps_encoder_rate": True}
    )
    ensemble_lr_scaling: bool = setting(False, "rates grow with the number of heads")
    policy_lr_scale: float = setting(0.0, "factor of the policy's rate; 0: that rate is 3e-4")
    policy_adam_eps: float = setting(1e-5, "Adam's epsilon for the policy")
    weight_decay: float = setting(0.0, "AdamW's; 0: Adam")
    grad_clip_norm: float = setting(20.0, "largest global norm of a gradient")
    value_every: int = setting(1, "model updates between two of the values", at_least=1)
    policy_every: int = setting(1, "and of the policy", at_least=1)
    tau: float = setting(0.01, "step of the target network towards the values", at_most=1)
    policy_tau: float = setting(
        0.01, "step of the EMA policy", at_most=1, needs={"keeps_target_policy": True}
    )


@dataclasses.dataclass(frozen=True)
class Eval(common.Eval):
    """Evaluations, and a look at the model with each."""

    model: bool = setting(
        True, "after every evaluation measure the model, too: model/… in the log, model.png"
    )


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of a run with this agent.

    A property that `needs` names says in its docstring what it takes to be true.
    """

    agent: str = setting("tdmpc", "which agent")
    env: Env = section(Env(), "the task")
    train: Train = section(Train(), "how long, how often")
    eval: Eval = section(Eval(), "evaluations")
    replay: Replay = section(Replay(), "what is stored")
    model: Model = section(Model(), "the world model")
    planner: Planner = section(Planner(), "acts in the environment")
    training_planner: TrainingPlanner = section(TrainingPlanner(), "makes training targets")
    reanalyze: Reanalyze = section(Reanalyze(), "makes stored targets again")
    loss: Loss = section(Loss(), "what is minimised")
    optimizer: Optimizer = section(Optimizer(), "how it is minimised")

    def for_task(self, spec: EnvSpec) -> Self:
        """These settings with what is left to the task filled in.

        With two updates a step continuous tasks take half the steps or less, while CartPole comes
        later to its best and leaves it (docs/results/suites.md). 3e-4 is TD-MPC2's rate for its 5M
        model; a narrow one learns sooner with more, but for its policy, which then settles before
        it has explored. Later a smaller one is as good or better: what remains is to tell places
        apart whose values differ by little. Random actions that are held find more, and episodes
        that begin again where a task is solved show more of it (docs/results/learning_history.md).
        """
        from mbx import returns  # loads JAX

        settings = super().for_task(spec)
        given, lengths = self.loss.discount, [s.episode_length for s in spec.tasks or (spec,)]
        each = tuple(
            choose(given > 0.0, given, returns.discount_from_episode_length(n)) for n in lengths
        )
        updates = self.train.utd_ratio or (0.5 if spec.discrete else 2.0)
        hold = self.train.seed_hold or (1 if spec.discrete else 4)
        reset = self.train.reset_solved or self._usual_reset(spec)
        own = self.optimizer
        tiny = self.model.size == "tiny" and not spec.discrete
        rate = choose(own.learning_rate > 0.0, own.learning_rate, 1e-3 if tiny else PUBLISHED_RATE)
        last = choose(own.learning_rate > 0.0, rate, PUBLISHED_RATE)
        last = choose(own.final_learning_rate > 0.0, own.final_learning_rate, last)
        factor = choose(own.policy_lr_scale > 0.0, own.policy_lr_scale, PUBLISHED_RATE / rate)
        model = self.model
        if model.bins == "auto" and spec.reward_range:
            known = [g for g in (*each, *self.loss.aux_gammas) if isinstance(g, float) and g < 1.0]
            steps = max(spec.episode_length, *(1.0 / (1.0 - g) for g in known), 0.0)
            low, high = bin_range(spec.reward_range, steps * spec.action_repeat)
            model = dataclasses.replace(model, bin_min=low, bin_max=high)
        return dataclasses.replace(
            settings,
            model=model,
            train=dataclasses.replace(
                self.train, utd_ratio=updates, seed_hold=hold, reset_solved=reset
            ),
            optimizer=dataclasses.replace(
                own, learning_rate=rate, final_learning_rate=last, policy_lr_scale=factor
            ),
            loss=dataclasses.replace(self.loss, discount=each if spec.tasks else each[0]),
        )

    def _usual_reset(self, spec: EnvSpec) -> int:
        """`train.reset_solved` where it is left to the task, or to each of several."""
        tasks = spec.tasks or (spec,)
        alone = self.env.num_envs <= len(tasks)
        if alone or self.train.dataset:
            return 0
        return max(task.reset_solved for task in tasks)

    def check_start(self, other: RunSettings) -> Iterator[str]:
        """An encoder reads, and heads say, other numbers than those that they were trained with."""
        if not isinstance(other, Settings):
            return
        start = f"of train.init_from={self.train.init_from!r}"
        normed, before = (s.model.normalize_observations for s in (self, other))
        if normed != before:
            yield (
                f"model.normalize_observations={normed}: the encoder {start} was trained with "
                f"{before}, set that"
            )
        for name in ("bin_min", "bin_max") if self.has_bins else ():
            given, trained = getattr(self.model, name), getattr(other.model, name)
            if given != trained:
                yield (
                    f"model.{name}={given}: the heads {start} were trained with {trained}; set "
                    f"model.bins='fixed' and model.{name}={trained}"
                )

    def environment_options(self, training: bool) -> dict[str, Any]:
        """Evaluations play whole episodes."""
        given = self.train.reset_solved
        return {"reset_solved": {0: None, -1: 0}.get(given, given)} if training else {}

    def updates_per_step(self) -> float:
        """Learner updates of an agent step, of settings that are `for_task`."""
        return self.train.utd_ratio

    def draws(self) -> tuple[int, ...]:
        """Windows of a batch; rows of a pass, and windows where it is made of them."""
        own, size = self.reanalyze, self.loss.batch_size
        if not own.enabled:
            return (size,)
        windows = -(-own.batch_size // (self.loss.horizon + 1))
        if own.current_batch:
            return size, min(windows, size)
        return size, windows if own.slices else own.batch_size

    def gains_by_cores(self) -> bool:
        """Measured up to 1M; at 5M updates lose more than plans gain."""
        return self.model.size in ("tiny", "1")

    def reanalyze_interval(self) -> int:
        """Learner updates between two passes of the loop.

        A learner that plans again for its own batch needs none beside that.
        """
        passes = self.reanalyze.enabled and not self.reanalyze.current_batch
        return self.reanalyze.interval if passes else 0

    def reanalyze_min_step(self) -> int:
        """Environment steps before the first pass."""
        return self.reanalyze.min_step

    def total_updates(self) -> int:
        """Learner updates of the whole run, which schedules are shares of.

        Of settings that are `for_task`.
        """
        steps = max(self.train.steps - self.train.seed_steps, 0) // self.env.action_repeat
        return max(int(steps * self.train.utd_ratio) + self.train.pretrain_updates, 1)

    def check(self) -> Iterator[str]:
        tasks, copies = self.env.name.count("+") + 1, self.env.num_envs
        reset = f"train.reset_solved={self.train.reset_solved}"
        if self.train.reset_solved > 0 and copies <= (tasks if self.several_tasks else 1):
            yield (
                f"{reset}: with env.num_envs={copies} every environment plays whole episodes, "
                "raise that or leave it 0"
            )
        if self.train.reset_solved > 0 and self.train.dataset:
            yield f"{reset}: with train.dataset no episodes are played, leave it 0"
        for name in ("loss", "reanalyze"):
            size, capacity = getattr(self, name).batch_size, self.replay.capacity
            used = name == "loss" or (self.stores_plans and self.reanalyze.enabled)
            if used and size > capacity:
                yield (
                    f"{name}.batch_size={size} exceeds replay.capacity={capacity}: lower the one "
                    "or raise the other"
                )
        heads = self.model.num_dynamics
        if self.loss.head_strategy == "split" and self.loss.batch_size % heads:
            yield (
                f"loss.batch_size={self.loss.batch_size} is not divisible by model.num_dynamics="
                f"{heads}: change it, or choose loss.head_strategy='concat' or 'single'"
            )
        wanted, stored = self.loss.awr_effective_samples, self.stored_actions
        if wanted and not 1.0 < wanted < stored:
            yield (
                f"loss.awr_effective_samples={wanted} of a state's {stored} planner actions: "
                "choose a number between 1 and that, or 0 for awr_temperature as it is"
            )
        if wanted and self.loss.advantage_scale == "range":
            yield (
                "loss.advantage_scale='range' has no effect where loss.awr_effective_samples "
                "chooses the temperature: set it to 'none' or 'state'"
            )
        if self.uses_expert and self.model.policy == "squashed":
            yield (
                f"loss.policy_loss={self.loss.policy_loss!r} compares the policy with a Gaussian "
                "of actions, but model.policy='squashed' is one before tanh: choose 'tanh_mean'"
            )
        if self.uses_expert and not self.training_planner.enabled:
            yield (
                f"loss.policy_loss={self.loss.policy_loss!r} distils stored experts: set "
                "training_planner.enabled=True"
            )

    @property
    def stored_actions(self) -> int:
        """Planner actions that losses read of a state."""
        kept = self.replay.keep_targets if self.training_planner.enabled else 0
        return kept or self.training_planner.num_samples

    @property
    def has_bins(self) -> bool:
        """model.num_bins above 1"""
        return self.model.num_bins > 1

    @property
    def several_dynamics(self) -> bool:
        """model.num_dynamics above 1"""
        return self.model.num_dynamics > 1

    @property
    def has_ensembles(self) -> bool:
        """two or more heads of dynamics, rewards or (loss.num_heads) values"""
        values = self.model.num_values != 1 and self.loss.num_heads > 1
        return values or self.model.num_rewards > 1 or self.several_dynamics

    @property
    def weighs_elites(self) -> bool:
        """planner.name other than 'cem', 'icem' and 'predictive'"""
        return self.planner.name not in ("cem", "icem", "predictive")

    @property
    def training_weighs_elites(self) -> bool:
        """training_planner.name other than 'cem', 'icem' and 'predictive'"""
        return self.training_planner.name not in ("cem", "icem", "predictive")

    @property
    def chooses_elites(self) -> bool:
        """planner.name other than 'predictive' (which takes the best)"""
        return self.planner.name != "predictive"

    @property
    def plans_ahead(self) -> bool:
        """planner.horizon above 1"""
        return self.planner.horizon > 1

    @property
    def plans_far(self) -> bool:
        """planner.horizon above 3 (shorter plans have one frequency)"""
        return self.planner.horizon > 3

    @property
    def trains_far(self) -> bool:
        """training_planner.horizon above 3 (shorter plans have one frequency)"""
        return self.training_planner.horizon > 3

    @property
    def plans_again(self) -> bool:
        """planner.iterations above 1, or planner.extra_iterations"""
        return self.planner.iterations > 1 or self.planner.extra_iterations > 0

    @property
    def trains_again(self) -> bool:
        """training_planner.iterations above 1, or training_planner.extra_iterations"""
        planner = self.training_planner
        return planner.iterations > 1 or planner.extra_iterations > 0

    @property
    def trains_ahead(self) -> bool:
        """training_planner.horizon above 1"""
        return self.training_planner.horizon > 1

    @property
    def reads_plans(self) -> bool:
        """a loss that reads planner actions (loss.value_target planner or lambda, or awr or kl in
        loss.policy_loss)"""
        terms = self.loss.policy_terms
        return self.loss.value_target in ("planner", "lambda") or "awr" in terms or "kl" in terms

    @property
    def stores_plans(self) -> bool:
        """training_planner.enabled, and a loss that reads planner actions (loss.value_target
        planner or lambda, or awr or kl in loss.policy_loss)"""
        return self.training_planner.enabled and self.reads_plans

    @property
    def weighs_plans(self) -> bool:
        """awr in loss.policy_loss, loss.value_target=lambda, or loss.value_weighting=weighted with
        loss.value_target=planner"""
        lambda_ = self.loss.value_target == "lambda"
        return "awr" in self.loss.policy_terms or lambda_ or self.weighs_values

    @property
    def weighs_values(self) -> bool:
        """loss.value_weighting=weighted with loss.value_target=planner"""
        return self.loss.value_target == "planner" and self.loss.value_weighting == "weighted"

    @property
    def uses_svg(self) -> bool:
        """svg in loss.policy_loss"""
        return "svg" in self.loss.policy_terms

    @property
    def policy_reads_model(self) -> bool:
        """svg in loss.policy_loss, or loss.optimist"""
        return self.uses_svg or self.loss.optimist

    @property
    def svg_first(self) -> bool:
        """svg named first in loss.policy_loss, whose value scale it is"""
        return next(iter(self.loss.policy_terms)) == "svg"

    @property
    def uses_expert(self) -> bool:
        """kl in loss.policy_loss"""
        return "kl" in self.loss.policy_terms

    @property
    def reads_expert_alone(self) -> bool:
        """kl in loss.policy_loss, and no loss that reads the actions or values of plans"""
        return self.uses_expert and not self.weighs_plans and self.loss.value_target != "planner"

    @property
    def moves_value_scale(self) -> bool:
        """svg in loss.policy_loss, or loss.advantage_scale=range"""
        return self.uses_svg or (self.weighs_plans and self.loss.advantage_scale == "range")

    @property
    def scales_values(self) -> bool:
        """svg in loss.policy_loss, loss.advantage_scale=range, or loss.optimist"""
        return self.moves_value_scale or (self.loss.optimist and self.reads_plans)

    @property
    def imagines_targets(self) -> bool:
        """model.critic=v with loss.value_target planner or td"""
        return self.model.critic == "v" and self.loss.value_target != "lambda"

    @property
    def targets_know_std(self) -> bool:
        """heads that value targets average: model.critic=v with several dynamics, reward or value
        heads, or loss.value_reduction=mean with loss.num_heads above 1; not
        loss.value_target=lambda"""
        if self.loss.value_target == "lambda":
            return False
        values = self.loss.value_reduction == "mean" and self.loss.num_heads > 1
        imagined = self.model.critic == "v" and (
            self.model.num_rewards > 1 or self.several_dynamics
        )
        return (values and self.model.num_values != 1) or imagined

    @property
    def targets_follow_policy(self) -> bool:
        """loss.value_target=td, model.critic=q, or loss.aux_gammas"""
        return (
            self.loss.value_target == "td" or self.model.critic == "q" or bool(self.loss.aux_gammas)
        )

    @property
    def keeps_target_policy(self) -> bool:
        """loss.trust_region_coef above 0, or loss.td_ema_policy"""
        return self.loss.td_ema_policy or possible(self.loss.trust_region_coef > 0.0)

    @property
    def changes_entropy(self) -> bool:
        """loss.entropy_coef_end at least 0"""
        return possible(self.loss.entropy_coef_end >= 0.0)

    @property
    def rate_falls(self) -> bool:
        """optimizer.final_learning_rate other than optimizer.learning_rate, or neither given and
        model.size=tiny"""
        rate, last = self.optimizer.learning_rate, self.optimizer.final_learning_rate
        if possible(last > 0.0):
            return possible(last != rate)
        return possible(rate <= 0.0) and self.model.size == "tiny"

    @property
    def steps_encoder_rate(self) -> bool:
        """optimizer.encoder_lr_step_at below 1"""
        return possible(self.optimizer.encoder_lr_step_at < 1.0)

    @property
    def follows_progress(self) -> bool:
        """A loss depends on the share of the run that is done."""
        warms_up = possible(self.loss.encoder_consistency_warmup > 0.0)
        return self.changes_entropy or warms_up


def bin_range(rewards: tuple[float, ...], steps: float) -> tuple[float, float]:
    """Lowest and highest bin, in symlog space: what `steps` environment steps can return.

    At least 1 to either side of 0, so that a head that is wrong by a little can say so.

    Args:
        rewards: the lowest and the highest of a step.
        steps: of an episode, or of 1 / (1 - discount) agent steps where those are more.

    Examples:
        >>> low, high = bin_range((0.0, 1.0), 1000)
        >>> low, round(high, 3)
        (-1.0, 6.909)
    """
    low, high = (math.log1p(abs(x) * steps) for x in (min(rewards[0], 0.0), max(rewards[1], 0.0)))
    return min(-1.0, -low), max(1.0, high)
