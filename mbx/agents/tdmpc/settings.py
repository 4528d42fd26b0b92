"""Settings of the TD-MPC agent; the defaults are what `configs/tdmpc.py` trains.

The modules that read a section describe it: planners in `planning`, value targets in
`value_targets`, losses in `losses`, optimisers in `update`. Steps are environment steps (action
repeat included) summed over environments; "share of the run" counts learner updates. Learning
rates, the discount and loss coefficients may be traced numbers (`mbx.train_fn`). Loads no JAX.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Self

from mbx.agents import settings as common
from mbx.agents.settings import RunSettings
from mbx.agents.tdmpc.loss_settings import Loss
from mbx.agents.tdmpc.planner_settings import Planner, TrainingPlanner, in_order
from mbx.settings import NONZERO, section, setting

if TYPE_CHECKING:
    from mbx.types import EnvSpec

__all__ = ["Loss", "Model", "Planner", "Settings", "TrainingPlanner"]

_UNWEIGHED = ("cem", "icem", "predictive")  # planners whose elites weigh the same
PUBLISHED_RATE = 3e-4  # of everything but the encoder, in TD-MPC2's config.yaml
MODEL_SIZES = ("tiny", "1", "5", "19", "48", "317")

_STORED = {"training_planner.enabled": True}
_REANALYZE = {"enabled": True}
_PASSES = {"enabled": True, "current_batch": False}
_FLOATS = ("float32", "bfloat16")


def given(number: Any) -> bool:
    """Whether a number is set; 0 leaves it to the task. Traced numbers are set."""
    return not isinstance(number, int | float) or number > 0


def _when(words: str, holds: Callable[[Any], bool]) -> Any:
    """A condition over several settings that `needs` names; `words` describe it."""
    return property(holds, doc=words)


def _spread(reduction: str, v_critic: bool = False) -> Any:
    """Whether heads differ in a score whose reduction over values is the setting `reduction`;
    v_critic: it reads dynamics and rewards only with a V critic."""
    section, _, name = reduction.partition(".")
    return _when(
        f"several heads of values (model.num_values, loss.num_heads) with {reduction}=mean, or of "
        f"dynamics or rewards{' with model.critic=v' * v_critic}",
        lambda s: (
            (s.averages_values and getattr(getattr(s, section), name) == "mean")
            or (s.several_dynamics or s.model.num_rewards > 1)
            and not (v_critic and s.model.critic == "q")
        ),
    )


@dataclasses.dataclass(frozen=True)
class Env(common.Env):
    """The task and how many copies of it are stepped together."""

    name: str = setting(
        "gymnax:Pendulum-v1",
        "Task as SUITE:TASK, or multi:SUITE:TASK+SUITE:TASK for several at once.",
    )


@dataclasses.dataclass(frozen=True)
class Train(common.Train):
    """How long a run is, and how often it learns."""

    steps: int = setting(10_000, "Environment steps of the run.", at_least=1)
    log_interval: int = setting(200, "Environment steps between log rows.", at_least=1)
    seed_hold: int = setting(
        0, "Agent steps that each random action is held; 0 = 4, or 1 with discrete actions."
    )
    reset_solved: int = setting(
        0,
        "Agent steps in a row with nearly the highest reward after which three environments in "
        "four begin another episode in training, where the suite says what its rewards can be "
        "(dmc: does); 0 = the task's, 50 there; -1 = never.",
        at_least=-1,
    )
    pretrain_updates: int = setting(
        500, "Pretraining updates, made at once after the random actions."
    )
    pretrain_policy: bool = setting(
        True, "Policy updates during pretraining as well.", needs={"pretrain_updates": NONZERO}
    )
    utd_ratio: float = setting(
        0.0, "Learner updates per agent step; 0 = 2, or 0.5 with discrete actions."
    )


@dataclasses.dataclass(frozen=True)
class Replay(common.Replay):
    """What is stored of the past."""

    half_life: float = setting(
        0.0,
        "Age at which updates draw a transition half as often, in agent steps of its environment; "
        "0 = uniform.",
    )
    keep_targets: int = setting(
        8, "Planner actions stored with a transition, best first; 0 = all.", needs=_STORED
    )
    actions_dtype: str = setting(
        "float32", "Type of stored planner actions.", choices=(*_FLOATS, "int8"), needs=_STORED
    )
    values_dtype: str = setting(
        "float32", "Type of stored planner values.", choices=_FLOATS, needs=_STORED
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """Shape of the world model."""

    size: str = setting(
        "tiny",
        "Millions of parameters, as in TD-MPC2; tiny = 0.13 (0.2 with a Q critic).",
        choices=MODEL_SIZES,
    )
    critic: str = setting("v", "Critic: v = V(z); q = Q(z, a).", choices=("q", "v"))
    policy: str = setting(
        "tanh_mean",
        "Policy of continuous actions: Gaussian squashed by tanh, or Gaussian around tanh(mean) "
        "with clipped samples (discrete actions have a categorical policy).",
        choices=("squashed", "tanh_mean"),
    )
    normalize_observations: bool = setting(
        False,
        "Normalization of observed vectors by their running mean and standard deviation; not of "
        "images and boards.",
    )
    num_values: int = setting(2, "Number of value heads; 0 = the size's.")
    num_dynamics: int = setting(1, "Number of dynamics heads.", at_least=1)
    num_rewards: int = setting(1, "Number of reward heads.", at_least=1)
    prior_scale: float = setting(
        0.0, "Scale of frozen random networks added to dynamics, reward and value heads; 0 = none."
    )
    num_bins: int = setting(101, "Bins of predicted rewards and values.", at_least=2)
    bins: str = setting(
        "fixed",
        "Range of the bins: fixed = from bin_min to bin_max; auto = over what an episode can "
        "return, where the suite says what its rewards can be (dmc: does).",
        choices=("fixed", "auto"),
    )
    bin_min: float = setting(-10.0, "Lowest bin, in symlog space.", at_least=None)
    bin_max: float = setting(10.0, "Highest bin, in symlog space.", at_least=None)
    log_std_min: float = setting(
        -3.0, "Lowest log standard deviation of a Gaussian policy.", at_least=None
    )
    log_std_max: float = setting(
        1.0, "Highest log standard deviation of a Gaussian policy.", at_least=None
    )
    dropout: float = setting(
        0.01, "Dropout in the first hidden layer of each value head.", at_most=1
    )
    episodic: str = setting(
        "auto", "Termination head; auto = if the task can end.", choices=("auto", "True", "False")
    )
    dtype: str = setting("float32", "Type of computations.", choices=_FLOATS)
    task_dim: int = setting(
        96, "Size of the embedding of each of several tasks.", needs="several_tasks"
    )

    def check(self) -> Iterator[str]:
        yield from in_order(self, "model", "bin_min", "bin_max")
        yield from in_order(self, "model", "log_std_min", "log_std_max")


@dataclasses.dataclass(frozen=True)
class Reanalyze:
    """How stored planner targets are refreshed with newer parameters."""

    enabled: bool = setting(
        True,
        "Refresh stored targets; without, agents learned little on dm_control "
        "(docs/planner_targets.md).",
        needs=_STORED,
    )
    interval: int = setting(10, "Learner updates between passes.", at_least=1, needs=_REANALYZE)
    batch_size: int = setting(128, "Transitions of a pass.", at_least=1, needs=_REANALYZE)
    min_step: int = setting(1_000, "Environment steps before the first pass.", needs=_PASSES)
    stale_exponent: float = setting(
        1.0, "Priority of stale targets; 0 = transitions are drawn uniformly.", needs=_PASSES
    )
    current_batch: bool = setting(
        False, "Refresh whole windows, those that the update is about to use.", needs=_REANALYZE
    )


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam with one clip of the global norm; rates of the model's components."""

    learning_rate: float = setting(
        0.0,
        "Base learning rate; 0 = 1e-3 for the tiny model with continuous actions, otherwise 3e-4.",
    )
    final_learning_rate: float = setting(
        0.0, "Learning rate after the decay; 0 = 3e-4 where learning_rate is 0, else no decay."
    )
    lr_decay_start: int = setting(
        10_000, "Updates before the model's rate falls; the policy's stays.", needs="rate_falls"
    )
    lr_decay_updates: int = setting(
        30_000, "Updates of the linear fall of the model's rate.", at_least=1, needs="rate_falls"
    )
    encoder_lr_scale: float = setting(0.3, "Factor of the encoder's rate.")
    encoder_lr_step_at: float = setting(
        1.0, "Share of the run after which the encoder's rate steps; 1 = never.", at_most=1
    )
    encoder_lr_step_scale: float = setting(
        1.0, "Factor by which the encoder's rate steps; 0 = frozen.", needs="steps_encoder_rate"
    )
    ensemble_lr_scaling: bool = setting(False, "Rates grow with the number of heads.")
    policy_lr_scale: float = setting(0.0, "Factor of the policy's rate; 0 = that rate is 3e-4.")
    weight_decay: float = setting(0.0, "Weight decay of AdamW; 0 = Adam.")
    grad_clip_norm: float = setting(20.0, "Largest global norm of a gradient.")
    value_every: int = setting(1, "Model updates between two updates of the values.", at_least=1)
    tau: float = setting(0.01, "Step of the target network towards the values.", at_most=1)
    policy_tau: float = setting(
        0.01, "Step of the EMA policy towards the policy.", at_most=1, needs="keeps_target_policy"
    )


@dataclasses.dataclass(frozen=True)
class Eval(common.Eval):
    """Evaluations, and diagnostics of the model with each."""

    model: bool = setting(
        True, "Diagnostics of the model after every evaluation: model/* in the log, model.png."
    )


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """All settings of a run with this agent; conditions that `needs` names are at the end."""

    agent: str = setting("tdmpc", "Name of the agent.")
    env: Env = section(Env(), "Task and its environments.")
    train: Train = section(Train(), "Length of the run and how often it learns.")
    eval: Eval = section(Eval(), "Evaluations during training.")
    replay: Replay = section(Replay(), "Contents of the replay buffer.")
    model: Model = section(Model(), "Parts and sizes of the world model.")
    planner: Planner = section(Planner(), "Planner that acts in the environment.")
    training_planner: TrainingPlanner = section(
        TrainingPlanner(), "Planner that makes training targets."
    )
    reanalyze: Reanalyze = section(Reanalyze(), "Refresh of stored targets (reanalyze).")
    loss: Loss = section(Loss(), "Losses and their batches.")
    optimizer: Optimizer = section(Optimizer(), "Optimizer of model, values and policy.")

    def for_task(self, spec: EnvSpec) -> Self:
        """These settings with what is left to the task filled in.

        Continuous tasks need at most half the steps with two updates a step; CartPole gets worse
        (docs/results/suites.md). 3e-4 is TD-MPC2's rate for its 5M model; a narrow model learns
        faster with a higher one, but its policy settles too early, and later a smaller rate is as
        good or better. Held random actions explore more, and early resets of solved episodes show
        more of that (docs/notes/learning_history.md).
        """
        from mbx import returns  # loads JAX

        settings = super().for_task(spec)
        lengths = [s.episode_length for s in spec.tasks or (spec,)]
        each = tuple(
            self.loss.discount
            if given(self.loss.discount)
            else returns.discount_from_episode_length(n)
            for n in lengths
        )
        updates = self.train.utd_ratio or (0.5 if spec.discrete else 2.0)
        hold = self.train.seed_hold or (1 if spec.discrete else 4)
        reset = self.train.reset_solved or self._usual_reset(spec)
        own = self.optimizer
        tiny = self.model.size == "tiny" and not spec.discrete
        rate, last = (1e-3 if tiny else PUBLISHED_RATE), PUBLISHED_RATE
        if given(own.learning_rate):
            rate = last = own.learning_rate
        if given(own.final_learning_rate):
            last = own.final_learning_rate
        factor = own.policy_lr_scale if given(own.policy_lr_scale) else PUBLISHED_RATE / rate
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
        """Automatic `train.reset_solved`; 0 with a dataset or one environment a task."""
        tasks = spec.tasks or (spec,)
        alone = self.env.num_envs <= len(tasks)
        if alone or self.train.offline:
            return 0
        return max(task.reset_solved for task in tasks)

    def check_start(self, other: RunSettings) -> Iterator[str]:
        """Refuses a start from a model with other observation scaling or other bins."""
        if not isinstance(other, Settings):
            return
        start = f"of train.init_from={self.train.init_from!r}"
        normed, before = (s.model.normalize_observations for s in (self, other))
        if normed != before:
            yield (
                f"model.normalize_observations={normed}: the encoder {start} was trained with "
                f"{before}, set that"
            )
        for name in ("bin_min", "bin_max"):
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
        """Learner updates per agent step, of settings that are `for_task`."""
        return self.train.utd_ratio

    def draws(self) -> tuple[int, ...]:
        """Windows of a batch; rows (or windows) of a reanalyze pass."""
        own, size = self.reanalyze, self.loss.batch_size
        if not own.enabled:
            return (size,)
        return size, self.refreshed_windows if own.current_batch else own.batch_size

    def gains_by_cores(self) -> bool:
        """Measured up to 1M; at 5M updates lose more than plans gain."""
        return self.model.size in ("tiny", "1")

    def reanalyze_interval(self) -> int:
        """Learner updates between the loop's reanalyze passes; 0: none."""
        passes = self.reanalyze.enabled and not self.reanalyze.current_batch
        return self.reanalyze.interval if passes else 0

    def reanalyze_min_step(self) -> int:
        """Environment steps before the first pass."""
        return self.reanalyze.min_step

    def total_updates(self) -> int:
        """Learner updates of the whole run, of settings that are `for_task`."""
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
        if self.train.reset_solved > 0 and self.train.offline:
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
        if self.loss.batch_size % heads:
            yield (
                f"loss.batch_size={self.loss.batch_size} is not divisible by model.num_dynamics="
                f"{heads}, whose heads share a batch: give a multiple of it"
            )
        kept, made = self.replay.keep_targets, self.training_planner.num_samples
        if self.stores_plans and kept > made:
            yield (
                f"replay.keep_targets={kept} exceeds training_planner.num_samples={made}: lower "
                "it, or 0 for all"
            )
        best, usual = self.loss.value_best_n, Loss.value_best_n
        averaged = self.loss.value_target == "planner" and self.loss.value_weighting == "best_n"
        if averaged and best != usual and best > self.stored_actions:
            yield (
                f"loss.value_best_n={best} exceeds the {self.stored_actions} planner actions of a "
                "state (replay.keep_targets, training_planner.num_samples): lower it"
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
    def refreshed_windows(self) -> int:
        """Windows of a batch that `reanalyze.current_batch` refreshes."""
        return min(-(-self.reanalyze.batch_size // (self.loss.horizon + 1)), self.loss.batch_size)

    # Conditions that no setting names in `needs`.
    stores_plans = _when(
        "The replay holds planner actions.",
        lambda s: s.training_planner.enabled and s.reads_plans,
    )
    refreshes_batch = _when(
        "An update refreshes the targets that it reads.",
        lambda s: s.stores_plans and s.reanalyze.enabled and s.reanalyze.current_batch,
    )
    acts_as_expert = _when(
        "Transitions store the acting planner's expert.",
        lambda s: s.uses_expert and s.loss.expert_source == "acting",
    )
    follows_plans = _when(
        "The planner does not run where its last plan holds.",
        lambda s: s.can_follow and s.planner.reuse > 0.0,
    )
    reads_expert_alone = _when(
        "No loss reads the actions or values of plans, but one their expert.",
        lambda s: s.uses_expert and not s.weighs_plans and s.loss.value_target != "planner",
    )
    follows_progress = _when(
        "A loss depends on the share of the run that is done.",
        lambda s: s.changes_entropy or s.loss.encoder_consistency_warmup > 0.0,
    )

    # Conditions in `needs`, in words that end a sentence.
    can_follow = _when(
        "continuous actions, planner.horizon above 1, and not the acting planner as expert",
        lambda s: (
            s.planner.horizon > 1 and s.model.policy != "categorical" and not s.acts_as_expert
        ),
    )
    several_dynamics = _when("model.num_dynamics above 1", lambda s: s.model.num_dynamics > 1)
    averages_values = _when(
        "model.num_values and loss.num_heads above 1",
        lambda s: s.model.num_values != 1 and s.loss.num_heads > 1,
    )
    plans_know_std = _spread("planner.value_reduction")
    training_plans_know_std = _spread("training_planner.value_reduction")
    svg_knows_std = _spread("loss.policy_reduction", v_critic=True)
    weighs_elites = _when(
        f"planner.name other than {_UNWEIGHED}", lambda s: s.planner.name not in _UNWEIGHED
    )
    training_weighs_elites = _when(
        f"training_planner.name other than {_UNWEIGHED}",
        lambda s: s.training_planner.name not in _UNWEIGHED,
    )
    chooses_elites = _when(
        "planner.name other than 'predictive' (which takes the best)",
        lambda s: s.planner.name != "predictive",
    )
    plans_ahead = _when("planner.horizon above 1", lambda s: s.planner.horizon > 1)
    trains_ahead = _when(
        "training_planner.horizon above 1", lambda s: s.training_planner.horizon > 1
    )
    reads_plans = _when(
        "a loss that reads planner actions (loss.value_target planner or lambda, or awr or kl in "
        "loss.policy_loss)",
        lambda s: s.loss.value_target != "td" or bool({"awr", "kl"} & s.loss.policy_terms.keys()),
    )
    weighs_plans = _when(
        "awr in loss.policy_loss, loss.value_target=lambda, or loss.value_weighting=weighted with "
        "loss.value_target=planner",
        lambda s: (
            "awr" in s.loss.policy_terms
            or s.loss.value_target == "lambda"
            or (s.loss.value_target == "planner" and s.loss.value_weighting == "weighted")
        ),
    )
    uses_svg = _when("svg in loss.policy_loss", lambda s: "svg" in s.loss.policy_terms)
    svg_first = _when(
        "svg named first in loss.policy_loss, whose value scale it is",
        lambda s: next(iter(s.loss.policy_terms)) == "svg",
    )
    uses_expert = _when("kl in loss.policy_loss", lambda s: "kl" in s.loss.policy_terms)
    samples_optimist = _when(
        "a loss that reads planner actions, and two or more samples of the policy in the training "
        "planner (num_samples, or num_proposals where it searches as the acting one)",
        lambda s: s.reads_plans and s.training_planner.policy_samples > 1,
    )
    scales_values = _when(
        "svg in loss.policy_loss, or loss.optimist",
        lambda s: s.uses_svg or (s.loss.optimist and s.reads_plans),
    )
    imagines_targets = _when(
        "model.critic=v with loss.value_target planner or td",
        lambda s: s.model.critic == "v" and s.loss.value_target != "lambda",
    )
    targets_know_std = _when(
        "heads that value targets average: model.critic=v with several reward heads (or several "
        "dynamics heads and loss.td_dynamics_reduction=from_std_coef), or "
        "loss.value_reduction=mean with several value heads; not loss.value_target=lambda",
        lambda s: (
            s.loss.value_target != "lambda"
            and (
                (s.loss.value_reduction == "mean" and s.averages_values)
                or (s.imagines_targets and (s.model.num_rewards > 1 or s.reduces_by_sign))
            )
        ),
    )
    reduces_by_sign = _when(
        "several dynamics heads and loss.td_dynamics_reduction=from_std_coef",
        lambda s: (
            s.several_dynamics
            and s.loss.td_all_dynamics
            and s.loss.td_dynamics_reduction == "from_std_coef"
        ),
    )
    targets_follow_policy = _when(
        "loss.value_target=td, model.critic=q, or loss.aux_gammas",
        lambda s: s.loss.value_target == "td" or s.model.critic == "q" or bool(s.loss.aux_gammas),
    )
    keeps_target_policy = _when(
        "loss.trust_region_coef above 0, or loss.td_ema_policy",
        lambda s: s.loss.td_ema_policy or s.loss.trust_region_coef > 0.0,
    )
    changes_entropy = _when(
        "loss.entropy_coef_end at least 0", lambda s: s.loss.entropy_coef_end >= 0.0
    )
    steps_encoder_rate = _when(
        "optimizer.encoder_lr_step_at below 1", lambda s: s.optimizer.encoder_lr_step_at < 1.0
    )

    @property
    def rate_falls(self) -> bool:
        """optimizer.final_learning_rate other than optimizer.learning_rate, or neither given and
        model.size=tiny"""
        rate, last = self.optimizer.learning_rate, self.optimizer.final_learning_rate
        if given(last):
            return not (isinstance(rate, float) and isinstance(last, float) and rate == last)
        return not given(rate) and self.model.size == "tiny"


def bin_range(rewards: tuple[float, ...], steps: float) -> tuple[float, float]:
    """Lowest and highest bin, in symlog space, for the return of `steps` environment steps.

    At least 1 on either side of 0, so that small errors can be represented.

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
