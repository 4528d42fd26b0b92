"""Settings of EMPO's agent; the defaults here are its default configuration. Loads no JAX."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

from mbx.agents import settings as common
from mbx.agents.settings import RunSettings
from mbx.settings import NONZERO, section, setting

MODELS = ("auto", "exact", "paths", "uniform", "learned")  # `mbx.empo.power.named`, which loads JAX

_NETWORKS = {"model.kind": ("networks", "mixed")}
_TABLES = {"model.kind": ("tables", "mixed")}
_MIXED = {"model.kind": "mixed"}
_HELD = ("network", "table")
_KINDS = {"networks": "network", "tables": "table"}


def _is(what: str, *names: str) -> Any:
    """A condition of `needs`: one of these parts of the model is a `what`, network or table."""
    words = f"{' or '.join(f'model.{name}' for name in names)} is a {what}"
    return property(lambda self: bool({*names} & {*self.model.held(what)}), doc=words)


@dataclasses.dataclass(frozen=True)
class Env(common.Env):
    """The world and how many copies of it are stepped together."""

    varied_starts: float = setting(0.0, "Share of training episodes begun anywhere.", at_most=1)
    maps: int = setting(
        64, "Number of maps of empo:maps/SOURCE to train on; of files, at most as many.", at_least=1
    )
    held_out: int = setting(16, "Held-out maps of empo:maps/SOURCE, for evaluations alone.")
    map_seed: int = setting(0, "Seed of the map generator, or of the choice of held-out files.")


@dataclasses.dataclass(frozen=True)
class Train(common.Train):
    """How long a run is and how often it learns."""

    utd_ratio: float = setting(0.0625, "Learner updates per agent step.")


@dataclasses.dataclass(frozen=True)
class Eval(common.Eval):
    """Evaluations: of returns, and of what humans reach beside different robots."""

    review_episodes: int = setting(
        256, "Episodes of the learned, a random and a frozen robot each; 0 = no comparison."
    )
    lookahead: bool = setting(False, "Evaluations act by the mean of Q_r's network and eq. (4).")
    profile: bool = setting(False, "Evaluations log the milliseconds of an update's parts.")


@dataclasses.dataclass(frozen=True)
class Power:
    """The robot's idea of power: arXiv 2508.00159, equations (1) to (9)."""

    source: str = setting(
        "world",
        "Parameters: world = the world's own, if any; config = those below.",
        choices=("world", "config"),
    )
    beta_h: float = setting(10.0, "Inverse temperature of the human prior, eq. (2).")
    gamma_h: float = setting(0.95, "Humans' discount; 1 = a probability.", above=0, at_most=1)
    beta_r: float = setting(40.0, "Exponent of the robots' power-law policy, eq. (5).")
    gamma_r: float = setting(0.95, "Robots' discount per step, below 1.", above=0, at_most=1)
    zeta: float = setting(1.0, "Humans' risk aversion over goals, eq. (7).", at_least=1)
    xi: float = setting(1.0, "Inequality aversion over humans, eq. (8).", at_least=1)
    eta: float = setting(1.1, "Inequality aversion over time, eq. (8).", at_least=1)
    terminal_v_r: float = setting(-1e-10, "V_r of terminal states, below 0.", at_least=None)
    reduce: str = setting("mean", "Aggregate over humans in eq. (8).", choices=("mean", "sum"))
    nu_h: float = setting(0.0, "Share of uniform actions in the human prior, eq. (2).", at_most=1)
    optimistic: bool = setting(
        False, "Humans expect robots to help: maximum instead of minimum in eq. (1)."
    )

    def check(self) -> Iterator[str]:
        """Rules that a range does not express."""
        if self.gamma_r >= 1.0:
            yield f"gamma_r={self.gamma_r}: give a discount below 1"
        if self.terminal_v_r >= 0.0:
            yield f"terminal_v_r={self.terminal_v_r}: give a number below 0, -1e-10 say"


@dataclasses.dataclass(frozen=True)
class Humans:
    """Who lives in the world: the prior that robots reckon with, and how humans act by it."""

    model: str = setting(
        "world",
        "Human prior. world = as the world says; auto = exact in small worlds, else shortest "
        "paths; learned = the network of humans.network.",
        choices=("world", *MODELS),
    )
    beta: float = setting(
        3.0,
        "Inverse temperature per action of shortest paths.",
        needs={"model": ("auto", "exact", "paths")},
    )
    habit: str = setting(
        "uniform",
        "Habit policy pi^0 of eq. (2), power.nu_h of the prior; paths = shortest paths.",
        choices=("uniform", "paths"),
        needs={"model": ("auto", "exact")},
    )
    max_states: int = setting(
        5_000, "Largest number of states that are listed.", at_least=1, needs={"model": MODELS}
    )
    network: str = setting(
        "", "File of a prior learned from exact ones.", needs={"model": "learned"}
    )
    epsilon: float = setting(0.0, "Share of random human actions; the prior ignores it.", at_most=1)
    resample: float = setting(
        0.01, "Probability per step of a new goal before the current one is reached.", at_most=1
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """What V_h^e, Q_r, X_h, U_r and V_r are held in."""

    kind: str = setting(
        "networks",
        "Networks, tables with an entry per state, or mixed: each as the next settings say.",
        choices=("networks", "tables", "mixed"),
    )
    v_h_e: str = setting(
        "network", "V_h^e of kind=mixed.", choices=("network", "table"), needs=_MIXED
    )
    q_r: str = setting("network", "Q_r of kind=mixed.", choices=("network", "table"), needs=_MIXED)
    hidden: int = setting(128, "Width of hidden layers.", at_least=1, needs=_NETWORKS)
    encoder: str = setting(
        "mlp",
        "State encoder. conv = over the picture of empo:maps/SOURCE; identity = heads see "
        "features only.",
        choices=("mlp", "conv", "identity"),
        needs="encodes",
    )
    q_encoder: str = setting(
        "shared",
        "Q_r's encoder. shared = V_h^e's, without Q_r's gradient; own = a second encoder; "
        "split = one for each part of q_head=dueling.",
        choices=("shared", "own", "split"),
        needs="q_network",
    )
    conv_width: int = setting(
        32, "Channels of encoder=conv.", at_least=1, needs={"model.encoder": "conv"}
    )
    q_head: str = setting(
        "exp",
        "Map from the last layer to Q_r below 0. dueling = a level and an advantage per action.",
        choices=("exp", "dueling", "softplus"),
        needs="value_networks",
    )
    x_h: str = setting(
        "sum", "X_h: sum over goals, network or table.", choices=("sum", "network", "table")
    )
    u_r: str = setting(
        "formula", "U_r: eq. (8), network or table.", choices=("formula", "network", "table")
    )
    v_r: str = setting(
        "formula", "V_r: eq. (9), network or table.", choices=("formula", "network", "table")
    )
    dropout: float = setting(
        0.0, "Dropout rate of heads' hidden layers, in losses.", at_most=0.99, needs=_NETWORKS
    )
    table_min_rate: float = setting(
        0.02,
        "Least rate of tables, 1/n until then; 1.0 for exact human actions.",
        at_most=1,
        needs=_TABLES,
    )
    table_rows: int = setting(
        100_000,
        "States that tables have room for where the world's are not listed; 0 = none.",
        needs=_TABLES,
    )
    table_q_r: float = setting(
        -1.0,
        "Q_r and V_r of states not yet met, below 0.",
        at_least=None,
        needs="value_tables",
    )
    table_v_h_e: float = setting(0.5, "V_h^e of states not yet met.", at_most=1, needs="v_table")
    table_x_h: float = setting(
        0.5, "X_h of states not yet met.", above=0, at_most=1, needs={"x_h": "table"}
    )

    def held(self, what: str) -> tuple[str, ...]:
        """Which of V_h^e, Q_r, X_h, U_r, V_r are a `what`, network or table."""
        one = _KINDS.get(self.kind)
        found = {"v_h_e": one or self.v_h_e, "q_r": one or self.q_r}
        found |= {"x_h": self.x_h, "u_r": self.u_r, "v_r": self.v_r}
        return tuple(name for name, own in found.items() if own == what)

    def check(self) -> Iterator[str]:
        """Kinds are what they say."""
        for other, only in (("table", "networks"), ("network", "tables")):
            if self.kind == only and (wrong := self.held(other)):
                yield f"{wrong[0]}={other!r} with kind={only!r}: choose kind=mixed"
            if self.kind == "mixed" and not self.held(other):
                yield f"kind='mixed', but nothing is a {other}: choose kind={only!r}"
        if self.table_q_r >= 0.0:
            yield f"table_q_r={self.table_q_r}: give a number below 0"


@dataclasses.dataclass(frozen=True)
class Loss:
    """Targets, and how far from them an estimate is."""

    batch_size: int = setting(32, "States per update.", at_least=1)
    advantage_coef: float = setting(
        0.0, "Coefficient of the error of log(-Q_r) less its mean.", needs="q_network"
    )
    q_loss: str = setting(
        "gamma",
        "Error of Q_r and V_r: relative or squared.",
        choices=("gamma", "mse"),
        needs="value_networks",
    )
    human_expectation: str = setting(
        "fresh",
        "Human actions in targets: exact = all, fresh = new draws, rollout = those acted "
        "(biased, goals persist).",
        choices=("exact", "fresh", "rollout"),
    )
    human_samples: int = setting(
        1, "Draws of human actions per state.", at_least=1, needs={"human_expectation": "fresh"}
    )
    room: float = setting(1.5, "Capacity for successors per joint action; 0 = all that can be.")
    x_h_goals: int = setting(
        0, "Goals drawn per state for X_h's target; 0 = all goals.", needs={"model.x_h": _HELD}
    )
    unique: int = setting(0, "Capacity for distinct successors; 0 = every successor is evaluated.")
    target_interval: int = setting(
        0, "Updates between hard copies; 0 = 1 for tables, 20 for networks."
    )
    target_intervals: tuple[str, ...] = setting(
        (), "Intervals of single ones, q_r=100,x_h=50 say, in place of target_interval."
    )
    target_rate: float = setting(
        0.0,
        "Share that the copy moves per update; 0 = hard copies.",
        at_most=1,
        needs={"model.kind": "networks"},
    )

    def check(self) -> Iterator[str]:
        """Copies are made in one way."""
        for name in ("target_interval", "target_intervals"):
            if self.target_rate and getattr(self, name):
                yield (
                    f"{name}={getattr(self, name)} has no effect with target_rate="
                    f"{self.target_rate}: set one of them"
                )
        for one in self.target_intervals:
            if not re.fullmatch(r"(v_h_e|q_r|x_h|u_r|v_r)=[1-9]\d*", one):
                yield f"target_intervals has {one!r}: give NAME=UPDATES, q_r=100 say"


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Adam with weight decay, of networks."""

    learning_rate_v: float = setting(1e-3, "Learning rate of V_h^e.", needs="v_network")
    learning_rate_q: float = setting(
        1e-3, "Learning rate of Q_r, X_h, U_r, V_r.", needs="more_networks"
    )
    weight_decay: float = setting(1e-4, "Weight decay of all parameters.", needs=_NETWORKS)
    grad_clip_norm: float = setting(10.0, "Largest gradient norm.", above=0, needs=_NETWORKS)
    scale_clip: bool = setting(
        False,
        "Clipping norm that falls with the rate: grad_clip_norm times rate / 1e-4.",
        needs=_NETWORKS,
    )


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """Stages of learning, in learner updates: see `mbx.empo.power.curriculum`."""

    steps: int = setting(0, "Updates in all, for the decay; 0 = the run's.", needs=_NETWORKS)
    v_h_e_steps: int = setting(1_000, "Updates of stage 0, V_h^e alone.")
    x_h_steps: int = setting(300, "Updates of stage 1, X_h added.", needs={"model.x_h": _HELD})
    u_r_steps: int = setting(300, "Updates of stage 2, U_r added.", needs={"model.u_r": _HELD})
    q_r_steps: int = setting(1_000, "Updates of stage 3, Q_r added.")
    v_r_steps: int = setting(300, "Updates of stage 4, V_r added.", needs={"model.v_r": _HELD})
    ramp_steps: int = setting(2_000, "Updates of stage 5, in which beta_r rises from 0.")
    epsilon_start: float = setting(1.0, "Share of random robot actions at first.", at_most=1)
    epsilon_end: float = setting(0.1, "Share of random robot actions at last.", at_most=1)
    epsilon_steps: int = setting(5_000, "Updates from epsilon_start to epsilon_end.")
    gamma_h_ramp: int = setting(0, "Updates in which gamma_h rises; 0 = none.")
    gamma_h_start: float = setting(
        0.0,
        "Value of gamma_h at the start of its ramp.",
        at_most=1,
        needs={"gamma_h_ramp": NONZERO},
    )
    gamma_r_ramp: int = setting(0, "Updates in which gamma_r rises once Q_r is learned; 0 = none.")
    gamma_r_start: float = setting(
        0.0,
        "Value of gamma_r at the start of its ramp.",
        at_most=1,
        needs={"gamma_r_ramp": NONZERO},
    )
    constant_fraction: float = setting(
        0.7, "Share of the run before rates fall.", at_most=1, needs=_NETWORKS
    )

    def check(self) -> Iterator[str]:
        """Exploration that does not change takes no time."""
        steps = self.epsilon_steps
        if self.epsilon_start == self.epsilon_end and steps != type(self)().epsilon_steps:
            yield (
                f"epsilon_steps={steps} has no effect with epsilon_start=epsilon_end="
                f"{self.epsilon_end}: leave it {type(self)().epsilon_steps}"
            )


@dataclasses.dataclass(frozen=True)
class Settings(RunSettings):
    """All of a run; steps are environment steps, those of the curriculum are learner updates."""

    agent: str = setting("empo", "Name of the agent.")
    env: Env = section(
        Env(name="empo:multigrid/gates_2h2r", num_envs=32, episode_length=30),
        "World and episodes; episode_length=0 = until the world ends, or 50 steps.",
    )
    train: Train = section(
        Train(steps=160_000, seed_steps=640, log_interval=3_200),
        "Length of the run and how often it learns.",
    )
    eval: Eval = section(Eval(interval=32_000, episodes=64), "Evaluations during training.")
    checkpoint: common.Checkpoint = section(
        common.Checkpoint(interval=32_000), "When the state is saved."
    )
    replay: common.Replay = section(
        common.Replay(capacity=65_536),
        "Contents of the replay buffer: states and the humans' goals.",
    )
    humans: Humans = section(Humans(), "Humans of the world.")
    power: Power = section(Power(), "Human power, which the robot maximises.")
    model: Model = section(Model(), "Networks or tables that are learned.")
    loss: Loss = section(Loss(), "Losses and their batches.")
    optimizer: Optimizer = section(Optimizer(), "Optimizer of the networks.")
    curriculum: Curriculum = section(Curriculum(), "Stages of learning, in learner updates.")

    def files(self) -> dict[str, str]:
        """The user's own files: those of the maps, and of the learned prior."""
        network = self.humans.network
        return super().files() | ({"humans.network": network} if network else {})

    def with_files(self, paths: Mapping[str, str]) -> Self:
        """These settings with other paths for the files that `files` names."""
        humans = dataclasses.replace(self.humans, network=paths.get("humans.network", ""))
        return dataclasses.replace(super().with_files(paths), humans=humans)

    def environment_options(self, training: bool) -> dict[str, Any]:
        """Parameters and humans for the world; evaluations begin where it begins."""
        if not self.env.name.startswith("empo:"):
            return {}
        options = {f: dataclasses.asdict(getattr(self, f)) for f in ("power", "humans")}
        env = self.env
        if training:
            options["varied_starts"] = env.varied_starts
        maps = (env.maps, env.held_out, env.map_seed)
        return options | {"maps": maps, "on_held_out": not training}

    v_network, v_table = _is("network", "v_h_e"), _is("table", "v_h_e")
    q_network = _is("network", "q_r")
    value_networks, value_tables = _is("network", "q_r", "v_r"), _is("table", "q_r", "v_r")
    more_networks = _is("network", "q_r", "x_h", "u_r", "v_r")

    @property
    def encodes(self) -> bool:
        """model.v_h_e, or model.q_r with model.q_encoder own or split, is a network."""
        return self.v_network or (self.q_network and self.model.q_encoder != "shared")

    def updates_per_step(self) -> float:
        """Learner updates of an agent step."""
        return self.train.utd_ratio

    def draws(self) -> tuple[int, ...]:
        """States of a batch."""
        return (self.loss.batch_size,)

    def check(self) -> Iterator[str]:
        """Rules over several sections."""
        many = self.env.name.startswith("empo:maps/")
        for name in () if many else ("maps", "held_out", "map_seed"):
            value = getattr(self.env, name)
            if value != getattr(Env(), name):
                yield (
                    f"env.{name}={value} has no effect with env.name={self.env.name!r}: it is for "
                    "empo:maps/SOURCE"
                )
        exact, tables = self.loss.human_expectation == "exact", self.model.held("table")
        if tables and not exact and self.model.table_min_rate > 0.5:
            yield (
                f"model.table_min_rate={self.model.table_min_rate} with loss.human_expectation="
                f"{self.loss.human_expectation!r}: drawn targets are noisy, lower it (0.02, say)"
            )
