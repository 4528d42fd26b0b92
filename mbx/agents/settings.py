"""Settings that the runs of all agents have in common; each agent adds its own sections.

    @dataclasses.dataclass(frozen=True)
    class Settings(RunSettings):
        agent: str = setting("mine", "Name of the agent.")
        train: Train = section(Train(steps=60_000), "Length of the run.")
        loss: Loss = section(Loss(), "Losses.")

Steps are environment steps (action repeat included) summed over environments unless a line says
otherwise. Nothing here loads JAX.
"""

from __future__ import annotations

import abc
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Self

from mbx.settings import NONZERO, section, setting

if TYPE_CHECKING:
    from mbx.types import EnvSpec

HEADS_HELP = "Custom auxiliary heads, as NAME or NAME:COEFFICIENT, several joined by +."
_MAP = re.compile(r"(empo:multigrid/)(?P<path>.+\.yaml)((?:@stored)?)", re.DOTALL)
_MAPS = re.compile(r"(empo:maps/)(?P<path>.*[/.].*?)((?:@stored)?)", re.DOTALL)


def head_terms(text: str) -> dict[str, float | None]:
    """Heads of "inverse_dynamics:0.1+mine" with coefficients; None: the declared coefficient.
    Raises ValueError for repeated or empty names and coefficients that are not positive numbers.
    """
    terms: dict[str, float | None] = {}
    for part in text.split("+") if text else ():
        name, colon, number = part.strip().partition(":")
        try:
            coef = float(number) if colon else None
        except ValueError:
            coef = -1.0
        wrong = coef is not None and not 0.0 < coef < math.inf
        if not name.isidentifier() or name in terms or wrong:
            raise ValueError(
                f"heads={text!r}: give names of registered heads, each once, with a positive "
                "coefficient or none, as 'inverse_dynamics:0.1+mine'"
            )
        terms[name] = coef
    return terms


@dataclasses.dataclass(frozen=True)
class Distributed:
    """One run on many devices or processes."""

    enabled: bool = setting(False, "Division of environments and batches among all devices.")
    coordinator: str = setting(
        "", "HOST:PORT of process 0. Empty = found out on a cluster.", needs={"enabled": True}
    )
    num_processes: int = setting(
        0,
        "Number of processes. 0 = found out; 1 = only the devices of this machine.",
        needs={"enabled": True},
    )
    process_id: int = setting(
        -1, "Number of this process. -1 = found out.", at_least=-1, needs={"enabled": True}
    )
    cores: int = setting(
        0,
        "Cores of the processor that are one device each. 0 = as many as environments divide "
        "among; 1 = one device, whose threads share every operation.",
        needs={"enabled": False, "num_seeds": 1},
    )
    fsdp: bool = setting(
        False, "Division of large parameters among all devices.", needs={"enabled": True}
    )
    heartbeat_timeout: int = setting(
        60,
        "Seconds of silence after which a process counts as lost.",
        at_least=1,
        needs={"enabled": True},
    )


@dataclasses.dataclass(frozen=True)
class Env:
    """The task and how many copies of it are stepped together."""

    name: str = setting(
        "gymnax:Pendulum-v1",
        "Task as SUITE:TASK, or a custom one as gym:FILE.py:CLASS; see --help.",
    )
    kwargs: dict[str, Any] = setting(
        {}, "Arguments of gym:, gymnax:, jax:, playground: tasks, a flag each (env.kwargs.mass=2)."
    )
    metrics: tuple[str, ...] = setting(
        (), "Numbers in a gym: task's info, averaged over episodes into the log: success,cost."
    )
    observe: tuple[str, ...] = setting(
        (), "Entries of a dictionary that are observed, as a,b. Empty = no text, no privileged_*."
    )
    pixels: bool = setting(
        False, "Rendered images of dmc: and gym: tasks as observations, instead of numbers."
    )
    image_size: int = setting(
        0, "Side of resized images in pixels. 0 = as they are, 64 where they are rendered."
    )
    grey: bool = setting(False, "Grey images instead of coloured ones.")
    frame_stack: int = setting(
        1, "Newest images stacked on the channels of an observation, oldest first.", at_least=1
    )
    shadows: bool = setting(
        True,
        "Shadows, reflections and smooth edges in images of dmc: tasks. False = much quicker where "
        "a processor renders.",
        needs={"pixels": True},
    )
    num_envs: int = setting(4, "Number of environments stepped together.", at_least=1)
    workers: int = setting(
        0, "Processes that step slow gym: and dmc: environments. 0 = none, one by one."
    )
    action_repeat: int = setting(0, "Environment steps per agent step. 0 = the suite's default.")
    episode_length: int = setting(0, "Time limit in agent steps. 0 = the task's own.")
    pad_to: tuple[int, ...] = setting(
        (0, 0),
        "Smallest sizes that observations and actions of several tasks are padded to.",
        needs={"several_tasks": True},
    )

    def check(self) -> Iterator[str]:
        """Metrics and parts are names; arguments are written into config.json and read again."""
        if not all(isinstance(name, str) for name in self.observe):
            yield f"observe={self.observe!r}: give names of an observation's parts, as text"
        if not all(isinstance(name, str) for name in self.metrics):
            yield f"metrics={self.metrics!r}: give names of numbers in info, as text"
        try:
            same = json.loads(json.dumps(self.kwargs)) == self.kwargs
        except (TypeError, ValueError):
            same = False
        if not same:
            yield (
                f"kwargs={self.kwargs!r}: give numbers, text, True, False, None, or lists and "
                "dictionaries of these"
            )


@dataclasses.dataclass(frozen=True)
class Train:
    """How long a run is; each agent adds how often it learns."""

    steps: int = setting(30_000, "Length of the run in environment steps.", at_least=1)
    seed_steps: int = setting(1_000, "Environment steps with random actions before learning.")
    seed_hold: int = setting(
        1,
        "Agent steps that each random action is held. Above 1, continuous actions are mostly at a "
        "bound.",
        at_least=1,
    )
    pretrain_updates: int = setting(0, "Gradient steps made at once after the random actions.")
    log_interval: int = setting(500, "Environment steps between log rows.", at_least=1)
    init_from: str = setting(
        "", "Run directory, or hf://USER/NAME, whose best parameters to start from. Empty = none."
    )
    init_parts: str = setting(
        "",
        "Parameters to take from there: a regular expression found in their paths, as encoder or "
        "^model/(encoder|rssm). Empty = all.",
        needs={"init_from": NONZERO},
    )
    dataset: str = setting(
        "",
        "Transitions to learn from without acting: dataset.npz, minari:NAME, lerobot:NAME, or the "
        "folder of such a data set in place of NAME. Empty = none.",
    )
    online: bool = setting(
        False,
        "Acting as well, with the dataset in the replay buffer from the start.",
        needs={"dataset": NONZERO},
    )

    @property
    def offline(self) -> bool:
        """Learning without acting."""
        return bool(self.dataset) and not self.online


@dataclasses.dataclass(frozen=True)
class Eval:
    """Evaluations without exploration noise."""

    interval: int = setting(3_000, "Environment steps between evaluations. 0 = only at the end.")
    episodes: int = setting(20, "Episodes per evaluation. 0, with interval=0 = no evaluation.")
    exploring: bool = setting(False, "Further evaluations, of the agent as it acts in training.")

    def check(self) -> Iterator[str]:
        """Without episodes there is nothing to do at an interval."""
        if self.interval and not self.episodes:
            yield (
                f"episodes=0 with eval.interval={self.interval}: no evaluation is made; set "
                "eval.interval=0, too, or give it episodes"
            )


@dataclasses.dataclass(frozen=True)
class Log:
    """Logs besides the run directory."""

    wandb: str = setting("", "Project of Weights & Biases that mirrors the rows. Empty = none.")
    trackio: str = setting("", "Project of Trackio that mirrors the rows. Empty = none.")
    wandb_entity: str = setting(
        "", "User or team of the project. Empty = your default.", needs={"wandb": NONZERO}
    )


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """When the state is saved."""

    interval: int = setting(
        6_000, "Environment steps between checkpoints. 0 = only at the end and by minutes."
    )
    minutes: float = setting(
        5.0, "Minutes between further checkpoints, the first one after the first updates. 0 = none."
    )
    keep: int = setting(2, "Newest checkpoints kept, in addition to the best.", at_least=1)


@dataclasses.dataclass(frozen=True)
class Replay:
    """Contents of the replay buffer."""

    capacity: int = setting(100_000, "Transitions stored, over all environments.", at_least=1)
    shards: int = setting(0, "Blocks from which batches are drawn evenly. 0 = one per device.")
    save: bool = setting(False, "Transitions written to dataset.npz at the end of the run.")


@dataclasses.dataclass(frozen=True)
class RunSettings(abc.ABC):
    """Settings of every run; an agent adds its own."""

    agent: str = setting("", "Name of the agent.")
    seed: int = setting(0, "Seed of parameters, environments, exploration and sampling.")
    num_seeds: int = setting(
        1, "Seeds trained together in one program, each with its own log.", at_least=1
    )
    imports: tuple[str, ...] = setting(
        (), "Custom modules that register what the run uses, as --import sets them."
    )
    resume: bool = setting(False, "Continuation of the run in the working directory.")
    matmul_precision: str = setting(
        "default", "Precision of float32 products.", choices=("default", "high", "highest")
    )
    gpu_compiler: str = setting(
        "auto",
        "Effort of a GPU's compiler: full, for the fastest steps; quick; auto = quick in runs of "
        "up to 200,000 steps.",
        choices=("auto", "quick", "full"),
    )
    distributed: Distributed = section(Distributed(), "Many devices and processes.")
    env: Env = section(Env(), "Task and its environments.")
    train: Train = section(Train(), "Length of the run and updates per step.")
    eval: Eval = section(Eval(), "Evaluations during training.")
    log: Log = section(Log(), "Logs besides the run directory.")
    checkpoint: Checkpoint = section(Checkpoint(), "When the state is saved.")
    replay: Replay = section(Replay(), "Replay buffer.")

    @property
    def several_tasks(self) -> bool:
        """env.name='multi:...'"""
        return self.env.name.startswith("multi:")

    def for_task(self, spec: EnvSpec) -> Self:
        """These settings with task-dependent defaults filled in."""
        found = {one: getattr(spec, one) for one in ("action_repeat", "episode_length", "metrics")}
        found["observe"] = tuple(part.name for part in spec.parts)
        return dataclasses.replace(self, env=dataclasses.replace(self.env, **found))

    def check_start(self, other: RunSettings) -> Iterator[str]:
        """Why parameters of another run would mean something else here; both are `for_task`."""
        yield from ()

    @abc.abstractmethod
    def updates_per_step(self) -> float:
        """Learner updates of an agent step, of settings that are `for_task`."""

    def files(self) -> dict[str, str]:
        """Paths of the user's own files that the environment is made from, by setting."""
        found = _MAP.fullmatch(self.env.name) or _MAPS.fullmatch(self.env.name)
        return {"env.name": found["path"]} if found else {}

    def with_files(self, paths: Mapping[str, str]) -> Self:
        """These settings with other paths for the files that `files` names."""
        if "env.name" not in paths:
            return self
        found = _MAP.fullmatch(self.env.name) or _MAPS.fullmatch(self.env.name)
        assert found is not None
        name = f"{found[1]}{paths['env.name']}{found[3]}"
        return dataclasses.replace(self, env=dataclasses.replace(self.env, name=name))

    def environment_options(self, training: bool) -> dict[str, Any]:
        """Options of the environment besides its name: for training, or to evaluate."""
        return {}

    def rows_before_learning(self) -> int:
        """Agent steps over all environments that must be stored before the first update."""
        return 2 * self.env.num_envs

    def draws(self) -> tuple[int, ...]:
        """All sizes of replay samples (rows or windows).
        Each of several devices draws its share of a size that they divide; 1 is never divided.
        """
        return (1,)

    def gains_by_cores(self) -> bool:
        """Whether a processor's cores are faster as separate devices that share each batch.
        This holds for small models, whose operations are too short for threads to share.
        """
        return False

    def large_updates(self) -> bool:
        """Whether an update on several cores needs more memory than a thread keeps, 64 MB.
        Such a program is faster with its memory in pieces, and is compiled at every start
        (`mbx.fast.allocator`).
        """
        return False

    def reanalyze_interval(self) -> int:
        """Learner updates between two refreshes of stored planner targets; 0: none."""
        return 0

    def reanalyze_min_step(self) -> int:
        """Environment steps before the first refresh."""
        return 0
